"""Two arms, concurrency by concurrency: better, worse, within noise; and from where on one of them stays better.

The ratio of two throughputs is judged by Welch's t interval on the logarithms of the repeats, at a level that holds for
all concurrencies of a comparison together (Bonferroni): with eight of them, eight chances to be fooled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

from scipy import stats

from gpubox.bench.cells import Cell, Frozen, Work
from gpubox.errors import RefusedError

CONFIDENCE: Final = 0.95  # that no verdict of one comparison is wrong by chance


class Verdict(StrEnum):
    """Of the first arm."""

    BETTER = "better"
    WORSE = "worse"
    WITHIN_NOISE = "within noise"
    TOO_FEW = "too few repeats"


class Row(Frozen):
    """`ratio`: of the geometric means, first over second; low and high: its interval, None with less than 2 repeats."""

    concurrency: int
    first: tuple[float, ...]
    second: tuple[float, ...]
    ratio: float
    low: float | None
    high: float | None
    verdict: Verdict


class Crossover(StrEnum):
    FOUND = "found"
    NONE = "none in range"
    UNDECIDED = "undecided"


class Comparison(Frozen):
    """`at`: the first concurrency from which `winner` stays better; `above`: the last one where the other is better.

    The lines really cross somewhere above `above` and at or below `at`. `measure_more`: where more repeats would tell.
    """

    first: str
    second: str
    rows: tuple[Row, ...]
    crossover: Crossover
    at: int | None
    above: int | None
    winner: str | None
    measure_more: tuple[int, ...]


def compare(first: Sequence[Cell], second: Sequence[Cell], *, confidence: float = CONFIDENCE) -> Comparison:
    """Leaves invalid cells out. Raises RefusedError when the arms did other work or share no concurrency."""
    check_same_work(first, second)
    a, b = throughputs(first), throughputs(second)
    shared = sorted(a.keys() & b.keys())
    if not shared:
        raise RefusedError(
            f"the arms share no concurrency: {sorted(a) or 'no valid cell'} against {sorted(b) or 'no valid cell'}",
            hint="sweep both with the same --concurrency",
        )
    level = 1 - (1 - confidence) / len(shared)
    rows = tuple(judge(concurrency, a[concurrency], b[concurrency], level) for concurrency in shared)
    return _crossing(first[0].arm.name, second[0].arm.name, rows)


def throughputs(cells: Sequence[Cell]) -> dict[int, tuple[float, ...]]:
    """Tokens per second of the valid cells by concurrency."""
    found: dict[int, list[float]] = {}
    for cell in cells:
        if cell.valid and cell.measured:
            found.setdefault(cell.concurrency, []).append(cell.measured.tokens_per_s)
    return {concurrency: tuple(values) for concurrency, values in found.items()}


def check_same_work(first: Sequence[Cell], second: Sequence[Cell]) -> None:
    """Raises RefusedError naming every part of the work that differs, within an arm or between them."""
    works: list[Work] = [cell.work for cell in (*first, *second)]
    if not first or not second:
        raise RefusedError("an arm has no cell", hint="gpubox bench sweep writes them")
    seen = {name: {str(getattr(work, name)) for work in works} for name in Work.model_fields}
    differing = {name: values for name, values in seen.items() if len(values) > 1}
    if differing:
        name, values = next(iter(differing.items()))
        raise RefusedError(
            f"the arms did not do the same work: {name} is {' and '.join(sorted(values))}",
            hint="measure both with equal limits, prompts and model: anything else compares nothing",
            detail="\n".join(f"{name}: {' / '.join(sorted(values))}" for name, values in differing.items()),
        )


def judge(concurrency: int, first: Sequence[float], second: Sequence[float], level: float) -> Row:
    """One row. `level`: confidence of this row's interval."""
    a, b = [math.log(value) for value in first], [math.log(value) for value in second]
    difference = sum(a) / len(a) - sum(b) / len(b)
    low, high = _interval(a, b, difference, level)
    return Row(
        concurrency=concurrency,
        first=tuple(first),
        second=tuple(second),
        ratio=math.exp(difference),
        low=None if low is None else math.exp(low),
        high=None if high is None else math.exp(high),
        verdict=_verdict(low, high),
    )


def _interval(
    a: Sequence[float], b: Sequence[float], difference: float, level: float
) -> tuple[float, float] | tuple[None, None]:
    if min(len(a), len(b)) < 2:
        return None, None
    if len(set(a)) == len(set(b)) == 1:
        return difference, difference  # no spread at all: Welch's formula divides by it
    interval = stats.ttest_ind(a, b, equal_var=False).confidence_interval(level)
    return float(interval.low), float(interval.high)


def _verdict(low: float | None, high: float | None) -> Verdict:
    if low is None or high is None:
        return Verdict.TOO_FEW
    if low > 0:
        return Verdict.BETTER
    return Verdict.WORSE if high < 0 else Verdict.WITHIN_NOISE


DECIDED: Final[Mapping[Verdict, int]] = {Verdict.BETTER: 0, Verdict.WORSE: 1}


def _crossing(first: str, second: str, rows: tuple[Row, ...]) -> Comparison:
    """Read from the highest concurrency down: who wins there, and for how long without a break."""
    open_rows = [row.concurrency for row in rows if row.verdict not in DECIDED]
    top = rows[-1].verdict

    def result(crossover: Crossover, at: int | None, above: int | None, more: list[int]) -> Comparison:
        winner = (first, second)[DECIDED[top]] if top in DECIDED and crossover is not Crossover.UNDECIDED else None
        return Comparison(
            first=first,
            second=second,
            rows=rows,
            crossover=crossover,
            at=at,
            above=above,
            winner=winner,
            measure_more=tuple(more),
        )

    if top not in DECIDED:
        return result(Crossover.UNDECIDED, None, None, open_rows)
    run = next((index for index in range(len(rows), 0, -1) if rows[index - 1].verdict is not top), 0)
    lost = [row.concurrency for row in rows[:run] if row.verdict in DECIDED and row.verdict is not top]
    if lost:
        between = [c for c in open_rows if lost[-1] < c < rows[run].concurrency]
        return result(Crossover.FOUND, rows[run].concurrency, lost[-1], between)
    if open_rows:
        return result(Crossover.UNDECIDED, None, None, open_rows)
    return result(Crossover.NONE, None, None, [])

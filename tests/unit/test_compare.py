"""Comparisons: formulas by hand, the crossover of known curves found again, and 'undecided' when noise hides it."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubox.bench import cells
from gpubox.bench.cells import Arm, Cell, Measured, Percentiles, Work
from gpubox.bench.compare import Crossover, Verdict, compare, judge
from gpubox.errors import InputError, RefusedError

GRID = (1, 2, 5, 10, 30, 70, 100, 250)
NO_TIME = Percentiles(mean=1.0, median=1.0, p99=1.0)
WORK = Work(
    model="m",
    prompts="0",
    output_tokens=512,
    ignore_eos=True,
    temperature=0.0,
    max_running_requests=256,
    context_length=8192,
    gpus=("GPU",),
)


def cell(arm: str, concurrency: int, repeat: int, speed: float, *, work: Work = WORK, invalid: str = "") -> Cell:
    measured = Measured(
        duration_s=1.0,
        requests=1,
        output_tokens=1,
        tokens_per_s=speed,
        ttft_ms=NO_TIME,
        tpot_ms=NO_TIME,
        itl_ms=NO_TIME,
        accept_length=None,
        kv_tokens=None,
    )
    told = Arm(
        name=arm, release=None, stack_id=None, server_digest=None, machine="m", driver=None, versions={}, arguments=()
    )
    return Cell(
        time="2026-01-01T00:00:00Z",
        work=work,
        arm=told,
        concurrency=concurrency,
        repeat=repeat,
        measured=measured,
        invalid=(invalid,) if invalid else (),
    )


def arm(name: str, speeds: dict[int, list[float]]) -> list[Cell]:
    return [cell(name, c, n, speed) for c, values in speeds.items() for n, speed in enumerate(values, 1)]


def test_interval_worked_out_by_hand() -> None:
    """Logs 0.0, 0.2 and 0.4 against 0.0: mean 0.2, variance 0.04 of 3; the second arm has variance 0.01 of 3 around 0.

    Standard error sqrt(0.04/3 + 0.01/3) = 0.12910; Welch's df = 0.016667^2 / (0.013333^2/2 + 0.003333^2/2) = 2.9412;
    t(0.975; 2.9412) = 3.2181; half-width 0.41547.
    """
    row = judge(1, [math.exp(x) for x in (0.0, 0.2, 0.4)], [math.exp(x) for x in (-0.1, 0.0, 0.1)], 0.95)
    assert row.ratio == pytest.approx(math.exp(0.2))
    assert row.low == pytest.approx(math.exp(0.2 - 0.41547), rel=1e-4)
    assert row.high == pytest.approx(math.exp(0.2 + 0.41547), rel=1e-4)
    assert row.verdict is Verdict.WITHIN_NOISE


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        ([100, 101, 99], [50, 51, 49], Verdict.BETTER),
        ([50, 51, 49], [100, 101, 99], Verdict.WORSE),
        ([100, 101, 99], [100, 102, 98], Verdict.WITHIN_NOISE),
        ([100], [50, 51], Verdict.TOO_FEW),
        ([100, 100], [50, 50], Verdict.BETTER),  # no spread: a clock too coarse, or a stand-in
        ([100, 100], [100, 100], Verdict.WITHIN_NOISE),
    ],
)
def test_verdicts(first: list[float], second: list[float], verdict: Verdict) -> None:
    assert judge(1, first, second, 0.95).verdict is verdict


def test_the_crossover_is_where_one_arm_stays_better() -> None:
    fast = [100.0, 101.0, 99.0]
    slow = [80.0, 81.0, 79.0]
    spec = arm("spec", {1: fast, 10: slow, 30: fast, 70: slow, 250: slow})
    plain = arm("plain", {1: slow, 10: fast, 30: slow, 70: fast, 250: fast})
    found = compare(spec, plain)
    assert (found.crossover, found.at, found.above, found.winner) == (Crossover.FOUND, 70, 30, "plain")
    assert compare(plain, spec).winner == "plain"


def test_one_arm_better_everywhere_is_an_answer() -> None:
    found = compare(arm("a", {c: [2.0, 2.01, 1.99] for c in GRID}), arm("b", {c: [1.0, 1.01, 0.99] for c in GRID}))
    assert (found.crossover, found.at, found.winner) == (Crossover.NONE, None, "a")


def test_noise_at_the_top_or_single_repeats_decide_nothing() -> None:
    noisy = compare(arm("a", {1: [2.0, 2.1], 250: [1.0, 2.0]}), arm("b", {1: [1.0, 1.1], 250: [1.1, 1.9]}))
    assert (noisy.crossover, noisy.winner) == (Crossover.UNDECIDED, None)
    assert 250 in noisy.measure_more
    single = compare(arm("a", {1: [2.0], 2: [2.0]}), arm("b", {1: [1.0], 2: [1.0]}))
    assert (single.crossover, single.measure_more) == (Crossover.UNDECIDED, (1, 2))


def curves(generator: random.Random, crossing: float, noise: float, repeats: int) -> tuple[list[Cell], list[Cell]]:
    """Throughput grows with concurrency and saturates; speculation's factor falls through 1 at `crossing`."""
    slope = generator.uniform(0.05, 0.4)

    def plain(concurrency: int) -> float:
        return 90 * concurrency / (1 + concurrency / 40)

    def repeated(speed: float) -> list[float]:
        return [speed * math.exp(generator.gauss(0, noise)) for _ in range(repeats)]

    spec = {c: repeated(plain(c) * (c / crossing) ** -slope) for c in GRID}
    return arm("spec", spec), arm("plain", {c: repeated(plain(c)) for c in GRID})


def test_the_crossover_of_200_known_curves_is_found_within_the_stated_margin() -> None:
    """The margin is the pair of neighbours (above, at]; it may miss in 1 of 20 comparisons, as its confidence says."""
    generator = random.Random(20261201)
    outcomes = []
    for _ in range(200):
        crossing = math.exp(generator.uniform(math.log(1.5), math.log(200)))
        found = compare(*curves(generator, crossing, noise=0.01, repeats=5))
        if found.crossover is Crossover.FOUND:
            assert found.winner == "plain"
            outcomes.append(found.above < crossing <= found.at)  # type: ignore[operator]
            continue
        assert found.crossover is Crossover.UNDECIDED, "a crossing inside the range is never called none"
        assert found.measure_more
    assert len(outcomes) >= 120, "noise of 1 % leaves most curves decided"
    assert outcomes.count(False) <= len(outcomes) * 0.05


def test_noise_that_hides_the_crossing_gives_undecided() -> None:
    generator = random.Random(7)
    seen = [compare(*curves(generator, 30.0, noise=1.0, repeats=3)).crossover for _ in range(50)]
    assert seen.count(Crossover.UNDECIDED) >= 45


@given(st.lists(st.tuples(st.floats(0.5, 2.0), st.integers(1, 4)), min_size=1, max_size=8), st.integers(0, 2**32))
def test_no_comparison_contradicts_its_own_rows(shape: list[tuple[float, int]], seed: int) -> None:
    generator = random.Random(seed)
    first = {2**i: [100 * r * math.exp(generator.gauss(0, 0.05)) for _ in range(n)] for i, (r, n) in enumerate(shape)}
    second = {2**i: [100 * math.exp(generator.gauss(0, 0.05)) for _ in range(n)] for i, (_, n) in enumerate(shape)}
    found = compare(arm("a", first), arm("b", second))
    verdicts = {row.concurrency: row.verdict for row in found.rows}
    if found.crossover is Crossover.FOUND:
        wins = Verdict.BETTER if found.winner == "a" else Verdict.WORSE
        assert found.at is not None
        assert found.above is not None
        assert {v for c, v in verdicts.items() if c >= found.at} == {wins}
        assert verdicts[found.above] in {Verdict.BETTER, Verdict.WORSE} - {wins}
    if found.crossover is Crossover.NONE:
        assert len(set(verdicts.values())) == 1
    if found.crossover is Crossover.UNDECIDED:
        assert found.measure_more
        assert all(verdicts[c] in (Verdict.WITHIN_NOISE, Verdict.TOO_FEW) for c in found.measure_more)


def test_arms_with_different_work_are_refused_with_what_differs() -> None:
    other = WORK.model_copy(update={"max_running_requests": 48, "prompts": "1"})
    with pytest.raises(RefusedError) as caught:
        compare([cell("a", 1, 1, 1.0)], [cell("b", 1, 1, 1.0, work=other)])
    assert "prompts is 0 and 1" in caught.value.message
    assert "max_running_requests: 256 / 48" in caught.value.detail


def test_invalid_cells_are_left_out_and_never_averaged() -> None:
    bad = cell("a", 1, 3, 1_000_000.0, invalid="2 of 10 requests failed")
    found = compare([*arm("a", {1: [1.0, 1.01]}), bad], arm("b", {1: [2.0, 2.01]}))
    assert found.rows[0].first == (1.0, 1.01)
    with pytest.raises(RefusedError, match="share no concurrency: no valid cell against"):
        compare([bad], arm("b", {1: [2.0, 2.01]}))


def test_results_survive_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    cells.append(path, cell("a", 1, 1, 1.0))
    with path.open("ab") as stream:
        stream.write(cell("a", 1, 2, 1.0).model_dump_json().encode()[:50])
    cells.append(path, cell("a", 1, 3, 1.0))
    assert [found.repeat for found in cells.read(path)] == [1, 3]
    (tmp_path / "other").write_text("no json\n")
    with pytest.raises(InputError, match="holds no cell"):
        cells.read(tmp_path / "other")
    with pytest.raises(InputError, match="No such file"):
        cells.read(tmp_path / "absent")

"""The verbs that measure: sweep and compare. docs/measuring.md."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from gpubox.bench import cells, prompts
from gpubox.bench.box_bench import bench_of_box
from gpubox.bench.cells import Cell
from gpubox.bench.compare import Comparison, Crossover, compare
from gpubox.bench.sweep import CONCURRENCIES, Bench, Plan, check_enough_prompts, open_cells, sweep
from gpubox.cli.box import open_box
from gpubox.errors import ExitCode, InputError

RESULTS = click.Path(dir_okay=False, path_type=Path)


class Numbers(click.ParamType[tuple[int, ...]]):
    """'1,2,5': positive whole numbers, each once, in rising order."""

    name = "numbers"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = str(value).split(",")
        if not all(word.strip().isdigit() and int(word) > 0 for word in words):
            self.fail(f"{value!r}: allowed are positive whole numbers with commas, e.g. 1,5,30", param, ctx)
        return tuple(sorted({int(word) for word in words}))


@click.group("bench")
def bench_group() -> None:
    """Measure what serves, and compare."""


@bench_group.command("sweep")
@click.option("--json", "as_json", is_flag=True, help="Print each cell as a JSON line on standard output.")
@click.option("--concurrency", type=Numbers(), default=CONCURRENCIES, help="Default 1,2,5,10,30,70,100,250.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Less than 2 decide nothing.")
@click.option("--output-tokens", type=click.IntRange(min=4), default=512, show_default=True)
@click.option("--requests-per-stream", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--prompts", "prompt_file", type=RESULTS, default=None, help="JSON lines of your own; default: shipped.")
@click.option("--name", default=None, help="What to call this arm (default: the release).")
@click.option("--results", type=RESULTS, default=None, help="Default: state/bench/<release>.jsonl.")
def sweep_release(
    as_json: bool,
    concurrency: tuple[int, ...],
    repeats: int,
    output_tokens: int,
    requests_per_stream: int,
    prompt_file: Path | None,
    name: str | None,
    results: Path | None,
) -> None:
    """Measure the serving release at every concurrency; go on where an earlier call ended."""
    box = open_box()
    plan = Plan(concurrency, repeats, output_tokens, requests_per_stream)
    bench = bench_of_box(box, plan, prompts.from_file(prompt_file) if prompt_file else None, name)
    check_enough_prompts(bench.texts, plan)
    path = results or box.layout.state / "bench" / f"{bench.arm.release}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    bad = _measure(bench, plan, path, as_json)
    if not as_json:
        click.echo(f"results: {path}")
    sys.exit(int(ExitCode.FAILED if bad else ExitCode.OK))


def _measure(bench: Bench, plan: Plan, path: Path, as_json: bool) -> int:
    """How many cells of this call are invalid."""
    total = len(open_cells(bench, plan, path))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bad = 0
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"sweep of {bench.arm.name}", total=total)
        for cell in sweep(bench, plan, path, lambda text: progress.console.print(text, highlight=False)):
            bad += not cell.valid
            click.echo(cell.model_dump_json() if as_json else describe(cell))
            progress.advance(task)
    return bad


def describe(cell: Cell) -> str:
    head = f"concurrency {cell.concurrency:>4}, repeat {cell.repeat}"
    if not cell.valid or cell.measured is None:
        return f"{head}: INVALID: {'; '.join(cell.invalid)}"
    seen = cell.measured
    accept = f", accept length {seen.accept_length:.2f}" if seen.accept_length else ""
    return (
        f"{head}: {seen.tokens_per_s:.1f} tokens/s, {seen.per_stream(cell.concurrency):.1f} a stream, "
        f"TTFT {seen.ttft_ms.median:.0f} ms, TPOT {seen.tpot_ms.median:.1f} ms{accept}"
    )


@bench_group.command("compare")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
@click.argument("first", type=RESULTS)
@click.argument("second", type=RESULTS)
def compare_arms(as_json: bool, first: Path, second: Path) -> None:
    """Compare two sweeps concurrency by concurrency, and say from where on one stays better.

    FIRST and SECOND are results of `gpubox bench sweep`, one arm in each.
    """
    found = compare(one_arm(first), one_arm(second))
    click.echo(found.model_dump_json(indent=2)) if as_json else show_comparison(found)
    sys.exit(int(ExitCode.FAILED if found.crossover is Crossover.UNDECIDED else ExitCode.OK))


def one_arm(path: Path) -> list[Cell]:
    """Raises InputError when the file holds several: the operator has to say which."""
    found = cells.read(path)
    names = sorted({cell.arm.name for cell in found})
    if len(names) != 1:
        raise InputError(f"{path}: holds {len(names)} arms: {', '.join(names)}", hint="one file for each arm")
    return found


def show_comparison(found: Comparison) -> None:
    table = Table(title=f"{found.first} over {found.second}", box=None, pad_edge=False)
    for heading in ("concurrency", "tokens/s", "tokens/s", "ratio", "interval", "verdict"):
        table.add_column(heading, justify="left" if heading == "verdict" else "right")
    for row in found.rows:
        mean = [f"{sum(values) / len(values):.1f} (n={len(values)})" for values in (row.first, row.second)]
        interval = "" if row.low is None or row.high is None else f"{row.low:.3f} to {row.high:.3f}"
        table.add_row(str(row.concurrency), *mean, f"{row.ratio:.3f}", interval, row.verdict)
    Console().print(table)
    click.echo(crossover_line(found))


def crossover_line(found: Comparison) -> str:
    more = ", ".join(map(str, found.measure_more))
    if found.crossover is Crossover.FOUND:
        between = f" (more repeats at {more} would tell)" if more else ""
        return (
            f"crossover: from concurrency {found.at} on {found.winner} stays better, at {found.above} not yet{between}"
        )
    if found.crossover is Crossover.NONE:
        return f"crossover: none in range, {found.winner} is better everywhere"
    return f"crossover: undecided, measure more repeats at {more}"

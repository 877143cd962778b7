"""A sweep: every concurrency, several times, one cell after the other; what was measured is not measured again.

Repeats go round by round over all concurrencies, so that a machine that warms up or slows down over the hour shows as
spread between repeats and not as a difference between concurrencies.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpubox.bench import cells, prompts
from gpubox.bench.bench_serving import Load, Target, command, read_result, write_prompts
from gpubox.bench.cells import Arm, Cell, Measured, Work, cell_key
from gpubox.bench.endpoint_facts import accept_length, counters, server_info
from gpubox.errors import InputError, ProofError
from gpubox.rollout.history import now
from gpubox.rollout.running import run_lines
from gpubox.rollout.service_user import run_as

CONCURRENCIES: Final = (1, 2, 5, 10, 30, 70, 100, 250)
LAST_WORDS: Final = 15  # lines of the load generator kept for an error

Report = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """`requests_per_stream`: how many requests one stream sends in a cell, one after the other."""

    concurrencies: tuple[int, ...] = CONCURRENCIES
    repeats: int = 3
    output_tokens: int = 512
    requests_per_stream: int = 4
    warmup_requests: int = 4

    def load(self, concurrency: int) -> Load:
        requests = concurrency * self.requests_per_stream
        return Load(concurrency, requests, self.output_tokens, min(self.warmup_requests, concurrency))

    @property
    def most_requests(self) -> int:
        return max(self.concurrencies) * self.requests_per_stream


@dataclass(frozen=True)
class Bench:
    """Everything that a cell needs. `user`: who runs the load generator; None is who calls.

    `alive` names the server's life: another name after a cell is a restart.
    """

    python: Path
    environment: Mapping[str, str]
    target: Target
    arm: Arm
    work: Work
    texts: tuple[str, ...]
    alive: Callable[[], str]
    user: str | None = None


def work_of(model: str, texts: tuple[str, ...], plan: Plan, base_url: str, gpus: tuple[str, ...]) -> Work:
    """What the endpoint is asked to do, with the limits that it says it has."""
    info = server_info(base_url)
    return Work(
        model=model,
        prompts=prompts.digest(texts),
        output_tokens=plan.output_tokens,
        ignore_eos=True,
        temperature=0.0,
        max_running_requests=info.max_running_requests,
        context_length=info.context_length,
        gpus=gpus,
    )


def check_enough_prompts(texts: tuple[str, ...], plan: Plan) -> None:
    """Raises InputError: a prompt that is asked twice in a cell is answered from a cache."""
    if len(texts) < plan.most_requests:
        most = max(plan.concurrencies)
        raise InputError(
            f"concurrency {most} needs {plan.most_requests} prompts, there are {len(texts)} different ones",
            hint="lower --requests-per-stream, or bring more with --prompts",
        )


def open_cells(bench: Bench, plan: Plan, results: Path) -> list[tuple[int, int]]:
    """(repeat, concurrency) of what is not yet measured well, in the order of measuring."""
    known = {cell.key for cell in cells.read(results) if cell.valid} if results.exists() else set()
    rounds = [(repeat, concurrency) for repeat in range(1, plan.repeats + 1) for concurrency in plan.concurrencies]
    return [(r, c) for r, c in rounds if cell_key(bench.work, bench.arm, c, r) not in known]


def sweep(bench: Bench, plan: Plan, results: Path, report: Report) -> Iterator[Cell]:
    """Measure what is open; each cell is on disk before it is yielded. Raises InputError before the first one."""
    check_enough_prompts(bench.texts, plan)
    for repeat, concurrency in open_cells(bench, plan, results):
        cell = measure(bench, plan.load(concurrency), repeat, report)
        cells.append(results, cell)
        yield cell


def measure(bench: Bench, load: Load, repeat: int, report: Report) -> Cell:
    """One cell. What goes wrong makes it invalid, with the reason; nothing is raised for what a server does."""
    life, before = bench.alive(), counters(bench.target.base_url)
    measured: Measured | None = None
    try:
        measured, problems = _run(bench, load, report)
    except ProofError as error:
        problems = [error.message]
    after = counters(bench.target.base_url)
    if (now_alive := bench.alive()) != life:
        problems.append(f"the server restarted meanwhile ({life}, then {now_alive})")
    if measured:
        info = server_info(bench.target.base_url)
        told = {"accept_length": accept_length(before, after), "kv_tokens": info.max_total_num_tokens}
        measured = measured.model_copy(update=told)
    return Cell(
        time=now(),
        work=bench.work,
        arm=bench.arm,
        concurrency=load.concurrency,
        repeat=repeat,
        measured=measured,
        invalid=tuple(problems),
    )


def _run(bench: Bench, load: Load, report: Report) -> tuple[Measured, list[str]]:
    said: deque[str] = deque(maxlen=LAST_WORDS)
    with tempfile.TemporaryDirectory(prefix="gpubox-bench-") as directory:
        asked, output = Path(directory) / "prompts.jsonl", Path(directory) / "result.jsonl"
        write_prompts(asked, bench.texts[: load.requests])
        if bench.user:
            shutil.chown(directory, bench.user)
        status = run_lines(
            [*run_as(bench.user), *command(bench.python, bench.target, load, asked, output)],
            environment=bench.environment,
            on_line=said.append,
            on_silence=lambda seconds: report(f"concurrency {load.concurrency}: measuring for {seconds:.0f} s"),
        )
        if status != 0:
            last = next((line for line in reversed(said) if line.strip()), "no word")
            raise ProofError(f"the load generator ended with status {status}: {last.strip()}", detail="\n".join(said))
        return read_result(output, load)

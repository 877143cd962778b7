"""One measurement at one concurrency is a cell: a JSON line with all that is needed to judge it later."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from gpubox.canonical import short_digest
from gpubox.errors import InputError
from gpubox.files import append_line


class Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Work(Frozen):
    """What every arm of a comparison has to share. `prompts`: sha256 of the prompts in their order.

    `output_tokens` per request, exactly when `ignore_eos`, at most otherwise. `max_running_requests` and
    `context_length`: the server's explicit limits; None where the server does not say.
    """

    model: str
    prompts: str
    output_tokens: int
    ignore_eos: bool
    temperature: float
    max_running_requests: int | None
    context_length: int | None
    gpus: tuple[str, ...]


class Arm(Frozen):
    """What was measured. Digests and names as in release.json, `versions` by distribution, `arguments` as the kernel
    has them; empty or None for an endpoint that is not one of ours.
    """

    name: str
    release: str | None
    stack_id: str | None
    server_digest: str | None
    machine: str
    driver: str | None
    versions: dict[str, str]
    arguments: tuple[str, ...]


class Percentiles(Frozen):
    """Milliseconds."""

    mean: float
    median: float
    p99: float


class Measured(Frozen):
    """`tokens_per_s` is output tokens of all streams together over the duration; `per_stream` that over concurrency."""

    duration_s: float
    requests: int
    output_tokens: int
    tokens_per_s: float
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    itl_ms: Percentiles
    accept_length: float | None
    kv_tokens: int | None

    def per_stream(self, concurrency: int) -> float:
        return self.tokens_per_s / concurrency


class Cell(Frozen):
    """`invalid`: why it must not be used; empty for a valid one. `repeat` counts from 1."""

    schema_version: Literal[1] = 1
    time: str
    work: Work
    arm: Arm
    concurrency: int
    repeat: int
    measured: Measured | None
    invalid: tuple[str, ...]

    @property
    def valid(self) -> bool:
        return self.measured is not None and not self.invalid

    @property
    def key(self) -> str:
        """Of what is measured, not of when: a cell with a known key need not be measured again."""
        return cell_key(self.work, self.arm, self.concurrency, self.repeat)


def cell_key(work: Work, arm: Arm, concurrency: int, repeat: int) -> str:
    return short_digest([work.model_dump(mode="json"), arm.model_dump(mode="json"), concurrency, repeat])


def append(path: Path, cell: Cell) -> None:
    """Durable before it returns."""
    append_line(path, cell.model_dump_json())


def read(path: Path) -> list[Cell]:
    """Every whole line, oldest first; what a kill tore is passed over. Raises InputError for another kind of file."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    found, refused = _parsed(line for line in lines if line.strip())
    if refused and not found:
        raise InputError(f"{path}: holds no cell of a sweep", hint="give the file that gpubox bench sweep wrote")
    return found


def _parsed(lines: Iterable[str]) -> tuple[list[Cell], int]:
    found, refused = [], 0
    for line in lines:
        try:
            found.append(Cell.model_validate_json(line))
        except ValidationError:
            refused += 1
    return found, refused

"""What the all-reduces of this box proved, and under which conditions: state/collectives.json.

A record holds as long as nothing that decides the outcome changed, so a rollback to a stack that passed stays fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from gpubox.collectives.ranks import Backend
from gpubox.files import write_atomic
from gpubox.layout import Layout

MOST_RECORDS = 50


class Conditions(BaseModel):
    """What decides whether an all-reduce passes. `gpus`: UUIDs by index; empty for gloo, as is `driver`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stack_id: str
    environment_digest: str
    backend: Backend
    ranks: int
    driver: str
    gpus: tuple[str, ...]
    kernel: str
    kernel_arguments: str


class GroupResult(BaseModel):
    """One group that passed. `bus_gb_per_s` at the largest size; `transports`: NCCL's own names, counted."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    devices: tuple[int, ...]
    seconds: dict[int, float]
    bus_gb_per_s: float
    library: str
    transports: dict[str, int]


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    time: str
    conditions: Conditions
    groups: tuple[GroupResult, ...]
    failure: str | None

    @property
    def passed(self) -> bool:
        return self.failure is None


class Records(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    records: tuple[Record, ...] = ()

    def under(self, conditions: Conditions) -> Record | None:
        return next((record for record in self.records if record.conditions == conditions), None)


def path(layout: Layout) -> Path:
    return layout.state / "collectives.json"


def read(layout: Layout) -> Records:
    """A file that cannot be read proves nothing: the all-reduces run again."""
    try:
        return Records.model_validate_json(path(layout).read_bytes())
    except (FileNotFoundError, ValidationError):
        return Records()


def keep(layout: Layout, record: Record) -> None:
    """Newest last, one for each set of conditions."""
    others = tuple(old for old in read(layout).records if old.conditions != record.conditions)
    kept = Records(records=(*others, record)[-MOST_RECORDS:])
    write_atomic(path(layout), (kept.model_dump_json(indent=2) + "\n").encode())

"""history.jsonl: what was tried on this box and how it ended. Append-only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from gpubox.files import append_line


class Verdict(StrEnum):
    PROVED = "proved"  # the release serves and its probes passed
    FAILED = "failed"  # the release was tried and did not prove
    RESTORED = "restored"  # the old release was put back and proved again
    UNPROVED = "unproved"  # the old release was put back, but it did not prove: the box needs a person
    INTERRUPTED = "interrupted"  # the activation ended half-way (kill, power); the link was put back


class Entry(BaseModel):
    """One line of history. `seconds`: from the stop of the old server to this verdict."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    time: str
    run: str
    who: str
    action: str
    from_release: str | None
    to_release: str | None
    verdict: Verdict
    step: str | None = None
    reason: str | None = None
    seconds: float | None = None
    log: list[str] = []


def now() -> str:
    """UTC, to the second, ISO 8601."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class History:
    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, entry: Entry) -> None:
        """Durable before it returns."""
        append_line(self.path, json.dumps(entry.model_dump(mode="json"), ensure_ascii=False))

    def __iter__(self) -> Iterator[Entry]:
        """Oldest first. Lines that a crash tore are passed over: they never were verdicts.

        Only a newline ends a line: str.splitlines would also cut at U+0085 and U+2028 inside a log line.
        """
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                yield Entry.model_validate_json(line)
            except ValidationError:
                continue

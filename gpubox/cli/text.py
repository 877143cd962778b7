"""Human text of `gpubox status`, `releases` and `history`."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from gpubox.rollout.history import Entry
from gpubox.rollout.status import ReleaseRow, Status


def show_status(seen: Status) -> None:
    rows: list[tuple[str, str | None]] = [
        ("release", seen.current or "none"),
        ("previous", seen.previous),
        ("unit", f"{seen.unit}, pid {seen.main_pid}, {seen.restarts} restarts"),
        ("running", None if seen.running == seen.current else str(seen.running)),
        ("model", f"{seen.served_model_name} at {seen.address}" if seen.address else None),
        ("overlay", f"{seen.overlay} (not a production box)" if seen.overlay else None),
        ("overrides", "; ".join(f"{rule}: {reason}" for rule, reason in seen.overrides.items())),
        ("last", _last(seen.last) if seen.last else None),
        ("lock", seen.lock),
        ("activating", f"{seen.activation.to_release}: {seen.activation.step} since {seen.activation.since}"
            if seen.activation else None),
        ("next", seen.advice),
    ]  # fmt: skip
    for name, value in rows:
        if value:
            print(f"{name:<12}{value}")


def show_releases(rows: list[ReleaseRow]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("", "release", "stack", "server", "last verdict", "remark"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        mark = "current" if row.current else "previous" if row.previous else ""
        last = f"{row.last.verdict} {row.last.time}" if row.last else "never activated"
        table.add_row(mark, row.id, row.stack, row.server, last, row.problem or row.failed or "")
    _console().print(table)


def show_history(entries: list[Entry]) -> None:
    console = _console()
    for entry in entries:
        console.print(f"{_last(entry)} by {entry.who}")
        if entry.reason:
            console.print(f"  {entry.step or ''}: {entry.reason}")
        for line in entry.log:
            console.print(f"  | {line}")


def _last(entry: Entry) -> str:
    took = f" in {entry.seconds} s" if entry.seconds is not None else ""
    return f"{entry.time} {entry.action} {entry.to_release}: {entry.verdict}{took}"


def _console() -> Console:
    """Plain text; a pipe has no width, and lines that people grep are not folded to 80 columns."""
    return Console(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)

"""Say what is being done and for how long."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

console = Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def step(what: str) -> Iterator[None]:
    """Show `what` with a running clock; when it ends, leave one line with the seconds it took."""
    started = time.monotonic()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    if not console.is_terminal:
        console.print(f"  .. {what}")
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            progress.add_task(what, total=None)
            yield
    except BaseException:
        console.print(f"[red]FAIL[/] {what} ({time.monotonic() - started:.1f} s)")
        raise
    console.print(f"[green]  ok[/] {what} ({time.monotonic() - started:.1f} s)")


def say(what: str) -> None:
    """One line that is no step, such as why nothing is done."""
    console.print(f"  -- {what}")

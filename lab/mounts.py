"""Remove a directory tree without following a mount out of it."""

from __future__ import annotations

import time
from pathlib import Path

from lab.shell import run

LAST_WRITES_SECONDS = 30  # children of a killed run get SIGTERM and may tidy up for a while themselves


def mounts_below(directory: Path) -> list[str]:
    """Mount points at or below `directory`, innermost first."""
    targets = run("findmnt", "--raw", "--noheadings", "--output", "TARGET").stdout.splitlines()
    return sorted((t for t in targets if t == str(directory) or t.startswith(f"{directory}/")), reverse=True)


def remove_tree(directory: Path) -> None:
    """Unmount what a killed run left mounted below `directory`, then remove it. A missing directory is fine."""
    deadline = time.monotonic() + LAST_WRITES_SECONDS
    while not _try_to_remove(directory, must=time.monotonic() > deadline):
        time.sleep(0.5)


def _try_to_remove(directory: Path, *, must: bool) -> bool:
    unmounted = [run("umount", target, check=must) for target in mounts_below(directory)]
    if any(done.returncode for done in unmounted):
        return False
    return run("rm", "-rf", "--one-file-system", directory, check=must).returncode == 0

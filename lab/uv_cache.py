"""One copy of the wheels on disk, used by every box and by later runs.

uv links files from its cache into a venv, and link(2) does not cross mounts, so a box needs the cache inside its own
file system. A box's root is a plain directory of this machine: hard links bring the shared cache in for free.
A program that writes *into* a cached file changes it everywhere; uv itself, and editors that replace files, do not.
"""

from __future__ import annotations

from pathlib import Path

from gpubox.layout import DEFAULT_ROOT, Layout
from lab.progress import say
from lab.settings import UV_CACHE
from lab.shell import ENDS_WITH_US, run

IN_BOX = Layout(DEFAULT_ROOT).wheel_cache


def cache_below(root: Path) -> Path:
    """A box's uv cache, seen from this machine."""
    return root / IN_BOX.relative_to("/")


def link_into(target: Path) -> None:
    """Link the shared cache into the directory `target`."""
    target.mkdir(parents=True, exist_ok=True)
    if UV_CACHE.exists():
        _merge(UV_CACHE, target)
        _remove_locks(target)


def save(root: Path) -> None:
    """Link what is new in the cache of the box whose file system is `root` into the shared cache."""
    source = cache_below(root)
    if source.exists():
        UV_CACHE.mkdir(parents=True, exist_ok=True)
        _merge(source, UV_CACHE)
        _remove_locks(UV_CACHE)


def _merge(source: Path, target: Path) -> None:
    """Add the files that `target` lacks; never replaces one."""
    linked = source.stat().st_dev == target.stat().st_dev
    if not linked:
        say(f"{source} and {target} are on different file systems: copying wheels instead of linking them")
    how = "--link" if linked else "--reflink=auto"
    run(*ENDS_WITH_US, "cp", "--archive", "--no-clobber", how, f"{source}/.", target)


def _remove_locks(cache: Path) -> None:
    """A lock file shared by link would make boxes wait for each other. Files named like it inside wheels stay."""
    run("find", cache, "-type", "f", "-name", "*.lock", "!", "-path", f"{cache}/archive-v*", "-delete")

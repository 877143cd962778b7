"""Durable file operations: a reader sees the old content or the new, also after a power cut."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` durable (fsync of a directory; see fsync(2))."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace `path` by `data` in one step: write a sibling, fsync, rename."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def append_line(path: Path, line: str) -> None:
    """Durable before it returns. A line torn by a crash is closed first, so that it cannot swallow this one."""
    data = line.encode() + b"\n"
    created = not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            data = b"\n" + data
        os.write(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if created:
        sync_directory(path.parent)


def link_atomic(link: Path, target: str) -> None:
    """Point the symbolic link `link` at `target` in one step (symlink beside it, then rename)."""
    temporary = link.with_name(f".{link.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)
    sync_directory(link.parent)

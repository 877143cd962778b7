"""Digests of whole files, several at once: hashlib releases Python's lock for large buffers, so threads suffice."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Event
from typing import Any, Final, Literal, NamedTuple

BUFFER: Final = 2 * 2**20  # bytes a read: large enough that threads seldom wait for Python's lock
JOBS_LIMIT: Final = 8  # one core with SHA instructions hashes about 2 GB/s: eight are ahead of any disk of a box
CLOCK_STEP_NS: Final = 20_000_000  # the kernel's clock for mtime moves every 1 to 10 ms

Algorithm = Literal["sha256", "git"]
OnBytes = Callable[[int], None]


class Digests(NamedTuple):
    """`sha256` of the bytes; `git`: the id that git gives these bytes (sha1 of a header and the bytes)."""

    sha256: str
    git: str


class Expected(NamedTuple):
    """What a file must hash to. The hub names large files by sha256 and small ones by git id."""

    algorithm: Algorithm
    value: str

    def matches(self, digests: Digests) -> bool:
        return self.value == (digests.sha256 if self.algorithm == "sha256" else digests.git)

    def __str__(self) -> str:
        return f"{self.algorithm} {self.value}"


class Identity(NamedTuple):
    """What stays equal as long as nobody writes to a file. size in bytes, mtime_ns in nanoseconds since the epoch."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


class ChangedError(Exception):
    """A file was written to while it was read: its digest means nothing."""


class CancelledError(Exception):
    """The caller wants no more digests."""


class Hasher:
    """Both digests in one pass. The git id only up to `GIT_LIMIT`: the hub gives larger files a sha256."""

    GIT_LIMIT: Final = 100 * 2**20  # bytes

    def __init__(self, size: int | None) -> None:
        self._sha256 = hashlib.sha256()
        self._git: Any = None
        if size is not None and size <= self.GIT_LIMIT:
            self._git = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)

    def update(self, data: bytes | memoryview) -> None:
        self._sha256.update(data)
        if self._git is not None:
            self._git.update(data)

    def digests(self) -> Digests:
        return Digests(self._sha256.hexdigest(), self._git.hexdigest() if self._git is not None else "")


class Hashed(NamedTuple):
    """One file, read whole: what it was, and its digests."""

    path: Path
    identity: Identity
    digests: Digests


def hash_file(path: Path, *, on_bytes: OnBytes | None = None, cancelled: Event | None = None) -> Hashed:
    """Read `path` whole. Raises OSError, ChangedError when it was written to meanwhile, CancelledError."""
    buffer = memoryview(bytearray(BUFFER))
    with path.open("rb", buffering=0) as stream:
        before = settled(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        hasher = Hasher(before.size)
        length = 0
        while length <= before.size and (count := stream.readinto(buffer)):
            length += count
            hasher.update(buffer[:count])
            if on_bytes is not None:
                on_bytes(count)
            if cancelled is not None and cancelled.is_set():
                raise CancelledError
        after = os.fstat(stream.fileno())
    if before != Identity.of(after):
        raise ChangedError(f"{path}: was written to while it was read")
    return Hashed(path, before, hasher.digests())


def settled(descriptor: int) -> Identity:
    """What identifies an open file, taken so late that whatever is written from now on gets another mtime."""
    status = os.fstat(descriptor)
    while 0 <= time.time_ns() - status.st_mtime_ns < CLOCK_STEP_NS:
        time.sleep(CLOCK_STEP_NS / 1e9)
        status = os.fstat(descriptor)
    return Identity.of(status)


def default_jobs() -> int:
    """As many threads as there are cores for this process (a container may have few of its node's)."""
    return min(len(os.sched_getaffinity(0)), JOBS_LIMIT)


def hash_files(
    paths: Sequence[Path], *, jobs: int, on_bytes: OnBytes | None = None, each: Callable[[Hashed], None]
) -> Iterator[tuple[Path, Hashed | Exception]]:
    """Hash `paths`, the largest first, and give each as it is done, with its digests or what went wrong.

    `each` runs in the thread that read the file, right after it: what it records stays when the caller dies.
    """
    cancelled = Event()

    def one(path: Path) -> Hashed:
        hashed = hash_file(path, on_bytes=on_bytes, cancelled=cancelled)
        each(hashed)
        return hashed

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        pending = {pool.submit(one, path): path for path in sorted(paths, key=_size, reverse=True)}
        try:
            for future in as_completed(pending):
                try:
                    yield pending[future], future.result()
                except (OSError, ChangedError) as error:
                    yield pending[future], error
        except BaseException:
            cancelled.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0

"""Where weights come from. Every source gives the same: a list of files, and their bytes from any place on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from gpubox.errors import GpuboxError, InputError
from gpubox.weights.hashing import BUFFER, Digests, Expected, Hasher, Identity, OnBytes, settled
from gpubox.weights.manifest import MANIFEST, Expectations, read_manifest

AGAIN: Final = "run the same command again: it goes on where it stopped"


class Wanted(NamedTuple):
    """One file to fetch. `size` in bytes; None when the source does not say before the bytes come."""

    name: str
    size: int | None
    expected: Expected


class Part:
    """A file that is not yet complete, and the digests of what it holds so far. Opening reads what is there."""

    def __init__(self, path: Path, size: int | None, on_bytes: OnBytes) -> None:
        self.size = size
        self.length = 0
        self._on_bytes = on_bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = os.fdopen(
            os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644), "r+b", buffering=0
        )
        self._hasher = Hasher(size)
        buffer = memoryview(bytearray(BUFFER))
        while count := self._stream.readinto(buffer):
            self._hasher.update(buffer[:count])
            self._grown(count)
        if size is not None and self.length > size:
            self.restart()

    def append(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        self._hasher.update(view)
        while view:
            written = self._stream.write(view)
            view = view[written:]
            self._grown(written or 0)

    def restart(self) -> None:
        """Forget all of it: what is there does not fit what comes."""
        self._stream.seek(0)
        self._stream.truncate()
        self._hasher = Hasher(self.size)
        self._grown(-self.length)

    def digests(self) -> Digests:
        return self._hasher.digests()

    def finish(self) -> Identity:
        """On disk, readable for the user that serves, and its identity from now on."""
        os.fchmod(self._stream.fileno(), 0o644)
        os.fsync(self._stream.fileno())
        return settled(self._stream.fileno())

    def close(self) -> None:
        self._stream.close()

    def _grown(self, count: int) -> None:
        self.length += count
        self._on_bytes(count)


class Source(Protocol):
    """`where` names it in messages; `proves` says what a right digest means when the list came from there."""

    where: str
    proves: str

    def wanted(self) -> list[Wanted]:
        """Every file there is. Raises GpuboxError."""

    def fill(self, file: Wanted, part: Part) -> None:
        """Bring `part` from its length to all of the file. Raises GpuboxError, OSError of the disk."""


class DirectorySource:
    """A directory with a manifest: a mounted share, another disk."""

    def __init__(self, directory: Path, manifest: Path | None) -> None:
        self.where = str(directory)
        self.directory = directory
        self._expected: Expectations = read_manifest(manifest or directory / MANIFEST)
        self.proves = f"the bytes are those of {self._expected.origin}"

    def wanted(self) -> list[Wanted]:
        found = []
        for name, expected in self._expected.files.items():
            path = self.directory / name
            if not path.is_file():
                raise InputError(
                    f"{path}: is missing, and {self._expected.origin} names it", hint="complete the source"
                )
            found.append(Wanted(name, path.stat().st_size, expected))
        return found

    def fill(self, file: Wanted, part: Part) -> None:
        for data in self._read(self.directory / file.name, part.length):
            part.append(data)

    def _read(self, path: Path, start: int) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(BUFFER))
        try:
            with path.open("rb", buffering=0) as stream:
                stream.seek(start)
                while count := stream.readinto(buffer):
                    yield buffer[:count]
        except OSError as error:
            raise GpuboxError(f"{path}: cannot be read: {error.strerror}", hint=AGAIN) from None

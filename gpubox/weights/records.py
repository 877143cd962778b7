"""What was read once is not read again: digests by path, size, mtime and inode, one small file for each file.

`state/weights/<digest of the path>.json`, written in one step when a file has been read, so that a command that is
killed loses only the files it was reading. A record is a memory, no proof against somebody with root.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpubox.canonical import DIGEST_LENGTH, canonical_json
from gpubox.errors import InputError
from gpubox.files import write_atomic
from gpubox.rollout.history import now
from gpubox.weights.hashing import Digests, Hashed, Identity


class Record(BaseModel):
    """One file as it was when it was read whole. `size` in bytes, `mtime_ns` in nanoseconds since the epoch."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    path: str
    size: int
    mtime_ns: int
    inode: int
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    git: Annotated[str, Field(pattern=r"^([0-9a-f]{40})?$")]
    read_at: str

    @property
    def identity(self) -> Identity:
        return Identity(self.size, self.mtime_ns, self.inode)

    @property
    def digests(self) -> Digests:
        return Digests(self.sha256, self.git)


class Records:
    """The records in `directory`. A damaged one counts as none: the file is read again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def find(self, path: Path) -> Digests | None:
        """The digests of `path`; None when it was never read, or changed since. Links count as what they name."""
        try:
            real = path.resolve()
            record = Record.model_validate_json(self._file(real).read_bytes())
            same = record.path == str(real) and record.identity == Identity.of(real.stat())
        except (OSError, RuntimeError, ValidationError):  # RuntimeError: links in a circle
            return None
        return record.digests if same else None

    def write(self, hashed: Hashed) -> None:
        """Raises OSError; call `prepare` first."""
        real = hashed.path.resolve()
        size, mtime_ns, inode = hashed.identity
        record = Record(
            path=str(real), size=size, mtime_ns=mtime_ns, inode=inode, **hashed.digests._asdict(), read_at=now()
        )
        self.directory.mkdir(parents=True, exist_ok=True)
        write_atomic(self._file(real), canonical_json(record.model_dump()))

    def prepare(self) -> None:
        """Before hours of reading: raises InputError when nothing could be recorded."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / ".writable").touch()
        except OSError as error:
            raise InputError(
                f"{self.directory}: what was read cannot be recorded: {error.strerror}",
                hint="run as root, or name another directory with --state",
            ) from None

    def forget_gone(self) -> None:
        """Remove the records of files that are no more."""
        for file in self.directory.glob("*.json"):
            try:
                gone = not Path(Record.model_validate_json(file.read_bytes()).path).exists()
            except (OSError, ValidationError):
                gone = True
            if gone:
                file.unlink(missing_ok=True)

    def _file(self, real: Path) -> Path:
        return self.directory / f"{hashlib.sha256(os.fsencode(real)).hexdigest()[: 2 * DIGEST_LENGTH]}.json"

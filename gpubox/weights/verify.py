"""Whether a model directory is whole, and whether its bytes are the ones that somebody published.

Two questions with two answers. *Structure* is told in milliseconds from headers and sizes by the one judge in
gpubox/specs/checkpoint.py. *Content* needs every byte and something to compare with: a manifest, or a hub's cache.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel

from gpubox.errors import InputError
from gpubox.specs.checkpoint import inspect_model_directory
from gpubox.weights.hashing import Digests, Expected, OnBytes, default_jobs, hash_files
from gpubox.weights.manifest import Expectations, expectations, model_files
from gpubox.weights.records import Records

DEEP_NEEDS_MANIFEST = (
    "name one with --manifest; `gpubox weights manifest DIR` writes one from the bytes that are here, "
    "which proves only that they did not change since"
)


class State(StrEnum):
    """What is known of one file's bytes."""

    PROVED = "proved"
    UNREAD = "unread"  # nobody read it since it last changed
    UNLISTED = "unlisted"  # nothing says what it must be
    WRONG = "wrong"
    MISSING = "missing"
    UNREADABLE = "unreadable"


class FileVerdict(BaseModel):
    """One file. `read`: whether its bytes were read now rather than remembered; `size` in bytes."""

    name: str
    size: int
    state: State
    expected: str | None = None
    found: str | None = None
    problem: str | None = None
    read: bool = False


class Verdict(BaseModel):
    """What is known of a model directory. `size` in bytes of all its shards; `read` in bytes, `seconds` of reading."""

    directory: str
    shards: int
    tensors: int
    size: int
    structure: list[str]
    notes: list[str]
    origin: str | None
    files: list[FileVerdict]
    read: int
    seconds: float

    @property
    def whole(self) -> bool:
        return not self.structure

    @property
    def wrong(self) -> list[FileVerdict]:
        """Files whose bytes, or whose absence, contradict what they must be."""
        return [file for file in self.files if file.state in (State.WRONG, State.MISSING, State.UNREADABLE)]

    def of_state(self, state: State) -> list[FileVerdict]:
        return [file for file in self.files if file.state is state]

    @property
    def proved(self) -> bool:
        """Whole, and every file is what the manifest says."""
        return self.whole and bool(self.files) and all(file.state is State.PROVED for file in self.files)


def verify(
    directory: Path,
    records: Records,
    *,
    manifest: Path | None = None,
    deep: bool = False,
    fresh: bool = False,
    jobs: int | None = None,
    on_start: OnBytes | None = None,
    on_bytes: OnBytes | None = None,
) -> Verdict:
    """What is known of the model in `directory`; with `deep` every file is read that was not read since it changed.

    fresh: what was recorded counts for nothing. on_start gets the number of bytes that will be read, on_bytes each
    part of them. Raises InputError for no such directory, for an unreadable manifest, and for `deep` without any.
    """
    seen = inspect_model_directory(directory)
    expected = expectations(directory, manifest)
    if deep and expected is None:
        raise InputError(f"{directory}: has no manifest to compare its bytes with", hint=DEEP_NEEDS_MANIFEST)
    files = _files(directory, expected)
    known = {} if fresh else {name: digests for name, path in files.items() if (digests := records.find(path))}
    started, to_read = time.monotonic(), 0
    read: dict[str, Digests | str] = {}
    if deep and expected is not None:
        wanted = {name: files[name] for name in expected.files if files[name].is_file()}
        # A file that was wrong is read again: it may have been the disk.
        wanted = {name: path for name, path in wanted.items() if not _as_wanted(known.get(name), expected.files[name])}
        to_read = sum(path.stat().st_size for path in wanted.values())
        if on_start is not None:
            on_start(to_read)
        read = _read(wanted, records, jobs or default_jobs(), on_bytes)
    return Verdict(
        directory=str(directory),
        shards=seen.shards,
        tensors=seen.tensors,
        size=seen.size,
        structure=[problem.message for problem in seen.problems],
        notes=seen.notes,
        origin=expected.origin if expected else None,
        files=[_judged(name, path, expected, known.get(name), read.get(name)) for name, path in files.items()],
        read=to_read,
        seconds=round(time.monotonic() - started, 3),
    )


def _files(directory: Path, expected: Expectations | None) -> Mapping[str, Path]:
    """Those that are there and those that should be, by name."""
    listed = {name: directory / name for name in expected.files} if expected else {}
    return dict(sorted((listed | model_files(directory)).items()))


def _as_wanted(digests: Digests | None, wanted: Expected) -> bool:
    return digests is not None and wanted.matches(digests)


def _read(
    wanted: Mapping[str, Path], records: Records, jobs: int, on_bytes: OnBytes | None
) -> dict[str, Digests | str]:
    """Digests, or what went wrong, by name. Each file is recorded as soon as it was read."""
    records.prepare()
    records.forget_gone()
    names = {path: name for name, path in wanted.items()}
    done: dict[str, Digests | str] = {}
    for path, result in hash_files(list(names), jobs=jobs, on_bytes=on_bytes, each=records.write):
        done[names[path]] = str(result) if isinstance(result, Exception) else result.digests
    return done


def _judged(
    name: str, path: Path, expected: Expectations | None, known: Digests | None, read: Digests | str | None
) -> FileVerdict:
    wanted = expected.files.get(name) if expected else None
    verdict = FileVerdict(name=name, size=0, state=State.MISSING, expected=str(wanted) if wanted else None)
    if not path.is_file():
        what = "a link to a directory or to nothing" if path.is_symlink() else "missing"
        return verdict.model_copy(update={"problem": what})
    size = path.stat().st_size
    if wanted is None:
        return verdict.model_copy(update={"size": size, "state": State.UNLISTED})
    if isinstance(read, str):
        return verdict.model_copy(update={"size": size, "state": State.UNREADABLE, "problem": read, "read": True})
    digests = read or known
    return verdict.model_copy(update={"size": size, "read": read is not None, **_compared(wanted, digests)})


def _compared(wanted: Expected, digests: Digests | None) -> dict[str, object]:
    if digests is None:
        return {"state": State.UNREAD}
    found = f"{wanted.algorithm} {digests.sha256 if wanted.algorithm == 'sha256' else digests.git}"
    if wanted.matches(digests):
        return {"state": State.PROVED, "found": found}
    return {"state": State.WRONG, "found": found, "problem": f"its {found} is not the expected {wanted.value}"}

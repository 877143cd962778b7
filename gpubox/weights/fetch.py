"""Fetch a model directory: every file proved before it gets its name, none of the operator's replaced.

Bytes gather in DIR/.partial, under names made from their digests, so that what another run or another revision left
there is continued only where it fits. A complete file is linked to its name, which fails when the name is taken.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Final, NamedTuple

from gpubox.errors import GpuboxError, InputError, LockedError, RefusedError
from gpubox.files import sync_directory, write_atomic
from gpubox.weights.hashing import CancelledError, Digests, Hashed, OnBytes, hash_files
from gpubox.weights.manifest import MANIFEST, checked_name, parse_manifest, render_manifest
from gpubox.weights.records import Records
from gpubox.weights.sources import AGAIN, Part, Source, Wanted

STAGING: Final = ".partial"  # gpubox/specs/checkpoint.py takes it for an unfinished download
RESERVE: Final = 256 * 2**20  # bytes of disk that stay free


class Fetched(NamedTuple):
    """`fetched` and `present` are numbers of files, `size` the bytes of all."""

    fetched: int
    present: int
    size: int


class Progress(NamedTuple):
    """`start` gets what is about to happen and its bytes; `advance` gets bytes, fewer than 0 when some are lost."""

    start: Callable[[str, int], None]
    advance: OnBytes


def fetch(
    source: Source,
    directory: Path,
    records: Records,
    *,
    jobs: int,
    progress: Progress,
    exclude: Sequence[str] = (),
    cancelled: Event | None = None,
) -> Fetched:
    """Bring every file of `source` to `directory` and write its manifest there.

    Raises RefusedError when files of these names and other content are there, LockedError when another fetch runs,
    GpuboxError when files could not be had: all others are in place then, and the same call goes on from there.
    """
    records.prepare()
    wanted = _chosen(source, exclude)
    _refuse_other_manifest(directory, wanted)
    present = _present(directory, wanted, records, jobs, progress)
    missing = [file for file in wanted if file.name not in present]
    _check_space(directory, missing)
    make_directory(directory / STAGING)
    with _alone(directory / STAGING):
        progress.start("fetching", sum(file.size or 0 for file in missing))
        fetching = _Fetching(source, directory, records, progress.advance, cancelled or Event())
        digests = present | fetching.all(missing, jobs)
        _write_manifest(directory, source, {name: found.sha256 for name, found in digests.items()})
        shutil.rmtree(directory / STAGING)
    return Fetched(len(missing), len(present), sum((directory / name).stat().st_size for name in digests))


class _Fetching:
    """The files of one call, several at once. One that fails does not stop the others: they may take hours."""

    def __init__(self, source: Source, directory: Path, records: Records, advance: OnBytes, cancelled: Event) -> None:
        self._source = source
        self._directory = directory
        self._records = records
        self._advance = advance
        self._cancelled = cancelled

    def all(self, files: Sequence[Wanted], jobs: int) -> dict[str, Digests]:
        done: dict[str, Digests] = {}
        failed: dict[str, GpuboxError] = {}
        with ThreadPoolExecutor(max_workers=jobs) as pool:
            pending = {pool.submit(self._one, file): file.name for file in files}
            try:
                for future in as_completed(pending):
                    name = pending[future]
                    try:
                        done[name] = future.result()
                    except GpuboxError as error:
                        failed[name] = error
            except BaseException:
                self._cancelled.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        if failed:
            first = failed[min(failed)]
            rest = "\n".join(failed[name].message for name in sorted(failed)[1:])
            raise type(first)(first.message, hint=first.hint, detail=rest or first.detail)
        return done

    def _one(self, file: Wanted) -> Digests:
        try:
            return self._fetch(file)
        except OSError as error:
            hint = f"make room; {AGAIN}" if error.errno in (errno.ENOSPC, errno.EDQUOT) else AGAIN
            raise GpuboxError(f"{self._directory / file.name}: {error.strerror or error}", hint=hint) from None

    def _fetch(self, file: Wanted) -> Digests:
        path = part_path(self._directory, file)
        part = Part(path, file.size, self._count)
        try:
            found = self._proved(file, part)
            identity = part.finish()
        except _WrongTwiceError as error:
            path.unlink()
            raise GpuboxError(
                str(error), hint="that source is damaged, or the manifest is of another version"
            ) from None
        finally:
            part.close()
        final = self._directory / file.name
        _name(path, final)
        self._records.write(Hashed(final, identity, found))
        return found

    def _proved(self, file: Wanted, part: Part) -> Digests:
        """Wrong bytes may be what an earlier run left, or a bad line: once, all of it is fetched again."""
        for again in (True, False):
            self._source.fill(file, part)
            found = part.digests()
            if file.expected.matches(found):
                return found
            if again:
                part.restart()
        raise _WrongTwiceError(
            f"{file.name} from {self._source.where}: came with other bytes twice: sha256 {found.sha256}, "
            f"git {found.git or 'not taken'}, expected {file.expected}"
        )

    def _count(self, count: int) -> None:
        self._advance(count)
        if self._cancelled.is_set():
            raise CancelledError


class _WrongTwiceError(Exception):
    pass


def part_path(directory: Path, file: Wanted) -> Path:
    """Where the bytes of `file` gather; two files of equal content have two."""
    return directory / STAGING / f"{file.expected.value}-{hashlib.sha256(file.name.encode()).hexdigest()[:8]}"


def _chosen(source: Source, exclude: Sequence[str]) -> list[Wanted]:
    found = [file for file in source.wanted() if not any(fnmatch.fnmatchcase(file.name, glob) for glob in exclude)]
    wanted = {checked_name(file.name, source.where): file for file in found if file.name != MANIFEST}
    if inside := sorted(name for name in wanted if name.split("/")[0] == STAGING):
        raise InputError(f"{source.where}: {inside[0]}: nothing may be called {STAGING}")
    if not wanted:
        raise InputError(f"{source.where}: there is nothing to fetch", hint="correct the name, or --exclude")
    return [wanted[name] for name in sorted(wanted)]


def _present(
    directory: Path, wanted: Sequence[Wanted], records: Records, jobs: int, progress: Progress
) -> dict[str, Digests]:
    """Files that are there already, each with the right bytes. Raises RefusedError when any has others."""
    files = {file.name: file for file in wanted if os.path.lexists(directory / file.name)}
    odd = {name for name, file in files.items() if not _could_be(directory / name, file)}
    found = {name: digests for name in files.keys() - odd if (digests := records.find(directory / name))}
    unread = {directory / name: name for name in files.keys() - odd - found.keys()}
    if unread:
        progress.start("reading what is there", sum(path.stat().st_size for path in unread))
        for path, result in hash_files(list(unread), jobs=jobs, on_bytes=progress.advance, each=records.write):
            if isinstance(result, Exception):
                raise GpuboxError(f"{path}: cannot be read: {result}") from None
            found[unread[path]] = result.digests
    odd |= {name for name, digests in found.items() if not files[name].expected.matches(digests)}
    if odd:
        raise RefusedError(
            f"{directory}: {min(odd)} is there with other content than the one to fetch, and is not replaced",
            hint="move what is listed away, or name another directory with --to",
            detail="\n".join(sorted(odd)),
        )
    return found


def _could_be(path: Path, file: Wanted) -> bool:
    return path.is_file() and (file.size is None or path.stat().st_size == file.size)


def _refuse_other_manifest(directory: Path, wanted: Sequence[Wanted]) -> None:
    path = directory / MANIFEST
    if not path.exists():
        return
    listed = parse_manifest(path.read_bytes(), str(path))
    for file in wanted:
        if file.expected.algorithm == "sha256" and listed.get(file.name, file.expected.value) != file.expected.value:
            raise RefusedError(
                f"{path}: says {listed[file.name]} of {file.name}, to be fetched is {file.expected.value}",
                hint="this directory holds another version: name another one with --to",
            )


def _write_manifest(directory: Path, source: Source, digests: dict[str, str]) -> None:
    """What is new is added below what is there."""
    path = directory / MANIFEST
    before = path.read_bytes() if path.exists() else b""
    listed = parse_manifest(before, str(path)) if before else {}
    for name in sorted(digests.keys() & listed.keys()):
        if digests[name] != listed[name]:
            raise RefusedError(
                f"{path}: says {listed[name]} of {name}, it is {digests[name]}", hint="correct one of them"
            )
    fresh = {name: digest for name, digest in digests.items() if name not in listed}
    if fresh:
        gap = b"" if before.endswith(b"\n") or not before else b"\n"
        comments = (f"{source.where}, fetched by gpubox", source.proves)
        write_atomic(path, before + gap + render_manifest(fresh, comments))


def _check_space(directory: Path, missing: Sequence[Wanted]) -> None:
    """Before the first byte. Sizes that a mirror does not tell cannot be counted."""
    parts = [part_path(directory, file) for file in missing]
    there = sum(path.stat().st_size for path in parts if path.exists())
    needed = sum(file.size or 0 for file in missing) - there + (RESERVE if missing else 0)
    place = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise GpuboxError(
            f"{directory}: {needed / 1e9:.1f} GB are needed there and {free / 1e9:.1f} GB are free",
            hint="make room, or name a directory on another disk with --to",
        )


@contextmanager
def _alone(staging: Path) -> Iterator[None]:
    descriptor = os.open(staging / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise LockedError(f"{staging.parent}: another gpubox weights fetch works there", hint="wait for it") from None
    finally:
        os.close(descriptor)


def _name(part: Path, final: Path) -> None:
    """Give a complete file its name, never one that is taken. Raises RefusedError, OSError.

    A link fails when the name exists; a file system without links gets a look before the rename.
    """
    make_directory(final.parent)
    try:
        os.link(part, final)
        part.unlink()
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        if os.path.lexists(final):
            raise RefusedError(f"{final}: somebody put it there meanwhile; it is not replaced", hint=AGAIN) from None
        part.rename(final)
    sync_directory(final.parent)


def make_directory(path: Path) -> None:
    """With its parents, each open for the user that serves, whatever the umask. Raises InputError."""
    if path.is_dir():
        return
    make_directory(path.parent)
    try:
        path.mkdir(exist_ok=True)
        path.chmod(0o755)
    except OSError as error:
        raise InputError(f"{path}: cannot be made: {error.strerror}", hint="correct --to, or run as root") from None

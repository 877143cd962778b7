"""Fill, verify and prune a wheelhouse. Everything put there is written down first, and nothing else is ever removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gpubox.build.fetch import PART, fetch, sha256_of
from gpubox.devtools.needed import Needed, Wants
from gpubox.errors import GpuboxError, InputError
from gpubox.files import write_atomic
from gpubox.specs.wheelhouse import MANIFESTS, HeldFile, Manifest, read_manifests

LEDGER = ".gathered"  # what was ever put here, one path a line
WORKERS = 4

OnBytes = Callable[[str, int], None]  # path, bytes of it that are there
OnFile = Callable[[Needed, bool], None]  # the file, and whether it was there already


@dataclass(frozen=True)
class Gathered:
    manifest: Manifest
    fetched: int
    already_there: int


def gather(directory: Path, wants: Wants, *, on_bytes: OnBytes, on_file: OnFile) -> Gathered:
    """All of `wants` in `directory`, checked, and its manifest. What is there and right is not fetched again.

    Goes on after a failure with what can be had; raises GpuboxError for the first failure with the others in detail.
    Then no manifest is written, and the next call goes on where this one ended.
    """
    directory.mkdir(parents=True, exist_ok=True)
    ours = _note(directory, [needed.path for needed in wants.files])
    failures: list[GpuboxError] = []
    held: list[HeldFile] = []
    fetched = 0
    with ThreadPoolExecutor(WORKERS) as pool:
        jobs = [
            (needed, pool.submit(_bring, directory, needed, needed.path in ours, on_bytes)) for needed in wants.files
        ]
        for needed, job in jobs:
            try:
                sha256, was_there = job.result()
            except GpuboxError as error:
                failures.append(error)
                continue
            size = (directory / needed.path).stat().st_size
            held.append(HeldFile(path=needed.path, sha256=sha256, size=size, role=needed.role))
            fetched += not was_there
            on_file(needed, was_there)
    if failures:
        first = failures[0]
        more = [error.message for error in failures]
        raise type(first)(
            f"{directory}: {len(failures)} of {len(wants.files)} files are missing: {first.message}",
            hint=first.hint,
            detail="\n".join(more),
        )
    manifest = Manifest(stack=wants.stack, pythons=wants.pythons, locks=wants.locks, files=held)
    (directory / MANIFESTS).mkdir(exist_ok=True)
    write_atomic(directory / MANIFESTS / f"{wants.stack}.json", manifest.render())
    return Gathered(manifest, fetched, len(held) - fetched)


def damages(directory: Path, *, on_bytes: OnBytes = lambda path, done: None) -> list[str]:
    """What is not as the manifests say, one line each. Raises InputError when there is no manifest."""
    manifests = read_manifests(directory)
    if not manifests:
        raise InputError(f"{directory}: no manifest, so nothing to verify", hint="run `make wheelhouse STACK=NAME`")
    found = []
    for held in {file.path: file for manifest in manifests for file in manifest.files}.values():
        path = directory / held.path
        if not path.is_file():
            found.append(f"{held.path}: missing")
        elif path.stat().st_size != held.size:
            found.append(f"{held.path}: {path.stat().st_size} bytes, the manifest says {held.size}")
        elif sha256_of(path, lambda done, name=held.path: on_bytes(name, done)) != held.sha256:  # type: ignore[misc]
            found.append(f"{held.path}: other bytes than the manifest says")
    return found


def superfluous(directory: Path, *, without: str | None = None) -> list[Path]:
    """Files that were put here and that no manifest names any more, the one of the stack `without` not counted."""
    manifests = read_manifests(directory)
    if without is not None and without not in {manifest.stack for manifest in manifests}:
        known = ", ".join(manifest.stack for manifest in manifests) or "none"
        raise InputError(f"{directory}: holds no stack {without!r}", hint=f"it holds: {known}")
    named = {file.path for manifest in manifests if manifest.stack != without for file in manifest.files}
    ours = _noted(directory)
    return sorted(path for path in _existing(directory, ours) if path.relative_to(directory).as_posix() not in named)


def prune(directory: Path, *, without: str | None = None) -> list[Path]:
    """Remove what is superfluous; returns it."""
    removed = superfluous(directory, without=without)
    if without is not None:
        (directory / MANIFESTS / f"{without}.json").unlink()
    for path in removed:
        path.unlink()
    left = _noted(directory) - {path.relative_to(directory).as_posix() for path in removed}
    write_atomic(directory / LEDGER, "".join(f"{name}\n" for name in sorted(left)).encode())
    return removed


def _bring(directory: Path, needed: Needed, ours: bool, on_bytes: OnBytes) -> tuple[str, bool]:
    """The sha256 of the file, which is there and right afterwards, and whether it was before."""
    path = directory / needed.path
    if path.is_file():
        digest = sha256_of(path)
        try:
            needed.check(digest)
        except GpuboxError as error:
            if not ours:
                raise InputError(f"{path}: {error.message}", hint="it was not gathered here: move it away") from None
            path.unlink()
        else:
            on_bytes(needed.path, path.stat().st_size)
            return digest, True
    seen: list[str] = []

    def check(digest: str) -> None:
        needed.check(digest)
        seen.append(digest)

    fetch(needed.address(), path, check, progress=lambda done: on_bytes(needed.path, done))
    return seen[-1], False


def _note(directory: Path, paths: list[str]) -> set[str]:
    """Write down what is about to be put here; returns it. A file that somebody else put here stays theirs."""
    noted = _noted(directory)
    ours = noted | {path for path in paths if not (directory / path).exists()}
    write_atomic(directory / LEDGER, "".join(f"{name}\n" for name in sorted(ours)).encode())
    return ours


def _noted(directory: Path) -> set[str]:
    path = directory / LEDGER
    return set(path.read_text().splitlines()) if path.is_file() else set()


def _existing(directory: Path, names: set[str]) -> Iterator[Path]:
    """Those of the noted files that exist, and what is left of their downloads."""
    for name in names:
        for path in (directory / name, directory / f"{name}{PART}"):
            if path.is_file() and directory.resolve() in path.resolve().parents:
                yield path

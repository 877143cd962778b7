"""Patches on files on disk: what each file is, apply and revert. Files change one patch at a time, all or none.

A file is recognised by its sha256 alone, so a run that was killed is continued by the next one, and a file that is
neither what a patch applies to nor what it gives is never touched. Installed files are hard links into the wheel
cache, which serves other stacks: a file is replaced, never written into.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gpubox.canonical import sha256_hex
from gpubox.errors import GpuboxError, InputError, RefusedError
from gpubox.files import write_atomic
from gpubox.specs.patch import Patch, PatchedFile, check_chain, file_versions, read_patch

PATCHES = "patches"  # the directory of patches in a stack and in its spec


class State(StrEnum):
    APPLIED = "applied"
    APPLICABLE = "applicable"
    NEITHER = "neither"


@dataclass(frozen=True)
class FileReport:
    """`found` is the sha256 of the file on disk, None when there is none."""

    path: str
    state: State
    found: str | None


@dataclass(frozen=True)
class PatchReport:
    """`state` is that of the files together: one that is neither decides, then one that is applicable."""

    patch: str
    files: list[FileReport]

    @property
    def state(self) -> State:
        states = {file.state for file in self.files}
        return next(state for state in (State.NEITHER, State.APPLICABLE, State.APPLIED) if state in states)


def read_patches(directory: Path, names: Sequence[str]) -> list[Patch]:
    """The patches `names` of `directory`, in this order. Raises InputError for a bad one or a broken chain."""
    patches = []
    for name in names:
        try:
            patches.append(read_patch(name, (directory / name).read_bytes()))
        except OSError as error:
            raise InputError(f"{directory / name}: {error.strerror}", hint="name a patch that exists") from None
    check_chain(patches)
    return patches


def check_patches(patches: Sequence[Patch], tree: Path) -> list[PatchReport]:
    """What each patch finds below `tree` (site-packages). Changes nothing."""
    versions = file_versions(patches)
    found = {path: _sha256(tree / path) for path in versions}
    seen = dict.fromkeys(versions, 0)  # how many of the patches of a file were reported
    reports = []
    for patch in patches:
        files = []
        for file in patch.header.files:
            seen[file.path] += 1
            known = found[file.path] in versions[file.path]
            done = known and versions[file.path].index(found[file.path]) >= seen[file.path]
            state = State.APPLIED if done else State.APPLICABLE if known else State.NEITHER
            files.append(FileReport(file.path, state, found[file.path]))
        reports.append(PatchReport(patch.name, files))
    return reports


def apply_patches(patches: Sequence[Patch], tree: Path) -> list[str]:
    """Apply what is not applied yet, in order. Returns the names of the patches that changed something.

    Raises RefusedError, before the first change, when any file is neither; InputError for a patch at odds with itself.
    """
    _refuse_strangers(patches, check_patches(patches, tree))
    changed = []
    for patch in patches:
        new: dict[str, bytes | None] = {}
        for file in patch.header.files:
            data = _read(tree / file.path)
            if _hash(data) == file.applies_to:  # after the patches before it, any other known file has this one
                new[file.path] = patch.apply(file, data)
        if new:
            _write_all(patch.name, tree, new)
            changed.append(patch.name)
    return changed


def revert_patches(patches: Sequence[Patch], tree: Path) -> list[str]:
    """Take out what is applied, the last patch first. Returns and raises as `apply_patches` does."""
    _refuse_strangers(patches, check_patches(patches, tree))
    changed = []
    for patch in reversed(patches):
        new: dict[str, bytes | None] = {}
        for file in patch.header.files:
            data = _read(tree / file.path)
            if data is not None and sha256_hex(data) == file.gives:
                new[file.path] = patch.revert(file, data)
        if new:
            _write_all(patch.name, tree, new)
            changed.append(patch.name)
    return changed


def patch_record(patches: Sequence[Patch]) -> list[dict[str, object]]:
    """What stack.json says of applied patches: the sha256 that each file had after each."""
    return [{"name": patch.name, "files": {file.path: file.gives for file in patch.header.files}} for patch in patches]


def drifted(record: Path, tree: Path) -> list[str]:
    """Patched files below `tree` that are not as the stack.json `record` says. A stack without patches has none."""
    entries = json.loads(record.read_bytes()).get("patches", [])
    last = {path: (entry["name"], sha) for entry in entries for path, sha in entry["files"].items()}
    problems = []
    for path, (name, wanted) in sorted(last.items()):
        found = _sha256(tree / path)
        if found != wanted:
            problems.append(f"{path} is {found or 'missing'}, after {name} it was {wanted}")
    return problems


def _refuse_strangers(patches: Sequence[Patch], reports: Sequence[PatchReport]) -> None:
    by_name = {patch.name: patch for patch in patches}
    problems = []
    for report in reports:
        wanted = {file.path: file for file in by_name[report.patch].header.files}
        for file in report.files:
            if file.state is State.NEITHER:
                problems.append(f"{report.patch}: {file.path} {_neither(wanted[file.path], file.found)}")
    if problems:
        raise RefusedError(
            problems[0],
            hint="patch the release that the patch names in distributions, unchanged; nothing was changed here",
            detail="\n".join(problems[1:]),
        )


def _neither(file: PatchedFile, found: str | None) -> str:
    is_now = f"has sha256 {found}" if found else "is missing"
    return f"{is_now}, neither what the patch applies to ({file.applies_to or 'no file'}) nor what it gives"


def _write_all(name: str, tree: Path, new: Mapping[str, bytes | None]) -> None:
    """All files or none: what was replaced is put back when a later one cannot be written."""
    old: dict[str, bytes | None] = {}
    try:
        for path, data in new.items():
            before = _read(tree / path)
            _put(tree / path, data)
            old[path] = before
    except OSError as error:
        for written, before in old.items():
            _put(tree / written, before)
        raise GpuboxError(
            f"{name}: {path}: {error.strerror}", hint="correct that and run again; this patch changed nothing"
        ) from None


def _put(path: Path, data: bytes | None) -> None:
    if data is None:
        path.unlink()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, data, path.stat().st_mode & 0o7777 if path.exists() else 0o644)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", hint="a patched file is a plain file that you may read") from None


def _hash(data: bytes | None) -> str | None:
    return None if data is None else sha256_hex(data)


def _sha256(path: Path) -> str | None:
    return _hash(_read(path))

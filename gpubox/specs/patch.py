"""A patch as data: a TOML header that says why and for exactly which bytes, then a unified diff. Pure.

The header ends where the first line of the diff starts (`--- `). Hashes decide on which files a patch may be used, so
its hunks are applied exactly where they say, without the offset and fuzz of patch(1).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Self

from packaging.utils import canonicalize_name
from pydantic import Field, field_validator, model_validator

from gpubox.canonical import sha256_hex
from gpubox.errors import InputError
from gpubox.toml import Strict, validate

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Pin = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.+!-]*$")]
Sentence = Annotated[str, Field(min_length=1)]

_HUNK = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@[^\n]*\n")
_NO_NEWLINE = b"\\ No newline at end of file"
MAKE = "make the diff with `diff -u a/FILE b/FILE`; docs/patches.md has the format"


class PatchedFile(Strict):
    """`path` is relative to site-packages. Without `applies_to` the patch makes the file."""

    path: str
    applies_to: Sha256 | None = None
    gives: Sha256

    @field_validator("path")
    @classmethod
    def _stays_inside(cls, value: str) -> str:
        path = PurePosixPath(value)
        if path.is_absolute() or ".." in path.parts or str(path) != value or value == ".":
            raise ValueError("a patch changes files below site-packages only, by their plain relative path")
        return value

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if self.applies_to == self.gives:
            raise ValueError(f"{self.path}: applies_to and gives are equal")
        return self


class Header(Strict):
    """`distributions` are the releases ("name==version") whose files the patch was made for.

    `upstream` names where the same matter was discussed or solved; `verified` says how this patch was proved,
    `unverified` what nobody has seen yet.
    """

    why: Sentence
    upstream: Annotated[list[Sentence], Field(min_length=1)]
    distributions: Annotated[list[Pin], Field(min_length=1)]
    verified: Annotated[list[Sentence], Field(min_length=1)]
    unverified: list[Sentence] = []
    files: Annotated[list[PatchedFile], Field(min_length=1)]

    @field_validator("files")
    @classmethod
    def _once(cls, value: list[PatchedFile]) -> list[PatchedFile]:
        paths = [file.path for file in value]
        if len(set(paths)) != len(paths):
            raise ValueError("a file is named twice")
        return value


@dataclass(frozen=True)
class Hunk:
    """`old` stands from line `old_start` (counted from 0) on; `new` takes its place, from `new_start` on."""

    old_start: int
    old: tuple[bytes, ...]
    new_start: int
    new: tuple[bytes, ...]

    def reversed(self) -> Hunk:
        return Hunk(self.new_start, self.new, self.old_start, self.old)


@dataclass(frozen=True)
class Patch:
    """`name` is the file's name; `hunks` by path."""

    name: str
    header: Header
    hunks: Mapping[str, tuple[Hunk, ...]]

    def apply(self, file: PatchedFile, data: bytes | None) -> bytes:
        """The content after the patch; `data` is None for a file that is not there. Raises InputError.

        The caller has compared `data` with `applies_to`, so an error means a header and a diff that disagree.
        """
        result = self._replace(file, data or b"", self.hunks[file.path])
        if sha256_hex(result) != file.gives:
            raise self._disagree(file, f"gives sha256 {sha256_hex(result)}")
        return result

    def revert(self, file: PatchedFile, data: bytes) -> bytes | None:
        """The content before the patch, None for a file that the patch made. Raises InputError as `apply` does."""
        result = self._replace(file, data, tuple(hunk.reversed() for hunk in self.hunks[file.path]))
        if file.applies_to is None:
            if result:
                raise self._disagree(file, "does not start from nothing")
            return None
        if sha256_hex(result) != file.applies_to:
            raise self._disagree(file, f"starts from sha256 {sha256_hex(result)}")
        return result

    def _replace(self, file: PatchedFile, data: bytes, hunks: Sequence[Hunk]) -> bytes:
        lines, result, at = _lines(data), list[bytes](), 0
        for hunk in hunks:
            end = hunk.old_start + len(hunk.old)
            if hunk.old_start < at or tuple(lines[hunk.old_start : end]) != hunk.old:
                raise self._disagree(file, f"has a hunk that does not fit at line {hunk.old_start + 1}")
            result += [*lines[at : hunk.old_start], *hunk.new]
            at = end
        return b"".join([*result, *lines[at:]])

    def _disagree(self, file: PatchedFile, what: str) -> InputError:
        return InputError(
            f"{self.name}: its diff of {file.path} {what}, its header says otherwise",
            hint="make the diff and both hashes anew from the locked release's file",
        )


def read_patch(name: str, data: bytes) -> Patch:
    """The patch in `data`. Raises InputError, naming the line, for anything but a TOML header and its unified diff."""
    start = 0 if data.startswith(b"--- ") else data.find(b"\n--- ") + 1
    if start == 0:
        raise InputError(f"{name}: no TOML header before a line that starts with '--- '", hint=MAKE)
    try:
        header = validate(Header, tomllib.loads(data[:start].decode()), name)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{name}: its header is not TOML: {error}", hint=MAKE) from None
    hunks, created = _read_diff(name, data[start:], data.count(b"\n", 0, start) + 1)
    named, changed = {file.path for file in header.files}, set(hunks)
    if named != changed:
        raise InputError(
            f"{name}: header and diff name different files: {', '.join(sorted(named ^ changed))}",
            hint="every file of the diff needs its [[files]], and nothing else",
        )
    for file in header.files:
        if (file.applies_to is None) != (file.path in created):
            raise InputError(
                f"{name}: {file.path}: a new file has no applies_to, every other file has one",
                hint="a diff of a new file starts with '--- /dev/null'",
            )
    return Patch(name, header, hunks)


def check_chain(patches: Sequence[Patch]) -> None:
    """Several patches may change one file, each from what the one before gives. Raises InputError otherwise."""
    if len({patch.name for patch in patches}) != len(patches):
        raise InputError("a patch is named twice", hint="name each patch once")
    last: dict[str, tuple[str, PatchedFile]] = {}
    for patch in patches:
        for file in patch.header.files:
            before = last.get(file.path)
            if before and before[1].gives != file.applies_to:
                raise InputError(
                    f"{patch.name}: applies to another {file.path} than {before[0]}, the patch before it, gives",
                    hint=f"make it anew after {before[0]}, or order the patches as they were made",
                )
            last[file.path] = (patch.name, file)
    for path, versions in file_versions(patches).items():
        if len(set(versions)) != len(versions):
            raise InputError(f"{path}: a patch undoes an earlier one", hint="drop both")


def check_distributions(patches: Sequence[Patch], locked: Mapping[str, str], origin: str) -> None:
    """Refuse a patch made for other releases than `locked` (version by canonical name). Raises InputError.

    A distribution that the lock does not hold (an engine built from source) is left to the hashes.
    """
    for patch in patches:
        wanted: dict[str, list[str]] = {}
        for pin in patch.header.distributions:
            name, _, version = pin.partition("==")
            wanted.setdefault(canonicalize_name(name), []).append(version)
        for name, versions in wanted.items():
            if locked.get(name, versions[0]) not in versions:
                raise InputError(
                    f"{origin}: holds {name} {locked[name]}, {patch.name} is for {' or '.join(versions)}",
                    hint="make the patch anew for that release, or take it out of patches in stack.toml",
                )


def file_versions(patches: Sequence[Patch]) -> dict[str, list[str | None]]:
    """By path, the sha256 of a file before the first patch and after each that changes it; None: not there."""
    versions: dict[str, list[str | None]] = {}
    for patch in patches:
        for file in patch.header.files:
            versions.setdefault(file.path, [file.applies_to]).append(file.gives)
    return versions


def _lines(data: bytes) -> list[bytes]:
    """Lines with their ends; only a newline ends a line."""
    return re.findall(rb"[^\n]*\n|[^\n]+", data)


def _read_diff(name: str, data: bytes, first_line: int) -> tuple[dict[str, tuple[Hunk, ...]], set[str]]:
    """The hunks by path, and the paths of new files."""
    reader = _Reader(name, _lines(data), first_line)
    found: dict[str, tuple[Hunk, ...]] = {}
    created = set[str]()
    while reader.more():
        path, is_new = reader.paths()
        if path in found:
            raise reader.error(f"{path} comes twice", back=1)
        found[path] = tuple(reader.hunks())
        created |= {path} if is_new else set()
        if not found[path]:
            raise reader.error(f"{path} has no hunk", back=1)
    return found, created


class _Reader:
    def __init__(self, name: str, lines: list[bytes], first_line: int) -> None:
        self.name, self.lines, self.first_line, self.at = name, lines, first_line, 0

    def more(self) -> bool:
        return self.at < len(self.lines)

    def error(self, what: str, *, back: int = 0) -> InputError:
        """About the next line, or the one `back` lines before it."""
        return InputError(f"{self.name}:{self.first_line + self.at - back}: {what}", hint=MAKE)

    def paths(self) -> tuple[str, bool]:
        """The path of the next file and whether it is new, from its lines `--- a/PATH` (or /dev/null), `+++ b/PATH`."""
        old, new = self._path(b"--- "), self._path(b"+++ ")
        if not new.startswith("b/") or old not in (f"a/{new[2:]}", "/dev/null"):
            raise self.error(f"{old!r} and {new!r} are not a/PATH (or /dev/null) and b/PATH of one file", back=1)
        return new[2:], old == "/dev/null"

    def hunks(self) -> Iterator[Hunk]:
        while self.more() and self.lines[self.at].startswith(b"@@"):
            head = _HUNK.fullmatch(self.lines[self.at])
            if head is None:
                raise self.error("not a hunk's head, '@@ -LINE,COUNT +LINE,COUNT @@'")
            self.at += 1
            counts = [1 if count is None else int(count) for count in (head[2], head[4])]
            # An empty range names the line before it, any other its first line, both counted from 1.
            starts = [int(start) - (count > 0) for start, count in zip((head[1], head[3]), counts, strict=True)]
            if min(starts) < 0:
                raise self.error("lines are counted from 1", back=1)
            old, new = self._body(*counts)
            yield Hunk(starts[0], old, starts[1], new)

    def _path(self, prefix: bytes) -> str:
        if not self.more() or not self.lines[self.at].startswith(prefix):
            raise self.error(f"expected a line that starts with {prefix.decode()!r}")
        text = self.lines[self.at].removeprefix(prefix).partition(b"\t")[0].rstrip(b"\n")
        self.at += 1
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise self.error("the path is not UTF-8", back=1) from None

    def _body(self, old_count: int, new_count: int) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        old, new, marks = list[bytes](), list[bytes](), b""
        while len(old) < old_count or len(new) < new_count or self._no_newline():
            if not self.more() or not self.lines[self.at].endswith(b"\n"):
                raise self.error("the diff ends inside a hunk")
            mark, text = self.lines[self.at][:1], self.lines[self.at][1:]
            if self._no_newline() and marks:
                for side in (old,) if marks == b"-" else (new,) if marks == b"+" else (old, new):
                    side[-1] = side[-1].removesuffix(b"\n")
            elif mark in (b" ", b"-", b"+"):
                old += [text] if mark != b"+" else []
                new += [text] if mark != b"-" else []
            else:
                raise self.error("a line of a hunk starts with a space, '-', '+' or '\\'")
            marks = mark
            self.at += 1
        if len(old) != old_count or len(new) != new_count:
            raise self.error("the hunk holds more lines than its head says")
        return tuple(old), tuple(new)

    def _no_newline(self) -> bool:
        return self.more() and self.lines[self.at].startswith(_NO_NEWLINE)

"""`/etc/pve/lxc/ID.conf`: read without loss, and changed only in the lines that a change is about.

Proxmox VE writes the file anew whenever one of its own programs changes it: keys sorted, raw `lxc.` lines last. But raw
lines can be set by no program of it, so people edit the file, and what they wrote must survive us. Reading follows
PVE::LXC::Config (parse_pct_config): lines end with a newline and nothing else, a `#` counts in the first column only,
the last of two equal keys wins, raw lines are a list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from urllib.parse import unquote

PENDING = "pve:pending"

# Perl's \s on the bytes of the file is ASCII only.
_HEADER = re.compile(r"\[(pve:pending|[a-z][a-z0-9_-]+)\]\s*", re.IGNORECASE | re.ASCII)
_LXC = re.compile(r"(?P<key>lxc\.[a-z0-9_.-]+)(?::|\s*=)\s*(?P<value>.*?)\s*", re.ASCII)
_KEY = re.compile(r"(?P<key>[a-z][a-z_]*\d*):\s*(?P<value>.+?)\s*", re.ASCII)
_SEPARATORS = re.compile(r"[,;\s]+", re.ASCII)


class Kind(Enum):
    COMMENT = "comment"  # a line of the description
    BLANK = "blank"
    HEADER = "header"  # opens a section, which runs to the next header
    LXC = "lxc"
    KEY = "key"
    OTHER = "other"  # PVE warns of it and drops it at its next write


@dataclass(frozen=True)
class Line:
    """`text` is the line as it stands, with its end; `value` is without space around it."""

    text: str
    kind: Kind
    key: str = ""
    value: str = ""


@dataclass(frozen=True)
class ContainerConfig:
    """One container's file. `values`, `lxc` and every change are about the main section: not pending, no snapshot."""

    lines: tuple[Line, ...]

    def render(self) -> str:
        return "".join(line.text for line in self.lines)

    @cached_property
    def values(self) -> dict[str, str]:
        return _values(self._main)

    @cached_property
    def pending(self) -> dict[str, str]:
        """Values that apply at the next start. Without `delete`, which `pending_deletes` holds."""
        return {key: value for key, value in self._pending_section.items() if key != "delete"}

    @cached_property
    def pending_deletes(self) -> frozenset[str]:
        """Keys that go away at the next start."""
        return frozenset(_names(self._pending_section.get("delete", "")))

    @cached_property
    def intended(self) -> dict[str, str]:
        """The values once what is pending applies: what `pct config` shows."""
        kept = {key: value for key, value in self.values.items() if key not in self.pending_deletes}
        return kept | self.pending

    @property
    def lxc(self) -> list[tuple[str, str]]:
        return [(line.key, line.value) for line in self._main if line.kind is Kind.LXC]

    @property
    def lock(self) -> str | None:
        """What PVE is doing with it, or was doing when it was interrupted: backup, create, snapshot, ..."""
        return self.values.get("lock")

    @property
    def description(self) -> str:
        return "".join(unquote(line.value) + "\n" for line in self._main if line.kind is Kind.COMMENT)

    @property
    def snapshots(self) -> list[str]:
        headers = [line.key for line in self.lines if line.kind is Kind.HEADER]
        return [name for name in headers if name.lower() != PENDING]

    def with_lxc(self, key: str, value: str) -> ContainerConfig:
        """Exactly one raw line `key`, with this value, where the first of them was. As it is when that holds."""
        own = [index for index, line in enumerate(self._main) if line.kind is Kind.LXC and line.key == key]
        if len(own) == 1 and self._main[own[0]].value == value:
            return self
        new = Line(f"{key}: {value}\n", Kind.LXC, key, value)
        if not own:
            return self._with_main(_appended(self._main, new))
        main = [new if index == own[0] else line for index, line in enumerate(self._main) if index not in own[1:]]
        return self._with_main(main)

    def without_lxc(self, unwanted: Callable[[str, str], bool]) -> ContainerConfig:
        """Without the raw lines of which `unwanted(key, value)` is true."""
        kept = [line for line in self._main if line.kind is not Kind.LXC or not unwanted(line.key, line.value)]
        return self if len(kept) == len(self._main) else self._with_main(kept)

    @cached_property
    def _main(self) -> tuple[Line, ...]:
        end = next((index for index, line in enumerate(self.lines) if line.kind is Kind.HEADER), len(self.lines))
        return self.lines[:end]

    @cached_property
    def _pending_section(self) -> dict[str, str]:
        """Of several, the last counts."""
        section: dict[str, str] = {}
        inside = False
        for line in self.lines:
            if line.kind is Kind.HEADER:
                inside = line.key.lower() == PENDING
                section = {} if inside else section
            elif inside and line.kind is Kind.KEY:
                section[line.key] = line.value
        return section

    def _with_main(self, main: Iterable[Line]) -> ContainerConfig:
        return ContainerConfig((*main, *self.lines[len(self._main) :]))


def parse(text: str) -> ContainerConfig:
    """Any text at all: what PVE would not understand is kept as it is."""
    pieces = text.split("\n")
    ended = [f"{piece}\n" for piece in pieces[:-1]]
    return ContainerConfig(tuple(_line(piece) for piece in [*ended, *([pieces[-1]] if pieces[-1] else [])]))


def parse_property(text: str, default_key: str) -> dict[str, str]:
    """A value of parts, `/dev/nvidia0,mode=0666`: the part without a name is `default_key`'s. Order is kept."""
    parts: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if equals:
            parts[key.strip()] = value.strip()
        elif part.strip():
            parts[default_key] = part.strip()
    return parts


def render_property(parts: Mapping[str, str], default_key: str) -> str:
    """The inverse of `parse_property`, as PVE prints it: `default_key` first and unnamed."""
    first = [parts[default_key]] if default_key in parts else []
    return ",".join([*first, *(f"{key}={value}" for key, value in parts.items() if key != default_key)])


def is_true(value: str | None) -> bool:
    """PVE's booleans, which a person may write as a word; absent is false."""
    return (value or "").lower() in ("1", "on", "yes", "true")


def _line(text: str) -> Line:
    bare = text.removesuffix("\n")
    if not bare.strip(" \t\r\f\v"):
        return Line(text, Kind.BLANK)
    if header := _HEADER.fullmatch(bare):
        return Line(text, Kind.HEADER, header[1])
    if bare.startswith("#"):
        return Line(text, Kind.COMMENT, "#", bare[1:])
    for kind, pattern in ((Kind.LXC, _LXC), (Kind.KEY, _KEY)):
        if found := pattern.fullmatch(bare):
            return Line(text, kind, found["key"], found["value"])
    return Line(text, Kind.OTHER)


def _values(lines: Iterable[Line]) -> dict[str, str]:
    return {line.key: line.value for line in lines if line.kind is Kind.KEY}


def _names(value: str) -> list[str]:
    return [name.removeprefix("!") for name in _SEPARATORS.split(value) if name]


def _appended(main: tuple[Line, ...], new: Line) -> list[Line]:
    """Behind the last raw line, else behind the last line that says anything: before the blank line of a header."""
    raw = [index for index, line in enumerate(main) if line.kind is Kind.LXC]
    said = [index for index, line in enumerate(main) if line.kind is not Kind.BLANK]
    at = (raw or said or [-1])[-1] + 1
    before = list(main[:at])
    if before and not before[-1].text.endswith("\n"):
        last = before[-1]
        before[-1] = Line(f"{last.text}\n", last.kind, last.key, last.value)
    return [*before, new, *main[at:]]

"""Read a lock: which wheel, by which hash, for which Python.

A lock is what `uv pip compile --generate-hashes` writes (pip's requirements format), restricted to what locks:
every entry is `name==version`, has at least one sha256, and nothing names an index, a path or another file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from packaging.markers import Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from gpubox.errors import InputError

_HASH = re.compile(r"\s--hash=(?:sha256:([0-9a-f]{64})(?=\s|$))?")
_SUFFIX = re.compile(r"-cu(?P<major>1[0-9]|[2-9])\d?$")
_LOCAL = re.compile(r"^cu(?P<major>1[0-9]|[2-9])\d?$")

# Distributions whose own major version is CUDA's. Not nvidia-cufft and the like, which count for themselves, and not
# nvidia-ml-py, which follows the driver: both real stacks hold 13.x of it.
_VERSIONED_LIKE_CUDA = re.compile(r"^(nvidia-cuda-.+|nvidia-(nvjitlink|nvtx|nvvm)|cuda-(toolkit|python|bindings))$")


@dataclass(frozen=True)
class LockEntry:
    """One locked distribution. `marker` is empty when it holds everywhere; `line` is where it starts, from 1."""

    name: str
    version: str
    marker: str
    hashes: frozenset[str]
    line: int


@dataclass(frozen=True)
class Lock:
    entries: tuple[LockEntry, ...]
    origin: str

    def expected(self, python: str) -> dict[str, str]:
        """Versions by canonical name on x86-64 Linux for `python`: "3.11" (its first release) or a full "3.11.7".

        Raises InputError when two entries of one name hold for this Python.
        """
        environment = _environment(python)
        found: dict[str, LockEntry] = {}
        for entry in self.entries:
            if entry.marker and not Marker(entry.marker).evaluate(environment):
                continue
            if entry.name in found:
                raise InputError(
                    f"{self.origin}:{entry.line}: {entry.name} is locked twice for Python {python} "
                    f"(also on line {found[entry.name].line})",
                    hint="regenerate the lock",
                )
            found[entry.name] = entry
        return {name: found[name].version for name in sorted(found)}


@lru_cache(maxsize=32)
def parse_lock(text: str, origin: str = "requirements.lock") -> Lock:
    """Raises InputError with the line number for anything that is not a pinned, hashed, index-free entry."""
    return Lock(tuple(_entry(line, logical, origin) for line, logical in _logical_lines(text)), origin)


def foreign_cuda(versions: Mapping[str, str], major: int) -> list[str]:
    """The distributions ("name==version") built for another CUDA major than `major`.

    Three things tell: a name ending in -cuNN, a local version +cuNNN, and the major version of the distributions that
    count like CUDA itself. Package metadata tells nothing more; what the kernels link is proved from their files.
    """
    return [
        f"{name}=={version}" for name, version in versions.items() if _cuda_major(name, version) not in (None, major)
    ]


def _cuda_major(name: str, version: str) -> int | None:
    suffix = _SUFFIX.search(name)
    if suffix:
        return int(suffix["major"])
    parsed = Version(version)
    local = _LOCAL.match(parsed.local or "")
    if local:
        return int(local["major"])
    return parsed.major if _VERSIONED_LIKE_CUDA.match(name) else None


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Entries with the line each starts on: a backslash at the end continues a line, # starts a comment."""
    start, parts = 0, list[str]()
    for number, raw in enumerate(text.split("\n"), 1):
        line = re.sub(r"(^|\s)#.*$", "", raw.rstrip("\r"))
        continued = line.endswith("\\")
        if line.strip("\\ \t"):
            start = start if parts else number
            parts.append(line.removesuffix("\\"))
        if parts and not continued:
            yield start, " ".join(parts).strip()
            parts = []
    if parts:
        yield start, " ".join(parts).strip()


def _entry(line: int, logical: str, origin: str) -> LockEntry:
    where = f"{origin}:{line}"
    regenerate = "a lock is generated, not written by hand: run `make lock STACK=<name>`"
    if logical.startswith("-"):
        raise InputError(f"{where}: option {logical.split(maxsplit=1)[0]!r} has no place in a lock", hint=regenerate)
    requirement_text, *_ = re.split(r"\s--", logical, maxsplit=1)
    options = logical[len(requirement_text) :]
    digests = [match[1] for match in _HASH.finditer(options)]
    if None in digests or _HASH.sub("", options).strip():
        raise InputError(f"{where}: not only sha256 hashes: {options.strip()[:80]!r}", hint=regenerate)
    try:
        requirement = Requirement(requirement_text)
    except InvalidRequirement as error:
        raise InputError(
            f"{where}: not a requirement: {requirement_text[:80]!r}", hint=regenerate, detail=str(error)
        ) from None
    version = _pinned(requirement)
    if version is None:
        raise InputError(f"{where}: {requirement_text!r} is not pinned as name==version", hint=regenerate)
    if not digests:
        raise InputError(f"{where}: {requirement.name} has no --hash=sha256:…", hint=regenerate)
    return LockEntry(
        name=canonicalize_name(requirement.name),
        version=version,
        marker=str(requirement.marker) if requirement.marker else "",
        hashes=frozenset(digests),
        line=line,
    )


def _pinned(requirement: Requirement) -> str | None:
    specifiers = list(requirement.specifier)
    if requirement.url or requirement.extras or len(specifiers) != 1 or specifiers[0].operator != "==":
        return None
    try:
        return str(Version(specifiers[0].version))
    except InvalidVersion:  # 1.*
        return None


def _environment(python: str) -> dict[str, str]:
    parts = python.split(".")
    return {
        "implementation_name": "cpython",
        "implementation_version": ".".join([*parts, "0"][:3]),
        "os_name": "posix",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": ".".join([*parts, "0"][:3]),
        "python_version": ".".join(parts[:2]),
        "sys_platform": "linux",
    }

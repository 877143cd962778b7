"""What a stack needs and no default index has: each file with the index that has it and the bytes it must be.

`stacks/<name>/artefacts.toml` holds one table per file, `[[unproved]]` or `[[proved]]`. Unproved means that nobody who
could write the lock has fetched the file: its hash is known from others only, each with where it was seen. The first
machine that fetches it records the proof (`gpubox stack prove`). Either way no other bytes are ever installed: file
names like these are known to be published again with other contents.

Indexes are names here. Their addresses are the operator's settings (`indexes`), since mirrors differ from site to site.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from pydantic import Field, TypeAdapter, field_validator, model_validator

from gpubox.canonical import canonical_json
from gpubox.errors import GpuboxError, InputError
from gpubox.toml import Name, Strict, load

ARTEFACTS_TOML = "artefacts.toml"
ARTEFACTS = "artefacts.json"  # in a spec

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Sha256Start = Annotated[str, Field(pattern=r"^[0-9a-f]{12,64}$")]
ArtefactFile = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")]
Subdirectory = Annotated[str, Field(pattern=r"^(\.|[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*)$")]
Kind = Literal["wheel", "python", "source"]


class RepublishedError(GpuboxError):
    """A file has other bytes than those that were locked."""


class Candidate(Strict):
    """A hash that others saw this file with; `source` says where."""

    sha256: Sha256
    source: Annotated[str, Field(min_length=1)]


class Superseded(Strict):
    """An earlier publication under the same name, known by at least 12 digits; told apart from tampering."""

    sha256: Sha256Start
    source: Annotated[str, Field(min_length=1)]


class Artefact(Strict):
    """One file. `index` names where it comes from; `requires` are a wheel's Requires-Dist, assumed until proved.

    kind wheel: a distribution of the lock. kind python: a relocatable Python build (.tar.gz with python/bin/python3).
    kind source: the engine's tree at one `commit` (a .tar.gz with one directory), whose project is in `subdirectory`;
    `requires` are that project's dependencies.
    """

    kind: Kind = "wheel"
    name: str
    version: str
    file: ArtefactFile
    index: Name
    requires: list[str] = []
    superseded: list[Superseded] = []
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None = None
    subdirectory: Subdirectory = "."

    @field_validator("requires")
    @classmethod
    def _requirements(cls, value: list[str]) -> list[str]:
        for text in value:
            try:
                Requirement(text)
            except InvalidRequirement as error:
                raise ValueError(f"{text!r} is no requirement: {error}") from None
        return value

    @model_validator(mode="after")
    def _file_name_says_the_same(self) -> Self:
        try:
            Version(self.version)
        except InvalidVersion:
            raise ValueError(f"version = {self.version!r} is no version") from None
        if (self.commit is not None) != (self.kind == "source"):
            raise ValueError("commit is what a source has, and nothing else")
        if self.kind != "wheel":
            return self
        try:
            name, version, _, _ = parse_wheel_filename(self.file)
        except InvalidWheelFilename as error:
            raise ValueError(f"file: {error}") from None
        if (name, version) != (canonicalize_name(self.name), Version(self.version)):
            raise ValueError(f"file = {self.file!r} is {name} {version}, not {self.name} {self.version}")
        return self

    @property
    def accepted(self) -> list[str]:
        """The sha256 values that this file may have, sorted."""
        raise NotImplementedError


class Unproved(Artefact):
    candidates: Annotated[list[Candidate], Field(min_length=1)]

    @property
    def accepted(self) -> list[str]:
        return sorted({candidate.sha256 for candidate in self.candidates})


class Proved(Artefact):
    """`size` in bytes."""

    sha256: Sha256
    size: Annotated[int, Field(ge=1)]

    @property
    def accepted(self) -> list[str]:
        return [self.sha256]


class Artefacts(Strict):
    """artefacts.toml. Every name once per kind."""

    unproved: list[Unproved] = []
    proved: list[Proved] = []

    @property
    def all(self) -> list[Artefact]:
        return sorted([*self.unproved, *self.proved], key=lambda artefact: artefact.file)

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        seen: set[tuple[str, str]] = set()
        for artefact in self.all:
            key = artefact.kind, canonicalize_name(artefact.name)
            if key in seen:
                raise ValueError(f"{artefact.kind} {artefact.name} is there twice")
            seen.add(key)
        return self


class Pinned(Strict):
    """What a spec says of an artefact: enough to fetch and to check it. Proving it changes nothing here."""

    kind: Kind
    name: str
    version: str
    file: ArtefactFile
    index: Name
    sha256: Annotated[list[Sha256], Field(min_length=1)]
    superseded: list[Superseded]
    subdirectory: Subdirectory


_PINS = TypeAdapter(list[Pinned])


def load_artefacts(directory: Path) -> Artefacts:
    """Of the stack in `directory`; empty when it has no artefacts.toml. Raises InputError."""
    path = directory / ARTEFACTS_TOML
    return load(Artefacts, path) if path.is_file() else Artefacts()


def pins(artefacts: Artefacts) -> list[Pinned]:
    return [
        Pinned(
            kind=artefact.kind,
            name=canonicalize_name(artefact.name),
            version=artefact.version,
            file=artefact.file,
            index=artefact.index,
            sha256=artefact.accepted,
            superseded=artefact.superseded,
            subdirectory=artefact.subdirectory,
        )
        for artefact in artefacts.all
    ]


def render_pins(pinned: list[Pinned]) -> bytes:
    return canonical_json(_PINS.dump_python(pinned, mode="json"))


def read_pins(files: Mapping[str, bytes]) -> list[Pinned]:
    """Those of a spec whose `files` were checked by hash."""
    return _PINS.validate_python(json.loads(files[ARTEFACTS])) if ARTEFACTS in files else []


def check_digest(pinned: Pinned, sha256: str, where: str) -> None:
    """Raises RepublishedError unless `sha256`, of the file found at `where`, is an accepted one."""
    if sha256 in pinned.sha256:
        return
    older = next((old.source for old in pinned.superseded if sha256.startswith(old.sha256)), None)
    known = f" It is an older publication of that name ({older})." if older else ""
    raise RepublishedError(
        f"{pinned.file}: re-published upstream: {where} has sha256 {sha256}, locked is {' or '.join(pinned.sha256)}",
        hint=f"nothing was installed.{known} Use the copy in your wheelhouse, or find out why it changed before you "
        f"write another hash into {ARTEFACTS_TOML}",
    )


def index_address(pinned: Pinned, indexes: Mapping[str, str]) -> str:
    """Where the operator says the artefact's index is. Raises InputError: no other source is ever tried."""
    if pinned.index in indexes:
        return indexes[pinned.index].rstrip("/")
    known = ", ".join(sorted(indexes)) or "none"
    raise InputError(
        f"{pinned.file}: comes from the index {pinned.index!r}, which has no address here (known: {known})",
        hint=f'set indexes = {{"{pinned.index}": "https://…"}} in group_data, or bring the file in a wheelhouse',
    )


def check_address(address: str) -> str:
    """Raises ValueError unless `address` is one that may stand in settings: a place, no password."""
    parts = urlsplit(address)
    if parts.scheme not in ("https", "http", "file") or (parts.scheme != "file" and not parts.hostname):
        raise ValueError(f"{address!r} is not https://, http:// or file://")
    if parts.username or parts.password:
        raise ValueError("no user or password in an address: command lines show it; let a mirror know the box itself")
    return address

"""What a wheelhouse holds: one manifest for each stack, every file by sha256. Written where it is gathered.

A wheelhouse is a flat directory that uv and pip read as --find-links, with `manifests/<stack>.json` beside the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from gpubox.canonical import canonical_json, sha256_hex
from gpubox.errors import BrokenError
from gpubox.specs.artefacts import Sha256
from gpubox.toml import Name, Strict

MANIFESTS = "manifests"
Role = Literal["stack", "engine build", "tools", "model", "python", "source", "driver", "patch"]


class HeldFile(Strict):
    """`path` below the wheelhouse; `size` in bytes; `role`: who needs it."""

    path: Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*/)*[A-Za-z0-9][A-Za-z0-9._+-]*$")]
    sha256: Sha256
    size: Annotated[int, Field(ge=0)]
    role: Role


class Manifest(Strict):
    """`locks`: sha256 of every lock whose wheels are all here, for every Python in `pythons`."""

    schema_version: Literal[1] = 1
    stack: Name
    pythons: list[str]
    locks: list[Sha256]
    files: list[HeldFile]

    def render(self) -> bytes:
        return canonical_json(self.model_dump(mode="json"))

    @property
    def digest(self) -> str:
        return sha256_hex(self.render())


def read_manifests(wheelhouse: Path) -> list[Manifest]:
    """Those of `wheelhouse`, by stack; none for a plain directory of wheels. Raises BrokenError for a damaged one."""
    return [read_manifest(path) for path in sorted((wheelhouse / MANIFESTS).glob("*.json"))]


def read_manifest(path: Path) -> Manifest:
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise BrokenError(f"{path}: no manifest: {error}", hint="gather the wheelhouse again") from None


def gathered_for(wheelhouse: Path, lock: bytes) -> bool:
    """Whether every wheel of `lock` is in `wheelhouse`, as far as its manifests say."""
    digest = sha256_hex(lock)
    return any(digest in manifest.locks for manifest in read_manifests(wheelhouse))

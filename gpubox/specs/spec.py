"""A spec: all that decides one build. Rendered by the controller, uploaded, and checked by hash before it is used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import Field, ValidationError

from gpubox.canonical import DIGEST_LENGTH, canonical_json, sha256_hex
from gpubox.errors import BrokenError
from gpubox.toml import Name, Strict

SPEC = "spec.json"
LOCK = "requirements.lock"
EDITED = "specs are never edited: remove this directory and deploy again"

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Build(Strict):
    """What every spec.json says. `inputs` are sha256 by path below the spec's directory."""

    schema_version: Literal[1] = 1
    name: Name
    inputs: dict[str, str]


AnyBuild = TypeVar("AnyBuild", bound=Build)


@dataclass(frozen=True)
class Spec(Generic[AnyBuild]):
    """`files` are the bytes of what the box gets by path below the spec's directory, spec.json among them."""

    build: AnyBuild
    files: dict[str, bytes]

    @property
    def id(self) -> str:
        return f"{self.build.name}-{sha256_hex(self.files[SPEC])[:DIGEST_LENGTH]}"


def hashes(inputs: dict[str, bytes]) -> dict[str, str]:
    return {name: sha256_hex(data) for name, data in inputs.items()}


def render_spec(build: AnyBuild, inputs: dict[str, bytes]) -> Spec[AnyBuild]:
    return Spec(build, {SPEC: canonical_json(build.model_dump(mode="json")), **inputs})


def read_spec(model: type[AnyBuild], directory: Path) -> Spec[AnyBuild]:
    """The spec that was uploaded to `directory`, every input checked by its sha256. Raises BrokenError."""
    try:
        raw = (directory / SPEC).read_bytes()
        build = model.model_validate_json(raw)
        files = {SPEC: raw, **{name: (directory / name).read_bytes() for name in build.inputs}}
    except (OSError, ValidationError) as error:
        raise BrokenError(f"{directory}: not a whole spec: {error}", hint=EDITED) from None
    for name, digest in build.inputs.items():
        if sha256_hex(files[name]) != digest:
            raise BrokenError(
                f"{directory / name}: sha256 is {sha256_hex(files[name])}, {SPEC} says {digest}", hint=EDITED
            )
    return Spec(build, files)

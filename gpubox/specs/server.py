"""Server profiles: what is served and how. One file each, `servers/<name>.toml`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from gpubox.errors import InputError
from gpubox.health.probes import Probes
from gpubox.specs.engine import EngineArguments
from gpubox.toml import Name, Strict, load, nearest


class ModelSource(Strict):
    """Either `build`, a directory of `models/` that the box converts once, or `path`, a directory on the box."""

    build: Name | None = None
    path: str | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.build is None) == (self.path is None):
            raise ValueError("give exactly one of 'build' and 'path'")
        if self.path is not None and not Path(self.path).is_absolute():
            raise ValueError(f"path must be absolute on the box, got {self.path!r}")
        return self


class Server(Strict):
    """`ready_deadline_s` lives in `probes`: a server that is not ready by then has failed."""

    name: Name
    description: str
    served_model_name: Annotated[str, Field(min_length=1)]
    port: Annotated[int, Field(ge=1024, le=65535)] = 30000
    model: ModelSource
    engine: EngineArguments = EngineArguments()
    environment: dict[str, str] = {}
    probes: Probes

    @field_validator("served_model_name")
    @classmethod
    def _no_colon(cls, value: str) -> str:
        if ":" in value:
            raise ValueError("must not contain ':' (the engine asserts it away at start)")
        return value

    @field_validator("environment")
    @classmethod
    def _environment_names(cls, value: dict[str, str]) -> dict[str, str]:
        return check_environment(value)


def check_environment(value: dict[str, str]) -> dict[str, str]:
    """Names and values that survive a systemd EnvironmentFile. Raises ValueError naming the bad one."""
    for name, text in value.items():
        if not name.replace("_", "").isalnum() or not name.isascii() or name[0].isdigit():
            raise ValueError(f"{name!r} is not an environment variable name (letters, digits, _)")
        if any(ord(character) < 32 or ord(character) == 127 for character in text):
            raise ValueError(f"{name} holds a control character; values are one line of printable text")
        if name.startswith("GPUBOX_"):
            raise ValueError(f"{name}: names starting with GPUBOX_ are set by gpubox")
    return value


def load_server(directory: Path, name: str) -> Server:
    """The profile `directory`/<name>.toml. Raises InputError; its `name` must be the file's name."""
    path = directory / f"{name}.toml"
    if not path.is_file():
        known = [file.stem for file in directory.glob("*.toml")]
        raise InputError(f"server = {name!r}: there is no {path}", hint=nearest(name, known))
    server = load(Server, path)
    if server.name != name:
        raise InputError(f"{path}: name = {server.name!r}, but the file says {name!r}", hint="make both equal")
    return server

"""Server profiles: what is served and how. One file each, `servers/<name>.toml`."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from gpubox.canonical import short_digest
from gpubox.errors import InputError
from gpubox.health.probes import Probes
from gpubox.specs.nccl import Nccl
from gpubox.toml import Name, Strict, load, nearest

Bytes = Annotated[int, Field(ge=1, le=2**53)]
Count = Annotated[int, Field(ge=1, le=2**31)]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
BoxPath = Annotated[str, Field(pattern=r"^/[^\x00-\x1f\x7f]*$")]


class ModelFacts(Strict):
    """What the argument rules need to know of a model, from its config.json and its files.

    architecture: `architectures[0]`. attention: mla for the DeepSeek family. quantization: of the checkpoint's weights.
    weight_bytes: all shards together. context_length: the model's own limit, in tokens. kv_bytes_per_token: bytes of KV
    cache that one token takes on one GPU; MLA keeps all of it on every GPU.
    """

    architecture: Word | None = None
    attention: Literal["mha", "mla"] | None = None
    quantization: Literal["none", "int4", "int8", "fp8", "fp4"] | None = None
    multimodal: bool = False
    weight_bytes: Bytes | None = None
    context_length: Count | None = None
    kv_bytes_per_token: Bytes | None = None


class CheckpointSource(Strict):
    """Either `build`, a directory of `models/` that the box converts once, or `path`, a directory on the box."""

    build: Name | None = None
    path: BoxPath | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.build is None) == (self.path is None):
            raise ValueError("give exactly one of 'build' and 'path'")
        return self


class ModelSource(CheckpointSource):
    facts: ModelFacts = ModelFacts()


class Draft(CheckpointSource):
    """The speculation draft. `kind`: what it was trained as. `attention`: mha for a Llama-style draft.

    sha256: of its model.safetensors, so that another file at the same path is noticed. weight_bytes: of that file.
    """

    kind: Literal["eagle3", "eagle", "standalone"]
    attention: Literal["mha", "mla"] = "mha"
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    weight_bytes: Bytes | None = None


class Hardware(Strict):
    """The machine that the profile is for. memory_mib: of one GPU, as nvidia-smi says. capability: compute_cap."""

    gpu: str
    gpus: Annotated[int, Field(ge=1, le=1024)]
    memory_mib: Count
    capability: Annotated[str, Field(pattern=r"^\d{1,2}\.\d$")]

    @property
    def major(self) -> int:
        """12 for what is called SM120."""
        return int(self.capability.partition(".")[0])

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib * 2**20


class Server(Strict):
    """`ready_deadline_s` lives in `probes`: a server that is not ready by then has failed.

    engine: arguments by name, checked against the table of each stack's engine. overrides: rules of docs/servers.md
    that the operator breaks knowingly, each with the reason, which every report of the box repeats.
    """

    name: Name
    description: str
    served_model_name: Annotated[str, Field(min_length=1)]
    port: Annotated[int, Field(ge=1024, le=65535)] = 30000
    model: ModelSource
    draft: Draft | None = None
    hardware: Hardware | None = None
    nccl: Nccl | None = None
    engine: dict[str, Any] = {}
    environment: dict[str, str] = {}
    overrides: dict[Name, Annotated[str, Field(min_length=10)]] = {}
    probes: Probes

    @cached_property
    def digest(self) -> str:
        """Names the profile's content in releases."""
        return short_digest(self.model_dump(mode="json"))

    @field_validator("served_model_name")
    @classmethod
    def _no_colon(cls, value: str) -> str:
        if ":" in value:
            raise ValueError("must not contain ':' (the engine asserts it away at start)")
        if value.startswith("-") or not value.isprintable():
            raise ValueError("must be printable and must not start with '-'")
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

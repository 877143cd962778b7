"""The operator's values for one box, as plain data in group_data; validated here and nowhere else."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from gpubox.layout import SERVICE_USER
from gpubox.nvidia.driver import AnyDriver
from gpubox.nvidia.toolkit import ToolkitSettings
from gpubox.proxmox.settings import ContainerSettings, NodeSettings
from gpubox.specs.artefacts import check_address
from gpubox.specs.nccl import Nccl
from gpubox.toml import Name, validate

# Keys that pyinfra and its connectors read from the same place. Everything else must be one of ours.
PYINFRA_PREFIXES = ("_", "ssh_", "docker_", "pct_")

Address = Annotated[str, AfterValidator(check_address)]


class Settings(BaseModel):
    """docs/settings.md shows each with an example; `pyinfra ... --data key=value` sets one for a single run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stack: Annotated[Name, Field(description="the software world to serve from: a directory of stacks/")]
    server: Annotated[Name, Field(description="what to serve: a file of servers/")]
    standby_stacks: Annotated[list[Name], Field(description="built and proved by every deploy, for rollback")] = []
    overlay: Annotated[Name | None, Field(description="what this machine lacks: a directory of overlays/")] = None
    python: Annotated[str, Field(pattern=r"^3\.\d+$", description="the box's system Python")] = "3.12"
    listen_address: Annotated[str, Field(description="where the server listens; loopback keeps it closed")] = (
        "127.0.0.1"
    )
    public_url: Annotated[str | None, Field(pattern=r"^https?://[^/]+$", description="where clients reach it")] = None
    service_user: Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_-]{0,30}$")] = SERVICE_USER
    stop_timeout_s: Annotated[int, Field(ge=1, le=7200, description="time for requests in flight at a stop")] = 300
    keep_releases: Annotated[int, Field(ge=2, le=100)] = 5
    wheelhouse: Annotated[str | None, Field(pattern=r"^/", description="a directory of wheels on the box")] = None
    offline: Annotated[bool, Field(description="build with no network: cache and wheelhouse only")] = False
    indexes: Annotated[
        dict[Name, Address], Field(description="addresses of the indexes that artefacts.toml names")
    ] = {}
    container: Annotated[ContainerSettings | None, Field(description="the container to make on the node")] = None
    driver: Annotated[AnyDriver | None, Field(description="the NVIDIA driver; the node's, in a container")] = None
    toolkits: Annotated[ToolkitSettings | None, Field(description="where CUDA toolkits are installed from")] = None
    nccl: Annotated[Nccl | None, Field(description="how its GPUs reach each other; over the profile's [nccl]")] = None
    force: Annotated[bool, Field(description="activate also a release that failed before")] = False

    @field_validator("listen_address")
    @classmethod
    def _address(cls, value: str) -> str:
        ipaddress.ip_address(value)
        return value

    @model_validator(mode="after")
    def _stacks_differ(self) -> Self:
        if len(set(self.standby_stacks)) != len(self.standby_stacks):
            raise ValueError(f"standby_stacks names a stack twice: {', '.join(self.standby_stacks)}")
        return self

    @property
    def stacks(self) -> list[str]:
        """The stack to serve first, then the standby stacks."""
        return [self.stack, *(name for name in self.standby_stacks if name != self.stack)]


def load_settings(data: Mapping[str, Any], host: str) -> Settings:
    """The settings of a box in pyinfra's host data. Raises InputError naming `host`."""
    return validate(Settings, _ours(data, NodeSettings, Settings), f"host {host}")


def load_node_settings(data: Mapping[str, Any], host: str) -> NodeSettings:
    """The settings of a node in pyinfra's host data. Raises InputError naming `host`."""
    return validate(NodeSettings, _ours(data, Settings, NodeSettings), f"host {host}")


def _ours(data: Mapping[str, Any], other: type[BaseModel], own: type[BaseModel]) -> dict[str, Any]:
    """Without pyinfra's keys, and those of the `other` kind of host: `--data key=value` goes to every host of a run."""
    foreign = other.model_fields.keys() - own.model_fields.keys()
    return {key: value for key, value in data.items() if key not in foreign and not key.startswith(PYINFRA_PREFIXES)}

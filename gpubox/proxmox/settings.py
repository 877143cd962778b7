"""The operator's values for a Proxmox VE node and for a container on it, as plain data in group_data."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gpubox.nvidia.driver import AnyDriver
from gpubox.toml import Name, Strict

AbsolutePath = Annotated[str, Field(pattern=r"^/[^,\s]*[^,\s/]$")]
CpuList = Annotated[str, Field(pattern=r"^\d+(-\d+)?(,\d+(-\d+)?)*$")]


class NodeSettings(Strict):
    """docs/proxmox.md shows each with an example. `kernel_arguments` are added to the command line; none is removed.

    `kernel`: the release to pin ("6.17.2-1-pve"); without it the pinned one, else the running one, is pinned.
    """

    driver: AnyDriver
    kernel: str | None = None
    allow_reboot: bool = False
    kernel_arguments: list[str] = []


class ContainerSettings(Strict):
    """A container on a node. Sizes in the units of their names; `disk_gib` is used at creation only.

    `devices_mode`: access to the GPU nodes inside, octal; 0666 lets a service user that is not root use them.
    `models`: a directory of the node, mounted read-only at /models. `allow_restart`: a running container may be
    restarted when a change needs it.
    """

    template: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*\.tar\.(gz|xz|zst)$")]
    template_sha512: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
    template_storage: str = "local"
    storage: str
    disk_gib: Annotated[int, Field(ge=8)]
    memory_mib: Annotated[int, Field(ge=1024)]
    cpuset: CpuList | None = None
    bridge: str = "vmbr0"
    address: Annotated[str, Field(pattern=r"^(dhcp|\d+\.\d+\.\d+\.\d+/\d+)$")] = "dhcp"
    gateway: str | None = None
    hostname: Name
    ostype: Literal["debian", "ubuntu"] = "debian"
    unprivileged: bool = True
    models: AbsolutePath | None = None
    devices_mode: Annotated[str, Field(pattern=r"^0[0-7]{3}$")] = "0666"
    startup_order: Annotated[int, Field(ge=0)] = 1
    allow_restart: bool = False

    @model_validator(mode="after")
    def _gateway_needs_address(self) -> Self:
        if self.gateway is not None and self.address == "dhcp":
            raise ValueError("gateway is for a fixed address; dhcp brings its own")
        return self

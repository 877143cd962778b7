"""What a node says of one container, and whether that forbids to go on. Pure: facts/containers.py asks the node."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpubox.container import ContainerConfig, parse
from gpubox.errors import BrokenError, LockedError, RefusedError
from gpubox.nvidia.gpu_count import DeviceNode, Gpus
from gpubox.proxmox.container_plan import check_same_container, template_volume
from gpubox.proxmox.settings import ContainerSettings


@dataclass(frozen=True)
class ContainerState:
    """`raw`: the bytes of its configuration; None when it is absent.

    running: LXC says so. held: a program of PVE works on it now. elsewhere: files of a guest with this id that is a VM
    or on another node. template: sha512 of the stored file, "" when it is missing (asked of an absent container only).
    models: "directory", "missing" or "link". changed_raw: raw lines written since it started. inside: its device nodes.
    has_run_file: the driver's .run file is in it, as long as the node's (its role checks the hash before it runs it).
    """

    raw: bytes | None = None
    running: bool = False
    held: bool = False
    elsewhere: tuple[str, ...] = ()
    template: str = ""
    models: str = "directory"
    changed_raw: tuple[str, ...] = ()
    inside: Mapping[str, DeviceNode] = field(default_factory=dict)
    has_run_file: bool = False

    @property
    def config(self) -> ContainerConfig | None:
        """Bytes that are not UTF-8 survive as surrogates; `encode` gives them back."""
        return None if self.raw is None else parse(self.raw.decode(errors="surrogateescape"))

    @property
    def sha1(self) -> str:
        """What PVE calls the digest of a configuration."""
        return hashlib.sha1(self.raw or b"", usedforsecurity=False).hexdigest()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.raw or b"").hexdigest()


@dataclass(frozen=True)
class NodeState:
    """pve: it has `pct`. storages: name -> active, of those that may hold containers. maintenance: HA says so."""

    pve: bool = False
    root: bool = False
    maintenance: bool = False
    storages: Mapping[str, bool] = field(default_factory=dict)
    gpus: Gpus = field(default_factory=Gpus)
    containers: Mapping[int, ContainerState] = field(default_factory=dict)

    def container(self, vmid: int) -> ContainerState:
        return self.containers.get(vmid, ContainerState())


def encode(config: ContainerConfig) -> bytes:
    return config.render().encode(errors="surrogateescape")


def check_possible(node: str, vmid: int, settings: ContainerSettings, state: NodeState) -> None:
    """What no later step of a deploy could put right. Raises RefusedError or BrokenError."""
    seen = state.container(vmid)
    if not state.pve:
        raise RefusedError(f"{node} has no pct: it is not a Proxmox VE node", hint="correct the node in the inventory")
    if not state.root:
        raise RefusedError(
            f"{node}: not root: PVE lets only root@pam pass devices and directories to a container",
            hint='connect as root (ssh_user = "root" for the node), or set _sudo = True; an API token is not enough',
        )
    if seen.raw is None and seen.elsewhere:
        kind = "a VM" if "/qemu-server/" in seen.elsewhere[0] else "a container of another node"
        raise RefusedError(
            f"{node}: id {vmid} belongs to {kind}: {seen.elsewhere[0]}",
            hint="correct the vmid in the inventory: ids are unique in a cluster, for VMs and containers together",
        )
    if settings.models is not None and seen.models != "directory":
        what = "no such directory" if seen.models == "missing" else "it goes through a symbolic link"
        raise RefusedError(
            f"{node}: models = {settings.models!r}: {what}",
            hint="make the directory on the node, or name its real path; PVE mounts no path with a link in it",
        )
    if seen.config is not None and seen.config.lock != "create":
        check_same_container(vmid, seen.config, settings)
    if seen.raw is None and state.storages and not state.storages.get(settings.storage):
        known = ", ".join(sorted(name for name, active in state.storages.items() if active)) or "none"
        raise RefusedError(
            f"{node}: storage = {settings.storage!r} cannot hold a container here: it is unknown or not active",
            hint=f"allowed: {known} (pvesm status --content rootdir)",
        )


def check_template(settings: ContainerSettings, seen: ContainerState) -> None:
    """The stored file, where there is one, is the wanted one. Raises BrokenError with both hashes."""
    if seen.template in ("", settings.template_sha512):
        return
    volume = template_volume(settings)
    raise BrokenError(
        f"template {volume}: sha512 is {seen.template}, wanted is {settings.template_sha512}",
        hint=f"remove it (pveam remove {volume}) and run again; or correct template_sha512, if that file is meant",
    )


def check_changeable(node: str, vmid: int, state: NodeState) -> None:
    """Something is about to change. Raises LockedError or RefusedError when PVE or a person said not now."""
    config = state.container(vmid).config
    if state.maintenance:
        raise RefusedError(
            f"{node} is in maintenance mode: CT {vmid} is left as it is",
            hint=f"end it (ha-manager crm-command node-maintenance disable {node}) and run again",
        )
    if config is None or config.lock is None:
        return
    if config.lock == "create":
        raise _half_created(vmid, held=state.container(vmid).held)
    raise LockedError(
        f"CT is locked ({config.lock}): CT {vmid} on {node}",
        hint=f"wait for that {config.lock} to end (pvesh get /nodes/{node}/tasks --vmid {vmid}) and run again; if none "
        f"is running, it was interrupted: pct unlock {vmid}",
    )


def _half_created(vmid: int, *, held: bool) -> LockedError:
    if held:
        return LockedError(f"CT is locked (create): CT {vmid} is being created now", hint="wait for it, run again")
    return LockedError(
        f"CT is locked (create): the creation of CT {vmid} was interrupted, and nothing works on it now",
        hint=f"look at it (pct config {vmid}); if it holds nothing of yours: pct unlock {vmid} && pct destroy {vmid} "
        f"--destroy-unreferenced-disks 1, and run again: it is created anew. If you know it to be whole: pct unlock "
        f"{vmid}, and run again",
    )

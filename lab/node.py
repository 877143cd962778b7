"""A node: a nested container that looks like a bare Proxmox VE node (docs/lab-node.md), and the containers on it.

LXC runs for real inside; what stands in for Proxmox's own programs is below lab/pve, which this module installs.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

from lab import image, keys, machine, network, node_setup
from lab.box import Box
from lab.settings import VMIDS, guest_address
from lab.shell import Completed

NESTING: tuple[tuple[str, object], ...] = (
    ("lxc.include", "/usr/share/lxc/config/nesting.conf"),
    ("lxc.cgroup.devices.allow", "a"),
    ("lxc.cgroup2.devices.allow", "a"),
    ("lxc.cap.drop", ""),
    ("lxc.mount.auto", "cgroup:rw:force proc:rw sys:rw"),
)


@dataclass(frozen=True)
class Node(Box):
    """A node. Its name must be one of lab.settings.NODES. All that a Box can do, and containers on it."""

    def ensure_image(self) -> Path:
        image.ensure_template()
        return image.ensure_node_image()

    def guest(self, vmid: int) -> Guest:
        return Guest(self, vmid)

    def wheel_roots(self) -> list[Path]:
        """Of the privileged containers: what one with shifted ids has fetched belongs to ids of its own."""
        return [root for root in sorted(self.rootfs.glob("rpool/data/subvol-*")) if root.stat().st_uid == 0]

    def discard(self) -> None:
        if network.table_exists():
            for guest in map(self.guest, VMIDS):
                network.restore_internet(guest.address)
        super().discard()

    def _furnish(self, root: Path) -> None:
        node_setup.furnish(root, self.name)

    def _wheels_below(self, root: Path) -> Path:
        """From here the node's privileged containers get theirs (pve/hooks)."""
        return root / node_setup.SHARE / "uv"

    def _config(self) -> list[tuple[str, object]]:
        """The bridge inside has the node's address, so LXC gives none to the interface."""
        base = [(key, value) for key, value in super()._config() if not key.startswith("lxc.net.0.ipv4")]
        return [*base, *NESTING]


@dataclass(frozen=True)
class Guest:
    """A container on a node, made by the node's `pct`; as tests look at it."""

    node: Node
    vmid: int

    @property
    def address(self) -> IPv4Address:
        """The address that the lab has for it; whether the container uses it is its configuration's matter."""
        return guest_address(self.node.name, self.vmid)

    @property
    def rootfs(self) -> Path:
        """Its file system seen from this machine, when its volume is the first on local-zfs."""
        return self.node.rootfs / f"rpool/data/subvol-{self.vmid}-disk-0"

    def run(self, command: str, *, check: bool = True, timeout: float = 600) -> Completed:
        """Run a shell command as root inside, through the node's lxc-attach, so also with the network cut."""
        attach = f"lxc-attach -n {self.vmid} --clear-env -- /bin/sh -c {shlex.quote(command)}"
        return self.node.run(attach, check=check, timeout=timeout)

    def authorize(self) -> None:
        """Let the lab's key into the container and know its host key, for ssh from this machine."""
        with machine.exclusive():  # one file of known host keys for all
            keys.authorize(self.rootfs, str(self.address))

    def cut_internet(self) -> None:
        """It can open no connection beyond the lab; ssh into it still works."""
        network.cut_internet(self.address)

    def restore_internet(self) -> None:
        network.restore_internet(self.address)


def template() -> tuple[str, str]:
    """Name and sha512 of the container template that the lab's nodes offer. Raises GpuboxError before a node was up."""
    return node_setup.TEMPLATE, node_setup.template_sha512()

"""A container's settings and its configuration as PVE writes it, for every test that needs a container."""

from __future__ import annotations

from typing import Any

from gpubox.proxmox.settings import ContainerSettings

VMID = 101
CONTAINER: dict[str, Any] = {
    "template": "debian-12-standard_12.12-1_amd64.tar.zst",
    "template_sha512": "a" * 128,
    "storage": "local-zfs",
    "disk_gib": 64,
    "memory_mib": 65536,
    "hostname": "gpu-box",
}
# Made from them on a node with one GPU; RAW follows, which `pct` cannot write.
CREATED = """\
arch: amd64
dev0: /dev/nvidia0,mode=0666
dev1: /dev/nvidiactl,mode=0666
dev2: /dev/nvidia-uvm,mode=0666
dev3: /dev/nvidia-uvm-tools,mode=0666
features: nesting=1
hostname: gpu-box
memory: 65536
net0: name=eth0,bridge=vmbr0,hwaddr=BC:24:11:5A:00:01,ip=dhcp,type=veth
onboot: 1
ostype: debian
rootfs: local-zfs:subvol-101-disk-0,size=64G
startup: order=1
swap: 0
unprivileged: 1
"""
RAW = "lxc.prlimit.memlock: unlimited\nlxc.prlimit.nofile: 1048576\n"


def container_settings(**changes: Any) -> ContainerSettings:
    return ContainerSettings.model_validate({**CONTAINER, **changes})

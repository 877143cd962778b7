"""The lab's hosts. GPUBOX_LAB_HOSTS names them, separated by spaces; `python -m lab up` brings them up.

A node brings the container 101 with it, which a deploy makes; a box is there already.
"""

import os

from lab import driver_run, settings
from lab.node import template

_HOSTS = os.environ.get("GPUBOX_LAB_HOSTS", "node1").split()
_VMID = 101


def _ssh(name: str) -> dict[str, object]:
    return {
        "ssh_hostname": str(settings.address(name)),
        "ssh_user": "root",
        "ssh_key": str(settings.SSH_KEY),
        "ssh_known_hosts_file": str(settings.KNOWN_HOSTS),
        "ssh_strict_host_key_checking": "yes",
        "ssh_allow_agent": False,
        "ssh_look_for_keys": False,
    }


def _container(node: str) -> dict[str, object]:
    """Privileged, since wheels that many boxes share by hard links cannot belong to shifted user ids."""
    name, sha512 = template()
    return {
        "template": name,
        "template_sha512": sha512,
        "storage": "local-zfs",
        "disk_gib": 40,
        "memory_mib": 16384,
        "address": f"{settings.guest_address(node, _VMID)}/{settings.SUBNET.prefixlen}",
        "gateway": str(settings.GATEWAY),
        "hostname": f"{node}-{_VMID}",
        "unprivileged": False,
        "allow_restart": True,
    }


proxmox_nodes = [(name, _ssh(name)) for name in _HOSTS if name in settings.NODES]
gpu_boxes = [(name, _ssh(name)) for name in _HOSTS if name not in settings.NODES]
gpu_boxes += [
    (f"@pct/{name}/{_VMID}", {"container": _container(name), "driver": driver_run.settings()})
    for name in _HOSTS
    if name in settings.NODES
]

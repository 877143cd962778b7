"""What to do about a message of `pct` or `pveam`. The message itself is shown as PVE wrote it."""

from __future__ import annotations

import re

# First match wins: the more telling ones come first.
_ADVICE = [
    (
        r"root@pam|Only root can pass|please run as root|[Pp]ermission check failed|[Pp]ermission denied - invalid",
        'connect to the node as root (ssh_user = "root"): PVE lets only root@pam pass devices and directories',
    ),
    (
        r"locked \(create\)",
        "a creation was interrupted: if the container holds nothing of yours, pct unlock {vmid} && pct destroy {vmid} "
        "--destroy-unreferenced-disks 1, and run again; if it is whole, pct unlock {vmid}",
    ),
    (
        r"locked \(\w[\w-]*\)",
        "wait for that task to end and run again; if none is running, it was interrupted: pct unlock {vmid}",
    ),
    (r"can't lock file|got timeout", "another program of PVE works on CT {vmid}: wait for it and run again"),
    (
        r"no quorum|not ready - |cluster not ready",
        "the cluster has no quorum, so /etc/pve is read-only: pvecm status; bring its other nodes back",
    ),
    (r"maintenance", "the node is in maintenance: ha-manager crm-command node-maintenance disable {node}, run again"),
    (
        r"detected modified configuration|file change by other user",
        "somebody changed the configuration of CT {vmid} at the same time: run again",
    ),
    (
        r"[Nn]o space left|out of space|[Ii]nsufficient free space|not enough free space|[Dd]isk quota exceeded|"
        r"Insufficient (suitable )?(allocatable )?extents|Free space .*exceeded",
        "the storage is full: pvesm status; free some, or name another storage or a smaller disk_gib for this box",
    ),
    (
        r"storage '[^']*' (does not exist|is not available|is disabled|does not support)|no such storage",
        "name a storage that may hold containers: pvesm status --content rootdir",
    ),
    (
        r"no such template|vztmpl/\S+' does not exist|can't find file '.*vztmpl|unable to (open|find) .*template",
        "pveam available --section system lists the templates of today: names leave it when a newer one comes. Name "
        "one of those with its sha512, or put the file into the storage by hand (/var/lib/vz/template/cache)",
    ),
    (
        r"Device /dev/nvidia\S* does not exist|/dev/nvidia\S* is not a device",
        "the node lacks a device node: nvidia-modprobe -c N makes /dev/nvidiaN, nvidia-modprobe -u -c 0 those of uvm; "
        "the node's unit makes them at boot",
    ),
    (r"Device /dev/\S+ does not exist", "a devN of CT {vmid} names a device that the node lacks: pct config {vmid}"),
    (
        r"[CV][TM] \d+ already exists|already exists on node|VM \d+ .*exists",
        "another guest has this id: correct the vmid in the inventory",
    ),
    (
        r"Configuration file '[^']*' does not exist",
        "there is no container {vmid} on this node: pct list, qm list; correct the vmid in the inventory",
    ),
    (
        r"protection mode enabled",
        "CT {vmid} is protected: pct set {vmid} --protection 0, run again, and protect it again",
    ),
    (
        r"bridge '[^']*' does not exist|no such bridge",
        "name a bridge of the node for this box: ip link show type bridge",
    ),
    (
        r"Could not resolve|Temporary failure in name resolution|download failed|wget.*failed",
        "the node could not fetch it: check its network, or put the file into the storage by hand",
    ),
    (
        r"unable to hotplug \w+:",
        "nothing was written, and a stopped container needs no hotplug: pct shutdown {vmid}, and run again",
    ),
    (
        r"startup for container|lxc-start.*failed",
        "why it did not start: pct start {vmid} --debug, journalctl -b -u pve-container@{vmid}",
    ),
]


def advice(message: str, node: str, vmid: int) -> str | None:
    """What to do next, for the first line of `message` that says something known."""
    for pattern, text in _ADVICE:
        if re.search(pattern, message):
            return text.format(node=node, vmid=vmid)
    return None

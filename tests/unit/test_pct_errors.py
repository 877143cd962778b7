"""What to do about PVE's messages."""

from __future__ import annotations

import pytest

from gpubox.proxmox.pct_errors import advice
from tests.containers import VMID


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("CT is locked (backup)", "pct unlock 101"),
        ("unable to create CT 101 - CT is locked (create)", "pct destroy 101"),
        ("unable to create CT 101 - CT 101 already exists on node 'pve2'", "another guest has this id"),
        ("unable to create CT 101 - VM 101 already exists on node 'pve2'", "another guest has this id"),
        ("Configuration file 'nodes/pve1/lxc/101.conf' does not exist", "pct list, qm list"),
        ("unable to create CT 101 - zfs error: cannot create 'rpool/x': out of space", "the storage is full"),
        ("lvcreate error: Insufficient free space: 16384 extents needed, but only 12 available", "the storage is full"),
        ("tar: ./usr/lib: Cannot mkdir: No space left on device", "the storage is full"),
        ("unable to create CT 101 - volume 'local:vztmpl/x.tar.zst' does not exist", "pveam available"),
        ("400 Parameter verification failed.\ntemplate: no such template", "pveam available"),
        ("Only root can pass arbitrary filesystem paths.", "as root"),
        ("403 Permission check failed (configuring device passthrough is only allowed for root@pam)", "as root"),
        ("please run as root", "as root"),
        ("cluster not ready - no quorum?", "pvecm status"),
        ("can't lock file '/run/lock/lxc/pve-config-101.lock' - got timeout", "another program of PVE"),
        ("detected modified configuration - file changed by other user? Try again.", "run again"),
        ("storage 'nope' does not exist", "pvesm status"),
        ("Device /dev/nvidia-uvm does not exist", "nvidia-modprobe"),
        ("can't update CT 101 drive 'mp0' - protection mode enabled", "--protection 0"),
        ("startup for container '101' failed", "pct start 101 --debug"),
        ("400 Parameter verification failed.\ndev1: unable to hotplug dev1: move_mount failed", "pct shutdown 101"),
        ("dev1: unable to hotplug dev1: Device /dev/nvidia-uvm does not exist", "nvidia-modprobe"),
        ("all is well", None),
    ],
)
def test_advice(message: str, said: str | None) -> None:
    text = advice(message, "pve1", VMID)
    assert (text is None) if said is None else (text is not None and said in text)

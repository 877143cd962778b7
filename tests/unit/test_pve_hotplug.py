"""A devN for a running container: pending on PVE 8, plugged in on PVE 9; as the sources of pve-container have it.

8: pve-container 5.3.5 (branch stable-bookworm) leaves every devN of a running container pending. 9: from 6.0.4 on
vmconfig_hotplug_pending plugs in a devN that is new; one to change or to take away waits for the next start.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpubox.container import parse
from gpubox.nvidia.gpu_count import DeviceNode
from gpubox.proxmox.container_plan import restart_reasons
from lab.pve import cli, cluster, config, hotplug, lxc, machine, pct, version
from lab.pve.errors import PveError

UVM = DeviceNode(510, 0)
GPU = DeviceNode(195, 0)
NODES = {"/dev/nvidia0": GPU, "/dev/nvidia-uvm": UVM}
CONTAINER = """\
arch: amd64
dev0: /dev/nvidia0,mode=0666
hostname: ct
memory: 512
ostype: debian
rootfs: local-zfs:subvol-101-disk-0,size=8G
"""


class Node:
    """A node of one PVE version in a directory, whose container 101 runs. `plugged`: paths plugged into it."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plugged: list[str] = []
        self._choice = directory / "pve"
        self._file = directory / "etc/pve/nodes/pve1/lxc/101.conf"
        self._file.parent.mkdir(parents=True)
        self._file.write_text(CONTAINER)
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(config, "ETC", directory / "etc/pve")
        monkeypatch.setattr(config, "LOCKS", directory / "lock")
        monkeypatch.setattr(config, "node_name", lambda: "pve1")
        monkeypatch.setattr(version, "CHOICE", self._choice)
        monkeypatch.setattr(lxc, "is_running", lambda _vmid: True)
        monkeypatch.setattr(lxc, "device_mode", lambda _path: None)
        monkeypatch.setattr(hotplug, "plug", lambda _vmid, _config, device: self.plugged.append(device["path"]))

    def runs(self, pve: str) -> None:
        self._choice.write_text(f"{pve}\n")

    def set(self, *options: str) -> int:
        return cli.main("pct", pct.COMMANDS, ["set", "101", *options])

    @property
    def text(self) -> str:
        return self._file.read_text()

    def waits_for(self) -> list[str]:
        """Our own words on it, with what was plugged in to be seen inside."""
        inside = {path: NODES[path] for path in ["/dev/nvidia0", *self.plugged]}
        return restart_reasons(parse(self.text), inside=inside, nodes=NODES)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


def test_pve_8_keeps_a_new_device_pending_and_a_restart_is_asked_for(node: Node) -> None:
    node.runs("8")
    assert node.set("--dev1", "/dev/nvidia-uvm,mode=0666") == 0
    assert node.plugged == []
    assert node.text == f"{CONTAINER}\n[pve:pending]\ndev1: /dev/nvidia-uvm,mode=0666\n"
    assert node.waits_for() == ["dev1: /dev/nvidia-uvm,mode=0666 (pending; is not set)"]


def test_pve_9_plugs_a_new_device_in_and_no_restart_is_asked_for(node: Node) -> None:
    node.runs("9")
    assert node.set("--dev1", "/dev/nvidia-uvm,mode=0666") == 0
    assert node.plugged == ["/dev/nvidia-uvm"]
    assert parse(node.text).values["dev1"] == "/dev/nvidia-uvm,mode=0666"
    assert "pve:pending" not in node.text
    assert node.waits_for() == []


@pytest.mark.parametrize("pve", ["8", "9"])
def test_no_pve_changes_or_takes_away_a_device_of_a_running_container(node: Node, pve: str) -> None:
    node.runs(pve)
    assert node.set("--dev0", "/dev/nvidia0,mode=0600") == 0
    assert node.waits_for() == ["dev0: /dev/nvidia0,mode=0600 (pending; is /dev/nvidia0,mode=0666)"]
    assert node.set("--delete", "dev0") == 0
    assert node.waits_for() == ["dev0: removed (pending; is /dev/nvidia0,mode=0666)"]
    assert node.plugged == []


def test_what_pve_9_could_not_plug_in_is_not_written(
    node: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_arguments: object) -> None:
        raise PveError("move_mount failed: Permission denied")

    node.runs("9")
    monkeypatch.setattr(hotplug, "plug", fails)
    assert node.set("--dev1", "/dev/nvidia-uvm") == 255
    assert "dev1: unable to hotplug dev1: move_mount failed: Permission denied" in capsys.readouterr().err
    assert node.text == CONTAINER


def test_the_node_says_which_it_is(node: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(machine, "running_kernel", lambda: "6.17.2-1-pve")
    monkeypatch.setattr(sys, "argv", ["pveversion"])
    cluster.pveversion()
    node.runs("9")
    cluster.pveversion()
    assert capsys.readouterr().out == (
        "pve-manager/8.4.14/b502d23c55afcba1 (running kernel: 6.17.2-1-pve)\n"
        "pve-manager/9.1.1/42db4a6cf33dac83 (running kernel: 6.17.2-1-pve)\n"
    )


OWN_MOUNTS = ["unshare", "--mount"]
OWN_USERS = ["unshare", "--mount", "--user", "--map-root-user"]


def works(namespaces: list[str]) -> bool:
    if os.geteuid() != 0:
        return False
    mounted = [*namespaces, "mount", "-t", "tmpfs", "x", "/mnt"]
    return subprocess.run(mounted, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not works(OWN_USERS), reason="needs root and namespaces")
@pytest.mark.parametrize("namespaces", [OWN_MOUNTS, OWN_USERS])
def test_a_node_made_outside_is_seen_and_works_inside(tmp_path: Path, namespaces: list[str]) -> None:
    """For real: a process in other namespaces, with a /dev of its own, stands for the container."""
    if os.statvfs(tmp_path).f_flag & os.ST_NODEV:
        pytest.skip("no device works in this directory for temporary files")
    place = tmp_path / "dev"
    place.mkdir()
    node = tmp_path / "node"
    os.mknod(node, 0o020666, os.makedev(1, 3))  # /dev/null
    script = f"mount -t tmpfs tmpfs {place} && echo ready && exec sleep 60"
    with subprocess.Popen([*namespaces, "sh", "-c", script], stdout=subprocess.PIPE, text=True) as inside:
        assert inside.stdout is not None
        assert inside.stdout.readline() == "ready\n"
        try:
            hotplug.bind(node, inside.pid, f"{place}/nvidia0", unprivileged=namespaces is OWN_USERS)
            seen = Path(f"/proc/{inside.pid}/root{place}/nvidia0")
            assert seen.stat().st_rdev == os.makedev(1, 3)
            seen.write_text("goes nowhere")
            assert seen.read_bytes() == b""
        finally:
            inside.terminate()
    assert list(place.iterdir()) == [], "nothing was made outside"
    with pytest.raises(OSError, match="No such file"):
        hotplug.bind(tmp_path / "gone", os.getpid(), "/x", unprivileged=False)

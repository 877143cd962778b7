"""The lab is what it claims to be: real systemd, real ssh, cuts that cut, a wheel cache that costs no disk."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpubox.errors import GpuboxError, InputError
from lab import network, uv_cache
from lab.boxes import Box, Lab
from lab.controller import pyinfra
from lab.settings import HOST_NUMBERS, KNOWN_HOSTS, SSH_KEY, discarded, interface

SMALL_WHEEL = "iniconfig==2.0.0"
FETCH_FROM_A_MIRROR = "curl -sS -m 5 -o /dev/null $(apt-get indextargets --format '$(REPO_URI)' | head -1)"


def can_reach_out(box: Box) -> bool:
    return box.run(FETCH_FROM_A_MIRROR, check=False).returncode == 0


def answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=3).close()
    except OSError:
        return False
    return True


def inodes(directory: Path) -> dict[str, tuple[int, int, int]]:
    """Relative name -> inode, time of last change, size, for every file."""
    found = {}
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            state = path.stat()
            found[str(path.relative_to(directory))] = (state.st_ino, state.st_mtime_ns, state.st_size)
    return found


def give_uv(box: Box) -> str:
    """Put the controller's uv into the box; returns the command that uses it with the box's wheel cache."""
    shutil.copy(Path(sys.executable).with_name("uv"), box.rootfs / "usr/local/bin/uv")
    return f"UV_CACHE_DIR={uv_cache.IN_BOX} uv"


def test_systemd_has_started_everything(box: Box) -> None:
    assert box.run("systemctl is-system-running").stdout.strip() == "running"
    assert box.run("cat /proc/1/comm").stdout.strip() == "systemd"
    assert box.run("systemctl --failed --no-legend").stdout == ""


def test_ssh_logs_in_with_the_labs_key_and_a_known_host_key(box: Box) -> None:
    assert box.ssh("hostname; id -un").stdout.split() == [box.name, "root"]
    assert SSH_KEY.stat().st_mode & 0o777 == 0o600
    assert box.address in KNOWN_HOSTS.read_text()


def test_run_reports_output_status_and_time_out(box: Box) -> None:
    done = box.run("cat; echo err >&2; exit 3", check=False, text="in")
    assert (done.stdout, done.stderr, done.returncode) == ("in", "err\n", 3)
    with pytest.raises(GpuboxError, match="exit status 3"):
        box.run("exit 3")
    started = time.monotonic()
    assert box.run("sleep 987", check=False, timeout=1).returncode == 124
    assert time.monotonic() - started < 10
    assert box.run("pgrep -x sleep", check=False).stdout == ""


def test_write_makes_the_directory(box: Box) -> None:
    box.write("/tmp/a b/c", "x\n")
    assert box.run("cat '/tmp/a b/c'; rm -r '/tmp/a b'").stdout == "x\n"


def test_pyinfra_reaches_the_box(box: Box) -> None:
    done = pyinfra([box.name], "-y", "exec", "--", "hostname")
    assert done.returncode == 0, done.stderr
    assert f"[{box.name}] {box.name}" in done.stdout + done.stderr


def test_apt_and_pip_work_inside(box: Box) -> None:
    box.run("apt-get install -y -q --no-install-recommends tree && apt-get purge -y -q tree")
    box.run(f"python3 -m venv /tmp/v && /tmp/v/bin/pip install -q --no-cache-dir {SMALL_WHEEL} && rm -r /tmp/v")


def test_cut_internet_leaves_only_ssh_from_here(box: Box) -> None:
    assert can_reach_out(box)
    box.cut_internet()
    try:
        assert not can_reach_out(box)
        assert box.ssh("true").returncode == 0
    finally:
        box.restore_network()
    assert can_reach_out(box)


def test_cut_network_leaves_only_attach(box: Box) -> None:
    box.cut_network()
    try:
        assert not answers(box.address, 22)
        assert box.run("true").returncode == 0
    finally:
        box.restore_network()
    assert box.ssh("true").returncode == 0


def test_hard_stop_and_start(box: Box) -> None:
    before = box.run("touch /var/tmp/stays; cat /proc/sys/kernel/random/boot_id; stat -c %Y /proc/1").stdout
    box.hard_stop()
    assert not answers(box.address, 22)
    box.start()
    assert box.ssh("rm /var/tmp/stays").returncode == 0
    assert box.run("cat /proc/sys/kernel/random/boot_id; stat -c %Y /proc/1").stdout != before


def test_limit_disk(box: Box) -> None:
    box.limit_disk("/opt/small", 8)
    full = box.run("head -c 16M /dev/zero > /opt/small/file", check=False)
    assert full.returncode != 0
    assert "No space left" in full.stderr
    box.unlimit_disk("/opt/small")
    assert box.run("head -c 16M /dev/zero > /opt/small/file && rm /opt/small/file").returncode == 0


def test_wheel_cache_is_shared_by_links(lab, box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """A box's wheels reach a second box through the shared cache, by link, and install there with the network cut."""
    shared = box.directory / "shared-uv-cache"  # a small cache of its own, on the file system of the boxes
    monkeypatch.setattr(uv_cache, "UV_CACHE", shared)
    monkeypatch.setattr(uv_cache, "IN_BOX", Path("/opt/gpubox/cache/small"))
    uv = give_uv(box)
    box.run(f"{uv} venv -q --clear /opt/gpubox/v && {uv} pip install -q -p /opt/gpubox/v {SMALL_WHEEL}")
    Lab.save_cache(box.name)
    first = inodes(shared)
    own = inodes(uv_cache.cache_below(box.rootfs))
    assert any("iniconfig" in name for name in first)
    assert all(own[name] == state for name, state in first.items()), "saving links, it does not copy"
    Lab.save_cache(box.name)
    assert inodes(shared) == first, "saving again changes nothing"

    (other,) = lab.up("test2", wheels=True)
    seeded = inodes(uv_cache.cache_below(other.rootfs))
    assert seeded == first, "seeding links, it does not copy"
    other.cut_internet()
    give_uv(other)
    other.run(f"{uv} venv -q /opt/gpubox/v && {uv} pip install -q --offline -p /opt/gpubox/v {SMALL_WHEEL}")
    assert other.run("/opt/gpubox/v/bin/python -c 'import iniconfig'").returncode == 0
    installed = next((other.rootfs / "opt/gpubox/v").rglob("iniconfig/__init__.py")).stat()
    assert installed.st_ino in {inode for inode, _, _ in first.values()}, "uv links from the seeded cache"
    assert box.run("cat /etc/machine-id").stdout != other.run("cat /etc/machine-id").stdout

    Lab.down([other.name])
    assert inodes(shared) == first, "a box's end leaves the shared cache as it was"


def test_up_again_keeps_the_box(lab, box: Box) -> None:
    boot = box.run("systemctl show -p UserspaceTimestampMonotonic").stdout
    assert lab.up(box.name) == [box]
    assert box.run("systemctl show -p UserspaceTimestampMonotonic").stdout == boot


def test_a_half_made_box_is_made_anew_and_down_leaves_nothing_of_it(lab, box: Box) -> None:
    half = Box("test2")
    lab.names.add(half.name)
    (half.directory / "rootfs.building/etc").mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", half.directory / "rootfs.building/etc"], check=True)
    lab.up(half.name)
    assert half.ssh("true").returncode == 0
    half.limit_disk("/opt/small", 8)
    Lab.down([half.name])
    assert not half.directory.exists()
    assert not [path for path in discarded() if half.container in path.name], "and nothing of it elsewhere"
    assert not Path(f"/sys/class/net/{interface(half.name)}").exists()
    assert str(half.directory) not in Path("/proc/mounts").read_text()
    assert network.is_up(), "the other boxes keep their network"


def test_an_unknown_name_is_refused_before_anything_is_made() -> None:
    with pytest.raises(InputError, match="no box named 'box99'"):
        Lab.up(["box99"])


def test_the_inventory_is_readable_without_the_lab() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("pyinfra"), "inventories/lab.py", "debug-inventory"],
        env=os.environ | {"GPUBOX_LAB_HOSTS": "box1 box4"},
        capture_output=True,
        text=True,
        check=True,
    )
    shown = done.stdout + done.stderr
    assert "box4" in shown
    assert '"server": "smollm2"' in shown


def test_addresses_and_interface_names_are_valid_and_distinct() -> None:
    assert len(set(HOST_NUMBERS.values())) == len(HOST_NUMBERS)
    assert all(len(interface(name)) <= 15 for name in HOST_NUMBERS)

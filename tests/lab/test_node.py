"""The lab's node behaves as a Proxmox VE node where gpubox looks: containers, their locks, a reboot, the driver.

What stands in for PVE's and NVIDIA's programs is compared with their sources and recordings in tests/unit/
test_pve_standins.py; here they run, over real LXC and systemd.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable

import pytest

from lab import driver_run
from lab.box import Box
from lab.node import Guest, Node, template
from lab.settings import GATEWAY, SUBNET
from lab.shell import Completed

VMID = 101
SMALL = 103  # a container that tests make and remove
WHEELS = "/usr/share/gpubox-lab/after-create.d/20-wheel-cache"
CACHE = "/usr/share/gpubox-lab/uv"
CUDA = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"


@pytest.fixture(scope="module")
def node(lab) -> Node:
    found: Box = lab.up("testnode1")[0]
    assert isinstance(found, Node)
    found.run(f"pveam update && pveam download local {template()[0]}")
    found.run(f"chmod -x {WHEELS}")  # only the container that is kept gets them: linking takes seconds
    return found


@pytest.fixture(scope="module")
def guest(node: Node) -> Guest:
    """Container 101, running: privileged, as the lab's inventory makes it."""
    made = node.guest(VMID)
    if node.run(f"pct status {VMID}", check=False).returncode:
        node.run(f"chmod +x {WHEELS} && mkdir -p {CACHE} && echo wheel >{CACHE}/marker")
        pct_create(node, VMID, "--onboot 1 --startup order=1 --ssh-public-keys /root/.ssh/authorized_keys")
        node.run(f"pct start {VMID} && chmod -x {WHEELS}")
    wait_for(lambda: made.run("systemctl is-system-running", check=False).stdout.strip() == "running")
    made.authorize()
    return made


def pct_create(node: Node, vmid: int, options: str = "", *, check: bool = True) -> Completed:
    address = node.guest(vmid).address
    net = f"name=eth0,bridge=vmbr0,ip={address}/{SUBNET.prefixlen},gw={GATEWAY}"
    fixed = f"--hostname ct{vmid} --unprivileged 0 --features nesting=1 --memory 1024 --swap 0 --rootfs local-zfs:4"
    volume = f"local:vztmpl/{template()[0]}"
    return node.run(f"pct create {vmid} {volume} {fixed} --net0 {net} {options}", check=check)


def destroy(node: Node, vmid: int) -> None:
    node.run(f"pct unlock {vmid}; pct destroy {vmid} --force 1; pvesm free local-zfs:subvol-{vmid}-disk-0", check=False)


def wait_for(happened: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.3)


def reboot(node: Node) -> None:
    """From inside, as pyinfra does it."""
    before = node.run("cat /proc/sys/kernel/random/boot_id").stdout
    node.run("systemctl reboot", check=False)
    wait_for(lambda: node.run("cat /proc/sys/kernel/random/boot_id", check=False).stdout not in ("", before))
    wait_for(lambda: node.run("systemctl is-system-running", check=False).stdout.strip() == "running")


def says(done: Completed, status: int, message: str) -> None:
    assert (done.returncode, done.stderr.strip()) == (status, message)


def test_a_bare_node_has_pve_and_no_driver(node: Node) -> None:
    assert node.run("systemctl is-system-running").stdout.strip() == "running"
    assert re.fullmatch(r"pve-manager/8\.\S+ \(running kernel: \S+-pve\)\n", node.run("pveversion").stdout)
    assert node.ssh("uname -r").stdout.strip().endswith("-pve")
    assert node.run("ls -l /etc/pve/lxc").stdout.strip().endswith(f"-> nodes/{node.name}/lxc")
    assert "inet 10.89.77.41/24" in node.run("ip -4 address show vmbr0").stdout
    assert len(node.run("lspci -Dnmm -d 10de:").stdout.splitlines()) == 2


def test_the_template_is_the_one_that_the_inventory_names(node: Node) -> None:
    name, sha512 = template()
    assert re.search(rf"^system +{re.escape(name)}$", node.run("pveam available").stdout, re.MULTILINE)
    assert f"local:vztmpl/{name}" in node.run("pveam list local").stdout
    path = node.run(f"pvesm path local:vztmpl/{name}").stdout.strip()
    assert node.run(f"sha512sum {path}").stdout.split()[0] == sha512


def test_a_container_boots_and_is_reached(node: Node, guest: Guest) -> None:
    assert guest.run("cat /proc/1/comm").stdout.strip() == "systemd"
    assert node.run(f"pct status {VMID}").stdout == "status: running\n"
    listed = node.run("pct list").stdout.splitlines()
    assert listed[0].split() == ["VMID", "Status", "Lock", "Name"]
    assert f"{VMID:<10} running                 ct{VMID}" in "\n".join(listed)
    config = node.run(f"cat /etc/pve/lxc/{VMID}.conf").stdout
    assert "lock:" not in config
    assert "rootfs: local-zfs:subvol-101-disk-0,size=4G" in config
    assert "unprivileged" not in config
    known = json.loads(node.run(f"pvesh get /nodes/{node.name}/lxc --output-format json").stdout)
    assert [(each["vmid"], each["status"]) for each in known] == [(VMID, "running")]


def test_a_container_is_on_the_network_of_the_lab(guest: Guest) -> None:
    over_ssh = Box("testnode1").run  # the node's shell is only how the command gets here
    assert over_ssh(f"timeout 5 bash -c 'head -c 4 </dev/tcp/{guest.address}/22'").stdout == "SSH-"
    fetch = "curl -sS -m 5 -o /dev/null $(apt-get indextargets --format '$(REPO_URI)' | head -1)"
    assert guest.run(fetch, check=False).returncode == 0
    guest.cut_internet()
    try:
        assert guest.run(fetch, check=False).returncode != 0
    finally:
        guest.restore_internet()


def test_wheels_come_by_link_and_registries_are_reached_as_by_the_node(node: Node, guest: Guest) -> None:
    inside = guest.rootfs / "opt/gpubox/cache/uv/marker"
    assert inside.stat().st_ino == (node.rootfs / CACHE.lstrip("/") / "marker").stat().st_ino
    for path in ("etc/environment", "etc/ssl/certs/ca-certificates.crt", "etc/resolv.conf"):
        assert (guest.rootfs / path).read_bytes() == (node.rootfs / path).read_bytes()
    assert guest.rootfs in node.wheel_roots(), "save-cache finds it"


def test_exec_gives_status_output_and_arguments_through(node: Node, guest: Guest) -> None:
    done = node.run(f"pct exec {VMID} -- sh -c 'echo out; echo err >&2; exit 37'", check=False)
    assert (done.returncode, done.stdout, done.stderr) == (37, "out\n", "err\n")
    assert node.run(f"""pct exec {VMID} -- printf '%s|' 'a b' '' "it's" '$x'""").stdout == "a b||it's|$x|"
    assert node.run(f"FROM_NODE=1 pct exec {VMID} -- sh -c 'echo $FROM_NODE'").stdout == "1\n"
    assert node.run(f"FROM_NODE=1 pct exec {VMID} --keep-env 0 -- sh -c 'echo $FROM_NODE'").stdout == "\n"


def test_push_and_pull_keep_content_mode_and_owner(node: Node, guest: Guest) -> None:
    node.write("/tmp/file", "content\n")
    node.run(f"pct push {VMID} /tmp/file /root/file --perms 640 --user daemon --group 0")
    assert guest.run("stat -c '%a %U %G' /root/file; cat /root/file").stdout == "640 daemon root\ncontent\n"
    assert node.run(f"pct pull {VMID} /root/file /tmp/back && cat /tmp/back").stdout == "content\n"


def test_a_missing_device_ends_set_and_start(node: Node) -> None:
    pct_create(node, SMALL)
    try:
        says(node.run(f"pct set {SMALL} --dev0 /dev/gone", check=False), 255, "Device /dev/gone does not exist")
        node.run("mknod /dev/here c 1 3")
        node.run(f"pct set {SMALL} --dev0 /dev/here,mode=0660,gid=5 && pct start {SMALL}")
        shown = node.guest(SMALL).run("stat -c '%a %u %g %t %T' /dev/here").stdout.split()
        assert shown == ["660", "0", "5", "1", "3"]
        node.run(f"pct stop {SMALL} && rm /dev/here")
        says(node.run(f"pct start {SMALL}", check=False), 255, "Device /dev/here does not exist")
        assert node.run(f"pct status {SMALL}").stdout == "status: stopped\n"
    finally:
        destroy(node, SMALL)


def test_a_bind_mount_is_read_only(node: Node) -> None:
    node.run("mkdir -p /srv/models && echo weights >/srv/models/file")
    pct_create(node, SMALL, "--mp0 /srv/models,mp=/models,ro=1")
    try:
        node.run(f"pct start {SMALL}")
        assert node.guest(SMALL).run("cat /models/file").stdout == "weights\n"
        assert "Read-only file system" in node.guest(SMALL).run("touch /models/new", check=False).stderr
    finally:
        destroy(node, SMALL)


def test_an_unprivileged_container_has_shifted_ids(node: Node) -> None:
    pct_create(node, SMALL, "--unprivileged 1")
    try:
        node.run(f"pct start {SMALL}")
        inside = node.guest(SMALL)
        assert inside.run("cat /proc/self/uid_map").stdout.split() == ["0", "100000", "65536"]
        assert inside.run("stat -c %u / /root/.. /etc/hostname").stdout.split() == ["0", "0", "0"]
    finally:
        destroy(node, SMALL)


@pytest.mark.parametrize(("signal", "left"), [("KILL", "lock: create\n"), ("TERM", "")])
def test_an_ended_creation_leaves_what_pve_leaves(node: Node, signal: str, left: str) -> None:
    """KILL: a configuration of its lock alone, and a volume that it does not name. TERM: PVE cleans up."""
    volume = f"local:vztmpl/{template()[0]}"
    node.run(f"pct create {SMALL} {volume} --unprivileged 0 --rootfs local-zfs:4 >/tmp/out 2>&1 & echo $! >/tmp/pid")
    wait_for(lambda: "extracting" in node.run("cat /tmp/out").stdout)
    node.run(f"kill -{signal} $(cat /tmp/pid)")
    node.run(f"flock -w 60 /run/lock/lxc/pve-config-{SMALL}.lock true")  # unpacking goes on, as in a worker of PVE
    try:
        assert node.run(f"cat /etc/pve/lxc/{SMALL}.conf", check=False).stdout == left
        has_volume = node.run(f"test -d /rpool/data/subvol-{SMALL}-disk-0", check=False).returncode == 0
        assert has_volume == bool(left)
        if left:
            says(node.run(f"pct start {SMALL}", check=False), 255, "CT is locked (create)")
            assert "create" in node.run("pct list").stdout
        else:
            assert "received interrupt" in node.run("cat /tmp/out").stdout
    finally:
        destroy(node, SMALL)


def test_a_full_storage_ends_a_creation_and_leaves_nothing(node: Node) -> None:
    node.run("mkdir -p /mnt/small && mount -t tmpfs -o size=50m small /mnt/small")
    node.run("printf 'zfspool: small\\n\\tpool mnt/small\\n\\tcontent rootdir\\n' >>/etc/pve/storage.cfg")
    try:
        done = node.run(
            f"pct create {SMALL} local:vztmpl/{template()[0]} --unprivileged 0 --rootfs small:4", check=False
        )
        assert done.returncode == 255
        assert "No space left on device" in done.stderr
        assert f"unable to create CT {SMALL} - command 'tar" in done.stderr
        assert node.run(f"ls /mnt/small; cat /etc/pve/lxc/{SMALL}.conf", check=False).stdout == ""
    finally:
        node.run("umount /mnt/small && sed -i '/^zfspool: small/,$d' /etc/pve/storage.cfg")


def test_the_driver_from_install_to_cuda_in_the_container_over_a_reboot(node: Node, guest: Guest) -> None:
    """What modules-load.d and a unit before pve-guests.service bring back; the container starts with it by itself."""
    version, run_file, sha256 = driver_run.settings().values()
    assert node.run(f"sha256sum {run_file}").stdout.split()[0] == sha256
    node.run("apt-get update -qq; apt-get install -y -qq proxmox-default-headers dkms")
    node.run(f"sh {run_file} --silent --dkms -M open --disable-nouveau --rebuild-initramfs --no-install-compat32-libs")
    kernel = node.run("uname -r").stdout.strip()
    assert node.run("dkms status").stdout == f"nvidia/{version}, {kernel}, x86_64: installed\n"
    assert node.run("modinfo -F license nvidia").stdout == "Dual MIT/GPL\n"
    node.write("/etc/modules-load.d/nvidia.conf", "nvidia\nnvidia_uvm\n")
    node.write("/etc/systemd/system/make-nodes.service", MAKE_NODES)
    node.run("systemctl enable -q make-nodes && systemctl start make-nodes")
    first = node.run("grep nvidia-uvm /proc/devices").stdout
    for number, device in enumerate(("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm")):
        node.run(f"pct set {VMID} --dev{number} /dev/{device},mode=0666")

    reboot(node)

    assert node.run("grep nvidia-uvm /proc/devices").stdout != first, "a dynamic number, as on a real machine"
    assert node.run("ls /dev/nvidia*").stdout.split() == [
        f"/dev/{name}" for name in ("nvidia-uvm", "nvidia-uvm-tools", "nvidia0", "nvidia1", "nvidiactl")
    ]
    wait_for(lambda: guest.run("systemctl is-system-running", check=False).stdout.strip() == "running")
    assert node.run(f"pct pending {VMID}").stdout.count("new ") == 0
    in_box = "--silent --no-kernel-modules --no-nvidia-modprobe --no-systemd --no-install-compat32-libs"
    node.run(f"pct push {VMID} {run_file} {run_file}")
    guest.run(f"sh {run_file} {in_box}")
    assert guest.run("nvidia-smi -L").stdout.count("NVIDIA H200") == 2
    assert guest.run(f'python3 -c "{CUDA}"').stdout == "0\n"
    assert guest.run(f'setpriv --reuid nobody --clear-groups python3 -c "{CUDA}"').stdout == "0\n"
    guest.run("mv /usr/lib/x86_64-linux-gnu/libcuda.so.1 /tmp && umount /dev/nvidia-uvm && rm /dev/nvidia-uvm")
    guest.run("mv /tmp/libcuda.so.1 /usr/lib/x86_64-linux-gnu/")
    assert guest.run("nvidia-smi -L").stdout.count("NVIDIA H200") == 2, "nvidia-smi does not need uvm, CUDA does"
    assert guest.run(f'python3 -c "{CUDA}"').stdout == "999\n"


MAKE_NODES = """
[Unit]
After=systemd-modules-load.service
Before=pve-guests.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/nvidia-modprobe -c 255 -c 0 -c 1
ExecStart=/usr/bin/nvidia-modprobe -u -c 0

[Install]
WantedBy=multi-user.target
"""


def test_a_node_without_the_module_boots_without_gpus(node: Node, guest: Guest) -> None:
    """And the container that names them does not start: its devN fails closed, with PVE's message."""
    node.run("mv /etc/modules-load.d/nvidia.conf /root/ && systemctl disable -q make-nodes")
    reboot(node)
    assert node.run("ls /proc/driver").stdout == ""
    log = node.run("journalctl -b -u pve-guests -o cat --no-pager").stdout
    assert f"Starting CT {VMID} failed: Device /dev/nvidia0 does not exist" in log
    assert node.run(f"pct status {VMID}").stdout == "status: stopped\n"


def test_the_pinned_kernel_boots(node: Node) -> None:
    before = node.run("uname -r").stdout
    node.run("apt-get install -y -qq proxmox-kernel-6.14.11-3-pve-signed")
    node.run(f"proxmox-boot-tool kernel pin {before.strip()}")
    reboot(node)
    assert node.run("uname -r").stdout == before
    node.run("proxmox-boot-tool kernel unpin")
    reboot(node)
    assert node.run("uname -r").stdout == "6.14.11-3-pve\n"
    assert "6.14.11-3-pve" in node.run("cat /proc/cmdline").stdout

"""The role container on a node whose driver is there: refusals, interrupted creations, what the operator added.

One node and one container for all tests, which follow each other: refused, killed, made, changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lab.node import template
from tests.lab.conftest import TestBoxes
from tests.lab.node_deploys import NODE, VMID, NodeDeploys, another_user, bare_node
from tests.lab.waiting import wait_for

CONFIG = f"/etc/pve/lxc/{VMID}.conf"
VOLUME = f"/rpool/data/subvol-{VMID}-disk-0"
WHAT_IS_MADE = {"unprivileged": False, "allow_restart": False}  # the lab's inventory allows restarts
EXTRACTED = f"{VOLUME}/usr/bin"  # of the archive, early in it


@pytest.fixture(scope="module")
def node(lab: TestBoxes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeDeploys]:
    with bare_node(lab, tmp_path_factory.mktemp("container")) as made:
        made.converges()
        yield made


def wanted(**changed: object) -> dict[str, object]:
    return {**WHAT_IS_MADE, **changed}


def untouched(node: NodeDeploys) -> str:
    """Everything below /etc/pve and every volume, by name and content."""
    return node.node.run(
        "find /etc/pve -type f ! -name .version -exec sha256sum {} + | sort; ls /rpool/data /var/lib/vz/template/cache"
    ).stdout


@contextmanager
def file(node: NodeDeploys, path: str, text: str) -> Iterator[None]:
    node.node.write(path, text)
    try:
        yield
    finally:
        node.node.run(f"rm {path}")


def test_a_template_that_is_not_offered_is_pves_message_and_what_to_do(node: NodeDeploys) -> None:
    before = untouched(node)
    said = node.refused(container=wanted(template="debian-12-standard_12.0-1_amd64.tar.zst"))
    assert "template: no such template" in said
    assert "pveam available --section system lists the templates of today" in said
    assert untouched(node) == before


def test_a_template_of_another_hash_is_not_used(node: NodeDeploys) -> None:
    name, sha512 = template()
    other = "0" * 128
    said = node.refused(container=wanted(template_sha512=other))
    assert f"template local:vztmpl/{name}: sha512 is {sha512}, wanted is {other}" in said
    again = node.refused(container=wanted(template_sha512=other))
    assert f"sha512 is {sha512}, wanted is {other}" in again, "also when the file is stored"
    assert f"pveam remove local:vztmpl/{name}" in again
    assert node.config() == ""


def test_an_unknown_storage_is_refused_with_those_that_would_do(node: NodeDeploys) -> None:
    said = node.refused(container=wanted(storage="local-lvm"))
    assert "storage = 'local-lvm' cannot hold a container here" in said
    assert "allowed: local-zfs (pvesm status --content rootdir)" in said


@pytest.mark.parametrize(
    ("path", "whose"),
    [
        (f"/etc/pve/qemu-server/{VMID}.conf", "a VM"),
        (f"/etc/pve/nodes/pve9/lxc/{VMID}.conf", "a container of another node"),
    ],
)
def test_an_id_of_another_guest_is_refused(node: NodeDeploys, path: str, whose: str) -> None:
    with file(node, path, "memory: 2048\n"):
        before = untouched(node)
        said = node.refused(container=wanted())
        assert untouched(node) == before
    assert f"{NODE}: id {VMID} belongs to {whose}: " in said
    assert "correct the vmid in the inventory: ids are unique in a cluster" in said


def test_a_node_in_maintenance_is_left_alone(node: NodeDeploys) -> None:
    maintenance = "ha-manager crm-command node-maintenance"
    node.node.run(f"{maintenance} enable {NODE}")
    try:
        before = untouched(node)
        said = node.refused(container=wanted())
        assert untouched(node) == before
    finally:
        node.node.run(f"{maintenance} disable {NODE}")
    assert f"{NODE} is in maintenance mode" in said
    assert f"{maintenance} disable {NODE}" in said


def test_another_user_than_root_is_told_so(node: NodeDeploys) -> None:
    with another_user(node.node) as user:
        before = untouched(node)
        said = node.refused(node={"ssh_user": user}, container=wanted())
        assert untouched(node) == before
    assert "not root" in said
    assert 'ssh_user = "root"' in said


def test_a_full_storage_is_pves_message_and_leaves_nothing(node: NodeDeploys) -> None:
    node.node.limit_disk("/rpool/data", 100)
    try:
        said = node.refused(container=wanted())
        left = node.node.run("ls /rpool/data").stdout
    finally:
        node.node.unlimit_disk("/rpool/data")
    assert "No space left on device" in said
    assert f"unable to create CT {VMID}" in said
    assert "the storage is full: pvesm status" in said
    assert (node.config(), left) == ("", "")


def test_a_killed_creation_is_not_guessed_about(node: NodeDeploys) -> None:
    """KILL leaves PVE's lock and a volume that nothing names. The deploy says what to type, and then goes on."""
    with node.started(container=wanted()) as process:
        wait_for(lambda: node.node.run(f"ls -d {EXTRACTED}", check=False).stdout, 60, "the template to be unpacked")
        node.node.run(f"kill -KILL $(pgrep -f '[/]usr/sbin/pct create {VMID}')")
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 1, said
    assert node.config() == "lock: create\n"
    said = node.refused(container=wanted())
    assert f"CT is locked (create): the creation of CT {VMID} was interrupted, and nothing works on it now" in said
    found = re.search(r"(pct unlock \d+ && pct destroy \d+\s+--destroy-unreferenced-disks 1)", said)
    assert found, said
    assert node.config() == "lock: create\n"
    node.node.run(found[1])
    assert node.node.run("ls /rpool/data").stdout == "", "the volume that no configuration named is gone too"


def test_a_deploy_killed_while_pve_creates_is_taken_up(node: NodeDeploys) -> None:
    """The controller is gone, PVE goes on: the next deploy waits for it to end."""
    with node.started(container=wanted()) as process:
        wait_for(lambda: node.node.run(f"ls -d {EXTRACTED}", check=False).stdout, 60, "the template to be unpacked")
        process.kill()
    assert node.config() == "lock: create\n"
    said = node.converges(container=wanted())
    assert f"CT {VMID} is being created: waiting for that to end" in said
    assert node.init()
    assert node.node.run(f"pct exec {VMID} -- hostname").stdout.strip() == f"{NODE}-{VMID}"


def test_the_second_deploy_changes_and_restarts_nothing(node: NodeDeploys) -> None:
    """H25."""
    init, config = node.init(), node.config()
    assert node.changes(container=wanted(allow_restart=True)) == []
    assert (node.init(), node.config()) == (init, config)


def test_a_creation_that_ended_before_the_raw_lines_is_completed(node: NodeDeploys) -> None:
    whole = node.config()
    assert "lxc.prlimit.memlock: unlimited" in whole
    node.node.run(f"pct stop {VMID} && sed -i '/^lxc\\./d' {CONFIG}")
    node.converges(container=wanted())
    assert node.config() == whole


def test_a_container_that_was_never_started_is_started(node: NodeDeploys) -> None:
    whole = node.config()
    node.node.run(f"pct stop {VMID}")
    assert node.changes(container=wanted()) == [f"Container | CT {VMID}: running"]
    assert node.config() == whole


def test_a_missing_device_is_pves_message_and_what_to_do(node: NodeDeploys) -> None:
    """H2: a devN of a path that is not there ends the start; nothing is started without it."""
    node.node.run(f"mknod /dev/gone c 1 3 && pct stop {VMID} && pct set {VMID} --dev9 /dev/gone && rm /dev/gone")
    try:
        said = node.refused(container=wanted())
        assert "Device /dev/gone does not exist" in said
        assert f"a devN of CT {VMID} names a device that the node lacks: pct config {VMID}" in said
        assert not node.init()
    finally:
        node.node.run(f"pct set {VMID} --delete dev9")
    node.converges(container=wanted())


def test_a_restart_is_asked_for(node: NodeDeploys) -> None:
    """Raw lines, and what PVE could not apply to the running container, count after a start: once, and when allowed."""
    init, changed = node.init(), wanted(memory_mib=8192, cpuset="0-1")
    for _ in range(2):  # it is not forgotten
        said = node.refused(container=changed)
        assert f"CT {VMID} runs, and must be restarted before these count" in said
        assert "lxc.cgroup2.cpuset.cpus: 0-1 (written; limits apply at a start)" in said
        assert "memory: 8192 (pending; is 16384)" in said
        assert "set allow_restart = True" in said
        assert node.init() == init
    node.converges(container=changed | {"allow_restart": True})
    restarted = node.init()
    assert restarted not in ("", init)
    assert node.changes(container=changed | {"allow_restart": True}) == []
    assert node.init() == restarted


OWN = """\
#operator's note%3A mine
dev7: /dev/own,mode=0600
lxc.environment: OWN=1
mp7: /srv/own,mp=/own
some-day-a-key: of a later version
tags: mine
lxc.cgroup2.devices.allow: c 195:* rwm
lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file
lxc.mount.entry: /srv/own srv none bind,optional,create=dir
"""
SNAPSHOT = """\

[before]
#a snapshot
memory: 512
lxc.cgroup2.devices.allow: c 195:* rwm
snaptime: 1700000000
"""
OLD_STYLE = (
    "lxc.cgroup2.devices.allow: c 195:* rwm\n",
    "lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file\n",
)


def test_what_the_operator_added_survives(node: NodeDeploys) -> None:
    """A change of raw lines leaves the rest of the file byte for byte; when PVE writes it, what PVE keeps stays."""
    node.node.run(f"pct stop {VMID} && mknod /dev/own c 1 3; mkdir -p /srv/own")
    before = OWN + node.config() + SNAPSHOT
    node.node.write(CONFIG, before)
    settings = wanted(memory_mib=8192, cpuset="0")
    node.converges(container=settings)
    expected = before.replace("cpuset.cpus: 0-1\n", "cpuset.cpus: 0\n")
    main, separator, snapshot = expected.partition("\n[before]\n")
    for line in OLD_STYLE:
        main = main.replace(line, "")
    assert node.config() == main + separator + snapshot
    assert node.guest.run("stat -c '%a %t %T' /dev/own; ls -d /own").stdout.split() == ["600", "1", "3", "/own"]

    changed = settings | {"memory_mib": 4096, "allow_restart": True}
    node.converges(container=changed)
    after = node.config()
    assert "memory: 4096\n" in after
    for line in (OWN + SNAPSHOT).splitlines(keepends=True):
        if line not in OLD_STYLE and not line.startswith("some-day-a-key"):  # which PVE drops
            assert line in after, line
    assert after.count("c 195:*") == 1, "in the snapshot only"
    assert node.changes(container=changed) == []


def test_a_locked_container_is_left_in_peace(node: NodeDeploys) -> None:
    settings = wanted(memory_mib=4096, cpuset="0")
    node.node.write(CONFIG, f"lock: backup\n{node.config()}")
    before = node.config()
    try:
        assert node.changes(container=settings) == [], "a backup does not stop a deploy that changes nothing"
        said = node.refused(container=settings | {"memory_mib": 2048})
        assert node.config() == before
    finally:
        node.node.run(f"pct unlock {VMID}")
    assert f"CT is locked (backup): CT {VMID} on {NODE}" in said
    assert "wait for that backup to end" in said


def test_another_container_of_this_id_is_not_touched(node: NodeDeploys) -> None:
    before, init = node.config(), node.init()
    said = node.refused(container=wanted(hostname="other-box", unprivileged=True))
    assert f"CT {VMID}: hostname is '{NODE}-{VMID}', wanted is 'other-box': is it the right container?" in said
    assert "correct the vmid in the inventory" in said
    assert f"CT {VMID}: unprivileged is False" in said
    assert (node.config(), node.init()) == (before, init)


def test_gpu_counts_that_differ_stop_with_all_four(node: NodeDeploys) -> None:
    """The configuration names a card that fell off the bus."""
    append_to_main = node.config().replace("\n[before]\n", "dev8: /dev/nvidia2,mode=0666\n\n[before]\n", 1)
    node.node.write(CONFIG, append_to_main)
    try:
        said = node.refused(container=wanted(memory_mib=4096, cpuset="0"))
        assert node.config() == append_to_main
    finally:
        node.node.run(f"sed -i '/^dev8:/d' {CONFIG}")
    numbers = f"PCI 2, driver 2, device nodes 2, configuration of CT {VMID} 3, nvidia-smi 2"
    assert f"{NODE}: the GPU counts differ: {numbers}" in said

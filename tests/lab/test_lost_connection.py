"""The node's ssh is lost at every step of a container's creation, killed or silent; then an unprivileged box serves.

One node for all tests, which follow each other: each deploy takes up what the one before had to leave, and the last one
goes on to a whole box of the stand-in engine: devices, models, service user and activation under shifted user ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from connectors.keepalive import WHAT_TO_DO, lost
from lab.node import Node, template
from tests.lab.conftest import TestBoxes
from tests.lab.drills import SETTINGS, Drill, DrillRepository
from tests.lab.node_deploys import VMID, NodeDeploys, bare_node, replaced
from tests.lab.waiting import wait_for

NODE = "testnode2"
CONFIG = f"/etc/pve/lxc/{VMID}.conf"
STORED = f"/var/lib/vz/template/cache/{template()[0]}"
MODELS = "/srv/models"  # of the node; /models inside
CONTAINER = {"unprivileged": True, "models": MODELS}
OWN = ("#the operator's note\n", "lxc.environment: OWN=1\n", "tags: mine\n")

INTERVAL_S, UNANSWERED = 2, 2
TO_NOTICE_S = INTERVAL_S * (UNANSWERED + 1)
TO_END_S = 10  # pyinfra's own, on a busy machine

# A program that stands still before it does its work, once: the file `held` holds its pid, and goes to let it go on.
HELD = "/run/held"
HOLD = f"""#!/bin/sh
case "$*" in {{arguments}})
  if mkdir {HELD}.once 2>/dev/null; then
    {{before}}
    echo $$ >{HELD}
    while [ -e {HELD} ]; do sleep 0.1; done
  fi ;;
esac
exec "$0.real" "$@"
"""


@contextmanager
def held(node: Node, program: str, arguments: str, before: str = ":") -> Iterator[None]:
    """`program` stands still at the first call that fits `arguments`; `before`: what it has done by then."""
    with replaced(node, program, HOLD.format(arguments=arguments, before=before)):
        try:
            yield
        finally:
            let_go(node)
            node.run(f"rm -rf {HELD}.once")


def let_go(node: Node) -> None:
    """The program goes on, as it would on a node that only lost its connection; returns when it has ended."""
    pid = node.run(f"cat {HELD} 2>/dev/null; rm -f {HELD}", check=False).stdout.strip()
    if pid:
        wait_for(lambda: node.run(f"test -d /proc/{pid}", check=False).returncode, 60, "the held program to end")


def at_template(node: Node) -> Iterator[None]:
    with held(node, "/usr/bin/pveam", "download*", f"head -c 1000000 /dev/urandom >{STORED}.tmp_dwnl"):
        yield


def at_creation(node: Node) -> Iterator[None]:
    """Nothing is held: the archive is being unpacked."""
    yield


def at_configuration(node: Node) -> Iterator[None]:
    with held(node, "/usr/bin/base64", "-d"):
        yield


def at_start(node: Node) -> Iterator[None]:
    with held(node, "/usr/sbin/pct", f'"start {VMID}"'):
        yield


# How a deploy is made to stand at a step, and the sign that it does.
STEPS: dict[str, tuple[Callable[[Node], Iterator[None]], str]] = {
    "template": (at_template, f"cat {HELD}"),
    "creation": (at_creation, f"ls -d /rpool/data/subvol-{VMID}-disk-0/usr/bin"),
    "configuration": (at_configuration, f"cat {HELD}"),
    "start": (at_start, f"cat {HELD}"),
}


@contextmanager
def killed(node: Node) -> Iterator[None]:
    """The node's end of the connection dies, as of a restarted sshd or a kernel short of memory."""
    sessions = node.run("pgrep -f '^sshd: root@'").stdout.split()
    node.run(f"kill -KILL {' '.join(sessions)}")
    yield


@contextmanager
def silent(node: Node) -> Iterator[None]:
    """Nothing arrives any more in either direction, and nobody is told."""
    with node.silenced_ssh():
        yield


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> DrillRepository:
    made = DrillRepository(tmp_path_factory.mktemp("repository"))
    for name in ("good-a", "good-b"):
        made.server(name, old='"/srv/model"', new='"/models/model"')
    return made


@pytest.fixture(scope="module")
def node(
    lab: TestBoxes, repository: DrillRepository, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NodeDeploys]:
    """Its operator has put a model and a wheelhouse where its boxes will see them."""
    directory = tmp_path_factory.mktemp("node")
    values = {**SETTINGS, "standby_stacks": [], "wheelhouse": "/models/wheelhouse"}
    with bare_node(lab, directory, NODE, root=repository.root, of_the_box=values) as made:
        made.node.run(f"mkdir -p {MODELS}/model {MODELS}/wheelhouse && echo '{{}}' >{MODELS}/model/config.json")
        wheel = made.node.rootfs / MODELS.lstrip("/") / "wheelhouse" / repository.wheel.name
        wheel.write_bytes(repository.wheel.read_bytes())
        made.converges()
        yield made


def impatient(directory: Path) -> dict[str, str]:
    """The node's data: an operator whose ssh gives up early."""
    file = directory / "ssh_config"
    file.write_text(f"Host *\n  ServerAliveInterval {INTERVAL_S}\n  ServerAliveCountMax {UNANSWERED}\n")
    return {"ssh_config_file": str(file)}


def start_over(node: Node) -> None:
    node.run(f"pct stop {VMID}; pct destroy {VMID}; pveam remove local:vztmpl/{template()[0]}", check=False)
    assert node.run(f"ls /rpool/data {CONFIG} {STORED}", check=False).stdout.strip() == "/rpool/data:"


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("how", [killed, silent])
def test_the_connection_is_lost(node: NodeDeploys, tmp_path: Path, how: Callable, step: str) -> None:
    """The deploy ends by itself, soon, and says what to do; that the next one goes on is what the next test shows."""
    if step == "template":
        start_over(node.node)
    stand, sign = STEPS[step]
    with contextmanager(stand)(node.node), node.started(node=impatient(tmp_path), container=CONTAINER) as process:
        wait_for(lambda: node.node.run(sign, check=False).stdout, 90, f"the step {step}")
        with how(node.node):
            since = time.monotonic()
            said, _ = process.communicate(timeout=120)
            took = time.monotonic() - since
    assert process.returncode == 1, said
    assert lost(NODE) in said, said
    assert WHAT_TO_DO in said
    assert "Traceback" not in said, said
    assert took < TO_NOTICE_S + TO_END_S, took
    if step == "configuration":
        assert node.config().count("lxc.prlimit.") in (0, 2), "all raw lines or none"
        node.node.write(CONFIG, OWN[0] + node.config() + "".join(OWN[1:]))
    if step == "start":
        assert all(line in node.config() for line in OWN), node.config()


@pytest.fixture(scope="module")
def box(node: NodeDeploys, repository: DrillRepository) -> Drill:
    """The container as a whole box, deployed to after all of that."""
    node.converges("--limit", node.box, container=CONTAINER)
    return Drill(node.guest, repository)


def test_the_deploy_after_all_of_them_serves(node: NodeDeploys, box: Drill) -> None:
    assert box.serving()
    host_key = node.guest.run("cat /etc/ssh/ssh_host_ed25519_key.pub").stdout.split()
    assert host_key[2] == f"root@{NODE}-{VMID}", "PVE's first set-up inside was not cut off with the connection"
    for line in OWN:
        assert node.config().count(line) == 1, "the operator's lines survived"
    assert node.config().count("lxc.prlimit.memlock: unlimited") == 1
    assert node.changes("--limit", node.box, container=CONTAINER) == []


def test_its_user_ids_are_shifted_and_the_service_is_not_root(node: NodeDeploys, box: Drill) -> None:
    assert "unprivileged: 1\n" in node.config()
    assert node.guest.run("cat /proc/self/uid_map").stdout.split() == ["0", "100000", "65536"]
    pid = box.status()["main_pid"]
    assert node.guest.run(f"stat -c %U /proc/{pid}").stdout.strip() == "gpubox"
    inside = int(node.guest.run("id -u gpubox").stdout)
    of_the_server = node.node.run("ps -eo uid,args | grep '[g]pubox_standin'").stdout.split()
    assert of_the_server[0] == str(100000 + inside), "and neither is it on the node"


def test_the_service_user_starts_cuda_on_the_devices(node: NodeDeploys, box: Drill) -> None:
    cuda = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"
    assert node.guest.run(f'su -s /bin/sh gpubox -c "python3 -c \\"{cuda}\\""').stdout == "0\n"
    for device in ("nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"):
        numbers = "stat -c '%a %t %T' /dev/" + device
        assert node.guest.run(numbers).stdout == node.node.run(numbers).stdout, device


def test_the_models_are_seen_and_cannot_be_written(node: NodeDeploys, box: Drill) -> None:
    assert node.guest.run("su -s /bin/sh gpubox -c 'cat /models/model/config.json'").stdout == "{}\n"
    assert "Read-only file system" in node.guest.run("touch /models/new", check=False).stderr


def test_another_release_is_activated_and_rolled_back(node: NodeDeploys, box: Drill) -> None:
    first = box.serving()
    node.converges("--limit", node.box, "--data", "server=good-b", container=CONTAINER)
    second = box.serving()
    assert second != first
    node.guest.run("gpubox rollback")
    assert box.serving() == first

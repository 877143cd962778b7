"""The role `container` on pyinfra's @fake connector, and its shell scripts run for real against files of a test."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyinfra.api import Config, FunctionCommand, Inventory, State, StringCommand
from pyinfra.api.connect import connect_all
from pyinfra.api.deploy import add_deploy
from pyinfra.api.exceptions import DeployError
from pyinfra.api.host import Host
from pyinfra.api.state import StateStage
from pyinfra.connectors.util import CommandOutput
from pyinfra.context import ctx_host, ctx_state

from facts import containers as facts
from facts.containers import Containers, Target
from gpubox.container import parse
from gpubox.errors import InputError
from gpubox.nvidia.gpu_count import DeviceNode, NodeGpus
from gpubox.proxmox.container_plan import create_arguments, plan_raw
from gpubox.proxmox.container_state import ContainerState, NodeState
from gpubox.proxmox.settings import ContainerSettings
from ops import pct
from roles import container as role

VMID = 101
DATA: dict[str, Any] = {
    "template": "debian-12-standard_12.12-1_amd64.tar.zst",
    "template_sha512": "a" * 128,
    "storage": "local-zfs",
    "disk_gib": 64,
    "memory_mib": 65536,
    "hostname": "gpu-box",
}
SETTINGS = ContainerSettings.model_validate(DATA)
NODES = {
    "/dev/nvidia0": DeviceNode(195, 0),
    "/dev/nvidiactl": DeviceNode(195, 255),
    "/dev/nvidia-uvm": DeviceNode(510, 0),
    "/dev/nvidia-uvm-tools": DeviceNode(510, 1),
}
GPUS = NodeGpus(("0000:c1:00.0",), {"0000:c1:00.0": 0}, NODES, 1)
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


def running(text: str, **changes: Any) -> ContainerState:
    return replace(ContainerState(raw=text.encode(), running=True, inside=NODES), **changes)


def node(container: ContainerState, **changes: Any) -> NodeState:
    return replace(NodeState(pve=True, root=True, gpus=GPUS, containers={VMID: container}), **changes)


BARE = node(ContainerState(), storages={"local-zfs": True})
CONVERGED = node(running(CREATED + RAW))


@dataclass
class Done:
    """What each operation would run, and what a failing one would say."""

    operations: list[tuple[str, list[str]]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    stdin: list[str] = field(default_factory=list)
    reads: int = 0

    @property
    def commands(self) -> list[str]:
        return [command for _, commands in self.operations for command in commands]


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """A deploy over a node in these states: each is what one read sees, the last for ever."""

    def deploy(
        *states: NodeState, stage: StateStage = StateStage.Execute, run_file: str | None = None, **changes: Any
    ) -> Done:
        done, left = Done(), list(states)

        def get_fact(self: Host, fact: type, *args: object, **kwargs: object) -> NodeState:
            assert fact is Containers, "a fact that nobody expects to be read"
            done.reads += 1
            return left.pop(0) if len(left) > 1 else left[0]

        wanted = ContainerSettings.model_validate({**DATA, **changes})
        monkeypatch.setattr(Host, "get_fact", get_fact)
        monkeypatch.setattr(role, "targets_on", lambda node, boxes: (Target(VMID, wanted, 360, run_file),))
        state = State(Inventory((["@fake/pve1"], {})), Config())
        connect_all(state)
        state.set_stage(StateStage.Prepare)
        host = state.inventory.get_host("@fake/pve1")
        with ctx_state.use(state), ctx_host.use(host):
            add_deploy(state, role.container)
            if stage is not StateStage.Prepare:
                state.set_stage(stage)
            for operation in host.op_hash_order:
                ran: list[StringCommand] = []
                about = state.ops[host][operation]
                for command in about.command_generator():
                    if isinstance(command, FunctionCommand):
                        done.failures.append(command.args[0])
                        break
                    ran.append(cast(StringCommand, command))
                done.operations.append((next(iter(state.op_meta[operation].names)), [str(command) for command in ran]))
                done.stdin += [str(command.connector_arguments.get("_stdin", "")) for command in ran]
                if stage is StateStage.Execute:
                    about.operation_meta.set_complete(not done.failures, list(ran), CommandOutput([]))
                if done.failures:
                    break
        return done

    return deploy


def test_from_nothing(deployed: Callable[..., Done]) -> None:
    stored = node(ContainerState(template="a" * 128))
    created, configured = node(ContainerState(raw=CREATED.encode())), node(ContainerState(raw=(CREATED + RAW).encode()))
    done = deployed(BARE, BARE, stored, created, configured, CONVERGED)
    assert [name for name, _ in done.operations] == [
        "Container | CT 101: template",
        "Container | CT 101: present",
        "Container | CT 101: configuration",
        "Container | CT 101: running",
        "Container | CT 101: driver file",
    ]
    assert "pveam download local debian-12-standard_12.12-1_amd64.tar.zst" in done.commands[0]
    assert done.commands[1] == "pct " + " ".join(create_arguments(VMID, SETTINGS, [0]))
    assert base64.b64decode(done.stdin[2]).decode() == CREATED + RAW
    assert done.commands[3] == "pct start 101"
    assert "pct exec 101 -- systemctl is-system-running --wait" in done.commands[4]
    assert (len(done.commands), done.failures) == (5, [])
    assert done.reads == 6, "one for the plan, one for the operations, one after each change, one after the start"


def test_a_plan_on_a_bare_node_shows_every_step(deployed: Callable[..., Done]) -> None:
    done = deployed(replace(BARE, gpus=NodeGpus(pci=("0000:c1:00.0",))), stage=StateStage.Prepare)
    assert [name for name, commands in done.operations if commands] == [
        "Container | CT 101: template",
        "Container | CT 101: present",
        "Container | CT 101: configuration",
        "Container | CT 101: running",
    ]
    assert "--dev0 /dev/nvidia0,mode=0666" in done.commands[1]
    assert done.commands[3] == "pct start 101"
    assert done.failures == []


def test_the_drivers_file_goes_in_once(deployed: Callable[..., Done]) -> None:
    run = "/root/NVIDIA driver.run"
    done = deployed(CONVERGED, run_file=run)
    assert done.commands == [
        f"sh -c {shlex.quote(f'pct exec 101 -- mkdir -p /root && pct push 101 {shlex.quote(run)} {shlex.quote(run)}')}"
    ]
    there = replace(CONVERGED.containers[VMID], has_run_file=True)
    assert deployed(replace(CONVERGED, containers={VMID: there}), run_file=run).commands == []


def test_converged_changes_nothing_and_costs_two_reads(deployed: Callable[..., Done]) -> None:
    done = deployed(CONVERGED)
    assert done.commands == []
    assert done.failures == []
    assert done.reads == 2, "one for the plan, one for the operations"


def test_a_locked_container_that_is_converged_is_left_to_its_backup(deployed: Callable[..., Done]) -> None:
    done = deployed(node(running("lock: backup\n" + CREATED + RAW)))
    assert (done.commands, done.failures) == ([], [])


def test_settings_go_through_pct_and_raw_lines_into_the_file_as_pve_left_it(deployed: Callable[..., Done]) -> None:
    before = running(CREATED.replace("memory: 65536", "memory: 512") + "cores: 8\n")
    after = running(CREATED + "lxc.tty.max: 2\n")
    done = deployed(node(before), node(before), node(after), CONVERGED, cpuset="0-15")
    assert done.commands[0] == f"pct set 101 --memory 65536 --delete cores --digest {before.sha1}"
    assert f"!= {after.sha256} ]" in done.commands[1], "not the text that was read first"
    written = base64.b64decode(done.stdin[1]).decode()
    assert written == CREATED + "lxc.tty.max: 2\n" + RAW + "lxc.cgroup2.cpuset.cpus: 0-15\n"


def test_a_stopped_container_is_started(deployed: Callable[..., Done]) -> None:
    stopped = node(replace(CONVERGED.container(VMID), running=False))
    done = deployed(stopped, stopped, CONVERGED)
    assert done.commands[0] == "pct start 101"
    assert "systemctl is-system-running --wait" in done.commands[1]
    assert done.failures == []


def test_a_start_that_did_not_help_fails(deployed: Callable[..., Done]) -> None:
    stopped = node(replace(CONVERGED.container(VMID), running=False))
    done = deployed(stopped)
    assert "it does not run" in done.failures[0]


PENDING = node(running(CREATED.replace("dev0: /dev/nvidia0,mode=0666\n", "") + RAW
                       + "\n[pve:pending]\ndev0: /dev/nvidia0,mode=0666\n"))  # fmt: skip


def test_a_restart_needs_leave(deployed: Callable[..., Done]) -> None:
    done = deployed(PENDING)
    assert done.commands == []
    assert "must be restarted" in done.failures[0]
    assert "allow_restart = True" in done.failures[0]
    assert "dev0: /dev/nvidia0,mode=0666 (pending; is not set)" in done.failures[0]


def test_a_restart_with_leave(deployed: Callable[..., Done]) -> None:
    done = deployed(PENDING, PENDING, CONVERGED, allow_restart=True)
    assert done.commands[0] == "pct reboot 101 --timeout 360"
    assert done.failures == []


def test_a_creation_that_still_goes_on_is_waited_for(deployed: Callable[..., Done]) -> None:
    """The connection was lost; PVE's own task was not."""
    creating = node(ContainerState(raw=b"lock: create\n", held=True))
    done = deployed(creating, creating, CONVERGED)
    assert "flock -w 600 /run/lock/lxc/pve-config-101.lock" in done.commands[0]
    assert done.failures == []


def test_a_creation_that_was_killed_is_the_operators_to_judge(deployed: Callable[..., Done]) -> None:
    done = deployed(node(ContainerState(raw=b"lock: create\n")))
    assert done.commands == []
    assert "pct unlock 101 && pct destroy 101" in done.failures[0]


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (replace(BARE, maintenance=True), "maintenance mode"),
        (
            replace(BARE, gpus=replace(GPUS, listed=0)),
            "PCI 1, device nodes 1, configuration of CT 101 none yet, nvidia-smi 0",
        ),
        (node(running("lock: snapshot\n" + CREATED)), "CT is locked (snapshot)"),
        (
            node(running(CREATED + RAW + "dev9: /dev/nvidia7\n")),
            "PCI 1, device nodes 1, configuration of CT 101 2, nvidia-smi 1",
        ),
    ],
)
def test_what_stops_a_deploy(deployed: Callable[..., Done], seen: NodeState, said: str) -> None:
    done = deployed(seen)
    assert said in done.failures[0]
    assert not [command for command in done.commands if "pct" in command.split()]


def test_a_wrong_template_is_not_used(deployed: Callable[..., Done]) -> None:
    done = deployed(node(ContainerState(template="b" * 128)))
    assert done.commands == []
    assert "b" * 128 in done.failures[0]


def test_what_cannot_be_put_right_stops_before_the_first_operation(deployed: Callable[..., Done]) -> None:
    with pytest.raises(DeployError, match="belongs to a VM"):
        deployed(node(ContainerState(elsewhere=("/etc/pve/qemu-server/101.conf",))))
    with pytest.raises(DeployError, match="is it the right container"):
        deployed(node(running(CREATED.replace("gpu-box", "mail"))))


def box(name: str, **data: Any) -> Host:
    values = {"stack": "a", "server": "b", **data}
    return cast(Host, SimpleNamespace(name=name, data=SimpleNamespace(dict=lambda: values)))


def test_which_boxes_are_containers_of_a_node() -> None:
    boxes = [
        box("@pct/pve1/102", container={**DATA, "hostname": "second"}, stop_timeout_s=10),
        box("@pct/pve1/101", container=DATA),
        box("@pct/pve1/103"),
        box("@pct/pve2/104", container=DATA),
        box("metal"),
    ]
    targets = role.targets_on("pve1", boxes)
    assert [(target.vmid, target.stop_timeout_s) for target in targets] == [(101, 360), (102, 70)]
    with pytest.raises(InputError, match="'x1' is no vmid"):
        role.targets_on("pve1", [box("@pct/pve1/x1", container=DATA)])


# --- the scripts, run ---


@pytest.fixture
def sh(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script with the node's places moved below tmp_path and stand-in programs of tmp_path/bin first."""
    for directory in ("etc/pve/lxc", "etc/pve/qemu-server", "etc/pve/ha", "run/lock/lxc", "dev", "bin", "srv/models"):
        (tmp_path / directory).mkdir(parents=True)

    def run(script: str, **options: Any) -> subprocess.CompletedProcess[str]:
        for place in ("/etc/pve", "/run/", "/proc/driver", "for d in /dev/nvidia"):
            script = script.replace(place, place.replace("/", f"{tmp_path}/", 1))
        environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "LC_ALL": "C.UTF-8"}
        command = ["sh", "-c", script]
        return subprocess.run(command, env=environment, check=False, text=True, capture_output=True, **options)

    return run


def program(tmp_path: Path, name: str, body: str) -> None:
    path = tmp_path / "bin" / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def written(before: str, *, cpuset: str = "0-3") -> StringCommand:
    target = Target(VMID, ContainerSettings.model_validate({**DATA, "cpuset": cpuset}), 360)
    plan = plan_raw(parse(before), target.settings, [0], 510)
    return pct._written(target, ContainerState(raw=before.encode()), plan)


def script_of(command: StringCommand) -> tuple[str, str]:
    """The script of `sh -c`, and what goes in on standard input."""
    return command.bits[2].obj, str(command.connector_arguments["_stdin"])


def run_written(sh: Callable[..., Any], command: StringCommand) -> subprocess.CompletedProcess[str]:
    script, stdin = script_of(command)
    return cast(subprocess.CompletedProcess[str], sh(script, input=stdin))


def test_raw_lines_are_written(sh: Callable[..., Any], tmp_path: Path) -> None:
    conf = tmp_path / "etc/pve/lxc/101.conf"
    conf.write_text(CREATED + "\n[snap]\nhostname: x\n")
    done = run_written(sh, written(conf.read_text()))
    assert done.returncode == 0, done.stderr
    assert conf.read_text() == CREATED + RAW + "lxc.cgroup2.cpuset.cpus: 0-3\n\n[snap]\nhostname: x\n"
    assert list(conf.parent.iterdir()) == [conf], "nothing is left beside it"
    assert not (tmp_path / "run/gpubox").exists(), "it does not run: no restart is due"


def test_a_configuration_that_changed_meanwhile_is_not_overwritten(sh: Callable[..., Any], tmp_path: Path) -> None:
    conf = tmp_path / "etc/pve/lxc/101.conf"
    conf.write_text(CREATED + "tags: mine\n")
    done = run_written(sh, written(CREATED))
    assert done.returncode != 0
    assert "detected modified configuration" in done.stderr
    assert conf.read_text() == CREATED + "tags: mine\n"


def test_half_a_text_is_not_written(sh: Callable[..., Any], tmp_path: Path) -> None:
    conf = tmp_path / "etc/pve/lxc/101.conf"
    conf.write_text(CREATED)
    script, stdin = script_of(written(CREATED))
    done = sh(script, input=stdin.splitlines()[0])
    assert done.returncode != 0
    assert "did not arrive whole" in done.stderr
    assert conf.read_text() == CREATED
    assert list(conf.parent.iterdir()) == [conf]


def test_the_lock_of_pve_is_respected(sh: Callable[..., Any], tmp_path: Path) -> None:
    conf = tmp_path / "etc/pve/lxc/101.conf"
    conf.write_text(CREATED)
    script, stdin = script_of(written(CREATED))
    lock = tmp_path / "run/lock/lxc/pve-config-101.lock"
    with lock.open("a") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        done = sh(script.replace("-w 10", "-w 0"), input=stdin)
        assert asked(sh).container(VMID).held
    assert done.returncode != 0
    assert "can't lock file" in done.stderr
    assert conf.read_text() == CREATED


def test_limits_written_into_a_running_container_are_remembered_for_that_run_of_it(
    sh: Callable[..., Any], tmp_path: Path
) -> None:
    conf = tmp_path / "etc/pve/lxc/101.conf"
    conf.write_text(CREATED)
    program(tmp_path, "lxc-info", f"echo {os.getpid()}")
    assert run_written(sh, written(CREATED)).returncode == 0
    now = conf.read_text()
    assert run_written(sh, written(now, cpuset="0-7")).returncode == 0
    changed = asked(sh).container(VMID).changed_raw
    assert changed[0] == "+ lxc.prlimit.memlock: unlimited", "what an earlier deploy wrote is not forgotten"
    assert changed[-1] == "+ lxc.cgroup2.cpuset.cpus: 0-7"
    program(tmp_path, "lxc-info", f"echo {os.getppid()}")
    assert asked(sh).container(VMID).changed_raw == (), "another run of it has them"
    program(tmp_path, "lxc-info", "exit 1")
    assert not asked(sh).container(VMID).running


def asked(sh: Callable[..., Any], models: str = "") -> NodeState:
    """What the fact's script says, as the fact reads it."""
    volume = "local:vztmpl/debian.tar.zst"
    command = facts.SCRIPT + f"\ncontainer {VMID} {volume} '{models}'\n" + facts.STORAGES
    done = sh(command)
    assert done.returncode == 0, done.stderr
    return Containers().process(done.stdout.splitlines())


def test_the_fact_of_a_bare_node(sh: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "stored").write_text("template")
    program(tmp_path, "pvesm", f"""case $1 in
      path) echo {tmp_path}/stored ;;
      status) printf 'Name Type Status Total\\nlocal dir active 1\\ntank zfspool inactive 1\\n' ;;
    esac""")  # fmt: skip
    program(tmp_path, "pct", "exit 1")
    seen = asked(sh, str(tmp_path / "srv/models"))
    assert seen.pve
    assert seen.storages == {"local": True, "tank": False}
    assert seen.gpus == NodeGpus()
    about = seen.container(VMID)
    assert about == ContainerState(template=hashlib.sha512(b"template").hexdigest())
    (tmp_path / "srv/link").symlink_to(tmp_path / "srv/models")
    assert asked(sh, str(tmp_path / "srv/link")).container(VMID).models == "link"
    assert asked(sh, "/nowhere").container(VMID).models == "missing"


def test_the_fact_of_a_node_with_gpus_and_a_container(sh: Callable[..., Any], tmp_path: Path) -> None:
    raw = b"#\xff\xc3\xbc\n" + CREATED.encode()
    (tmp_path / "etc/pve/lxc/101.conf").write_bytes(raw)
    (tmp_path / "etc/pve/ha/manager_status").write_text(f'{{"node_status":{{"{os.uname().nodename}":"maintenance"}}}}')
    information = tmp_path / "proc/driver/nvidia/gpus/0000:c1:00.0/information"
    information.parent.mkdir(parents=True)
    information.write_text("Model: \t\t NVIDIA H200\nDevice Minor: \t 3\nGPU Excluded:\t No\n")
    program(tmp_path, "lspci", """echo '0000:c1:00.0 "0302" "10de" "2335" -ra1 "10de" "18be"'""")
    program(tmp_path, "nvidia-smi", "echo 'GPU 0: NVIDIA H200 (UUID: GPU-0)'; echo '  MIG 1g.18gb Device 0: (UUID: M)'")
    program(tmp_path, "pvesm", "echo asked though nothing is absent >&2; exit 1")
    program(tmp_path, "lxc-info", f"echo {os.getpid()}")
    seen = asked(sh)
    assert (seen.gpus.pci, seen.gpus.minors, seen.gpus.listed) == (("0000:c1:00.0",), {"0000:c1:00.0": 3}, 1)
    assert seen.maintenance
    about = seen.container(VMID)
    assert about.raw == raw
    assert about.running
    assert not about.held


def test_device_numbers_are_hexadecimal() -> None:
    seen = Containers().process(["node /dev/nvidiactl c3 ff", "inside 101 /dev/nvidia-uvm 1fe 0", "running 101 yes"])
    assert seen.gpus.nodes == {"/dev/nvidiactl": DeviceNode(195, 255)}
    assert seen.container(VMID).inside == {"/dev/nvidia-uvm": DeviceNode(510, 0)}


def test_a_guest_elsewhere_is_seen(sh: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "etc/pve/qemu-server/101.conf").write_text("memory: 1\n")
    assert asked(sh).container(VMID).elsewhere == (f"{tmp_path}/etc/pve/qemu-server/101.conf",)


@pytest.mark.parametrize(("content", "rc"), [("right", 0), ("wrong", 1)])
def test_a_download_is_proved(sh: Callable[..., Any], tmp_path: Path, content: str, rc: int) -> None:
    program(tmp_path, "pveam", f"""case $1 in
      available) echo 'system  another.tar.zst  amd64' ;;
      update) touch {tmp_path}/updated ;;
      download) echo "got $2 $3"; printf %s {content} >{tmp_path}/stored ;;
    esac""")  # fmt: skip
    program(tmp_path, "pvesm", f"echo {tmp_path}/stored")
    sha512 = hashlib.sha512(b"right").hexdigest()
    done = sh(pct.DOWNLOAD.format(storage="local", template="debian.tar.zst", volume="local:vztmpl/x", sha512=sha512))
    assert done.returncode == rc, done.stderr
    assert "got local debian.tar.zst" in done.stdout
    assert (tmp_path / "updated").exists(), "the list did not know it"
    if rc:
        assert sha512 in done.stderr
        assert hashlib.sha512(b"wrong").hexdigest() in done.stderr

"""The role `container` on pyinfra's @fake connector: which commands, in which order, after how many reads."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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

from facts.containers import Containers, Target
from gpubox.errors import InputError
from gpubox.nvidia.gpu_count import Gpus
from gpubox.proxmox.container_plan import create_arguments
from gpubox.proxmox.container_state import ContainerState, NodeState
from roles import container as role
from tests.containers import CONTAINER, CREATED, RAW, VMID, container_settings
from tests.gpus import gpus_of

SETTINGS = container_settings()
GPUS = gpus_of(["0000:c1:00.0"])


def running(text: str, **changes: Any) -> ContainerState:
    return replace(ContainerState(raw=text.encode(), running=True, inside=GPUS.nodes), **changes)


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

        wanted = container_settings(**changes)
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
    assert "setsid pct " + " ".join(create_arguments(VMID, SETTINGS, [0])) in done.commands[1]
    assert base64.b64decode(done.stdin[2]).decode() == CREATED + RAW
    assert done.commands[3] == "pct start 101"
    assert "pct exec 101 -- systemctl is-system-running --wait" in done.commands[4]
    assert (len(done.commands), done.failures) == (5, [])
    assert done.reads == 6, "one for the plan, one for the operations, one after each change, one after the start"


def test_a_plan_on_a_bare_node_shows_every_step(deployed: Callable[..., Done]) -> None:
    done = deployed(replace(BARE, gpus=Gpus(pci=("0000:c1:00.0",))), stage=StateStage.Prepare)
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


def test_a_creation_in_its_last_steps_is_waited_for_too(deployed: Callable[..., Done]) -> None:
    """PVE takes its lock from the configuration before the first set-up inside."""
    ending = node(ContainerState(raw=(CREATED + RAW).encode(), held=True))
    done = deployed(ending, ending, CONVERGED)
    assert "CT 101 is being worked on: waiting" in done.commands[0]
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
            replace(BARE, gpus=replace(GPUS, listed=())),
            "PCI 1, driver 1, device nodes 1, configuration of CT 101 none yet, nvidia-smi 0",
        ),
        (node(running("lock: snapshot\n" + CREATED)), "CT is locked (snapshot)"),
        (
            node(running(CREATED + RAW + "dev9: /dev/nvidia7\n")),
            "PCI 1, driver 1, device nodes 1, configuration of CT 101 2, nvidia-smi 1",
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
        box("@pct/pve1/102", container={**CONTAINER, "hostname": "second"}, stop_timeout_s=10),
        box("@pct/pve1/101", container=CONTAINER),
        box("@pct/pve1/103"),
        box("@pct/pve2/104", container=CONTAINER),
        box("metal"),
    ]
    targets = role.targets_on("pve1", boxes)
    assert [(target.vmid, target.stop_timeout_s) for target in targets] == [(101, 360), (102, 70)]
    with pytest.raises(InputError, match="'x1' is no vmid"):
        role.targets_on("pve1", [box("@pct/pve1/x1", container=CONTAINER)])

"""The roles on pyinfra's @fake connector: which operations, in which order, and what they would run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pyinfra.api import Config, Inventory, State
from pyinfra.api.connect import connect_all
from pyinfra.api.deploy import add_deploy
from pyinfra.api.exceptions import DeployError
from pyinfra.api.host import Host
from pyinfra.api.state import StateStage
from pyinfra.context import ctx_host, ctx_state
from pyinfra.facts.server import Os, Which

from facts.box import Box, BoxState
from gpubox.settings import Settings
from gpubox.specs.findings import Finding
from gpubox.specs.plan import BoxPlan, plan_box
from ops.tools import tools_digest
from roles.box import PACKAGES, UNITS, box, directories, rendered
from roles.preflight import preflight
from roles.serve import releases, serve
from roles.stacks import stacks
from roles.tools import tools

ROOT = Path(__file__).resolve().parents[2]
DATA = {
    "stack": "cuda130-next",
    "standby_stacks": ["cuda128"],
    "server": "smollm2",
    "overlay": "cpu",
    "python": "3.11",
    "listen_address": "0.0.0.0",
}
PLAN = plan_box(ROOT, Settings.model_validate(DATA))
Planned = list[tuple[str, list[str]]]


def converged(plan: BoxPlan) -> BoxState:
    """A box on which all of `plan` holds."""
    state = BoxState()
    state.many = {
        "package": list(PACKAGES),
        "command": ["python3", "python3.11"],
        "stacks": [spec.id for spec in plan.stacks],
        "models": [plan.model.id] if plan.model else [],
        "releases": [spec.id for spec in plan.releases],
        "enabled": [f"{unit} enabled" for unit in UNITS],
    }
    state.one = {
        "user": "gpubox",
        "tools": tools_digest(),
        "gpubox": "/opt/gpubox/tools/bin/gpubox",
        "current": plan.wanted.id,
        "running": plan.wanted.id,
        "active": "active",
    }
    state.files = {file.path: (file.sha256, file.mode, "root:root") for file in rendered(plan.settings)}
    state.directories = {d.path: (d.mode, f"{d.owner}:{d.owner}") for d in directories(plan.settings)}
    return state


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[BoxState], Planned]]:
    """What a deploy would do on a box in this state. A fact that nobody expects to be read fails the test."""

    def deploy(seen: BoxState, **data: object) -> Planned:
        reads: list[str] = []

        def get_fact(self: Host, fact: type, *args: object, **kwargs: object) -> object:
            reads.append(fact.__name__)
            known = {Box: seen, Os: "Linux", Which: "/usr/sbin/command"}
            return known[fact] if fact in known else getattr(fact(), "default", str)()

        monkeypatch.setattr(Host, "get_fact", get_fact)
        inventory = Inventory((["@fake/box"], {**DATA, **data}), gpu_boxes=(["@fake/box"], {}))
        state = State(inventory, Config())
        state.cwd = str(ROOT)
        connect_all(state)
        state.set_stage(StateStage.Prepare)
        host = inventory.get_host("@fake/box")
        with ctx_state.use(state), ctx_host.use(host):
            plan = preflight()
            for role in (box, tools, stacks, releases, serve):
                add_deploy(state, role, plan)
            done = [
                (next(iter(state.op_meta[h].names)), [str(c) for c in state.ops[host][h].command_generator()])
                for h in host.op_hash_order
            ]
        deploy.reads = reads  # type: ignore[attr-defined]
        return done

    yield deploy


def names(plan: Planned) -> list[str]:
    return [name for name, _ in plan]


def changing(plan: Planned) -> list[str]:
    return [name for name, commands in plan if commands]


def test_order_of_a_deploy(planned: Callable[..., Planned]) -> None:
    assert names(planned(BoxState())) == [
        "Box | Debian packages",
        "Box | Service user",
        "Box | Directories",
        "Box | Unit files",
        "Box | Units",
        "Tools | gpubox and uv",
        "Stacks | Stack cuda130-next",
        "Stacks | Stack cuda128",
        "Stacks | Model smollm2",
        "Releases | Rendered releases",
        "Serve | Activate",
        "Serve | Prove from outside",
    ]


def test_a_bare_box_changes_everywhere(planned: Callable[..., Planned]) -> None:
    plan = planned(BoxState())
    assert changing(plan) == names(plan)[:-1], "all but the question from outside, which changes nothing"


def test_a_converged_box_changes_nowhere_and_is_read_once(planned: Callable[..., Planned]) -> None:
    assert changing(planned(converged(PLAN))) == []
    assert planned.reads == ["Box"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("key", ["current", "running", "active"])
def test_activation_is_decided_by_what_runs(planned: Callable[..., Planned], key: str) -> None:
    seen = converged(PLAN)
    seen.one[key] = "something-else"
    assert changing(planned(seen)) == ["Serve | Activate"]


def test_an_interrupted_activation_is_taken_up_again(planned: Callable[..., Planned]) -> None:
    seen = converged(PLAN)
    seen.one["pending"] = "yes"
    assert changing(planned(seen)) == ["Serve | Activate"]


def test_unit_files_reload_and_never_restart(planned: Callable[..., Planned]) -> None:
    seen = converged(PLAN)
    seen.files["/etc/systemd/system/sglang.service"] = ("0" * 64, "644", "root:root")
    seen.one["reload"] = "yes"
    plan = planned(seen)
    assert changing(plan) == ["Box | Unit files", "Box | Units"]
    commands = [command for _, commands in plan for command in commands]
    assert "systemctl daemon-reload" in commands
    assert not [command for command in commands if "restart" in command]


def test_activation_command(planned: Callable[..., Planned]) -> None:
    seen = converged(PLAN)
    seen.one["current"] = "x"
    ((_, commands),) = [entry for entry in planned(seen) if entry[1]]
    assert commands[0].startswith("/opt/gpubox/tools/bin/gpubox activate --who ")
    assert commands[0].endswith(PLAN.wanted.id)
    assert "--force" not in commands[0]
    assert all(f"--protect {spec.id}" in commands[1] for spec in PLAN.releases)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("kernel_driver", "/sys/module/nvidia", "has a driver"),
        (
            "foreign_listener",
            'LISTEN 0 5 0.0.0.0:30000 0.0.0.0:* users:(("python3",pid=7,fd=3))',
            "port = 30000 is in use",
        ),
    ],
)
def test_preflight_refuses(planned: Callable[..., Planned], key: str, value: str, said: str) -> None:
    seen = BoxState()
    seen.one[key] = value
    with pytest.raises(DeployError, match=said):
        planned(seen)


def test_preflight_refuses_what_failed_before(planned: Callable[..., Planned]) -> None:
    seen = converged(PLAN)
    seen.many["failed"] = [f'{PLAN.wanted.id} {{"reason": "ready: died"}}']
    with pytest.raises(DeployError, match="failed when it was last activated"):
        planned(seen)
    assert planned(seen, force=True)


def test_the_fact_reads_its_own_format() -> None:
    lines = [
        "user gpubox",
        "file abc 644 root:root /etc/a b",
        "directory 700 root:root /opt/x",
        "stacks a-1",
        "stacks b-2",
    ]
    seen = Box().process(lines)
    assert seen.get("user") == "gpubox"
    assert seen.files == {"/etc/a b": ("abc", "644", "root:root")}
    assert seen.directories == {"/opt/x": ("700", "root:root")}
    assert seen.has("stacks", "b-2")
    assert not seen.has("stacks", "c-3")


def test_starting_the_server_never_pulls_in_the_recovery() -> None:
    """It would move the link back in the middle of an activation, where state/pending.json exists."""
    unit = next(file.content for file in rendered(PLAN.settings) if file.path.endswith("/sglang.service"))
    pulling = [line for line in unit.splitlines() if line.startswith(("Wants=", "Requires=", "BindsTo=", "Upholds="))]
    assert pulling
    assert not [line for line in pulling if "recover" in line]
    assert "After=network-online.target gpubox-recover.service" in unit


def test_warnings_are_shown_with_the_plan_and_stop_nothing(
    planned: Callable[..., Planned], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warning = Finding("a-rule", "warning", "servers/smollm2.toml", "engine.x", "may be slow", "set it")
    monkeypatch.setattr("roles.preflight.plan_box", lambda root, settings: replace(PLAN, warnings=[warning]))
    monkeypatch.setattr(logging.getLogger("pyinfra"), "propagate", True)
    assert planned(converged(PLAN))
    assert "servers/smollm2.toml: engine.x: may be slow [a-rule]; what to do: set it" in caplog.text

"""What a role would do on pyinfra's @fake connector, on a box in a given state, when planned and when run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pyinfra.api import Config, FileUploadCommand, FunctionCommand, Inventory, State
from pyinfra.api.connect import connect_all
from pyinfra.api.deploy import add_deploy
from pyinfra.api.host import Host
from pyinfra.api.state import StateStage
from pyinfra.context import ctx_host, ctx_state
from pyinfra.facts.apt import AptKeys
from pyinfra.facts.deb import DebPackages
from pyinfra.facts.files import File
from pyinfra.facts.server import Which

from facts.box import Box, BoxState, Question, look_at
from facts.node import Node
from gpubox.settings import Settings
from gpubox.specs.plan import BoxPlan, plan_box

ROOT = Path(__file__).resolve().parents[2]
DATA = {"stack": "cuda130-next", "standby_stacks": ["cuda128"], "server": "smollm2", "python": "3.11"}
Role = Callable[[BoxPlan], None]


@dataclass
class Planned:
    """By operation: its commands as text; `refused`: the text of an operation that would stop the deploy."""

    commands: dict[str, list[str]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    uploads: dict[str, str] = field(default_factory=dict)
    reads: int = 0

    @property
    def changing(self) -> list[str]:
        return [name for name, commands in self.commands.items() if commands]


def planned(
    monkeypatch: pytest.MonkeyPatch,
    role: Role,
    seen: BoxState,
    *,
    stage: StateStage = StateStage.Execute,
    node: Sequence[str] = (),
    **data: object,
) -> Planned:
    """`node`: lines of facts/node.py's script. A fact that nobody expects to be read fails the test."""
    result = Planned()
    plan = plan_box(ROOT, Settings.model_validate({**DATA, **data}))

    def get_fact(self: Host, fact: type, *args: object, **kwargs: object) -> object:
        if fact is Box:
            result.reads += 1
            return seen
        known: dict[type, object] = {Which: "/usr/bin/x", DebPackages: {}, AptKeys: {}, Node: node, File: None}
        return known[fact] if fact in known else getattr(fact(), "default", str)()

    monkeypatch.setattr(Host, "get_fact", get_fact)
    inventory = Inventory((["@fake/box"], {}), gpu_boxes=(["@fake/box"], {}))
    state = State(inventory, Config())
    state.cwd = str(ROOT)
    connect_all(state)
    state.set_stage(StateStage.Prepare)
    host = inventory.get_host("@fake/box")
    with ctx_state.use(state), ctx_host.use(host):
        look_at(Question(plan.settings, (), (), plan.server.port, ""))
        add_deploy(state, role, plan)
        state.current_stage = stage
        for op in host.op_hash_order:
            name = next(iter(state.op_meta[op].names))
            result.commands[name] = []
            for command in state.ops[host][op].command_generator():
                result.commands[name].append(str(command))
                if isinstance(command, FunctionCommand):
                    result.refused[name] = command.args[0]
                if isinstance(command, FileUploadCommand):
                    command.src.seek(0)
                    result.uploads[command.dest] = command.src.read()
    return result

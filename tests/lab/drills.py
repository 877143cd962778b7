"""A small repository of its own for drills: the real roles and the real command, around the stand-in engine.

The stand-in (tests/standin) answers as the real engine does but loads in a second, so every fault at every step can be
tried for real: real pyinfra, real ssh, real systemd, real kills.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from gpubox.errors import GpuboxError
from gpubox.settings import Settings
from gpubox.specs.plan import BoxPlan, plan_box
from lab.boxes import Box
from lab.node import Guest
from lab.question import ask
from lab.settings import REPOSITORY
from tests.lab.waiting import wait_for
from tests.standin.build import build_wheel, write_stack

COPIED = [
    "deploy.py",
    "prepare.py",
    "rollback.py",
    "config.py",
    "roles",
    "ops",
    "facts",
    "templates",
    "templates_node",
    "tools",
    "gpubox",
    "lab",
]
COPIED += ["pyproject.toml", "inventories/lab.py"]
PORT = 30000
SETTINGS = {
    "stack": "standin-a",
    "standby_stacks": ["standin-b"],
    "server": "good-a",
    "python": "3.11",
    "listen_address": "0.0.0.0",
    "stop_timeout_s": 5,
    "wheelhouse": "/srv/wheelhouse",
}
SERVER = """\
name = "{name}"
description = "drill"
served_model_name = "drill"
model.path = "/srv/model"
environment = {{ STANDIN_VARIANT = "{name}"{fault} }}
[engine]
context_length = 2048
[probes]
ready_deadline_s = 12
completion_deadline_s = 6
[[probes.questions]]
ask = "What is the capital of France?"
expect = "Paris"
tries = 2
"""
FAULTS = ["never-ready", "exit-at-once", "wrong-model", "no-completion"]


class DrillRepository:
    """A copy of what a deploy reads, with stand-in stacks and server profiles in place of the real ones."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in COPIED:
            source, target = REPOSITORY / name, root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, target)
        self.wheel = build_wheel(root / "wheels")
        for name in ("standin-a", "standin-b"):
            write_stack(root / "stacks", self.wheel, name)
        for directory in ("servers", "models", "overlays", "inventories/group_data"):
            (root / directory).mkdir(parents=True, exist_ok=True)
        lines = [f"{key} = {value!r}\n" for key, value in SETTINGS.items()]
        (root / "inventories" / "group_data" / "gpu_boxes.py").write_text("".join(lines))
        for name in ("good-a", "good-b", "good-c"):
            self.server(name)
        for name in [*FAULTS, "stubborn-worker"]:
            self.server(name, fault=name)

    def server(self, name: str, *, fault: str | None = None, old: str = "", new: str = "") -> None:
        """Write servers/NAME.toml; `old` -> `new` spoils it."""
        extra = f', STANDIN_FAULT = "{fault}"' if fault else ""
        text = SERVER.format(name=name, fault=extra)
        assert old in text
        (self.root / "servers" / f"{name}.toml").write_text(text.replace(old, new, 1) if old else text)

    def plan(self, **data: object) -> BoxPlan:
        return plan_box(self.root, Settings.model_validate({**SETTINGS, **data}))

    def pyinfra(self, boxes: list[Box], script: str, *flags: str, **data: object) -> subprocess.CompletedProcess[str]:
        process = self.start(boxes, script, *flags, **data)
        output, errors = process.communicate(timeout=300)
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def start(self, boxes: list[Box], script: str, *flags: str, **data: object) -> subprocess.Popen[str]:
        """pyinfra as a user starts it: human text on stderr."""
        settings = [word for key, value in data.items() for word in ("--data", f"{key}={value}")]
        command = [str(Path(sys.executable).with_name("pyinfra")), "inventories/lab.py", script, *flags, *settings]
        # The copy comes before the installed project on the path.
        names = " ".join(box.name for box in boxes)
        environment = {**os.environ, "GPUBOX_LAB_HOSTS": names, "PYTHONPATH": str(self.root)}
        # The copy's lab package computes its paths from where it lies; the keys are in the real one.
        (self.root / ".lab").exists() or (self.root / ".lab").symlink_to(REPOSITORY / ".lab")
        return subprocess.Popen(
            command, cwd=self.root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


@dataclass
class Drill:
    """One box, or container of a node, and the repository that is deployed to it."""

    box: Box | Guest
    repository: DrillRepository

    def prepare(self) -> None:
        """What an operator of an air-gapped box brings by hand: a wheelhouse and a model directory."""
        wheel = self.repository.wheel
        self.box.run("mkdir -p /srv/wheelhouse /srv/model && echo '{}' > /srv/model/config.json")
        shutil.copy2(wheel, self.box.rootfs / "srv/wheelhouse" / wheel.name)

    def deploy(self, *flags: str, **data: object) -> subprocess.CompletedProcess[str]:
        return self.repository.pyinfra([self.box], "deploy.py", *(flags or ("-y",)), **data)

    def start_deploy(self, **data: object) -> subprocess.Popen[str]:
        return self.repository.start([self.box], "deploy.py", "-y", **data)

    def release(self, **data: object) -> str:
        return self.repository.plan(**data).wanted.id

    def status(self) -> dict[str, object]:
        return json.loads(self.box.run("gpubox status --json").stdout)

    def history(self) -> list[dict[str, object]]:
        return json.loads(self.box.run("gpubox history --json -n 1000").stdout)

    def answers(self) -> str:
        """What the server says from outside; raises when it does not."""
        return ask(f"http://{self.box.address}:{PORT}", timeout=10)

    def pause_at(self, point: str | None) -> None:
        self.box.run("rm -f /run/gpubox/drill")
        if point:
            self.box.write("/run/gpubox/drill", point)

    def paused_pid(self, timeout: float = 60) -> int:
        """The activation that stands still at the drill point."""

        def stopped() -> int | None:
            lines = self.box.run("ps -eo pid,stat,args").stdout.splitlines()
            pids = [int(line.split()[0]) for line in lines if "run-activation" in line and line.split()[1][0] == "T"]
            return pids[0] if pids else None

        return wait_for(stopped, timeout, "an activation standing at the drill point")

    def settled(self, timeout: float = 60) -> dict[str, object]:
        """Status when nothing is being changed and nothing is left open."""

        def quiet() -> dict[str, object] | None:
            seen = self.status()
            busy = self.box.run("systemctl list-units 'gpubox-activate-*' --no-legend --plain").stdout.strip()
            return seen if not (busy or seen["activation"] or seen["interrupted"]) else None

        return wait_for(quiet, timeout, "the box to settle")

    def serving(self) -> str:
        """The release that serves, checked: current is what runs, and it answers from outside."""
        seen = self.settled()
        assert seen["current"] == seen["running"], seen
        assert "Paris" in self.answers()
        return str(seen["current"])

    def wait_serving(self, timeout: float = 60) -> None:
        def up() -> bool:
            try:
                return "Paris" in self.answers()
            except GpuboxError:
                return False

        wait_for(up, timeout, "the server to answer")

    def final_names(self) -> list[str]:
        """Everything under a final name in the stores."""
        return self.box.run("cd /opt/gpubox && ls -d stacks/* releases/* models/* 2>/dev/null || true").stdout.split()

    def untouched(self) -> tuple[object, ...]:
        """What must not change while bad input is refused."""
        listing = self.box.run(
            "find /opt/gpubox /etc/systemd/system -not -path '*/cache/*' -printf '%p %T@ %s\\n' | sort | sha256sum"
        ).stdout
        return listing, self.status()["main_pid"], self.status()["current"]

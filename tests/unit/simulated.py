"""A simulated box for the state machine: releases that behave as told, and processes that die as by kill -9.

It stands in for systemd and a server. Its state is on disk, so it survives the death of the process that changes it, as
the real ones do. The lab drills the same steps with real systemd (tests/lab).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from gpubox.canonical import sha256_hex
from gpubox.errors import GpuboxError, ProofError
from gpubox.health.probes import Probes, Question
from gpubox.layout import Layout
from gpubox.rollout import activation
from gpubox.rollout.activation import Box, Request
from gpubox.rollout.locking import Anchor
from gpubox.rollout.service import UnitState
from gpubox.specs.release import Release

PROBES = Probes(questions=(Question(ask="?", expect=("!",)),), ready_deadline_s=5.0)
KILLED = 137


class SimulatedService:
    def __init__(self, layout: Layout) -> None:
        self._path = layout.root / "service.json"
        self._layout = layout
        self.stops = 0

    def _load(self) -> dict[str, str | None]:
        return json.loads(self._path.read_text()) if self._path.exists() else {"running": None, "sub": "dead"}

    def _save(self, running: str | None, sub: str) -> None:
        self._path.write_text(json.dumps({"running": running, "sub": sub}))

    def behaviour(self, release: str) -> str:
        directory = self._layout.releases / release
        return json.loads((directory / "release.json").read_text())["environment"]["BEHAVES"]

    def state(self) -> UnitState:
        seen = self._load()
        active = "active" if seen["running"] else "inactive"
        restarts = 1 if seen["sub"] == "auto-restart" else 0
        return UnitState(active, str(seen["sub"]), "success", 1 if seen["running"] else 0, restarts, "")

    def start(self) -> None:
        """As ExecStart=/opt/gpubox/current/serve does: whatever the link names at this moment."""
        current = self._layout.current
        if not current.is_symlink():
            return
        release = current.readlink().name
        self._save(release, "auto-restart" if self.behaviour(release) == "exits" else "running")

    def stop(self, port: int, report: Callable[[str], None]) -> bool:
        self._save(None, "dead")
        self.stops += 1
        return False

    def running_release(self) -> str | None:
        return self._load()["running"]

    def log_tail(self, lines: int) -> list[str]:
        return ["the server's last words"]

    def power_cut(self) -> None:
        self._save(None, "dead")


class SimulatedProber:
    def __init__(self, service: SimulatedService) -> None:
        self._service = service

    def wait_ready(self, release: Release, is_dead: Callable[[], str | None], report: Callable[[str], None]) -> None:
        if reason := is_dead():
            raise ProofError(reason)
        if release.environment["BEHAVES"] == "never-ready":
            raise ProofError("not ready within 5 s")

    def prove(self, release: Release, *, forced_kill: bool, report: Callable[[str], None]) -> None:
        if release.environment["BEHAVES"] in ("wrong-model", "no-completion"):
            raise ProofError(release.environment["BEHAVES"])


class SimulatedGates:
    def before_stop(self, release: Release, *, force: bool, report: Callable[[str], None]) -> None:
        if release.environment["BEHAVES"] == "bad-draft":
            raise ProofError("the draft does not fit")

    def before_start(self, release: Release, report: Callable[[str], None]) -> None:
        if release.environment["BEHAVES"] == "no-all-reduce":
            raise ProofError("all-reduce hung")


class SimulatedBox:
    def __init__(self, root: Path) -> None:
        self.layout = Layout(root)
        for directory in (self.layout.state, self.layout.releases, self.layout.stacks / "world-0", root / "model"):
            directory.mkdir(parents=True, exist_ok=True)
        (self.layout.stacks / "world-0" / "stack.json").write_text("{}")
        (root / "model" / "config.json").write_text("{}")
        self.service = SimulatedService(self.layout)
        self.box = Box(self.layout, self.service, SimulatedProber(self.service), SimulatedGates(), lambda point: None)
        self.lines: list[str] = []
        self._runs = 0

    def add(self, number: int, behaves: str, *, arguments: list[str] | None = None) -> str:
        """A release in the store that behaves as told once it runs."""
        files = {"serve": b"#!/bin/sh\n", "env": b""}
        release = Release(
            server="server",
            server_digest="0",
            stack="world",
            stack_id="world-0",
            overlay=None,
            model_id=None,
            model_path=str(self.layout.root / "model"),
            served_model_name="m",
            listen_address="127.0.0.1",
            port=30000,
            arguments=[str(number), *(arguments or [])],
            environment={"BEHAVES": behaves},
            probes=PROBES,
            files={name: sha256_hex(data) for name, data in files.items()},
        )
        spec = self.layout.root / "incoming" / release.id
        spec.mkdir(parents=True, exist_ok=True)
        for name, data in {**files, "release.json": release.to_bytes()}.items():
            (spec / name).write_bytes(data)
        return self.box.store.add(spec)

    def request(self, release: str, *, force: bool = False) -> Request:
        self._runs += 1
        anchor = Anchor(pid=2**22 + self._runs, started=0.0)  # no such process: its owner is gone once it ends
        return Request(f"run-{self._runs}", "tester", "activate", release, anchor, force)

    def activate(self, release: str, *, force: bool = False) -> None:
        self.box.activate(self.request(release, force=force), self.lines.append)

    def reboot(self) -> None:
        """Power off, power on: recovery moves the link, then systemd starts what it names."""
        self.service.power_cut()
        self.box.recover(self.lines.append, restart=False)
        self.service.start()

    def killed_after(self, ticks: int, action: Callable[[], object]) -> int:
        """Run `action` in a process of its own that dies at its `ticks`-th durable write; its exit status."""
        pid = os.fork()
        if pid == 0:
            _die_at_fsync(ticks)
            try:
                action()
            except GpuboxError:
                os._exit(1)
            except BaseException:
                os._exit(99)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _die_at_fsync(ticks: int) -> None:
    left = [ticks]
    real = os.fsync

    def fsync(descriptor: int) -> None:
        left[0] -= 1
        if left[0] <= 0:
            os._exit(KILLED)
        real(descriptor)

    os.fsync = fsync


def kill_at(box: SimulatedBox, point: str) -> None:
    """Let the next activation die at a named point of the table of steps."""
    box.box._pause = lambda here: os._exit(KILLED) if here == point else None


STEP_POINTS = [f"{step}:{side}" for step in activation.STEPS for side in ("before", "after")]

"""Activation apart from the session that asked for it: a transient systemd unit does it, anybody may watch.

Losing the ssh connection loses the view, not the work. When the unit is killed, its ExecStopPost puts the old release
back; after a power cut the boot does (gpubox-recover.service).
"""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter

from gpubox.errors import ExitCode, GpuboxError
from gpubox.files import write_atomic
from gpubox.layout import Layout
from gpubox.rollout.activation import Request

POLL_S = 0.2
KEPT_RUNS = 50
REQUEST = TypeAdapter(Request)


class Outcome(BaseModel):
    """How a run ended; written last by the run itself."""

    model_config = ConfigDict(frozen=True)

    exit_code: int
    message: str


class Run:
    """The files and the unit of one activation."""

    def __init__(self, layout: Layout, name: str) -> None:
        self.name = name
        self.unit = f"gpubox-activate-{name}.service"
        self.directory = layout.state / "runs"
        self.request_path = self.directory / f"{name}.request.json"
        self.log_path = self.directory / f"{name}.log"
        self.outcome_path = self.directory / f"{name}.outcome.json"

    def request(self) -> Request:
        return REQUEST.validate_json(self.request_path.read_bytes())

    def finish(self, outcome: Outcome) -> None:
        write_atomic(self.outcome_path, outcome.model_dump_json().encode())

    def outcome(self) -> Outcome | None:
        return Outcome.model_validate_json(self.outcome_path.read_bytes()) if self.outcome_path.exists() else None


def new_run_name() -> str:
    """Sorts by time, UTC; unique also within a second."""
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ-") + secrets.token_hex(2)


def start(layout: Layout, request: Request) -> Run:
    """Start the transient unit. Raises GpuboxError when systemd refuses."""
    run = Run(layout, request.run)
    run.directory.mkdir(parents=True, exist_ok=True)
    _forget_old_runs(run.directory)
    write_atomic(run.request_path, REQUEST.dump_json(request))
    run.log_path.touch()
    gpubox = Path(sys.executable).with_name("gpubox")
    command = ["systemd-run", "--quiet", "--collect", f"--unit={run.unit}", "--service-type=exec"]
    command += [f"--description=gpubox {request.action} {request.release}"]
    command += [f"--property=ExecStopPost={gpubox} recover --run {run.name}"]
    command += [f"--property=StandardOutput=append:{run.log_path}", f"--property=StandardError=append:{run.log_path}"]
    command += ["--property=TimeoutStopSec=infinity", str(gpubox), "run-activation", run.name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise GpuboxError(f"systemd-run failed ({done.returncode}): {done.stderr.strip()}", hint="systemctl status")
    return run


def _forget_old_runs(directory: Path) -> None:
    """Names sort by time; history keeps the verdicts for ever, the logs of the last runs are enough."""
    runs = sorted({path.name.split(".")[0] for path in directory.iterdir()})
    for name in runs[:-KEPT_RUNS]:
        for path in directory.glob(f"{name}.*"):
            path.unlink()


def follow(run: Run, show: Callable[[str], None]) -> Outcome:
    """Show the run's log lines until it is over. Raises GpuboxError when the run was killed half-way."""
    for line in _lines(run):
        show(line)
    outcome = run.outcome()
    if outcome is None:
        raise GpuboxError(
            f"activation {run.name} was killed before it ended; the release that served before was put back",
            hint="gpubox history; gpubox status",
        )
    return outcome


def _lines(run: Run) -> Iterator[str]:
    with run.log_path.open(encoding="utf-8", errors="replace") as log:
        partial = ""
        while True:
            over = not _is_running(run)
            while chunk := log.readline():
                partial += chunk
                if partial.endswith("\n"):
                    yield partial.rstrip("\n")
                    partial = ""
            if over:
                return
            time.sleep(POLL_S)


def _is_running(run: Run) -> bool:
    state = subprocess.run(["systemctl", "is-active", run.unit], capture_output=True, text=True, check=False)
    return state.stdout.strip() in ("active", "activating", "deactivating", "reloading")


def failure(error: GpuboxError) -> Outcome:
    return Outcome(exit_code=int(error.exit_code), message=str(error))


SUCCESS = Outcome(exit_code=int(ExitCode.OK), message="")

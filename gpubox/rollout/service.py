"""The server's systemd unit: state, start, a stop that is really over, and what it said last."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from gpubox.errors import GpuboxError
from gpubox.nvidia.gpu import busy_gpus

UNIT = "sglang.service"
LEFTOVER_GRACE_S = 15.0  # after systemd says stopped: time for the kernel to close sockets and free GPU memory
FORCED_RESULTS = frozenset({"timeout", "watchdog", "oom-kill"})  # systemd ended it, it did not end by itself


@dataclass(frozen=True)
class UnitState:
    """What `systemctl show` says of the unit; `restarts` counts automatic restarts since the last explicit start."""

    active: str
    sub: str
    result: str
    main_pid: int
    restarts: int
    cgroup: str

    @property
    def stopped(self) -> bool:
        return self.active in ("inactive", "failed")


def systemctl(*arguments: str) -> str:
    """Standard output. Raises GpuboxError with systemctl's own words."""
    done = subprocess.run(["systemctl", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise GpuboxError(
            f"systemctl {' '.join(arguments)} failed ({done.returncode}): {done.stderr.strip()}",
            hint=f"systemctl status {UNIT}; journalctl -u {UNIT} -n 50",
        )
    return done.stdout


class SystemdService:
    """The real service. Unit tests drive the state machine with a simulated one of the same shape."""

    def __init__(self, unit: str = UNIT) -> None:
        self.unit = unit

    def state(self) -> UnitState:
        names = "ActiveState,SubState,Result,MainPID,NRestarts,ControlGroup"
        lines = systemctl("show", self.unit, f"--property={names}").splitlines()
        values = dict(line.split("=", 1) for line in lines if "=" in line)
        return UnitState(
            active=values.get("ActiveState", "unknown"),
            sub=values.get("SubState", "unknown"),
            result=values.get("Result", "unknown"),
            main_pid=int(values.get("MainPID") or 0),
            restarts=int(values.get("NRestarts") or 0),
            cgroup=values.get("ControlGroup", ""),
        )

    def start(self) -> None:
        """Returns when the server's process was started, which is not when it is ready."""
        systemctl("reset-failed", self.unit)
        systemctl("start", self.unit)

    def stop(self, port: int, report: Callable[[str], None]) -> bool:
        """Stop and wait until nothing is left: cgroup empty, `port` free, GPUs idle.

        Returns whether the server was killed rather than ended by itself. Raises GpuboxError naming what is left.
        """
        before = self.state()
        systemctl("stop", self.unit)
        forced = self.state().result in FORCED_RESULTS
        deadline = time.monotonic() + LEFTOVER_GRACE_S
        while left := self._left_over(before.cgroup, port):
            if time.monotonic() >= deadline:
                raise GpuboxError(
                    f"{self.unit} is stopped, but {left}",
                    hint="end that process; gpubox ends only what belongs to its own unit",
                )
            report(f"stopped; waiting: {left}")
            time.sleep(1)
        return forced

    def running_release(self) -> str | None:
        """The release that the running server was started from, as its own environment says."""
        pid = self.state().main_pid
        return _environment_of(pid).get("GPUBOX_RELEASE") if pid else None

    def log_tail(self, lines: int) -> list[str]:
        """The unit's last journal lines, without decoration."""
        command = ["journalctl", "-u", self.unit, "-n", str(lines), "-o", "cat", "--no-pager", "--quiet"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()

    def _left_over(self, cgroup: str, port: int) -> str | None:
        if pids := processes_in(cgroup):
            return f"its cgroup still holds processes {', '.join(map(str, pids))}"
        if owner := port_owner(port):
            return f"port {port} is still in use by {owner}"
        if gpus := busy_gpus():
            return f"GPU memory is still in use: {gpus}"
        return None


def processes_in(cgroup: str) -> list[int]:
    """Processes in the cgroup and below it. Looks where systemd keeps its tree: cgroup v2, or v1's named hierarchy."""
    if not cgroup:
        return []
    pids: list[int] = []
    for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified"):
        for listing in Path(root + cgroup).rglob("cgroup.procs"):
            pids += [int(line) for line in listing.read_text().split()]
    return sorted(set(pids))


def port_owner(port: int) -> str | None:
    """Who listens on TCP `port`: 'name (pid)', or None. Sees all processes only as root."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            if connection.pid is None:
                return "a process of another namespace or user"
            return f"{psutil.Process(connection.pid).name()} ({connection.pid})"
    return None


def _environment_of(pid: int) -> dict[str, str]:
    try:
        return psutil.Process(pid).environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return {}

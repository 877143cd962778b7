"""activate: move `current` to a release, restart, prove it; on any failure put the old release back.

The steps are the table STEPS. From `stop` on, state/pending.json says what is being tried; whoever finds it without a
living owner (the unit's ExecStopPost, the next command, the boot) puts the old release back with `recover`. So
`current` names a complete release at every moment, and after a kill at any line a proved one serves again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from gpubox.errors import BrokenError, GpuboxError, RefusedError
from gpubox.files import write_atomic
from gpubox.layout import Layout
from gpubox.rollout.history import Entry, History, Verdict, now
from gpubox.rollout.locking import Anchor, BoxLock
from gpubox.rollout.service import UnitState
from gpubox.rollout.store import Store
from gpubox.specs.release import Release

Document = TypeVar("Document", bound=BaseModel)
Report = Callable[[str], None]
LOG_LINES = 30  # last lines of a failed server kept in history and shown


class Step(StrEnum):
    LOCK = "lock"
    PREFLIGHT = "preflight"
    STOP = "stop"
    COLLECTIVES = "collectives"
    LINK = "link"
    START = "start"
    READY = "ready"
    PROVE = "prove"
    RECORD = "record"


STEPS: dict[Step, str] = {
    Step.LOCK: "one change at a time on this box",
    Step.PREFLIGHT: "the release and all it needs is complete; it did not fail before",
    Step.STOP: "stop the old server: cgroup empty, port free, GPU memory at its baseline",
    Step.COLLECTIVES: "an all-reduce of its ranks, unless that is known to pass here",
    Step.LINK: "move the link current",
    Step.START: "start the new server",
    Step.READY: "wait until it is ready",
    Step.PROVE: "right model, right answers",
    Step.RECORD: "write the verdict",
}


StepRunner = Callable[[Step], AbstractContextManager[None]]


class Service(Protocol):
    """The server's unit. gpubox.service has the real one."""

    def state(self) -> UnitState: ...
    def start(self) -> None: ...
    def stop(self, port: int, report: Report) -> bool: ...
    def running_release(self) -> str | None: ...
    def log_tail(self, lines: int) -> list[str]: ...


class Prober(Protocol):
    """Health as proof. gpubox.prober has the real one."""

    def wait_ready(self, release: Release, is_dead: Callable[[], str | None], report: Report) -> None: ...
    def prove(self, release: Release, *, forced_kill: bool, report: Report) -> None: ...


class Gates(Protocol):
    """What a release must pass beyond its own files. gpubox.rollout.gates has the real ones."""

    def before_stop(self, release: Release, *, force: bool, report: Report) -> None: ...
    def before_start(self, release: Release, report: Report) -> None: ...


class Pending(BaseModel):
    """What an activation is trying; exists only between `stop` and the end of `record`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    who: str
    action: str
    from_release: str | None
    to_release: str
    since: str


class Progress(BaseModel):
    """Where a running activation is, for `gpubox status`."""

    model_config = ConfigDict(frozen=True)

    run: str
    to_release: str
    step: str
    since: str


@dataclass(frozen=True)
class Request:
    """What somebody asked for. `action`: activate or rollback. `force`: also a release that failed before."""

    run: str
    who: str
    action: str
    release: str
    anchor: Anchor
    force: bool = False


class Box:
    """One box: its store, its unit, its probes, its gates, its history."""

    def __init__(self, layout: Layout, service: Service, prober: Prober, gates: Gates, pause: Report) -> None:
        self.layout = layout
        self.store = Store(layout)
        self.history = History(layout.state / "history.jsonl")
        self.lock = BoxLock(layout.state / "lock")
        self.service = service
        self.prober = prober
        self.gates = gates
        self._pause = pause

    @property
    def pending_path(self) -> Path:
        return self.layout.state / "pending.json"

    def pending(self) -> Pending | None:
        return _read(Pending, self.pending_path)

    def progress(self) -> Progress | None:
        return _read(Progress, self.layout.state / "progress.json")

    def activate(self, request: Request, report: Report) -> None:
        """Serve `request.release`, proved, or what served before. Returns only when it serves.

        Raises LockedError and RefusedError before anything changed; ProofError (or another GpuboxError) after the old
        release was put back, with the failed server's last log lines as detail.
        """
        step = _Steps(self, request, report)
        with ExitStack() as stack:
            with step(Step.LOCK):
                held = self.lock.held(request.who, f"{request.action} {request.release}", anchor=request.anchor)
                note = stack.enter_context(held)
            stack.callback((self.layout.state / "progress.json").unlink, missing_ok=True)
            if note:
                report(note)
            self._recover_locked(report, restart=True)
            self._activate_locked(request, step, report)

    def recover(self, report: Report, *, restart: bool = True) -> bool:
        """End what a dead activation left open: put the old release back. Returns whether there was anything.

        restart=False at boot, where systemd starts the unit right after.
        """
        if self.pending() is None:
            return False
        with self.lock.recovering(timeout_s=5):
            return self._recover_locked(report, restart=restart)

    def _activate_locked(self, request: Request, step: _Steps, report: Report) -> None:
        old = self.store.current()
        with step(Step.PREFLIGHT):
            release = self.store.check(request.release)
            self._refuse_failed(request)
            self.gates.before_stop(release, force=request.force, report=report)
            old_port = self._port_of(old, release.port)
        pending = Pending(
            run=request.run,
            who=request.who,
            action=request.action,
            from_release=old,
            to_release=request.release,
            since=now(),
        )
        write_atomic(self.pending_path, pending.model_dump_json().encode())
        started = time.monotonic()
        try:
            with step(Step.STOP):
                forced = self.service.stop(old_port, report)
            with step(Step.COLLECTIVES):
                self.gates.before_start(release, report)
            with step(Step.LINK):
                self.store.set_current(request.release)
            self._serve(request.release, release, forced, step, report)
        except GpuboxError as error:
            self._put_back(pending, error, step.now, time.monotonic() - started, report)
            raise
        with step(Step.RECORD):
            self._record(pending, request.release, Verdict.PROVED, seconds=time.monotonic() - started)
            self._settle(pending)

    def _port_of(self, release_id: str | None, default: int) -> int:
        """Where the old server listens. One whose files were edited must not keep a good release from coming."""
        try:
            return self.store.read(release_id).port if release_id else default
        except BrokenError:
            return default

    def _settle(self, pending: Pending) -> None:
        """What follows from a proof that is written down; may run twice."""
        if pending.from_release and pending.from_release != pending.to_release:
            self.store.set_previous(pending.from_release)
        self.store.clear_failed(pending.to_release)
        self.pending_path.unlink()

    def _serve(self, release_id: str, release: Release, forced: bool, step: StepRunner, report: Report) -> None:
        with step(Step.START):
            self.service.start()
        with step(Step.READY):
            self.prober.wait_ready(release, self.dead_reason, report)
        with step(Step.PROVE):
            self._right_process(release_id)
            self.prober.prove(release, forced_kill=forced, report=report)
            if reason := self.dead_reason():
                raise GpuboxError(f"release {release_id} answered, then died: {reason}")

    def _right_process(self, release_id: str) -> None:
        running = self.service.running_release()
        if running != release_id:
            raise GpuboxError(f"the unit runs release {running}, not {release_id}", hint="systemctl cat sglang.service")

    def dead_reason(self) -> str | None:
        """Why the unit is dead, or None while it lives. A restart counts: it hides a crash."""
        state = self.service.state()
        if state.stopped:
            return f"the unit is {state.active} ({state.result})"
        if state.restarts > 0 or state.sub == "auto-restart":
            return f"the server ended by itself ({state.result}), automatic restarts so far: {state.restarts}"
        return None

    def _put_back(self, pending: Pending, error: GpuboxError, step: Step, seconds: float, report: Report) -> None:
        """Record the failure, then bring back what served before, and record that too."""
        was_tried = step in (Step.START, Step.READY, Step.PROVE)
        log = self.service.log_tail(LOG_LINES) if was_tried else []
        error.detail = "\n".join(filter(None, [error.detail, *log]))
        report(f"failed at step {step}: {error.message}")
        if was_tried:
            self.store.mark_failed(pending.to_release, f"{step}: {error.message}")
        self._record(
            pending, pending.to_release, Verdict.FAILED, seconds=seconds, step=step, reason=error.message, log=log
        )
        self._restore(pending, report)
        self.pending_path.unlink(missing_ok=True)

    def _restore(self, pending: Pending, report: Report) -> None:
        old = pending.from_release
        if old == pending.to_release:
            report("it is the release that served before: there is nothing else to put back")
            return
        self._stop_quietly(pending, report)
        self.store.set_current(old)
        if old is None:
            report("there was no release before: nothing serves now")
            return
        report(f"putting back {old}")
        started = time.monotonic()
        try:
            self._serve(old, self.store.read(old), True, _silent_step, report)
        except GpuboxError as error:
            report(f"the old release did not prove either: {error.message}")
            self._record(pending, old, Verdict.UNPROVED, reason=error.message, seconds=time.monotonic() - started)
        else:
            report(f"{old} serves again")
            self._record(pending, old, Verdict.RESTORED, seconds=time.monotonic() - started)

    def _stop_quietly(self, pending: Pending, report: Report) -> None:
        try:
            self.service.stop(self.store.read(pending.to_release).port, report)
        except GpuboxError as error:
            report(error.message)

    def _recover_locked(self, report: Report, *, restart: bool) -> bool:
        pending = self.pending()
        if pending is None:
            return False
        if any(entry.run == pending.run and entry.verdict is Verdict.PROVED for entry in self.history):
            self._settle(pending)
            return True
        report(f"activation {pending.run} of {pending.to_release} was interrupted: putting back {pending.from_release}")
        reason = "the activation ended half-way (killed, or the box went down)"
        if not any(entry.run == pending.run for entry in self.history):
            self._record(pending, pending.to_release, Verdict.INTERRUPTED, reason=reason)
        if restart:
            self._restore(pending, report)
        else:
            self.store.set_current(pending.from_release)
        self.pending_path.unlink()
        return True

    def _refuse_failed(self, request: Request) -> None:
        reason = self.store.failed_reason(request.release)
        if reason and not request.force:
            raise RefusedError(
                f"release {request.release} failed when it was last activated: {reason}",
                hint="change the stack or the server profile, or try it again with --force (deploy: --data force=true)",
            )

    def _record(
        self,
        pending: Pending,
        release: str,
        verdict: Verdict,
        *,
        step: Step | None = None,
        reason: str | None = None,
        seconds: float | None = None,
        log: list[str] | None = None,
    ) -> None:
        self.history.append(
            Entry(
                time=now(),
                run=pending.run,
                who=pending.who,
                action=pending.action,
                from_release=pending.from_release,
                to_release=release,
                verdict=verdict,
                step=step,
                reason=reason,
                seconds=None if seconds is None else round(seconds, 1),
                log=log or [],
            )
        )


class _Steps:
    """Runs a block as one step: drill point, progress for watchers, time taken."""

    def __init__(self, box: Box, request: Request, report: Report) -> None:
        self._box = box
        self._request = request
        self._report = report
        self.now = Step.LOCK

    @contextmanager
    def __call__(self, step: Step) -> Iterator[None]:
        self.now = step
        self._box._pause(f"{step}:before")
        if step is not Step.LOCK:
            self._publish(step)
        self._report(f"{step}: {STEPS[step]}")
        started = time.monotonic()
        yield
        if (seconds := time.monotonic() - started) >= 1:
            self._report(f"{step}: done in {seconds:.1f} s")
        self._box._pause(f"{step}:after")

    def _publish(self, step: Step) -> None:
        progress = Progress(run=self._request.run, to_release=self._request.release, step=step, since=now())
        write_atomic(self._box.layout.state / "progress.json", progress.model_dump_json().encode())


@contextmanager
def _silent_step(step: Step) -> Iterator[None]:
    yield


def _read(model: type[Document], path: Path) -> Document | None:
    try:
        return model.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None

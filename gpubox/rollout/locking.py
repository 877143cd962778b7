"""One change at a time on a box.

Two things make up the lock: flock(2) on state/lock, held by the process that changes something right now, and the
record in it: who, what for, since when, and an *anchor*, the process whose life is the life of the whole job. For a
deploy the anchor is the sshd process of the controller's connection, so the lock outlives the single commands of the
deploy and ends with the connection, however the controller dies. Nothing has to be released or to expire.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from gpubox.errors import LockedError
from gpubox.rollout.history import now

SESSION_DAEMONS = frozenset({"sshd", "sshd-session"})  # OpenSSH 9.8 moved sessions into sshd-session
SESSION_VARIABLE = "GPUBOX_SESSION_PID"


class Anchor(BaseModel):
    """A process, told from a later one of the same number by its start (seconds since the epoch, from /proc)."""

    model_config = ConfigDict(frozen=True)

    pid: int
    started: float

    @classmethod
    def of(cls, process: psutil.Process) -> Anchor:
        return cls(pid=process.pid, started=process.create_time())

    def alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.started) < 0.05 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


class Holder(BaseModel):
    model_config = ConfigDict(frozen=True)

    who: str
    what: str
    since: str
    anchor: Anchor

    def __str__(self) -> str:
        return f"{self.who} ({self.what}) since {self.since}"


def session_anchor() -> Anchor:
    """The connection this command came through (sshd's, or the connector's session in a container), else this process.

    A connector that enters a container through its node has no sshd inside; it names the process that stands for its
    connection in GPUBOX_SESSION_PID.
    """
    if session := os.environ.get(SESSION_VARIABLE):
        with suppress(ValueError, psutil.NoSuchProcess):
            return Anchor.of(psutil.Process(int(session)))
    me = psutil.Process()
    for ancestor in me.parents():
        if ancestor.name() in SESSION_DAEMONS:
            return Anchor.of(ancestor)
    return Anchor.of(me)


class BoxLock:
    def __init__(self, path: Path) -> None:
        self.path = path

    def holder(self) -> Holder | None:
        """Who holds the lock now; None when nobody alive does."""
        record = self._read()
        return record if record and record.anchor.alive() else None

    def busy(self) -> bool:
        """Whether a command changes something at this moment."""
        if not self.path.exists():
            return False
        descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._flock(descriptor)
        except LockedError:
            return True
        finally:
            os.close(descriptor)
        return False

    @contextmanager
    def held(self, who: str, what: str, *, anchor: Anchor, keep: bool = False) -> Iterator[str | None]:
        """Hold the lock for this block. `keep`: leave the record, so that the anchor's connection goes on holding it.

        Yields a note when the lock of a dead holder was taken over, else None. Raises LockedError.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._flock(descriptor)
            before = self._read()
            if before and before.anchor.alive() and before.anchor != anchor:
                raise _locked(before)
            note = f"took over the lock of {before}, which is gone" if before and before.anchor != anchor else None
            inherited = before if before and before.anchor == anchor else None
            since = inherited.since if inherited else now()
            self._write(descriptor, Holder(who=who, what=what, since=since, anchor=anchor).model_dump_json())
            try:
                yield note
            finally:
                if not (keep or inherited):
                    self._write(descriptor, "")
        finally:
            os.close(descriptor)

    @contextmanager
    def recovering(self, timeout_s: float) -> Iterator[None]:
        """Exclusive against running commands, whoever's job it is: a recovery ends what a dead command left open.

        Waits up to `timeout_s` for a running command. Raises LockedError.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                try:
                    self._flock(descriptor)
                    break
                except LockedError:
                    if time.monotonic() >= deadline:
                        raise
                    time.sleep(0.2)
            yield
        finally:
            os.close(descriptor)

    def _flock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _locked(self._read()) from None

    def _read(self) -> Holder | None:
        try:
            return Holder.model_validate_json(self.path.read_text())
        except (FileNotFoundError, ValidationError):
            return None

    @staticmethod
    def _write(descriptor: int, text: str) -> None:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)


def _locked(holder: Holder | None) -> LockedError:
    return LockedError(
        f"this box is being changed by {holder or 'another gpubox command'}",
        hint="wait for it (gpubox status shows it), or end that process or its ssh connection",
    )

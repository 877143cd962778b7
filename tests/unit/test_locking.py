"""Who holds a box's lock: a living process of the deploy's connection, and nobody once that has ended."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpubox.errors import LockedError
from gpubox.rollout.locking import SESSION_VARIABLE, Anchor, BoxLock, session_anchor


@pytest.fixture
def connection() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for a connection; ends with the test."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def anchor_of(process: subprocess.Popen[bytes]) -> Anchor:
    return Anchor.of(psutil.Process(process.pid))


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def test_a_session_in_a_container_is_named_by_its_connector(
    monkeypatch: pytest.MonkeyPatch, connection: subprocess.Popen[bytes]
) -> None:
    monkeypatch.setenv(SESSION_VARIABLE, str(connection.pid))
    assert session_anchor().pid == connection.pid


@pytest.mark.parametrize("named", ["", "nonsense", "0x1", "-1", "ended"])
def test_without_one_this_command_or_its_sshd_is_the_anchor(
    monkeypatch: pytest.MonkeyPatch, connection: subprocess.Popen[bytes], named: str
) -> None:
    end(connection)
    monkeypatch.delenv(SESSION_VARIABLE, raising=False)
    expected = session_anchor()
    assert expected.pid in {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    monkeypatch.setenv(SESSION_VARIABLE, str(connection.pid) if named == "ended" else named)
    assert session_anchor() == expected


def test_a_kept_record_holds_until_the_connection_ends(tmp_path: Path, connection: subprocess.Popen[bytes]) -> None:
    lock, mine = BoxLock(tmp_path / "lock"), Anchor.of(psutil.Process())
    with lock.held("first", "building", anchor=anchor_of(connection), keep=True) as note:
        assert note is None
    with (
        pytest.raises(LockedError, match=r"first \(building\) since"),
        lock.held("second", "building", anchor=mine),
    ):
        pass
    with lock.held("first", "activating", anchor=anchor_of(connection), keep=True):  # the same connection goes on
        pass
    end(connection)
    assert lock.holder() is None
    with lock.held("second", "building", anchor=mine) as note:
        assert note is not None
        assert "took over the lock of first" in note
    assert lock.holder() is None


def test_only_one_command_at_a_time(tmp_path: Path) -> None:
    lock, mine = BoxLock(tmp_path / "lock"), Anchor.of(psutil.Process())
    with lock.held("first", "building", anchor=mine):
        assert lock.busy()
        with pytest.raises(LockedError), lock.held("second", "building", anchor=mine):
            pass
    assert not lock.busy()

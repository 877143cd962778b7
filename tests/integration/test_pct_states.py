"""Containers that do not run, or not all the time, over @pct (pct_node.py)."""

from __future__ import annotations

import io
import os
import signal
import threading

import pytest
from pyinfra.api import QuoteString
from pyinfra.api.exceptions import ConnectError
from pyinfra.api.host import Host
from pyinfra.api.state import StateStage
from pyinfra.connectors.util import CommandOutput

from connectors.pct import empty_machine
from tests.integration.pct_boxes import reach, shell, vmids
from tests.integration.pct_node import PctNode


@pytest.mark.parametrize("state", ["STOPPED", "FROZEN", None])
def test_until_it_runs_a_container_is_planned_as_an_empty_machine(node: PctNode, state: str | None) -> None:
    number = next(vmids)
    if state:
        node.set_state(number, state)
    (box,) = reach(node, number, stage=StateStage.Prepare)
    before = len(node.attached())
    assert shell(box, "cat /etc/os-release; false") == (True, CommandOutput([]))
    assert shell(box, "uname -s")[1].stdout_lines == ["Linux"]
    assert shell(box, "command -v", QuoteString("systemctl"), "|| true")[1].stdout_lines == ["/usr/bin/systemctl"]
    node.set_state(number, "RUNNING")
    assert shell(box, "echo planned once, from one picture")[1].stdout_lines == []
    assert len(node.attached()) == before


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("which python3", ["/usr/bin/python3"]),
        ("command -v 'g++' || true", ["/usr/bin/g++"]),
        ("if command -v apt >/dev/null 2>&1; then ( apt list ); fi", []),
        ("cat uname -s", []),
        ("", []),
    ],
)
def test_answers_of_an_empty_machine(command: str, answer: list[str]) -> None:
    assert empty_machine(command) == answer


@pytest.mark.parametrize(("state", "says"), [("STOPPED", "is STOPPED"), (None, "does not exist")])
def test_nothing_pretends_to_have_run(node: PctNode, state: str | None, says: str) -> None:
    number = next(vmids)
    if state:
        node.set_state(number, state)
    (box,) = reach(node, number)
    done, output = shell(box, "true")
    assert not done
    assert f"container {number} on node pve1 {says}" in output.stderr
    assert f"pct start {number}" in output.stderr
    for transfer in (box.put_file, box.get_file):
        with pytest.raises(OSError, match=f"container {number} on node pve1 {says}"):
            transfer(io.BytesIO(b"x"), "/nowhere") if transfer == box.put_file else transfer("/x", io.BytesIO())


def test_a_container_made_in_this_run_is_used_at_once(node: PctNode) -> None:
    number = next(vmids)
    (box,) = reach(node, number)
    node.set_state(number, "RUNNING")
    assert shell(box, "echo here")[1].stdout_lines == ["here"]


def test_a_container_that_stops_half_way_and_comes_back(node: PctNode, vmid: int, box: Host) -> None:
    assert shell(box, "true")[0]
    node.set_state(vmid, "STOPPED")
    done, output = shell(box, "true")
    assert not done
    assert "is STOPPED" in output.stderr
    node.set_state(vmid, "RUNNING")
    assert shell(box, "echo back")[1].stdout_lines == ["back"]


def test_a_command_that_the_stop_ends_says_so(node: PctNode, vmid: int, box: Host) -> None:
    stop = f"printf STOPPED > {node.directory}/state/{vmid}"
    session = node.attached()[-1]["pid"]
    done, output = shell(box, f"{stop}; echo begun; (sleep 0.3; kill -9 {session}) >/dev/null 2>&1 & kill -9 $$")
    assert not done
    assert output.stdout_lines == ["begun"]
    assert "is STOPPED" in output.stderr


def test_an_attach_that_fails_before_the_news_of_the_stop(node: PctNode, vmid: int, box: Host) -> None:
    session = node.attached()[-1]["pid"]
    (node.directory / "state" / str(vmid)).write_text("STOPPED")
    late = threading.Timer(0.3, os.kill, (session, signal.SIGKILL))
    late.start()
    done, output = shell(box, "true")
    late.join()
    assert not done
    assert "is STOPPED" in output.stderr


def test_a_missing_program_is_not_a_missing_container(box: Host) -> None:
    session = shell(box, "echo $GPUBOX_SESSION_PID")[1].stdout
    done, output = shell(box, "true", _shell_executable="no-such-shell")
    assert not done
    assert 'Failed to exec "no-such-shell"' in output.stderr
    assert "container" not in output.stderr
    assert shell(box, "echo $GPUBOX_SESSION_PID")[1].stdout == session


def test_connecting_again_waits_for_a_container_that_ran(node: PctNode, vmid: int, box: Host) -> None:
    """server.reboot of pyinfra connects until that works."""
    box.disconnect()
    node.set_state(vmid, "STOPPED")
    with pytest.raises(ConnectError, match="is STOPPED"):
        box.connect(raise_exceptions=True)
    node.set_state(vmid, "RUNNING")
    box.connect(raise_exceptions=True)
    assert shell(box, "true")[0]

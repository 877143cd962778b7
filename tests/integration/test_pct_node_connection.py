"""The one ssh connection of @pct to a node (pct_node.py): shared, lost, made anew; and pyinfra's own command line."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pyinfra.api import Config, Inventory, State
from pyinfra.api.exceptions import ConnectError
from pyinfra.api.host import Host

from tests.integration.pct_boxes import cli, reach, shell, vmids
from tests.integration.pct_node import PctNode


def test_one_connection_for_all_containers_of_a_node(node: PctNode) -> None:
    numbers = [next(vmids) for _ in range(4)]
    for number in numbers:
        node.set_state(number, "RUNNING")
    before = node.connections()
    for box in reach(node, *numbers):
        assert shell(box, "true")[0]
    assert node.connections() == before + 1


def test_more_containers_than_sessions_in_one_connection(node: PctNode) -> None:
    numbers = [next(vmids) for _ in range(5)]
    for number in numbers:
        node.set_state(number, "RUNNING")
    node.limit_sessions(3)
    try:
        before = node.connections()
        for box in reach(node, *numbers):
            assert shell(box, "true")[0]
        assert 2 <= node.connections() - before <= 3
    finally:
        node.limit_sessions(1000)


def test_a_node_that_takes_no_session_at_all(node: PctNode, vmid: int) -> None:
    node.limit_sessions(0)
    try:
        with pytest.raises(ConnectError, match="node pve1: sshd opens no session"):
            reach(node, vmid)
    finally:
        node.limit_sessions(1000)


def test_a_lost_connection_is_made_anew(node: PctNode, box: Host) -> None:
    assert shell(box, "true")[0]
    node.cut()
    time.sleep(0.3)
    assert shell(box, "echo again")[1].stdout_lines == ["again"]


def test_a_connection_lost_under_a_command_is_told(node: PctNode, box: Host, tmp_path: Path) -> None:
    # The command outlives the connection it came through, as with sshd: it must not be taken for done.
    cut = f"kill -USR1 {node._process.pid}; sleep 2"
    done, output = shell(box, "echo begun;", cut)
    assert not done
    assert "connection to node pve1 was lost" in output.stderr


def test_unreachable_node_is_a_connect_error() -> None:
    data = {"ssh_hostname": "127.0.0.1", "ssh_port": 1}
    state = State(Inventory(([("pve1", data), "@pct/pve1/101"], {})), Config())
    with pytest.raises(ConnectError, match="node pve1: Could not connect"):
        state.inventory.get_host("@pct/pve1/101").connect(raise_exceptions=True)


def test_a_machine_without_lxc_is_not_taken_for_an_empty_container(node: PctNode, vmid: int) -> None:
    info = node.directory / "bin/lxc-info"
    text = info.read_text()
    info.write_text("#!/bin/sh\necho 'lxc-info: Insufficent privileges' >&2; exit 1\n")
    try:
        with pytest.raises(ConnectError, match=r"pve1: .*Proxmox VE, reached as root.*Insufficent privileges"):
            reach(node, vmid)
    finally:
        info.write_text(text)


def test_without_an_entry_for_the_node_the_box_says_how_to_reach_it(node: PctNode, vmid: int) -> None:
    name = f"@pct/127.0.0.1/{vmid}"
    state = State(Inventory(([(name, node.ssh_data)], {})), Config())
    host = state.inventory.get_host(name)
    host.connect(raise_exceptions=True)
    assert shell(host, "true")[0]


def test_a_node_that_is_not_reached_by_ssh_is_refused() -> None:
    state = State(Inventory((["@fake/pve1", "@pct/@fake/101"], {})), Config())
    state.inventory.hosts["@fake"] = state.inventory.get_host("@fake/pve1")
    with pytest.raises(ConnectError, match="not as an ssh host"):
        state.inventory.get_host("@pct/@fake/101").connect(raise_exceptions=True)


def test_timeout_ends_the_wait(node: PctNode, vmid: int) -> None:
    # In a process of its own, as pyinfra's timeouts need gevent's patches.
    started = time.monotonic()
    done = cli(node, [vmid], 'server.shell(commands=["sleep 30"], _timeout=1)')
    assert done.returncode == 1
    assert "timed out after 1s" in done.stderr
    assert time.monotonic() - started < 15


def test_a_deploy_over_several_containers_runs_side_by_side(node: PctNode, tmp_path: Path) -> None:
    numbers = [next(vmids) for _ in range(3)]
    for number in numbers:
        node.set_state(number, "RUNNING")
    meet = tmp_path / "here"  # each waits for the others: one that blocked the rest would time out
    meet.mkdir()
    wait = f"touch {meet}/$$; for i in $(seq 100); do [ $(ls {meet} | wc -l) = 3 ] && exit 0; sleep 0.1; done; exit 1"
    before = node.connections()
    done = cli(
        node,
        numbers,
        f"server.shell(commands=[{wait!r}])",
        f"files.put(src=io.StringIO('text'), dest='{tmp_path}/put-' + host.name.rsplit('/')[-1], mode='600')",
    )
    assert done.returncode == 0, done.stderr
    assert node.connections() == before + 2, "one for the node as a host, one for its containers"
    for number in numbers:
        target = tmp_path / f"put-{number}"
        assert (target.read_text(), target.stat().st_mode & 0o777) == ("text", 0o600)

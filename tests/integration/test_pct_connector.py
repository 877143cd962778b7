"""The connector @pct over a real ssh connection to a node whose LXC programs are stubs (pct_node.py)."""

from __future__ import annotations

import io
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyinfra.api import Config, HiddenValue, Inventory, QuoteString, State, StringCommand
from pyinfra.api.exceptions import ConnectError, InventoryError
from pyinfra.api.host import Host
from pyinfra.api.state import StateStage
from pyinfra.connectors.util import CommandOutput

from connectors.container import variables_of
from connectors.pct import CHUNK, PctConnector, empty_machine
from tests.integration.pct_node import PctNode

ROOT = Path(__file__).resolve().parents[2]
vmids = itertools.count(101)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PctNode]:
    node = PctNode(tmp_path_factory.mktemp("node"))
    yield node
    node.stop()


@pytest.fixture
def vmid(node: PctNode) -> int:
    """A running container that no other test touches."""
    number = next(vmids)
    node.set_state(number, "RUNNING")
    return number


def reach(node: PctNode, *vmids: int, stage: StateStage = StateStage.Execute) -> list[Host]:
    """Connected hosts of one run, which has come to `stage`."""
    names = [f"@pct/pve1/{vmid}" for vmid in vmids]
    state = State(Inventory(([("pve1", node.ssh_data), *names], {})), Config())
    hosts = [state.inventory.get_host(name) for name in names]
    for host in hosts:
        host.connect(raise_exceptions=True)
    state.set_stage(stage)
    return hosts


@pytest.fixture
def box(node: PctNode, vmid: int) -> Host:
    return reach(node, vmid)[0]


def shell(host: Host, *bits: object, **arguments: object) -> tuple[bool, CommandOutput]:
    return host.run_shell_command(StringCommand(*bits), **arguments)


# Names


def test_name_tells_node_and_container() -> None:
    ((name, data, groups),) = PctConnector.make_names_data("pve1.example.org/101")
    assert (name, groups) == ("@pct/pve1.example.org/101", ["@pct"])
    assert data == {"ssh_hostname": "pve1.example.org", "pct_node": "pve1.example.org", "pct_vmid": 101}


@pytest.mark.parametrize("name", ["", "pve1", "pve1/", "/101", "pve1/99", "pve1/0101", "pve1/web", "a/b/101", None])
def test_a_wrong_name_is_refused(name: str) -> None:
    with pytest.raises(InventoryError, match=r"@pct/<node>/<vmid>"):
        list(PctConnector.make_names_data(name))


# Commands


def test_what_the_node_is_asked_to_run(node: PctNode, vmid: int, box: Host) -> None:
    before = len(node.attached())
    assert shell(box, "echo", QuoteString("it's"))[0]
    (call,) = node.attached()[before:]
    argv = call["argv"]
    settings_end = argv.index("--")
    assert argv[:3] == ["-n", str(vmid), "--clear-env"]
    assert argv[settings_end:] == ["--", "sh", "-c", "echo 'it'\"'\"'s'"]
    variables = dict(word.removeprefix("--set-var=").split("=", 1) for word in argv[3:settings_end])
    assert variables["HOME"] == "/root"
    assert variables["LANG"] == "C.UTF-8"
    assert variables["PATH"].startswith("/usr/local/sbin:/usr/local/bin:/usr/sbin")


def test_state_is_asked_once_per_run(node: PctNode, vmid: int, box: Host) -> None:
    for _ in range(3):
        assert shell(box, "true")[0]
    assert (node.directory / "asked").read_text().split("\n").count(f"-n {vmid} -sH") == 1


def test_nothing_of_the_nodes_environment_comes_along(box: Host) -> None:
    assert shell(box, 'echo "<$OF_THE_NODE>"')[1].stdout_lines == ["<>"]


def test_exit_code_and_both_outputs(box: Host) -> None:
    done, output = shell(box, "echo out; echo err >&2; exit 7")
    assert (done, output.stdout_lines, output.stderr_lines) == (False, ["out"], ["err"])
    assert shell(box, "exit 7", _success_exit_codes=[7])[0]
    assert not shell(box, "kill -9 $$")[0]


def test_stdin_environment_and_directory(box: Host) -> None:
    done, output = shell(box, "cat; pwd; echo $A", _stdin=["one", "two"], _env={"A": "b c"}, _chdir="/usr")
    assert (done, output.stdout_lines) == (True, ["one", "two", "/usr", "b c"])


def test_su_pipes_are_made_inside_the_container(node: PctNode, box: Host) -> None:
    before = len(node.attached())
    shell(box, "true", _su_user="nobody", _su_shell="sh")
    argv = node.attached()[before]["argv"]
    assert argv[argv.index("--") + 1 :] == ["sh", "-c", "su -s $(command -v sh) nobody -c 'sh -c true'"]


def test_output_larger_than_any_buffer(box: Host) -> None:
    done, output = shell(box, "seq 200000")
    assert done
    assert output.stdout_lines == [str(n) for n in range(1, 200001)]


def test_output_that_is_not_utf8(box: Host) -> None:
    assert shell(box, r"printf 'a\377b\nnext\n'")[1].stdout_lines == [r"a\xffb", "next"]


def test_timeout_ends_the_wait(node: PctNode, vmid: int) -> None:
    # In a process of its own, as pyinfra's timeouts need gevent's patches.
    started = time.monotonic()
    done = cli(node, [vmid], 'server.shell(commands=["sleep 30"], _timeout=1)')
    assert done.returncode == 1
    assert "timed out after 1s" in done.stderr
    assert time.monotonic() - started < 15


anything = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=200)
any_bytes = st.binary(max_size=200).map(lambda data: os.fsdecode(data.replace(b"\0", b"")))
slow = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@slow
@given(st.one_of(anything, any_bytes))
@example("$(touch x) `id` \\ \n\r\t '\"'\"' -- ! {} * ~ #")
@example("")
@example(os.fsdecode(bytes(range(1, 256))))
def test_any_argument_arrives_unchanged(box: Host, tmp_path: Path, text: str) -> None:
    target = tmp_path / "it's a $target"
    done, output = shell(box, "printf %s", QuoteString(text), ">", QuoteString(str(target)))
    assert done, output.output
    assert target.read_bytes() == text.encode("utf-8", "surrogateescape")


@pytest.mark.parametrize(("text", "why"), [("a\0b", "NUL"), ("\ud800", "neither UTF-8 nor a byte")])
def test_what_no_argument_can_hold_is_refused(box: Host, text: str, why: str) -> None:
    with pytest.raises(OSError, match=why):
        shell(box, "echo", QuoteString(text))


def test_secrets_arrive_and_are_not_shown(
    box: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shown: list[str] = []
    monkeypatch.setattr("connectors.pct.echo", lambda text, err: shown.append(text))
    caplog.set_level("DEBUG")
    secret = QuoteString(HiddenValue("s3cr3t'x"))
    target = tmp_path / "target"
    done, output = shell(box, "printf %s", secret, ">", str(target), "; false", print_input=True)
    assert not done
    assert target.read_text() == "s3cr3t'x"
    assert "MASKED" in shown[0]
    assert "MASKED" in caplog.text
    assert "s3cr3t" not in shown[0] + caplog.text + output.output


# Containers that do not run


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


# The session inside the container


def test_session_lives_as_long_as_the_connection(node: PctNode, box: Host) -> None:
    pids = {int(shell(box, "echo $GPUBOX_SESSION_PID")[1].stdout) for _ in range(2)}
    assert len(pids) == 1
    session = psutil.Process(pids.pop())
    assert session.name() == "cat"
    node.cut()
    gone, _ = psutil.wait_procs([session], timeout=10)
    assert gone


def test_variables_of_etc_environment() -> None:
    lines = ["A=1", 'PATH="/usr/bin:/bin"', "export B='two words'", "# C=no", "", "D", "E=", " F = x", "http_proxy=u=v"]
    expected = {"A": "1", "PATH": "/usr/bin:/bin", "B": "two words", "E": "", "http_proxy": "u=v"}
    assert variables_of(lines) == expected


# The node


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


# Files


def leftovers(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith(".pyinfra-")]


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, 3 * CHUNK + 17])
def test_upload_and_download(box: Host, tmp_path: Path, size: int) -> None:
    source, target = tmp_path / "source", tmp_path / "a 'new' $target"
    source.write_bytes(os.urandom(size))
    assert box.put_file(str(source), str(target))
    assert target.read_bytes() == source.read_bytes()
    back = io.BytesIO()
    assert box.get_file(str(target), back)
    assert back.getvalue() == source.read_bytes()
    assert leftovers(tmp_path) == []


def test_upload_of_open_files(box: Host, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes("ü\r\n".encode())
    with source.open() as text, source.open("rb") as data:
        for file in (text, data, io.StringIO("ü\r\n", newline=""), io.BytesIO("ü\r\n".encode())):
            target.unlink(missing_ok=True)
            assert box.put_file(file, str(target))
            assert target.read_bytes() == "ü\r\n".encode()


def test_upload_reads_in_chunks(box: Host, tmp_path: Path) -> None:
    class Counted(io.BytesIO):
        largest = 0

        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(size)
            Counted.largest = max(Counted.largest, len(data))
            return data

    assert box.put_file(Counted(bytes(5 * CHUNK)), str(tmp_path / "target"))
    assert 0 < Counted.largest <= CHUNK


def test_upload_keeps_the_mode_of_what_is_there(box: Host, tmp_path: Path) -> None:
    kept, new = tmp_path / "kept", tmp_path / "new"
    kept.write_text("old, and longer")
    kept.chmod(0o4710)
    for target in (kept, new):
        assert box.put_file(io.StringIO("text"), str(target))
        assert target.read_text() == "text"
    umask = os.umask(0)
    os.umask(umask)
    assert kept.stat().st_mode & 0o7777 == 0o4710
    assert new.stat().st_mode & 0o7777 == 0o666 & ~umask


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_upload_keeps_the_owner_of_what_is_there(box: Host, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.touch()
    os.chown(target, 1234, 4321)
    assert box.put_file(io.StringIO("text"), str(target))
    assert (target.stat().st_uid, target.stat().st_gid) == (1234, 4321)


def test_upload_follows_a_link(box: Host, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("elsewhere")
    assert box.put_file(io.StringIO("text"), str(link))
    assert link.is_symlink()
    assert (tmp_path / "elsewhere").read_text() == "text"


def test_upload_into_a_device(box: Host) -> None:
    assert box.put_file(io.StringIO("text"), "/dev/null")
    assert not Path("/dev/null").is_file()


def test_failed_uploads_say_why(box: Host, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"upload of .* is a directory"):
        box.put_file(io.StringIO("text"), str(tmp_path))
    with pytest.raises(OSError, match="No such file or directory"):
        box.put_file(io.BytesIO(bytes(20 * CHUNK)), str(tmp_path / "missing/target"))


def test_an_upload_that_changes_on_the_way_is_refused(box: Host, tmp_path: Path) -> None:
    class Growing(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return b"more" if self.tell() else super().read(size) + b"more"

    class Shrinking(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return b""

    target = tmp_path / "target"
    target.write_text("old")
    with pytest.raises(OSError, match="0 of 4 bytes arrived"):
        box.put_file(Shrinking(b"text"), str(target))
    assert target.read_text() == "old"
    assert leftovers(tmp_path) == []


def test_a_broken_upload_leaves_the_old_file(node: PctNode, box: Host, tmp_path: Path) -> None:
    class Cutting(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if self.tell() == 8 * CHUNK:
                node.cut()
                time.sleep(0.3)
            return super().read(size)

    target = tmp_path / "target"
    target.write_text("old")
    with pytest.raises(OSError, match="was lost"):
        box.put_file(Cutting(bytes(64 * CHUNK)), str(target))
    deadline = time.monotonic() + 10
    while leftovers(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert leftovers(tmp_path) == []
    assert target.read_text() == "old"
    assert box.put_file(io.StringIO("new"), str(target))
    assert target.read_text() == "new"


def test_an_upload_that_a_stop_ends_says_so(node: PctNode, vmid: int, box: Host, tmp_path: Path) -> None:
    class Stopping(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if self.tell() == 8 * CHUNK:
                node.set_state(vmid, "STOPPED")
            return super().read(size)

    with pytest.raises(OSError, match=rf"upload of .*container {vmid} on node pve1 is STOPPED"):
        box.put_file(Stopping(bytes(64 * CHUNK)), str(tmp_path / "target"))
    assert not (tmp_path / "target").exists()


def test_a_local_file_that_cannot_be_read(box: Host, tmp_path: Path) -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise OSError("bad sector")

    target = tmp_path / "target"
    with pytest.raises(OSError, match="bad sector"):
        box.put_file(Failing(b"text"), str(target))
    assert not target.exists()


def test_failed_downloads_say_why(box: Host, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"download of .*No such file or directory"):
        box.get_file(str(tmp_path / "missing"), io.BytesIO())


def test_rsync_is_refused(box: Host) -> None:
    with pytest.raises(NotImplementedError, match="through its node"):
        box.check_can_rsync()
    with pytest.raises(NotImplementedError):
        box.rsync("a", "b", [])


# pyinfra's own command line, with gevent


def cli(node: PctNode, vmids: list[int], *operations: str) -> subprocess.CompletedProcess[str]:
    directory = node.directory / f"cli-{vmids[0]}"
    directory.mkdir()
    boxes = [f"@pct/pve1/{vmid}" for vmid in vmids]
    (directory / "inventory.py").write_text(f"nodes = [('pve1', {node.ssh_data!r})]\nboxes = {boxes!r}\n")
    body = textwrap.indent("\n".join(operations), "    ")
    imports = "import io\nfrom pyinfra import host\nfrom pyinfra.operations import files, server\n"
    (directory / "deploy.py").write_text(f"{imports}if 'boxes' in host.groups:\n{body}\n")
    command = [str(Path(sys.executable).with_name("pyinfra")), "inventory.py", "deploy.py", "-y", "-v"]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        command, cwd=directory, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )


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

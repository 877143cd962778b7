"""Commands over @pct, through a real ssh connection to a node whose LXC programs are stubs (pct_node.py)."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyinfra.api import HiddenValue, QuoteString
from pyinfra.api.exceptions import InventoryError
from pyinfra.api.host import Host

from connectors.container import variables_of
from connectors.pct import PctConnector
from tests.integration.pct_boxes import shell
from tests.integration.pct_node import PctNode


def test_name_tells_node_and_container() -> None:
    ((name, data, groups),) = PctConnector.make_names_data("pve1.example.org/101")
    assert (name, groups) == ("@pct/pve1.example.org/101", ["@pct"])
    assert data == {"ssh_hostname": "pve1.example.org", "pct_node": "pve1.example.org", "pct_vmid": 101}


@pytest.mark.parametrize("name", ["", "pve1", "pve1/", "/101", "pve1/99", "pve1/0101", "pve1/web", "a/b/101", None])
def test_a_wrong_name_is_refused(name: str) -> None:
    with pytest.raises(InventoryError, match=r"@pct/<node>/<vmid>"):
        list(PctConnector.make_names_data(name))


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

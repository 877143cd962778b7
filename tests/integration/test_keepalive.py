"""What waits on a node that went silent ends in bounded time and says what to do: real ssh, the real pyinfra."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyinfra.api import Config, Inventory, State

from connectors.keepalive import INTERVAL_S, UNANSWERED, WHAT_TO_DO, _patience
from tests.integration.pct_node import PctNode

ROOT = Path(__file__).resolve().parents[2]
VMID = 101
INTERVAL, COUNT = 1, 2
DEPLOY = """
from pyinfra import host
from pyinfra.facts.server import Command
from pyinfra.operations import server
from connectors.keepalive import watch_connections

watch_connections()
"""
OPERATION = "server.shell(commands=[{command!r}])"
FACT = "host.get_fact(Command, command={command!r})"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PctNode]:
    node = PctNode(tmp_path_factory.mktemp("node"))
    node.set_state(VMID, "RUNNING")
    yield node
    node.stop()


def ssh_config(directory: Path, interval: int, count: int) -> str:
    file = directory / f"ssh_config-{interval}-{count}"
    file.write_text(f"Host *\n  ServerAliveInterval {interval}\n  ServerAliveCountMax {count}\n")
    return str(file)


@contextmanager
def deploying(node: PctNode, directory: Path, host: str, code: str) -> Iterator[subprocess.Popen[str]]:
    """pyinfra, with the patience of an ssh_config, on the node or on a container of it."""
    data = node.ssh_data | {"ssh_config_file": ssh_config(directory, INTERVAL, COUNT)}
    (directory / "inventory.py").write_text(f"hosts = [('pve1', {data!r})] + [n for n in ['{host}'] if n != 'pve1']\n")
    (directory / "deploy.py").write_text(DEPLOY + code + "\n")
    command = [str(Path(sys.executable).with_name("pyinfra")), "inventory.py", "deploy.py", "-y", "--limit", host]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=directory, env={**os.environ, "PYTHONPATH": path}, stdout=pipe, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("code", [OPERATION, FACT])
@pytest.mark.parametrize("host", ["pve1", f"@pct/pve1/{VMID}"])
def test_a_node_that_went_silent_ends_the_deploy(node: PctNode, tmp_path: Path, host: str, code: str) -> None:
    begun = tmp_path / "begun"
    command = f"touch {begun}; sleep 20"
    with deploying(node, tmp_path, host, code.format(command=command)) as process:
        deadline = time.monotonic() + 30
        while not begun.exists():
            assert time.monotonic() < deadline, "the command did not start"
            time.sleep(0.05)
        with node.silent():
            started = time.monotonic()
            said, _ = process.communicate(timeout=60)
            took = time.monotonic() - started
    assert process.returncode == 1, said
    assert "Traceback" not in said, said
    assert "pve1 was lost; what it was doing may still be running there" in said
    assert said.count(WHAT_TO_DO) == 1, said
    assert took < 2 * INTERVAL * (COUNT + 1) + 5, took


def test_a_quiet_command_is_not_taken_for_a_silent_node(node: PctNode, tmp_path: Path) -> None:
    """Four times longer than the patience."""
    command = f"sleep {4 * INTERVAL * (COUNT + 1)}; echo done"
    with deploying(node, tmp_path, "pve1", OPERATION.format(command=command)) as process:
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said


def test_a_command_that_fails_says_nothing_of_the_connection(node: PctNode, tmp_path: Path) -> None:
    with deploying(node, tmp_path, "pve1", OPERATION.format(command="exit 3")) as process:
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "was lost" not in said


def test_the_operators_ssh_config_sets_the_patience(node: PctNode, tmp_path: Path) -> None:
    files = {
        "of-his-own": (ssh_config(tmp_path, 7, 3), (7, 3)),
        "off": (ssh_config(tmp_path, 0, 3), (0, 3)),
        "none": (str(tmp_path / "absent"), (INTERVAL_S, UNANSWERED)),
    }
    hosts = [(name, node.ssh_data | {"ssh_config_file": file}) for name, (file, _) in files.items()]
    state = State(Inventory((hosts, {})), Config())
    for name, (_, expected) in files.items():
        assert _patience(state.inventory.get_host(name).connector) == expected

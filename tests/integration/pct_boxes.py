"""Containers of a test's node as hosts of pyinfra: through its API, and through its command line."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from pyinfra.api import Config, Inventory, State, StringCommand
from pyinfra.api.host import Host
from pyinfra.api.state import StateStage
from pyinfra.connectors.util import CommandOutput

from tests.integration.pct_node import PctNode

ROOT = Path(__file__).resolve().parents[2]
vmids = itertools.count(101)


def reach(node: PctNode, *vmids: int, stage: StateStage = StateStage.Execute) -> list[Host]:
    """Connected hosts of one run, which has come to `stage`."""
    names = [f"@pct/pve1/{vmid}" for vmid in vmids]
    state = State(Inventory(([("pve1", node.ssh_data), *names], {})), Config())
    hosts = [state.inventory.get_host(name) for name in names]
    for host in hosts:
        host.connect(raise_exceptions=True)
    state.set_stage(stage)
    return hosts


def shell(host: Host, *bits: object, **arguments: object) -> tuple[bool, CommandOutput]:
    return host.run_shell_command(StringCommand(*bits), **arguments)


def cli(node: PctNode, vmids: list[int], *operations: str) -> subprocess.CompletedProcess[str]:
    """A deploy of these operations with pyinfra's own command line, which has gevent's patches."""
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

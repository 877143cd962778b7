"""Deploys of one node and its container 101, with values of the test's own over those of inventories/lab.py."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lab import controller
from lab.node import Guest, Node
from lab.settings import REPOSITORY
from lab.shell import Completed
from tests.lab.conftest import TestBoxes

NODE = "testnode1"
VMID = 101
TIMEOUT_S = 300


@dataclass(frozen=True)
class NodeDeploys:
    """`pyinfra --limit NODE`: the roles proxmox_node and container, and nothing of the box.

    `root`: the repository that is deployed. `of_the_box`: values of the box beside its container.
    """

    node: Node
    directory: Path
    root: Path = REPOSITORY
    of_the_box: Mapping[str, Any] = field(default_factory=dict)

    @property
    def box(self) -> str:
        """`--limit` with it, and the box is deployed to as well."""
        return f"@pct/{self.node.name}/{VMID}"

    @property
    def guest(self) -> Guest:
        return self.node.guest(VMID)

    def inventory(self, node: dict[str, Any] | None = None, container: dict[str, Any] | None = None) -> Path:
        """A file with these values over the lab's; without `container` the node shall have none."""
        with patch.dict(os.environ, controller.environment([self.node.name])):
            values = runpy.run_path(str(REPOSITORY / controller.INVENTORY))
        (_, of_node), (_, of_box) = values["proxmox_nodes"][0], values["gpu_boxes"][0]
        groups = runpy.run_path(str(REPOSITORY / "inventories/group_data/proxmox_nodes.py"))
        nodes = [(self.node.name, {**of_node, "driver": groups["driver"], **(node or {})})]
        boxes = []
        if container is not None:
            made = {**of_box["container"], **container}
            boxes = [(self.box, {**of_box, **self.of_the_box, "container": made})]
        file = self.directory / "hosts.py"
        file.write_text(f"proxmox_nodes = {nodes!r}\ngpu_boxes = {boxes!r}\n")
        return file

    @property
    def place(self) -> dict[str, Any]:
        """Where and with which modules pyinfra runs."""
        return {"cwd": self.root, "env": os.environ | {"PYTHONPATH": str(self.root)}}

    def command(self, *arguments: str, **values: dict[str, Any] | None) -> list[str]:
        program, _lab, *rest = controller.command("deploy.py", "-y", "--limit", self.node.name, *arguments)
        return [program, str(self.inventory(**values)), *rest]

    def deploy(self, *arguments: str, **values: dict[str, Any] | None) -> Completed:
        """The caller judges. Both outputs are in `stdout`, as a person sees them."""
        with self.started(*arguments, **values) as process:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        return Completed(process.args, process.returncode, output, "")

    @contextmanager
    def started(self, *arguments: str, **values: dict[str, Any] | None) -> Iterator[subprocess.Popen[str]]:
        """A deploy that the block watches, kills or waits for."""
        with subprocess.Popen(
            self.command(*arguments, **values),
            **self.place,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def converges(self, *arguments: str, **values: dict[str, Any] | None) -> str:
        """Deploy with success; what it said."""
        done = self.deploy(*arguments, **values)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def refused(self, **values: dict[str, Any] | None) -> str:
        """What a deploy says that must not succeed."""
        done = self.deploy(**values)
        assert done.returncode == 1, done.stdout
        assert "Traceback" not in done.stdout, done.stdout
        return done.stdout

    def changes(self, *arguments: str, **values: dict[str, Any] | None) -> list[str]:
        """The operations that changed something in a deploy that succeeds."""
        done = subprocess.run(
            self.command("--json", *arguments, **values),
            **self.place,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        results = json.loads(done.stdout)["results"]
        assert results["failed_hosts"] == []
        assert results["totals"]["hosts"] > 0
        return [entry["name"] for entry in results["operations"] if entry["success"] or entry["error"]]

    def config(self) -> str:
        return self.node.run(f"cat /etc/pve/lxc/{VMID}.conf", check=False).stdout

    def read(self, path: str) -> str:
        return self.node.run(f"cat {path}", check=False).stdout

    def boot_id(self) -> str:
        return self.read("/proc/sys/kernel/random/boot_id")

    def init(self) -> str:
        """The pid of the container's init on the node; empty while it does not run."""
        return self.node.run(f"lxc-info -n {VMID} -pH", check=False).stdout.strip()


@contextmanager
def bare_node(lab: TestBoxes, directory: Path, name: str = NODE, **fields: Any) -> Iterator[NodeDeploys]:
    """A node as Proxmox's installer leaves it, and gone afterwards: other modules want it bare as well.

    `fields`: of NodeDeploys.
    """
    lab.down(name)
    (node,) = lab.up(name)
    assert isinstance(node, Node)
    try:
        yield NodeDeploys(node, directory, **fields)
    finally:
        lab.down(name)


@contextmanager
def another_user(node: Node) -> Iterator[str]:
    """A user of the node who may log in with the lab's key."""
    node.run("useradd -m admin && cp -r /root/.ssh /home/admin/ && chown -R admin: /home/admin/.ssh")
    try:
        yield "admin"
    finally:
        node.run("userdel -r admin", check=False)


@contextmanager
def replaced(node: Node, path: str, script: str) -> Iterator[None]:
    """A program of the node is `script`, which finds the real one at PATH.real."""
    node.run(f"mv {path} {path}.real")
    try:
        node.write(path, script)
        node.run(f"chmod 755 {path}")
        yield
    finally:
        node.run(f"mv -f {path}.real {path}")

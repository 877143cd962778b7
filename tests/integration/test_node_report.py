"""The program node_report.py with the real pyinfra, asking this machine: which is no Proxmox VE node."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "node_report.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    file = tmp_path / "hosts.py"
    file.write_text('proxmox_nodes = ["@local"]\ngpu_boxes = ["@fake/box"]\n')
    return file


def test_a_failed_check_is_status_1_and_says_what_to_do(inventory: Path) -> None:
    done = run(inventory)
    assert done.returncode == 1
    assert done.stdout.startswith("@local: fail\n")
    assert "  fail  Proxmox VE: no pveversion\n          why: " in done.stdout
    assert "@fake/box" not in done.stdout


def test_json_lines(inventory: Path) -> None:
    done = run(inventory, "--json", "--limit", "@local")
    assert done.returncode == 1
    (data,) = map(json.loads, done.stdout.splitlines())
    assert data["host"] == "@local"
    assert {"name": "Proxmox VE", "verdict": "fail"}.items() <= data["checks"][0].items()


def test_a_node_that_cannot_be_reached_is_status_1(tmp_path: Path) -> None:
    file = tmp_path / "hosts.py"
    file.write_text(
        'proxmox_nodes = [("gone", {"ssh_hostname": "127.0.0.1", "ssh_port": 1, "ssh_connect_retries": 0})]\n'
    )
    done = run(file)
    assert done.returncode == 1
    assert "gone: fail" in done.stdout
    assert "did not answer" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.py"], "does not exist"),
        ([], "Missing argument"),
        (["{inventory}", "--limit", "box9"], "proxmox_nodes has: @local"),
        (["{inventory}", "--jsno"], "No such option"),
    ],
)
def test_usage_is_status_2(inventory: Path, arguments: list[str], said: str) -> None:
    done = run(*(word.format(inventory=inventory) for word in arguments))
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize(
    ("content", "said"), [("gpu_boxes = ['@fake/box']\n", "names no node"), ("syntax error", "read")]
)
def test_an_inventory_without_nodes_is_status_2(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "hosts.py"
    file.write_text(content)
    done = run(file)
    assert (done.returncode, said in done.stderr) == (2, True)

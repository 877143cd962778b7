"""The main job on real input: the real engine from the real locks, deployed, rolled back without a network."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from lab.boxes import Box, Lab
from lab.controller import pyinfra
from lab.question import ask, endpoint
from tests.lab.conftest import TestBoxes

NEW, OLD = "cuda130-next", "cuda128"


@pytest.fixture(scope="module")
def served(lab: TestBoxes) -> Iterator[Box]:
    """A box that the real deploy was run on; its wheels are kept for the next box."""
    (box,) = lab.up("test2")
    done = pyinfra(["test2"], "deploy.py", "-y")
    assert done.returncode == 0, done.stdout + done.stderr
    yield box


def status(box: Box) -> dict[str, object]:
    return json.loads(box.run("gpubox status --json").stdout)


def stack_served(box: Box) -> str:
    """The stack that the running process really is of, from the kernel and not from our records."""
    pid = status(box)["main_pid"]
    command = box.run(f"tr '\\0' ' ' < /proc/{pid}/cmdline").stdout
    return command.split("/opt/gpubox/stacks/")[1].split("/")[0].rsplit("-", 1)[0]


def changes(text: str) -> list[str]:
    """The operations that changed something or failed, from `--json`."""
    results = json.loads(text)["results"]
    assert results["failed_hosts"] == []
    assert results["totals"]["hosts"] > 0
    return [operation["name"] for operation in results["operations"] if operation["success"] or operation["error"]]


def test_the_real_engine_answers_from_the_new_stack(served: Box) -> None:
    assert "Paris" in ask(endpoint(served.address))
    assert stack_served(served) == NEW
    assert status(served)["overlay"] == "cpu"


def test_the_second_deploy_changes_and_restarts_nothing(served: Box) -> None:
    before = status(served)
    again = pyinfra(["test2"], "deploy.py", "-y", "--json")
    assert again.returncode == 0, again.stderr
    assert changes(again.stdout) == []
    after = status(served)
    assert after["main_pid"] == before["main_pid"]
    assert after["restarts"] == 0


def test_rollback_without_a_network_and_forward_again(served: Box) -> None:
    served.cut_internet()
    try:
        back = pyinfra(["test2"], "rollback.py", "-y", "--data", f"stack={OLD}")
        assert back.returncode == 0, back.stdout + back.stderr
        assert "Paris" in ask(endpoint(served.address))
        assert stack_served(served) == OLD
        forward = pyinfra(["test2"], "rollback.py", "-y")
        assert forward.returncode == 0, forward.stdout + forward.stderr
        assert "Paris" in ask(endpoint(served.address))
        assert stack_served(served) == NEW
    finally:
        served.restore_network()
    assert served.run("gpubox verify --deep", check=False).returncode == 0
    verdicts = [entry["verdict"] for entry in json.loads(served.run("gpubox history --json").stdout)]
    assert verdicts == ["proved", "proved", "proved"]


def test_two_boxes_from_one_commit_are_equal(lab: TestBoxes, served: Box) -> None:
    """Byte-equal stack.json and release.json of both stacks, on a box that was built from scratch beside the first."""
    Lab.save_cache("test2")
    (other,) = lab.up("test3")
    done = pyinfra(["test3"], "prepare.py", "-y")
    assert done.returncode == 0, done.stdout + done.stderr
    records = "cd /opt/gpubox && sha256sum stacks/*/stack.json releases/*/*"
    first, second = served.run(records).stdout, other.run(records).stdout
    assert first == second
    assert first.count("stack.json") == 2
    assert first.count("release.json") == 2

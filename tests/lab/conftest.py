"""Real boxes for the tests of this directory: brought up when first asked for, destroyed at the end.

GPUBOX_LAB_KEEP=1 keeps them (and starts from what an earlier run kept), for quick repetition by hand.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from lab.boxes import Box, Lab
from lab.settings import REPOSITORY

KEEP = os.environ.get("GPUBOX_LAB_KEEP") == "1"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "lab: needs root and brings up containers on this machine")


# Modules that share hosts: one worker of pytest-xdist runs their tests, in their order. A module that is not named is a
# group of its own, so it must have hosts of its own. The longest group comes first: it would be waited for at the end.
GROUPS = {
    "test_lost_connection": "testnode2, test3",
    "test_rebuild": "testnode2, test3",
    "test_container_role": "testnode1",
    "test_driver_packages": "testnode1",
    "test_node": "testnode1",
    "test_node_roles": "testnode1",
    "test_drills": "test1, test2",
    "test_lab_itself": "test1, test2",
    "test_wheelhouse": "test1, test2",
    "test_toolkit": "test4",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "tests/lab/" in item.path.as_posix()]
    for item in here:
        item.add_marker("lab")
    order = list(GROUPS)
    here.sort(key=lambda item: order.index(item.path.stem) if item.path.stem in GROUPS else len(order))
    others = set(items) - set(here)
    items[:] = [*(item for item in items if item in others), *here]


class ByHosts(LoadScopeScheduling):
    """Of pytest-xdist's own, `loadgroup` groups nothing with pytest 9 (it changes what no longer is the test's id)."""

    def _split_scope(self, nodeid: str) -> str:
        module = PurePosixPath(nodeid.partition("::")[0]).stem
        return GROUPS.get(module, module)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByHosts:
    return ByHosts(config, log)


SWEEP = "from lab.boxes import Lab; Lab.sweep()"


class TestBoxes:
    """Boxes of this test run. `up` may be called for more of test1, test2, test3, test4 at any time."""

    __test__ = False

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._claims: dict[str, socket.socket] = {}

    def up(self, *names: str, wheels: bool = False) -> list[Box]:
        """`wheels`: for a box in which the committed stacks are built."""
        fresh = [name for name in names if name not in self.names]
        if fresh:
            self.down(*fresh)  # what a killed run left would not be a fresh box
        self.names.update(fresh)
        return Lab.up(names, wheels=wheels)

    def down(self, *names: str) -> None:
        """Their names are free at once. A box's files may take a minute to remove: tests do not wait for it."""
        for name in names:
            self._claim(name)
        if not KEEP:
            Lab.discard(names)
            subprocess.Popen(["nice", sys.executable, "-c", SWEEP], cwd=REPOSITORY, stderr=subprocess.DEVNULL)

    def close(self) -> None:
        if self.names and not KEEP:
            Lab.down(sorted(self.names))

    def _claim(self, name: str) -> None:
        """Until this process ends, `name` is of its tests: another worker that takes it would destroy it under them."""
        if name in self._claims:
            return
        claim = self._claims[name] = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0gpubox-lab-tests/{name}")
        except OSError:
            del self._claims[name]
            pytest.fail(f"{name} is in use by another worker or test run: do GROUPS in {__file__} name this module?")


@pytest.fixture(scope="session")
def lab() -> Iterator[TestBoxes]:
    if os.geteuid() != 0:
        pytest.skip("lab tests make containers, which needs root: run make test-lab")
    boxes = TestBoxes()
    try:
        yield boxes
    finally:
        boxes.close()


@pytest.fixture(scope="session")
def box(lab: TestBoxes) -> Box:
    """The box test1, shared by the whole run: leave it as you found it."""
    return lab.up("test1")[0]

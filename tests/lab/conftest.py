"""Real boxes for the tests of this directory: brought up when first asked for, destroyed at the end.

GPUBOX_LAB_KEEP=1 keeps them (and starts from what an earlier run kept), for quick repetition by hand.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from lab.boxes import Box, Lab

KEEP = os.environ.get("GPUBOX_LAB_KEEP") == "1"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "lab: needs root and brings up containers on this machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/lab/" in item.path.as_posix():
            item.add_marker("lab")


class TestBoxes:
    """Boxes of this test run. `up` may be called for more of test1, test2, test3, test4 at any time."""

    __test__ = False

    def __init__(self) -> None:
        self.names: set[str] = set()

    def up(self, *names: str) -> list[Box]:
        fresh = [name for name in names if name not in self.names]
        if fresh and not KEEP:
            Lab.down(fresh)  # what a killed run left would not be a fresh box
        self.names.update(fresh)
        return Lab.up(names)

    def close(self) -> None:
        if self.names and not KEEP:
            Lab.down(sorted(self.names))


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

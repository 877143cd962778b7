"""A node with one ssh server for each module of tests, and a running container for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyinfra.api.host import Host

from tests.integration.pct_boxes import reach, vmids
from tests.integration.pct_node import PctNode


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


@pytest.fixture
def box(node: PctNode, vmid: int) -> Host:
    return reach(node, vmid)[0]

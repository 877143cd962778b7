"""Where the nodes' part of a deploy ends and the boxes' part begins, in every run."""

from __future__ import annotations

from pyinfra.api import deploy

from ops import base


@deploy("Nodes")
def nodes_come_first() -> None:
    """For every host. pyinfra runs what no host has in common side by side; one operation that all share puts an order
    between what comes before it on the nodes and after it on the boxes.
    """
    base.waited_for(name="Nodes are done, boxes may begin")

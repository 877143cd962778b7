"""A kept release serves again."""

from __future__ import annotations

from pyinfra import host
from pyinfra.api import deploy

from gpubox.specs.plan import BoxPlan
from ops import release as op
from roles.serve import prove_from_outside


@deploy("Rollback")
def rollback(plan: BoxPlan) -> None:
    """`--data stack=NAME` picks a stack; without it the previous release is meant, whatever group_data says."""
    op.rolled_back(name="Roll back", stack=host.inventory.get_override_data().get("stack"))
    prove_from_outside(plan)

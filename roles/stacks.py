"""What a release needs: the stacks, standby stacks included, and the model. Built and proved beside what serves."""

from __future__ import annotations

from pyinfra import host
from pyinfra.api import deploy

from gpubox.plan import BoxPlan
from ops import release as op


@deploy("Stacks")
def stacks(plan: BoxPlan) -> None:
    for spec in host.loop(plan.stacks):
        op.stack_built(name=f"Stack {spec.build.name}", spec=spec, settings=plan.settings)
    if plan.model:
        op.model_built(name=f"Model {plan.model.build.name}", spec=plan.model, settings=plan.settings)

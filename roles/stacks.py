"""What a release needs: the stacks, standby stacks included, and the model. Built and proved beside what serves."""

from __future__ import annotations

from pyinfra import host
from pyinfra.api import deploy

from gpubox.specs.plan import BoxPlan
from ops import release as op


@deploy("Stacks")
def stacks(plan: BoxPlan) -> None:
    for spec in host.loop(plan.stacks):
        op.built(name=f"Stack {spec.build.name}", kind="stack", spec=spec, settings=plan.settings)
    for model in host.loop(plan.models):
        op.built(name=f"Model {model.build.name}", kind="model", spec=model, settings=plan.settings)

"""The command `gpubox` on the box."""

from __future__ import annotations

from pyinfra.api import deploy

from gpubox.specs.plan import BoxPlan
from ops import tools as op


@deploy("Tools")
def tools(plan: BoxPlan) -> None:
    op.installed(
        name="gpubox and uv",
        digest=op.tools_digest(),
        wheelhouse=plan.settings.wheelhouse,
        offline=plan.settings.offline,
    )

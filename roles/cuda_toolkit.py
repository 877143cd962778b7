"""The CUDA toolkits of a box's stacks, side by side, each where its stack's CUDA_HOME points."""

from __future__ import annotations

from pyinfra.api import deploy

from facts.box import box_state
from gpubox.nvidia import toolkit
from gpubox.nvidia.toolkit import PLACE
from gpubox.specs.plan import BoxPlan
from ops import base
from ops import toolkit as op
from ops.base import File
from roles import nvidia_userland
from roles.keys import key_of


def files(plan: BoxPlan, *, bare_metal: bool = False) -> list[File]:
    """The repository, its key, exact versions, and what keeps the driver away. Raises InputError for a key file."""
    settings, wanted = plan.settings.toolkits, toolkit.wanted_packages(plan.stacks)
    if settings is None or not wanted:
        return []
    own = toolkit.apt_files(settings, wanted, key_of(PLACE, settings))
    driver = nvidia_userland.files(plan.settings, bare_metal=bare_metal)
    return [*driver, *(File(path, content) for path, content in own.items())]


@deploy("CUDA toolkits")
def cuda_toolkit(plan: BoxPlan) -> None:
    """Nothing without `toolkits` in the settings. What is wrong with them, `files` has raised in preflight."""
    settings, wanted = plan.settings.toolkits, toolkit.wanted_packages(plan.stacks)
    if settings is None or not wanted:
        return
    op.allowed(name="System and key", settings=settings, key=key_of(PLACE, settings))
    wanted_files = files(plan, bare_metal=box_state().readings.bare_metal)
    base.rendered_files(name="Repository and pins", wanted=wanted_files)
    op.installed(name="Toolkits", settings=settings, wanted=wanted, offline=plan.settings.offline)
    op.frozen(name="On hold", wanted=wanted)
    op.proved(name="Nothing but toolkits", settings=settings, wanted=wanted, driver=plan.settings.driver)

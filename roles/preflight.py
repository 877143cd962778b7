"""Refuse bad input before the first operation, on any host: pyinfra reads every deploy before it runs one."""

from __future__ import annotations

from pyinfra import host, logger

from facts.box import BoxState, Question, box_state, look_at
from gpubox.errors import GpuboxError, InputError, RefusedError
from gpubox.nvidia import driver_packages, repository, toolkit
from gpubox.nvidia.userland import check_stacks, found
from gpubox.settings import load_settings
from gpubox.specs.artefacts import index_address
from gpubox.specs.plan import BoxPlan, plan_box
from gpubox.specs.stack import brings_python, pinned_artefacts
from ops.refusal import before_anything_ran
from roles import cuda_toolkit, nvidia_userland
from roles.box import PACKAGES, directories, rendered
from roles.keys import key_of
from roles.serve import ssh_address
from roles.templates import ROOT


def preflight(*, activates: bool = True) -> BoxPlan:
    """The plan for the current host. Raises DeployError: host, key, value, what is allowed, what to do.

    What may be wrong, and what is broken knowingly, is shown with the plan, in a dry run too.

    activates: this run will activate the plan's release, so one that failed before is refused too.
    """
    try:
        plan = plan_box(ROOT, load_settings(host.data.dict(), host.name))
        plan.public_url(ssh_address())
        wanted = [*directories(plan.settings), *rendered(plan.settings)]
        wanted += [*nvidia_userland.files(plan.settings), *cuda_toolkit.files(plan)]
        paths = [*(item.path for item in wanted), driver_packages.PLACE.sources]
        look_at(Question(plan.settings, tuple(PACKAGES), tuple(paths), plan.server.port, plan.server.model.path or ""))
        _check_box(plan, box_state())
        _check_gpus(plan, box_state())
        if activates:
            _check_not_failed(plan, box_state())
    except GpuboxError as error:
        raise before_anything_ran(error) from None
    for note in plan.notes:
        logger.warning(f"{host.print_prefix}{note}")
    return plan


def _check_box(plan: BoxPlan, seen: BoxState) -> None:
    settings = plan.settings
    if plan.overlay and plan.overlay.refuse_nvidia_driver and (driver := seen.get("kernel_driver")):
        raise RefusedError(
            f"overlay = {plan.overlay.name!r} is for machines without a GPU, and this one has a driver: {driver}",
            hint="remove overlay from this host's group_data",
        )
    missing = seen.has("command", "python3") and not seen.has("command", f"python{settings.python}")
    if missing and not (all(brings_python(spec) for spec in plan.stacks) and plan.model is None):
        raise InputError(
            f"python = {settings.python!r}: the box has no python{settings.python}",
            hint="set python to the box's own version (python3 --version) if the stack's lock covers it, or install it",
        )
    for spec in plan.stacks:
        for pinned in pinned_artefacts(spec):
            if not (settings.wheelhouse or seen.has("stacks", spec.id) or pinned.kind == "python"):
                index_address(pinned, settings.indexes)
    if listener := seen.get("foreign_listener"):
        raise InputError(
            f"port = {plan.server.port} is in use on the box: {listener}",
            hint="end that process, or give the server profile another port",
        )
    if plan.server.model.path and not seen.get("model_config"):
        raise InputError(
            f"model.path = {plan.server.model.path!r}: no config.json there on the box",
            hint="mount or copy the model there, or correct the path in servers/",
        )
    builds = any(not seen.has("stacks", spec.id) for spec in plan.stacks)
    if settings.wheelhouse and not seen.get("wheelhouse") and builds:
        raise InputError(f"wheelhouse = {settings.wheelhouse!r}: no such directory on the box", hint="correct the path")


def _check_gpus(plan: BoxPlan, seen: BoxState) -> None:
    """What no role of this run can put right. The loaded module is none of that: the node's role may yet change it."""
    settings = plan.settings
    if settings.driver is not None:
        check_stacks(settings.driver, plan.stacks)
        if seen.readings.answered:
            key = key_of(driver_packages.PLACE, settings.driver)
            driver_packages.check_source(settings.driver, key, found(seen.readings))
    if settings.toolkits is not None and seen.readings.answered:
        repository.check_system(toolkit.PLACE, seen.readings.system)


def _check_not_failed(plan: BoxPlan, seen: BoxState) -> None:
    if plan.settings.force:
        return
    marks = [value for value in seen.many.get("failed", []) if value.startswith(plan.wanted.id + " ")]
    if marks:
        raise RefusedError(
            f"release {plan.wanted.id} failed when it was last activated: {marks[0].partition(' ')[2]}",
            hint="change the stack or the server profile, or try it again with --data force=true",
        )

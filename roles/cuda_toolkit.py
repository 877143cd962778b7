"""The CUDA toolkits of a box's stacks, side by side, each where its stack's CUDA_HOME points."""

from __future__ import annotations

from pathlib import Path

from pyinfra.api import deploy

from gpubox.errors import InputError
from gpubox.nvidia import toolkit
from gpubox.nvidia.openpgp import armored, fingerprints
from gpubox.nvidia.toolkit import ToolkitSettings
from gpubox.specs.plan import BoxPlan
from ops import base
from ops import toolkit as op
from ops.base import File
from roles import nvidia_userland

ROOT = Path(__file__).resolve().parent.parent


def files(plan: BoxPlan) -> list[File]:
    """The repository, its key, exact versions, and what keeps the driver away. Raises InputError for a key file."""
    settings, wanted = plan.settings.toolkits, toolkit.wanted_packages(plan.stacks)
    if settings is None or not wanted:
        return []
    key = "" if settings.is_directory else armored(_key(settings), _origin(settings))
    own = toolkit.apt_files(settings, wanted, key)
    return [*nvidia_userland.files(plan.settings), *(File(path, content) for path, content in own.items())]


@deploy("CUDA toolkits")
def cuda_toolkit(plan: BoxPlan) -> None:
    """Nothing without `toolkits` in the settings. What is wrong with them, `files` has raised in preflight."""
    settings, wanted = plan.settings.toolkits, toolkit.wanted_packages(plan.stacks)
    if settings is None or not wanted:
        return
    keys = [] if settings.is_directory else fingerprints(_key(settings), _origin(settings))
    op.allowed(name="System and key", settings=settings, keys=keys)
    base.rendered_files(name="Repository and pins", wanted=files(plan))
    op.installed(name="Toolkits", settings=settings, wanted=wanted, offline=plan.settings.offline)
    op.frozen(name="On hold", wanted=wanted)
    op.proved(name="Nothing but toolkits", settings=settings, wanted=wanted)


def _key(settings: ToolkitSettings) -> bytes:
    try:
        return (ROOT / str(settings.key)).read_bytes()
    except OSError as error:
        raise InputError(
            f"toolkits.key = {settings.key!r}: {error.strerror}",
            hint=f"the repository's public key, as a path below {ROOT} or an absolute one on this machine",
        ) from None


def _origin(settings: ToolkitSettings) -> str:
    return f"toolkits.key = {settings.key!r}"

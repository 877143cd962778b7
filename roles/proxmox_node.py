"""A Proxmox VE node: kernel, driver, device nodes. Everything that boxes on it take for granted."""

from __future__ import annotations

from pyinfra import host
from pyinfra.api import deploy

from facts.node import look_at_node
from gpubox.errors import GpuboxError
from gpubox.proxmox.node import GRUB_DROP_IN, check_node
from gpubox.proxmox.settings import NodeSettings
from gpubox.settings import load_node_settings
from ops import node as op
from ops.base import File
from ops.refusal import before_anything_ran
from roles.templates import rendered_below


def rendered() -> list[File]:
    return rendered_below("templates_node", {})


def preflight_node() -> NodeSettings:
    """The settings of the current host. Raises DeployError for what can be refused before anything runs."""
    try:
        settings = load_node_settings(host.data.dict(), host.name)
        paths = [*(file.path for file in rendered()), GRUB_DROP_IN]
        check_node(settings, look_at_node(paths, settings))
    except GpuboxError as error:
        raise before_anything_ran(error) from None
    return settings


@deploy("Node")
def proxmox_node(settings: NodeSettings) -> None:
    wanted = rendered()
    arguments = settings.kernel_arguments
    op.packages(name="Packages and headers", settings=settings)
    op.files_written(name="Files", wanted=wanted)
    op.initramfs_current(name="Initramfs", wanted=wanted)
    op.driver_installed(name=f"Driver {settings.driver.version}", settings=settings)
    # After the driver: when it does not build for another kernel, the one that has it stays pinned.
    op.kernel_pinned(name="Kernel pinned", settings=settings)
    op.units_enabled(name="Units enabled")
    op.kernel_command_line(name=f"Kernel command line {' '.join(arguments)}".rstrip(), arguments=arguments)
    op.rebooted(name="Reboot", settings=settings)
    op.units_started(name="Device nodes")
    op.proved(name="Every GPU everywhere", settings=settings)

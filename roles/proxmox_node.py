"""A Proxmox VE node: kernel, driver, device nodes. Everything that boxes on it take for granted."""

from __future__ import annotations

from pyinfra import host
from pyinfra.api import deploy

from facts.node import look_at_node
from gpubox.errors import GpuboxError
from gpubox.nvidia.driver import AnyDriver, PackagedDriver
from gpubox.nvidia.driver_packages import PLACE, protective_files
from gpubox.nvidia.repository import source_files
from gpubox.proxmox.node import GRUB_DROP_IN, check_node
from gpubox.proxmox.settings import NodeSettings
from gpubox.settings import load_node_settings
from ops import node as op
from ops.base import File
from ops.refusal import before_anything_ran
from roles.keys import key_of
from roles.templates import rendered_below


def rendered(driver: AnyDriver | None) -> list[File]:
    """All files of a node. Raises InputError for the key file of a repository."""
    return [*rendered_below("templates_node", {}), *driver_files(driver, modules=True)]


def driver_files(driver: AnyDriver | None, *, modules: bool) -> list[File]:
    """What keeps the driver from apt, or at its version, and where it comes from."""
    files = protective_files(driver, modules=modules)
    if isinstance(driver, PackagedDriver):
        files |= source_files(PLACE, driver, key_of(PLACE, driver))
    return [File(path, content) for path, content in files.items()]


def preflight_node() -> NodeSettings:
    """The settings of the current host. Raises DeployError for what can be refused before anything runs."""
    try:
        settings = load_node_settings(host.data.dict(), host.name)
        paths = [*(file.path for file in rendered(settings.driver)), GRUB_DROP_IN, PLACE.sources]
        check_node(settings, look_at_node(paths, settings), key_of(PLACE, settings.driver))
    except GpuboxError as error:
        raise before_anything_ran(error) from None
    return settings


def unwanted_files(driver: AnyDriver | None) -> list[str]:
    """Of ours, from when the driver came another way."""
    return [] if isinstance(driver, PackagedDriver) else [PLACE.sources]


@deploy("Node")
def proxmox_node(settings: NodeSettings) -> None:
    driver, arguments = settings.driver, settings.kernel_arguments
    wanted = rendered(driver)
    op.packages(name="Packages and headers", settings=settings)
    op.files_written(name="Files", wanted=wanted, unwanted=unwanted_files(driver))
    op.initramfs_current(name="Initramfs", wanted=wanted)
    op.driver_installed(name=f"Driver {driver.version}", settings=settings)
    if isinstance(driver, PackagedDriver):
        op.driver_held(name="On hold")
    # After the driver: when it does not build for another kernel, the one that has it stays pinned.
    op.kernel_pinned(name="Kernel pinned", settings=settings)
    op.units_enabled(name="Units enabled")
    op.kernel_command_line(name=f"Kernel command line {' '.join(arguments)}".rstrip(), arguments=arguments)
    op.rebooted(name="Reboot", settings=settings)
    op.units_started(name="Device nodes")
    op.proved(name="Every GPU everywhere", settings=settings)

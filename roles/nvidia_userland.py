"""The NVIDIA driver as a box sees it: libraries of exactly the loaded module's version, and proof that CUDA starts.

In a container the module is the node's. On bare metal it is the box's own, and is installed as on a node.
"""

from __future__ import annotations

from pyinfra.api import deploy

from facts.box import box_state
from facts.node import look_at_node
from gpubox.nvidia.driver import AnyDriver, PackagedDriver
from gpubox.nvidia.driver_packages import PLACE
from gpubox.nvidia.userland import is_complete
from gpubox.proxmox.settings import NodeSettings
from gpubox.settings import Settings
from gpubox.specs.plan import BoxPlan
from ops import base, node
from ops import userland as op
from ops.base import File
from roles import proxmox_node
from roles.keys import key_of
from roles.proxmox_node import driver_files, unwanted_files


def files(settings: Settings, *, bare_metal: bool = False) -> list[File]:
    """What keeps the driver from apt, or at its version; wanted where a driver or toolkits are.

    The paths are the same for a container and a bare-metal machine. Raises InputError for a key file.
    """
    if settings.driver is None and settings.toolkits is None:
        return []
    return driver_files(settings.driver, modules=bare_metal)


@deploy("NVIDIA userland")
def nvidia_userland(plan: BoxPlan) -> None:
    """Nothing without `driver` in the settings. After the role box, which brings python3 and the service's user."""
    driver = plan.settings.driver
    if driver is None:
        return
    # Read before anything ran. That is no matter: nothing before this role touches the driver of a bare-metal machine.
    seen = box_state().readings
    op.allowed(name="One source of the driver", driver=driver, key=key_of(PLACE, driver))
    wanted = files(plan.settings, bare_metal=seen.bare_metal)
    base.rendered_files(name="Driver kept from apt", wanted=wanted, unwanted=unwanted_files(driver))
    if seen.bare_metal and not is_complete(driver, seen):
        _bare_metal_driver(driver)
    op.installed(name=f"Driver libraries {driver.version}", driver=driver, offline=plan.settings.offline)
    if isinstance(driver, PackagedDriver):
        op.held(name="On hold")
    op.proved(name="CUDA starts", driver=driver)


def _bare_metal_driver(driver: AnyDriver) -> None:
    """The node's operations, without those that are Proxmox's. It never reboots: a pending reboot ends the deploy."""
    settings, wanted = NodeSettings(driver=driver), proxmox_node.rendered(driver)
    look_at_node([file.path for file in wanted], settings)
    op.build_tools(name="Compiler, dkms, headers")
    node.files_written(name="Files", wanted=wanted)
    node.initramfs_current(name="Initramfs", wanted=wanted)
    node.driver_installed(name=f"Driver {driver.version}", settings=settings)
    node.units_enabled(name="Units enabled")
    node.rebooted(name="Reboot", settings=settings)
    node.units_started(name="Device nodes")
    node.proved(name="Every GPU everywhere", settings=settings)

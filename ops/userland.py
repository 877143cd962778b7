"""The driver's libraries in a box, of the loaded module's version: from the .run file, or from apt."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from pyinfra import host, state
from pyinfra.api import QuoteString, operation
from pyinfra.api.state import StateStage
from pyinfra.operations import apt

from facts.box import box_state
from facts.node import node_readings
from gpubox.nvidia import userland
from gpubox.nvidia.driver import AnyDriver, DriverSettings, PackagedDriver
from gpubox.nvidia.driver_packages import check_source
from gpubox.nvidia.repository import Key
from gpubox.proxmox.node import TOOLS
from ops import driver_packages
from ops.refusal import refusal
from ops.run_file import install_script
from ops.streamed import Streamed

# The libraries and tools alone: the module is the node's, and so are its device nodes and its persistence daemon.
OPTIONS = ["--silent", "--no-kernel-modules", "--no-nvidia-modprobe", "--no-systemd", "--no-install-compat32-libs"]


@operation()
def build_tools() -> Iterator[Any]:
    """On bare metal: what DKMS builds the module with, and the headers of the running kernel."""
    kernel = node_readings().release
    present = {*node_readings().packages, *box_state().readings.kernel_packages}
    missing = [name for name in (*TOOLS, f"linux-headers-{kernel}") if name not in present]
    if not missing:
        host.noop("compiler, dkms and headers are installed")
        return
    yield from apt.packages._inner(packages=missing, update=True, no_recommends=True)


@operation()
def allowed(driver: DriverSettings, key: Key | None) -> Iterator[Any]:
    """Before anything changes: no driver from another source; a supported system and the key that belongs to it."""
    seen = box_state().readings
    if not seen.answered and state.current_stage != StateStage.Execute:
        host.noop("the box is looked at when it runs")
        return
    if stop := refusal(lambda: check_source(driver, key, userland.found(seen))):
        yield stop
        return
    host.noop("one source of one driver")


@operation()
def installed(driver: AnyDriver, offline: bool) -> Iterator[Any]:
    """Libraries of exactly the loaded module's version, in the place of another version's."""
    seen = box_state().readings
    checks = [
        partial(userland.check_module, driver, seen),
        partial(userland.check_replaceable, driver, seen),
    ]
    if stop := refusal(*checks):
        yield stop
        return
    if userland.is_installed(driver, seen):
        host.noop(f"the libraries of driver {driver.version} are installed")
        return
    if isinstance(driver, PackagedDriver):
        yield from driver_packages.installed(driver, userland.found(seen), offline=offline)
        return
    if not driver.run.startswith("/") and not box_state().has("command", "curl"):
        yield from apt.packages._inner(packages=["ca-certificates", "curl"], update=True, no_recommends=True)
    yield Streamed("sh", "-c", QuoteString(install_script(driver, OPTIONS)))


@operation()
def held() -> Iterator[Any]:
    """An upgrade of the system does not move the driver's packages."""
    yield from driver_packages.held(userland.found(box_state().readings))


@operation()
def proved(driver: DriverSettings) -> Iterator[Any]:
    """nvidia-smi lists every GPU, and CUDA starts and sees them all, as the service's user too."""
    if state.current_stage != StateStage.Execute:
        host.noop("CUDA is asked when everything has run")
        return
    seen = box_state().readings
    if stop := refusal(lambda: userland.check_proof(driver, seen)):
        yield stop
        return
    host.noop(f"{len(seen.gpus.gpu_nodes)} GPUs, driver {seen.loaded}, CUDA starts")

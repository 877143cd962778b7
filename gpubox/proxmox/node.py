"""The rules by which a node is converged: which kernel, which packages, is the driver there, what waits for a reboot.

Pure functions of the readings and the operator's settings. What is known to be wrong stands in tables with reason and
reference.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpubox.errors import InputError, RefusedError
from gpubox.nvidia import driver_packages
from gpubox.nvidia.driver import DriverSettings, numbers
from gpubox.nvidia.driver_packages import Found
from gpubox.nvidia.gpu_count import count_problem
from gpubox.nvidia.repository import Key
from gpubox.proxmox.node_readings import NodeReadings
from gpubox.proxmox.settings import NodeSettings

OPEN_LICENSE = "Dual MIT/GPL"  # modinfo of the open modules; the closed ones say "NVIDIA" (open-gpu-kernel-modules#259)
DEVICES_UNIT = "gpubox-nvidia-devices.service"
PERSISTENCE_UNIT = "nvidia-persistenced.service"
UNITS = (PERSISTENCE_UNIT, DEVICES_UNIT)
RIVALS = ("nouveau", "nova_core")  # the kernel's own drivers of the same cards
TOOLS = ("build-essential", "curl", "dkms", "mokutil", "pciutils")

# What GRUB's configuration, a shell script, and the kernel read alike.
_ARGUMENT = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.,:;=@/+*\[\]()-]*\Z")
GRUB_DROP_IN = "/etc/default/grub.d/gpubox.cfg"


@dataclass(frozen=True)
class KernelLimit:
    """Drivers below `driver` do not build on kernels from `kernel` on."""

    driver: tuple[int, ...]
    kernel: tuple[int, ...]
    reason: str
    reference: str


KERNEL_LIMITS = (
    KernelLimit((595,), (6, 19), "a change of the kernel's mm interface", "Frogging-Family/linux-tkg#1186"),
    KernelLimit((556,), (6, 17), "too old for its DRM and timer interfaces", "NVIDIA/open-gpu-kernel-modules#1143"),
)
SUGGESTED_SERIES = "6.17 (Proxmox VE 9.1), 6.14 (9.0) or 6.8 (8.x)"

# PCI ids of the RTX PRO 6000 Blackwell: Workstation, Max-Q, Server. And the first driver that lists them: the one that
# came with CUDA 12.8 U1, 570.124.06, does not (NVIDIA/open-gpu-kernel-modules, README of each tag).
BLACKWELL_IDS = frozenset({"2bb1", "2bb4", "2bb5"})
FIRST_BLACKWELL_DRIVER = "570.133.07"


def kernel_limit(driver: str, kernel: str) -> KernelLimit | None:
    """Why `driver` is known not to build on `kernel`; None when nothing is known against it."""
    for limit in KERNEL_LIMITS:
        if numbers(driver) < limit.driver and numbers(kernel) >= limit.kernel:
            return limit
    return None


def wanted_kernel(settings: NodeSettings, seen: NodeReadings) -> str:
    """The kernel to pin: the operator's, else the one pinned already, else the running one."""
    return settings.kernel or seen.pin or seen.release


def next_kernel(seen: NodeReadings) -> str:
    """The kernel of the next boot, as far as proxmox-boot-tool decides it; without a pin the newest installed."""
    return seen.next_boot_pin or seen.pin or max(seen.kernels, key=numbers, default="")


def check_node(settings: NodeSettings, seen: NodeReadings, key: Key | None = None) -> None:
    """Refuse what can be refused before the first operation. Raises InputError or RefusedError.

    key: of the driver's repository, when it has one.
    """
    if not seen.pve:
        raise InputError(
            "this host has no pveversion: it is not a Proxmox VE node",
            hint="list it under gpu_boxes as a plain ssh host if it is a bare-metal machine",
        )
    if seen.user:
        raise RefusedError(
            f"connected as {seen.user}, who is not root: only root can make a node ready",
            hint='connect as root (ssh_user = "root" for the node), or set _sudo = True',
        )
    if bad := [argument for argument in settings.kernel_arguments if not _ARGUMENT.match(argument)]:
        raise InputError(
            f"kernel_arguments: {bad[0]!r} is not one argument",
            hint="one item for each, as key or key=value, without spaces, quotes, $ or backslashes",
        )
    driver, kernel = settings.driver.version, wanted_kernel(settings, seen)
    if limit := kernel_limit(driver, kernel):
        raise InputError(
            f"kernel {kernel}: driver {driver} does not build on it ({limit.reason}; {limit.reference})",
            hint=f"set kernel to an installed or installable one of series {SUGGESTED_SERIES}; "
            f"on this node: {_usable(driver, seen) or 'none installed yet'}; or set driver to a newer version",
        )
    old = [gpu.address for gpu in seen.cards if gpu.device in BLACKWELL_IDS]
    if old and numbers(driver) < numbers(FIRST_BLACKWELL_DRIVER):
        raise InputError(
            f"driver.version = {driver!r} does not know the RTX PRO 6000 Blackwell at {', '.join(old)}",
            hint=f"{FIRST_BLACKWELL_DRIVER} or newer",
        )
    driver_packages.check_source(settings.driver, key, found(seen))
    if seen.secure_boot == "enabled" and not driver_installed(settings.driver, kernel, seen):
        raise RefusedError(
            "Secure Boot is on: the kernel refuses the unsigned modules that would be built",
            hint="turn Secure Boot off in the firmware; signing with a key of your own is not supported here",
        )


def found(seen: NodeReadings) -> Found:
    return Found(seen.system, seen.driver_packages, seen.run_file, seen.libcuda, modules=True)


def _usable(driver: str, seen: NodeReadings) -> str:
    return ", ".join(kernel for kernel in seen.kernels if kernel_limit(driver, kernel) is None)


def packages(settings: NodeSettings, seen: NodeReadings) -> list[str]:
    """Tools, headers of the wanted kernel, and the kernel itself when it is not installed.

    The metapackage of the headers makes every kernel upgrade bring its own, so that DKMS builds for it. Names as in
    wvthoog/proxmox-vgpu-installer#6.
    """
    kernel = wanted_kernel(settings, seen)
    names = [*TOOLS, "proxmox-default-headers", f"proxmox-headers-{kernel}"]
    if kernel not in seen.kernels:
        names.append(f"proxmox-kernel-{kernel}-signed")
    return names


def driver_installed(driver: DriverSettings, kernel: str, seen: NodeReadings) -> bool:
    """Exactly this version, open flavour, built by DKMS for `kernel`, with its own libraries and no others.

    From apt: all of its packages at that version too.
    """
    module = seen.module_for(kernel)
    return (
        built_for(driver.version, kernel, seen)
        and module is not None
        and (module.version, module.license) == (driver.version, OPEN_LICENSE)
        and set(seen.libcuda) == {driver.version}
        and not driver_packages.problems(driver, found(seen))
    )


def built_for(version: str, kernel: str, seen: NodeReadings) -> bool:
    return any(
        (entry.module, entry.version, entry.kernel, entry.status) == ("nvidia", version, kernel, "installed")
        for entry in seen.dkms
    )


def only_the_build_is_missing(driver: DriverSettings, kernel: str, seen: NodeReadings) -> bool:
    """The driver is installed and known to DKMS, but not built for this kernel."""
    known = any((entry.module, entry.version) == ("nvidia", driver.version) for entry in seen.dkms)
    open_elsewhere = all(
        module.license == OPEN_LICENSE for module in seen.modules if module.version == driver.version
    ) and any(module.version == driver.version for module in seen.modules)
    return (
        known
        and open_elsewhere
        and set(seen.libcuda) == {driver.version}
        and not built_for(driver.version, kernel, seen)
        and not driver_packages.problems(driver, found(seen))
    )


def grub_drop_in(arguments: list[str]) -> str:
    """GRUB reads its drop-ins after /etc/default/grub: what the operator wrote there stays, and ours comes last."""
    return (
        "# Written by gpubox from kernel_arguments; removed when that is empty.\n"
        f'GRUB_CMDLINE_LINUX_DEFAULT="$GRUB_CMDLINE_LINUX_DEFAULT {" ".join(arguments)}"\n'
    )


def missing_arguments(wanted: list[str], command_line: str) -> list[str]:
    present = set(command_line.split())
    return [argument for argument in wanted if argument not in present]


def pending_reboot(settings: NodeSettings, seen: NodeReadings) -> list[str]:
    """Why the node has to reboot, from what runs now against what is installed; empty when it has not."""
    kernel, reasons = wanted_kernel(settings, seen), []
    if seen.release != kernel:
        reasons.append(f"kernel {seen.release} runs, {kernel} is pinned")
    if seen.loaded_driver and (seen.loaded_driver, seen.loaded_open) != (settings.driver.version, True):
        flavour = "open" if seen.loaded_open else "closed"
        reasons.append(f"driver {seen.loaded_driver} ({flavour}) is loaded, {settings.driver.version} (open) is wanted")
    if rivals := [name for name in RIVALS if name in seen.loaded_modules]:
        reasons.append(f"{' and '.join(rivals)} is loaded: it keeps the GPUs from the driver")
    if seen.hmm_disabled == "N":
        reasons.append("nvidia_uvm is loaded with uvm_disable_hmm=0")
    if missing := missing_arguments(settings.kernel_arguments, seen.command_line):
        reasons.append(f"the kernel runs without {' '.join(missing)}")
    return reasons


def reboot_refusals(settings: NodeSettings, seen: NodeReadings) -> list[str]:
    """Why a reboot now would end without GPUs or not at all; empty when it is safe."""
    kernel, boots, problems = wanted_kernel(settings, seen), next_kernel(seen), []
    if boots != kernel:
        problems.append(f"the next boot takes kernel {boots or '(none found)'}, not {kernel}")
    if kernel not in seen.kernels or kernel not in seen.initrds:
        problems.append(f"kernel {kernel} has no image or no initramfs in /boot")
    if not driver_installed(settings.driver, kernel, seen):
        problems.append(f"driver {settings.driver.version} (open) is not installed and built for kernel {kernel}")
    if seen.initrd_stale:
        problems.append(f"the initramfs of {kernel} is older than the module options")
    return problems


def problems_in_service(settings: NodeSettings, seen: NodeReadings) -> list[str]:
    """What keeps boxes from using the GPUs although everything is installed; empty when they can."""
    problems = []
    if seen.loaded_driver != settings.driver.version:
        problems.append(f"driver {seen.loaded_driver or '(none)'} is loaded, {settings.driver.version} is wanted")
    if counts := count_problem(seen.gpus):
        problems.append(str(counts))
    if seen.gpus.missing_nodes:
        problems.append(f"device nodes are missing: {', '.join(seen.gpus.missing_nodes)}")
    if missing := [unit for unit in UNITS if unit not in seen.units_enabled]:
        problems.append(f"not started at boot: {', '.join(missing)}")
    problems += driver_packages.problems(settings.driver, found(seen))
    return problems

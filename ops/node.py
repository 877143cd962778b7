"""A Proxmox VE node is made ready for GPU boxes. Each operation decides from the node's readings when it runs."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from pyinfra import host, state
from pyinfra.api import QuoteString, StringCommand, operation
from pyinfra.api.state import StateStage
from pyinfra.operations import apt

from facts.node import STATE, node_readings
from gpubox.nvidia.driver import AnyDriver, DriverSettings, PackagedDriver
from gpubox.nvidia.gpu_count import counts_text
from gpubox.proxmox import node
from gpubox.proxmox.settings import NodeSettings
from ops import driver_packages, reboot
from ops.base import File, enable_units, put_files
from ops.refusal import stop
from ops.run_file import install_script
from ops.streamed import Streamed

REBOOT_TIMEOUT_S = 1800  # a server with 8 GPUs and much memory trains for minutes before it boots
KERNEL_CMDLINE = "/etc/kernel/cmdline"

# The packages build for the running kernel; another one may be the next to boot. And they do not load the module, which
# the .run file does. It cannot be loaded while nouveau has the GPUs, and then a reboot is pending anyway.
BUILD = """
[ "$(modinfo -k {kernel} -F version nvidia 2>/dev/null)" = {version} ] ||
  dkms install -m nvidia -v {version} -k {kernel} || exit
[ -e /proc/driver/nvidia/version ] || modprobe nvidia 2>/dev/null || true
"""


@operation()
def packages(settings: NodeSettings) -> Iterator[Any]:
    """Tools to build modules, the headers, and the kernel to pin when it is not there."""
    seen = node_readings()
    missing = [name for name in node.packages(settings, seen) if name not in seen.packages]
    if not missing:
        host.noop("all packages are installed")
        return
    yield from apt.packages._inner(packages=missing, update=True, no_recommends=True)


@operation()
def kernel_pinned(settings: NodeSettings) -> Iterator[Any]:
    """A kernel upgrade does not take the GPUs away: the node boots the kernel that the driver is built for."""
    seen = node_readings()
    kernel = node.wanted_kernel(settings, seen)
    if seen.pin == kernel and seen.stamps.get("pin") == _digest(kernel):
        host.noop(f"kernel {kernel} is pinned")
        return
    refresh = " && proxmox-boot-tool refresh" if seen.esp_sync else ""  # copies the pin to where it boots from
    yield _applied("pin", _digest(kernel), f"proxmox-boot-tool kernel pin {shlex.quote(kernel)}{refresh}")


@operation()
def files_written(wanted: list[File], unwanted: Sequence[str] = ()) -> Iterator[Any]:
    yield from put_files(wanted, node_readings().files, unwanted)


@operation()
def initramfs_current(wanted: list[File]) -> Iterator[Any]:
    """Module options and blacklists take effect from the initramfs on."""
    options = [file for file in wanted if file.path.startswith("/etc/modprobe.d/")]
    digest = _digest(*(file.content for file in options))
    seen = node_readings()
    if seen.stamps.get("initramfs") == digest and not seen.initrd_stale:
        host.noop("the initramfs has the module options")
        return
    yield _applied("initramfs", digest, "update-initramfs -u -k all")


@operation()
def driver_installed(settings: NodeSettings) -> Iterator[Any]:
    """The open kernel modules of exactly this version, by DKMS, for the kernel that will boot."""
    seen, driver = node_readings(), settings.driver
    kernel = node.wanted_kernel(settings, seen)
    if node.driver_installed(driver, kernel, seen):
        host.noop(f"driver {driver.version} is installed for kernel {kernel}")
        return
    if node.only_the_build_is_missing(driver, kernel, seen):
        yield Streamed("dkms", "install", "-m", "nvidia", "-v", driver.version, "-k", QuoteString(kernel))
    elif seen.loaded_driver and not settings.allow_reboot:
        yield stop(
            f"driver {seen.loaded_driver} is loaded and boxes may be using it; {driver.version} is wanted. "
            "Its installation replaces the node's libraries and ends in a reboot. Nothing was changed.\n"
            "  what to do: plan an interruption of every box of this node, then deploy with allow_reboot = True"
        )
        return
    else:
        yield from _installation(driver, kernel, seen)
    yield StringCommand("sh", "-c", QuoteString(_check_script(driver, kernel)))


def _installation(driver: AnyDriver, kernel: str, seen: node.NodeReadings) -> Iterator[Any]:
    if not isinstance(driver, PackagedDriver):
        yield Streamed("sh", "-c", QuoteString(install_script(driver, _installer_options(kernel, seen))))
        return
    yield from driver_packages.installed(driver, node.found(seen))
    yield Streamed("sh", "-c", QuoteString(BUILD.format(version=driver.version, kernel=shlex.quote(kernel))))


@operation()
def driver_held() -> Iterator[Any]:
    """An upgrade of the system does not move the driver's packages."""
    yield from driver_packages.held(node.found(node_readings()))


@operation()
def units_enabled() -> Iterator[Any]:
    """systemd knows the unit files and starts them at boot."""
    seen = node_readings()
    missing = [unit for unit in node.UNITS if unit not in seen.units_enabled]
    yield from enable_units(missing, reload=seen.reload)


@operation()
def kernel_command_line(arguments: list[str]) -> Iterator[Any]:
    """The operator's opt-in arguments are on the command line of the next boot. Nothing else of it is touched."""
    seen = node_readings()
    wanted = _command_line_files(arguments, seen)
    wrong = [file for file in wanted if seen.files.get(file.path) != (file.sha256, file.mode, "root:root")]
    stale = not arguments and node.GRUB_DROP_IN in seen.files
    if not wrong and not stale and seen.stamps.get("cmdline", _digest()) == _digest(*arguments):
        host.noop("the command line has the arguments" if arguments else "no arguments are asked for")
        return
    # Said before the first command, for --dry: --diff is silent about a file whose directory is still to be made.
    if added := node.missing_arguments(arguments, seen.command_line):
        host.log(f"command line\n  - {seen.command_line}\n  + {' '.join([seen.command_line, *added])}")
    if stale:
        host.log("the arguments of an earlier deploy leave the command line with the next reboot")
    if wrong:
        yield from put_files(wrong, {})
    if stale:
        yield StringCommand("rm", "-f", node.GRUB_DROP_IN)
    apply = ["update-grub"] if "grub" in seen.bootloaders else []
    apply += ["proxmox-boot-tool refresh"] if "systemd-boot" in seen.bootloaders else []
    yield _applied("cmdline", _digest(*arguments), " && ".join(apply) or "true")


def _command_line_files(arguments: list[str], seen: node.NodeReadings) -> list[File]:
    """Where each boot loader reads it; of systemd-boot's only file, which is the operator's, no other word changes."""
    wanted = []
    if "grub" in seen.bootloaders and arguments:
        wanted.append(File(node.GRUB_DROP_IN, node.grub_drop_in(arguments)))
    missing = node.missing_arguments(arguments, seen.kernel_cmdline_file)
    if "systemd-boot" in seen.bootloaders and missing:
        wanted.append(File(KERNEL_CMDLINE, " ".join([*seen.kernel_cmdline_file.split(), *missing]) + "\n"))
    return wanted


@operation(is_idempotent=True)
def rebooted(settings: NodeSettings) -> Iterator[Any]:
    """Reboot when what runs is not what is installed, if allowed and if the driver is built for what will boot."""
    seen = node_readings()
    reasons = node.pending_reboot(settings, seen)
    if not reasons:
        host.noop("nothing waits for a reboot")
        return
    pending = _listed("a reboot is pending:", reasons)
    if not settings.allow_reboot:
        yield stop(f"{pending}\n  what to do: reboot the node yourself, or deploy with allow_reboot = True, then go on")
        return
    if refusals := node.reboot_refusals(settings, seen):
        yield stop(f"{pending}\n{_listed('not rebooting, since the node would come back without GPUs:', refusals)}")
        return
    if seen.stamps.get("reboot") == _digest(*reasons):
        yield stop(
            f"{pending}\nnot rebooting again: a reboot for the same reasons did not help.\n"
            f"  what to do: find out why (journalctl -k -b), then remove {STATE}/reboot.applied"
        )
        return
    yield _applied("reboot", _digest(*reasons), "true")
    yield from reboot.rebooted(REBOOT_TIMEOUT_S)


@operation()
def units_started() -> Iterator[Any]:
    """The device nodes exist and the persistence daemon runs; a node that is gone is made again."""
    seen = node_readings()
    incomplete = bool(seen.gpus.missing_nodes)
    stopped = [unit for unit in node.UNITS if unit not in seen.units_active]
    if not incomplete and not stopped:
        host.noop("units are active and all device nodes exist")
        return
    host.log(f"GPUs: {counts_text(seen.gpus)}")
    if node.PERSISTENCE_UNIT in stopped:
        yield StringCommand("systemctl", "start", node.PERSISTENCE_UNIT)
    if incomplete or node.DEVICES_UNIT in stopped:
        yield StringCommand(
            "systemctl", "restart", node.DEVICES_UNIT, "||", "{",
            "journalctl", "-u", node.DEVICES_UNIT, "-n", "5", "--no-pager", "-o", "cat", ">&2;", "exit", "1;", "}",
        )  # fmt: skip


@operation()
def proved(settings: NodeSettings) -> Iterator[Any]:
    """The wanted driver is loaded; PCI, device nodes and nvidia-smi show the same GPUs; nothing is pending."""
    if state.current_stage != StateStage.Execute:
        host.noop("the node is asked when everything has run")
        return
    seen = node_readings()
    problems = [*node.problems_in_service(settings, seen), *node.pending_reboot(settings, seen)]
    if problems:
        log = _listed("kernel log:", list(seen.xids)) if seen.xids else ""
        yield stop("\n".join([_listed("the node is not ready:", problems), *([log] if log else [])]))
    elif "reboot" in seen.stamps:
        yield StringCommand("rm", "-f", f"{STATE}/reboot.applied")  # it helped: the next one may have the same reasons
    else:
        host.noop(f"{len(seen.cards)} GPUs, driver {seen.loaded_driver}, kernel {seen.release}")


def _installer_options(kernel: str, seen: node.NodeReadings) -> list[str]:
    """With the last one it also installs while something holds the GPUs; a reboot follows."""
    held = bool(seen.loaded_driver) or any(name in seen.loaded_modules for name in node.RIVALS)
    return [
        "--silent",
        "--dkms",
        "--kernel-module-type=open",
        f"--kernel-name={kernel}",
        "--disable-nouveau",
        "--rebuild-initramfs",
        "--no-install-compat32-libs",
        *(["--allow-installation-with-running-driver"] if held else []),
    ]


def _check_script(driver: DriverSettings, kernel: str) -> str:
    """What DKMS put there is the open flavour of this version; asked before anything reboots into it."""
    return f"""
version=$(modinfo -k {shlex.quote(kernel)} -F version nvidia)
license=$(modinfo -k {shlex.quote(kernel)} -F license nvidia)
[ "$version" = {driver.version} ] && [ "$license" = "{node.OPEN_LICENSE}" ] && exit 0
echo "gpubox: the nvidia module for kernel {kernel} is version '$version', license '$license';" \\
  "wanted: {driver.version}, '{node.OPEN_LICENSE}' (the open modules: the only ones that run a Blackwell GPU)" >&2
exit 1
"""


def _applied(name: str, digest: str, command: str) -> StringCommand:
    """`command`, and then a stamp that says of what it was the result: a run interrupted between the two repeats it."""
    stamp = f"{STATE}/{name}.applied"
    script = f"{command} && mkdir -p {STATE} && echo {digest} >{stamp}.new && mv {stamp}.new {stamp}"
    return StringCommand("sh", "-c", QuoteString(script))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _listed(title: str, items: list[str]) -> str:
    return "\n".join([title, *(f"  - {item}" for item in items)])

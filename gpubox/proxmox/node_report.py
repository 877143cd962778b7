"""The preflight report of a node: what would make boxes slow, hang or fail, read before anything is built on it.

Each rule looks at the readings alone and says what it saw, why it matters and what to do, with the reference.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from gpubox.nvidia import driver_packages
from gpubox.nvidia.driver import numbers
from gpubox.nvidia.gpu_count import count_problem, counts_text
from gpubox.proxmox import node
from gpubox.proxmox.node_readings import NodeReadings

Verdict = Literal["pass", "warn", "fail"]
MIB = 1 << 20
BAR_OF_A_CARD_WITHOUT_RESIZABLE_BAR = 256 * MIB
FEW_CORRECTABLE = 100  # errors since boot that a healthy link may have had while it trained


@dataclass(frozen=True)
class Check:
    """One line of the report. `why` and `do` are empty where there is nothing to do."""

    name: str
    verdict: Verdict
    reading: str
    why: str = ""
    do: str = ""


def passed(name: str, reading: str) -> Check:
    return Check(name, "pass", reading)


def unread(name: str, do: str) -> Check:
    return Check(name, "warn", "could not be read", "what was not looked at may be wrong", do)


def proxmox(seen: NodeReadings) -> Check:
    name = "Proxmox VE"
    version = seen.pve.partition("/")[2].partition("/")[0]
    if numbers(version)[:1] in ((8,), (9,)):
        return passed(name, version)
    return Check(
        name, "fail", seen.pve or "no pveversion", "only versions 8 and 9 are known", "upgrade, or use a plain ssh host"
    )


def kernel(seen: NodeReadings) -> Check:
    """Would a reboot, also one that nobody planned, come back with GPUs? (strongtz/i915-sriov-dkms#403)"""
    name, boots = "next kernel", node.next_kernel(seen)
    driver = next((module.version for module in seen.modules if module.kernel == seen.release), "")
    reading = f"{boots or '(none found)'} boots next, {seen.release} runs"
    if not driver:
        return Check(name, "warn", reading, "no driver is installed yet", "deploy the node")
    if limit := node.kernel_limit(driver, boots):
        why = f"driver {driver} does not build on it: {limit.reason} ({limit.reference})"
        return Check(name, "fail", reading, why, f"proxmox-boot-tool kernel pin {seen.release}")
    if not node.built_for(driver, boots, seen):
        why = f"DKMS has not built driver {driver} for it: the node would come back without GPUs"
        return Check(name, "fail", reading, why, f"install proxmox-headers-{boots}; dkms autoinstall -k {boots}")
    return passed(name, reading)


def secure_boot(seen: NodeReadings) -> Check:
    name = "Secure Boot"
    if not seen.secure_boot:
        return unread(name, "install mokutil")
    if seen.secure_boot == "disabled":
        return passed(name, "disabled")
    if seen.loaded_driver:
        return Check(name, "warn", "enabled, and a driver is loaded", "a new module needs a signature", "turn it off")
    return Check(name, "fail", "enabled", "the kernel refuses unsigned modules", "turn it off in the firmware")


def root_file_system(seen: NodeReadings) -> Check:
    name = "root file system"
    if seen.root_fs == "zfs":
        why = "freezes under GPU load were reported with ZFS as root (local-inference-lab/rtx6kpro)"
        return Check(name, "warn", "zfs", why, "if the node freezes, suspect this first; ext4 is the tried choice")
    return passed(name, seen.root_fs) if seen.root_fs else unread(name, "findmnt /")


def link_widths(seen: NodeReadings) -> Check:
    """Width always counts; the generation of an idle card drops by itself and says nothing."""
    name = "PCIe width"
    if not any(gpu.max_width for gpu in seen.cards):
        return unread(name, "look at LnkSta of lspci -vvv")
    narrow = [f"{gpu.address} x{gpu.width} of x{gpu.max_width}" for gpu in seen.cards if gpu.width < gpu.max_width]
    if narrow:
        why = "a card in a narrower slot or on a bad riser slows every collective down to its own speed"
        return Check(name, "warn", ", ".join(narrow), why, "check slot, riser and bifurcation")
    return passed(name, ", ".join(sorted({f"x{gpu.width}" for gpu in seen.cards})))


def resizable_bar(seen: NodeReadings) -> Check:
    name = "Resizable BAR"
    small = [gpu.address for gpu in seen.cards if 0 < gpu.bar_bytes <= BAR_OF_A_CARD_WITHOUT_RESIZABLE_BAR]
    if small:
        why = (
            "without it peers do not see the card's memory, and a Blackwell card may not start, with the message that"
            " the wrong driver gives (NVIDIA/open-gpu-kernel-modules#862)"
        )
        return Check(name, "warn", f"256 MiB or less: {', '.join(small)}", why, "turn on Above 4G and Resizable BAR")
    if not any(gpu.bar_bytes for gpu in seen.cards):
        return unread(name, "look at the Regions of lspci -vvv")
    return passed(name, ", ".join(sorted({f"{gpu.bar_bytes // MIB} MiB" for gpu in seen.cards})))


def acs(seen: NodeReadings) -> Check:
    """H8: with peer traffic sent up to the root complex the first all-reduce may hang for ever (NVIDIA/nccl#1999)."""
    name = "ACS"
    if len(seen.cards) < 2:
        return passed(name, "fewer than two GPUs: no peer traffic")
    if not seen.acs_read:
        return unread(name, "run as root, with pciutils installed")
    above = {bridge for gpu in seen.cards for bridge in gpu.parents}
    redirecting = [bridge for bridge in seen.acs_redirecting if not above or bridge in above]
    if redirecting:
        why = "they redirect peer-to-peer traffic: the first all-reduce may hang (NVIDIA/nccl#1999, #2079)"
        do = "prove all-reduce at 2 ranks and at all; clear it: setpci -s BRIDGE ECAP_ACS+6.w=0000, at every boot"
        return Check(name, "warn", f"redirect on {', '.join(redirecting)}", why, do)
    return passed(name, "no bridge above a GPU redirects")


def iommu(seen: NodeReadings) -> Check:
    name = "IOMMU"
    kinds = sorted({gpu.iommu or "off" for gpu in seen.cards}) or ["off"]
    translated = [kind for kind in kinds if kind.startswith("DMA")]
    if translated and len(seen.cards) > 1:
        why = "translation costs peer traffic about 15 % and hung with 8 GPUs (local-inference-lab/rtx6kpro)"
        return Check(name, "warn", ", ".join(kinds), why, 'kernel_arguments = ["iommu=pt"], then a reboot')
    return passed(name, ", ".join(kinds))


def pcie_errors(seen: NodeReadings) -> Check:
    name = "PCIe errors"
    if not seen.aer_read:
        return unread(name, "the firmware may keep AER for itself")
    shown = [f"{e.address}: {e.fatal} fatal, {e.nonfatal} non-fatal, {e.correctable} correctable" for e in seen.aer]
    why, do = "errors on a link become Xid 79 under load", "reseat the card; check riser, power and temperature"
    if any(error.fatal for error in seen.aer):
        return Check(name, "fail", "; ".join(shown), why, do)
    if any(error.nonfatal or error.correctable > FEW_CORRECTABLE for error in seen.aer):
        return Check(name, "warn", "; ".join(shown), why, do)
    return passed(name, "; ".join(shown) or "none")


def gpu_counts(seen: NodeReadings) -> Check:
    name = "number of GPUs"
    if seen.gpus.pci is None:
        return unread(name, "ls /sys/bus/pci/devices")
    reading, problem = counts_text(seen.gpus), count_problem(seen.gpus)
    if problem is None:
        return passed(name, reading)
    if seen.gpus.pci and not seen.loaded_driver:
        return Check(name, "warn", reading, "no driver is loaded yet", "deploy the node")
    return Check(
        name, "fail", reading, "a box would serve from fewer GPUs than it was given, or not start", problem.hint
    )


def device_nodes(seen: NodeReadings) -> Check:
    """H2: nothing but this unit makes the nodes of uvm before the first container starts (jammsen#11, wolf#361)."""
    name = "device nodes"
    if not seen.loaded_driver:
        return Check(name, "warn", "none expected", "no driver is loaded yet", "deploy the node")
    if missing := seen.gpus.missing_nodes:
        why = "CUDA in a container fails with error 999, or the container does not start"
        return Check(name, "fail", f"missing: {', '.join(missing)}", why, f"systemctl restart {node.DEVICES_UNIT}")
    if node.DEVICES_UNIT not in seen.units_enabled:
        why = "after the next boot nobody makes them before the containers start"
        return Check(name, "fail", f"{node.DEVICES_UNIT} is not enabled", why, "deploy the node")
    return passed(name, "all exist, and are made at boot")


def driver(seen: NodeReadings) -> Check:
    """H1, H6: loaded module, module on disk, libraries and packages are one version, to the last number."""
    name = "driver"
    on_disk = seen.module_for(seen.release)
    versions = {
        "loaded": seen.loaded_driver or "none",
        "on disk": on_disk.version if on_disk else "none",
        "libraries": " and ".join(seen.libcuda) or "none",
    }
    reading = ", ".join(f"{where} {version}" for where, version in versions.items())
    if there := driver_packages.parts(seen.driver_packages):
        versions["packages"] = " and ".join(sorted({package.version.rpartition("-")[0] for package in there}))
        reading = ", ".join(f"{where} {version}" for where, version in versions.items())
        if seen.run_file:
            why = f"apt installed {driver_packages.names_of(there)} beside a driver from a .run file"
            return Check(name, "fail", reading, why, "remove one of the two (docs/node.md), then deploy the node")
        if moving := driver_packages.unheld(there):
            why = f"not on hold: {', '.join(moving)}; the next upgrade moves the driver under running boxes"
            return Check(name, "fail", reading, why, "deploy the node with driver.repository, or purge these packages")
    if set(versions.values()) == {"none"}:
        return Check(name, "warn", reading, "no driver is installed yet", "deploy the node")
    if len(set(versions.values())) > 1:
        return Check(
            name, "fail", reading, "new programs fail with a version mismatch", "deploy the node, or reboot it"
        )
    return passed(name, reading)


def open_modules(seen: NodeReadings) -> Check:
    """H4: the closed modules do not start a Blackwell GPU; nvidia-smi then finds no devices."""
    name = "open modules"
    closed = [f"{m.kernel}: {m.license}" for m in seen.modules if m.license != node.OPEN_LICENSE]
    if seen.loaded_driver and not seen.loaded_open:
        closed.insert(0, "the loaded one is closed")
    if closed:
        why = "Blackwell needs the open modules (Start9Labs/start-technologies#3465)"
        return Check(name, "fail", "; ".join(closed), why, "deploy the node")
    return passed(name, node.OPEN_LICENSE if seen.modules else "none installed yet")


def rivals(seen: NodeReadings) -> Check:
    name = "other GPU drivers"
    loaded = [module for module in node.RIVALS if module in seen.loaded_modules]
    if loaded:
        why = "it keeps the GPUs from NVIDIA's driver"
        return Check(name, "fail", ", ".join(loaded), why, "deploy the node (it is blacklisted there), then reboot")
    return passed(name, "none loaded")


def heterogeneous_memory(seen: NodeReadings) -> Check:
    name = "uvm_disable_hmm"
    if seen.hmm_disabled == "N":
        why = "recommended off for all-reduce over PCIe on these cards (local-inference-lab/rtx6kpro)"
        return Check(name, "warn", "off in the loaded module", why, "deploy the node, then reboot")
    return passed(name, "on" if seen.hmm_disabled else "nvidia_uvm is not loaded yet")


def kernel_log(seen: NodeReadings) -> Check:
    name = "kernel log"
    if not seen.kernel_log_read:
        return unread(name, "journalctl -k -b")
    if seen.xids:
        why = "the driver reported errors since boot: heat, power, risers and firmware are the first suspects"
        return Check(
            name, "fail", "; ".join(seen.xids), why, "look the Xid up in NVIDIA's list; reboot once it is cured"
        )
    return passed(name, "no Xid since boot")


RULES: tuple[Callable[[NodeReadings], Check], ...] = (
    proxmox,
    kernel,
    secure_boot,
    root_file_system,
    gpu_counts,
    device_nodes,
    driver,
    open_modules,
    rivals,
    heterogeneous_memory,
    link_widths,
    resizable_bar,
    acs,
    iommu,
    pcie_errors,
    kernel_log,
)


def report(seen: NodeReadings) -> list[Check]:
    """Every rule's verdict; a machine that did not answer has one, which fails."""
    if not seen.running:
        return [Check("node", "fail", "did not answer", "nothing could be read", "check ssh to it")]
    return [rule(seen) for rule in RULES]


def verdict(checks: list[Check]) -> Verdict:
    """The worst of them."""
    verdicts = {check.verdict for check in checks}
    return "fail" if "fail" in verdicts else "warn" if "warn" in verdicts else "pass"


def as_text(host: str, checks: list[Check]) -> str:
    lines = [f"{host}: {verdict(checks)}"]
    for check in checks:
        lines.append(f"  {check.verdict:<4}  {check.name}: {check.reading}")
        if check.verdict != "pass":
            lines += [f"          why: {check.why}", f"          what to do: {check.do}"]
    return "\n".join(lines)


def as_json(host: str, checks: list[Check]) -> str:
    """One line, so that the reports of many nodes are JSON lines."""
    return json.dumps({"host": host, "verdict": verdict(checks), "checks": [asdict(check) for check in checks]})

"""The lab's own: what a boot of the node decides, before anything else of it runs.

A container has no kernel of its own. So `uname -r`, the kernel command line and the PCI devices of the
machine that the node stands for are laid over the real ones here, for the programs that read them.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from . import machine

GRUB = Path("/boot/grub/grub.cfg")
PCI = Path("/sys/bus/pci/devices")


def main() -> None:
    machine.STATE.mkdir(exist_ok=True)
    release = machine.next_kernel()
    machine.KERNEL.write_text(f"{release}\n")
    machine.PINNED_ONCE.unlink(missing_ok=True)
    machine.BOOTS.parent.mkdir(parents=True, exist_ok=True)
    boots = int(machine.BOOTS.read_text()) if machine.BOOTS.exists() else 0
    machine.BOOTS.write_text(f"{boots + 1}\n")
    lay_over(Path("/proc/cmdline"), f"BOOT_IMAGE=/boot/vmlinuz-{release} {command_line(release)}\n")
    show_pci()


def command_line(release: str) -> str:
    """Of this kernel, as the last update-grub wrote it."""
    text = GRUB.read_text() if GRUB.exists() else ""
    found = re.search(rf"^\s*linux\s+/boot/vmlinuz-{re.escape(release)} (.*)$", text, re.MULTILINE)
    return found[1] if found else "root=/dev/mapper/pve-root ro quiet"


def lay_over(target: Path, text: str) -> None:
    """Let `target`, a file of the kernel, say `text` until the next boot."""
    source = machine.STATE / f"over{str(target).replace('/', '-')}"
    source.write_text(text)
    if target.exists():
        subprocess.run(["mount", "--bind", source, target], check=True)


def show_pci() -> None:
    """The recorded devices, in place of this machine's: the attributes that were recorded, and no others."""
    if not PCI.is_dir():
        return
    shown = machine.STATE / "pci-devices"
    for device in machine.pci_devices():
        directory = shown / device.address
        directory.mkdir(parents=True, exist_ok=True)
        values = {"vendor": f"0x{device.vendor}", "device": f"0x{device.device}", "class": f"0x{device.pci_class}"}
        if device.width:
            values |= {"current_link_speed": device.speed, "current_link_width": device.width}
        for name, value in values.items():
            (directory / name).write_text(f"{value}\n")
    subprocess.run(["mount", "--bind", shown, PCI], check=True)

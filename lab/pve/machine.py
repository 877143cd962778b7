"""The machine that the lab's node pretends to be: its GPUs from recordings, its kernels, its boot.

What a boot decides lies below /run/gpubox-lab and is gone after it; what outlives one lies where PVE keeps it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

RECORDINGS = Path("/usr/share/gpubox-lab/recordings")  # of one machine
LOST = Path("/var/lib/gpubox-lab/lost-gpus")  # bus addresses, one a line: on PCI, and not initialised by the driver
BOOTS = Path("/var/lib/gpubox-lab/boots")  # how often the node has booted
STATE = Path("/run/gpubox-lab")
KERNEL = STATE / "kernel"  # the release that runs
BOOT = Path("/boot")
PINNED = Path("/etc/kernel/proxmox-boot-pin")
PINNED_ONCE = Path("/etc/kernel/next-boot-pin")
MODULES = Path("/lib/modules")
NVIDIA = "10de"


@dataclass(frozen=True)
class PciDevice:
    """As the recorded machine's sysfs had it; ids in hexadecimal, four or six digits."""

    address: str
    vendor: str
    device: str
    pci_class: str
    speed: str = ""
    width: str = ""

    @property
    def is_gpu(self) -> bool:
        return self.vendor == NVIDIA and self.pci_class.startswith("03")


def recorded(name: str) -> str:
    """The output in a recording, without its command and status. Raises OSError when there is none."""
    lines = (RECORDINGS / name).read_text().splitlines(keepends=True)
    return "".join(lines[1:-1])


def pci_devices() -> list[PciDevice]:
    line = re.compile(r"^(\S+:\S+\.\d) 0x(\w{4}) 0x(\w{4}) 0x(\w{6})(?: ([\d.]+ GT/s PCIe) (\d+))?\s*$", re.MULTILINE)
    return [PciDevice(*(group or "" for group in found)) for found in line.findall(recorded("lspci.txt"))]


def gpus() -> list[PciDevice]:
    return [device for device in pci_devices() if device.is_gpu]


def lost_gpus() -> set[str]:
    return set(LOST.read_text().split()) if LOST.exists() else set()


def kernels() -> list[str]:
    """Installed releases, oldest first."""
    found = [file.name.removeprefix("vmlinuz-") for file in BOOT.glob("vmlinuz-*")]
    return sorted(found, key=release_key)


def release_key(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", release))


def next_kernel() -> str:
    """The kernel that the next boot takes: pinned once, pinned, else the newest."""
    installed = kernels()
    for pin in (PINNED_ONCE, PINNED):
        wanted = pin.read_text().strip() if pin.exists() else ""
        if wanted in installed:
            return wanted
    return installed[-1]


def running_kernel() -> str:
    return KERNEL.read_text().strip()


def module_file(kernel: str) -> Path:
    """Where DKMS puts the stand-in for nvidia.ko: `key=value` lines, as modinfo reads the real one's."""
    return MODULES / kernel / "updates/dkms/nvidia.ko"


def module_info(kernel: str) -> dict[str, str]:
    """Of the nvidia module for `kernel`; empty when it was not built."""
    file = module_file(kernel)
    if not file.exists():
        return {}
    return dict(line.split("=", 1) for line in file.read_text().splitlines() if "=" in line)

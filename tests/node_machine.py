"""A node laid out in a directory: files below a root, and programs that print what a real one printed.

The scripts under test run for real, by sh, with GPUBOX_ROOT and PATH pointing here.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures/node"
H200 = FIXTURES / "h200-x2"
KERNEL = "6.17.2-1-pve"
NEWER = "7.0.2-1-pve"
RECORDED_DRIVER = "580.159.04"
ADDRESSES = ("0000:00:06.0", "0000:00:07.0")
SYSTEM = "/usr/sbin:/usr/bin:/sbin:/bin"
BASE = (
    "awk basename cat cut dash date env false find grep head ls mkdir mknod mv readlink rm sed sh sha256sum sort stat"
)
BASE += " tail timeout touch tr true uniq wc"


def recorded(path: Path) -> str:
    """The output in a recording, without the lines that say what was run and how it ended."""
    lines = path.read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(("$ ", "[rc=", "# ", "bash: line")))


class Machine:
    """Files and programs; `log` has every call of a program made by `records`, a line each."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "root"
        self.bin = directory / "bin"
        self.log = directory / "calls"
        self.root.mkdir()
        self.bin.mkdir()
        for name in BASE.split():
            (self.bin / name).symlink_to(shutil.which(name, path=SYSTEM) or f"/bin/{name}")
        self.log.touch()

    def file(self, path: str, text: str = "") -> Path:
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        return target

    def program(self, name: str, body: str) -> None:
        target = self.bin / name
        target.unlink(missing_ok=True)
        target.write_text(f"#!/bin/sh\n{body}\n")
        target.chmod(0o755)

    def says(self, name: str, text: str, status: int = 0) -> None:
        text_file = self.bin.parent / f"{name}.txt"
        text_file.write_text(text)
        self.program(name, f"cat {shlex.quote(str(text_file))}; exit {status}")

    def records(self, name: str, body: str = "") -> None:
        self.program(name, f'echo "{name} $*" >>{shlex.quote(str(self.log))}\n{body}')

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.bin), "GPUBOX_ROOT": str(self.root), "LC_ALL": "C", "HOME": os.devnull}
        return subprocess.run(
            ["/bin/sh", "-c", script],
            cwd=self.root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


def two_h200(directory: Path) -> Machine:
    """The recorded pair of H200, as a Proxmox VE node whose driver is installed and whose device nodes exist."""
    machine = Machine(directory)
    machine.says("uname", KERNEL + "\n")
    machine.says("pveversion", f"pve-manager/9.1.1/42db4a6cf33dac83 (running kernel: {KERNEL})\n")
    machine.says("lspci", "")
    for kernel in (KERNEL, NEWER):
        machine.file(f"/boot/vmlinuz-{kernel}")
        machine.file(f"/boot/initrd.img-{kernel}")
        machine.file(f"/lib/modules/{kernel}/modules.dep")
    machine.file("/etc/kernel/proxmox-boot-pin", KERNEL + "\n")
    machine.file("/proc/cmdline", f"BOOT_IMAGE=/boot/vmlinuz-{KERNEL} root=/dev/mapper/pve-root ro quiet\n")
    machine.file("/proc/driver/nvidia/version", recorded(H200 / "proc-driver-nvidia-version.txt"))
    machine.file("/proc/modules", recorded(H200 / "modules.txt"))
    machine.file("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm", "Y\n")
    machine.file(f"/usr/lib/x86_64-linux-gnu/libcuda.so.{RECORDED_DRIVER}")
    machine.says("dkms", f"nvidia/{RECORDED_DRIVER}, {KERNEL}, x86_64: installed\n")
    machine.program(
        "modinfo",
        f'[ "$2" = {KERNEL} ] || exit 1\n'
        f"case $4 in version) echo {RECORDED_DRIVER} ;; license) echo Dual MIT/GPL ;; esac",
    )
    for number, address in enumerate(ADDRESSES):
        _pci_device(machine, address)
        machine.file(f"/dev/nvidia{number}", f"c3 {number:x}\n")
        machine.file(
            f"/proc/driver/nvidia/gpus/{address}/information", f"Model: \t\t NVIDIA H200\nDevice Minor: \t {number}\n"
        )
    for name, numbers in (("nvidiactl", "c3 ff"), ("nvidia-uvm", "ee 0"), ("nvidia-uvm-tools", "ee 1")):
        machine.file(f"/dev/{name}", f"{numbers}\n")
    bus_ids = [line.split(", ")[1] for line in recorded(H200 / "nvidia-smi-pcie-q.csv").splitlines()[1:]]
    machine.says("nvidia-smi", "".join(f"{bus_id}\n" for bus_id in bus_ids))
    machine.says("mokutil", "SecureBoot disabled\n")
    machine.says("findmnt", "ext4\n")
    machine.says("journalctl", "")
    machine.program(
        "systemctl", "case $1 in is-enabled) echo enabled ;; is-active) echo active ;; show) echo no ;; esac"
    )
    return machine


def _pci_device(machine: Machine, address: str) -> None:
    """Below a bridge of its own, as sysfs links it. The large region is the 256 GiB that an H200 asks for."""
    bridge = f"0000:00:0{int(address[9]) - 5}.0"
    real = f"/sys/devices/pci0000:00/{bridge}/{address}"
    recorded_line = next(line for line in (H200 / "lspci.txt").read_text().splitlines() if line.startswith(address))
    for name, value in zip(("vendor", "device", "class"), recorded_line.split()[1:4], strict=True):
        machine.file(f"{real}/{name}", f"{value}\n")
    machine.file(f"{real}/current_link_width", "16\n")
    machine.file(f"{real}/max_link_width", "16\n")
    machine.file(
        f"{real}/resource",
        "0x0000000092000000 0x0000000092ffffff 0x0000000000040200\n"
        "0x0000380000000000 0x0000383fffffffff 0x000000000014220c\n"
        "0x0000000000000000 0x0000000000000000 0x0000000000000000\n",
    )
    machine.file(f"{real}/iommu_group/type", "identity\n")
    for kind in ("correctable", "nonfatal", "fatal"):
        machine.file(
            f"{real}/aer_dev_{kind}", f"RxErr 0\nTOTAL_ERR_{'COR' if kind == 'correctable' else kind.upper()} 0\n"
        )
    link = machine.root / f"sys/bus/pci/devices/{address}"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(machine.root / real.lstrip("/"))

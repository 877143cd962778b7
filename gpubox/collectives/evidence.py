"""What the box can see of the reasons for which an all-reduce fails. Each reading is shown as the machine gave it."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Final

from gpubox.errors import RefusedError

NVIDIA_VENDOR: Final = "0x10de"
NEEDED_SHM: Final = 1 << 30  # bytes; NVIDIA's NCCL guide gives containers --shm-size=1g, 64 MiB is known to fail
_UNDERLINE: Final = re.compile(r"\x1b\[\d*m")  # nvidia-smi topo prints it even into a pipe
QUERY: Final = "index,pci.bus_id,utilization.gpu,power.draw,memory.used"
ADVICE: Final = (
    "python node_report.py on the node shows ACS and IOMMU (NVIDIA/nccl#1999): clear ACS or turn the IOMMU off there, "
    "or set the server's profile to one without peer-to-peer"
)


def check_shared_memory(directory: Path = Path("/dev/shm")) -> None:
    """Room for the buffers of ranks that talk through shared memory. Raises RefusedError (NVIDIA/nccl#342: ENOSPC)."""
    try:
        status = os.statvfs(directory)
    except OSError as error:
        raise RefusedError(f"{directory}: {error.strerror}", hint="mount a tmpfs there: NCCL needs it") from None
    free = status.f_bavail * status.f_frsize
    if free < NEEDED_SHM:
        raise RefusedError(
            f"{directory} has {free >> 20} MiB free, the ranks need {NEEDED_SHM >> 20} MiB to talk through it",
            hint=f"remove what lies in it, or: mount -o remount,size=8G {directory}",
        )


def observe() -> str:
    """One line for each thing to look at, taken while the ranks still hang."""
    lines = [
        f"kernel command line: {kernel_arguments() or 'unknown'}",
        f"IOMMU groups by type: {_iommu_types()}",
        *_gpus_in_iommu_groups(),
        *_said_by(["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv"]),
        *_said_by(["nvidia-smi", "topo", "-p2p", "r"]),
        "a GPU near 100 % at low power that neither ends nor fills its memory waits for a peer that it cannot reach;",
        "the table of nvidia-smi topo says OK on such machines too",
    ]
    return "\n".join(lines)


def kernel_arguments() -> str:
    try:
        return Path("/proc/cmdline").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _iommu_types(root: Path = Path("/sys/kernel/iommu_groups")) -> str:
    """identity: addresses pass untranslated. DMA, DMA-FQ: translated, which peer traffic may not survive."""
    types = Counter(path.read_text(encoding="utf-8").strip() for path in root.glob("*/type"))
    return ", ".join(f"{count} {name}" for name, count in sorted(types.items())) or "none (the IOMMU is off)"


def _gpus_in_iommu_groups(root: Path = Path("/sys/bus/pci/devices")) -> list[str]:
    found = []
    for device in sorted(root.glob("*")):
        try:
            vendor, kind = ((device / name).read_text(encoding="utf-8").strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == NVIDIA_VENDOR and kind.startswith("0x03"):
            group = device / "iommu_group"
            name = group.readlink().name if group.is_symlink() else "none"
            found.append(f"GPU {device.name}: IOMMU group {name}, path {device.resolve().relative_to('/sys/devices')}")
    return found


def _said_by(command: list[str]) -> list[str]:
    """A program's output; what it says when it cannot answer is evidence too. A hung driver must not hang this."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except FileNotFoundError:
        return []
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"{' '.join(command)}: {error}"]
    table = _UNDERLINE.sub("", done.stdout + done.stderr).split("Legend:")[0]
    return [line.rstrip() for line in table.splitlines() if line.strip()]

"""What the box knows of its GPUs, from the kernel's driver file and nvidia-smi."""

from __future__ import annotations

import subprocess
from pathlib import Path

from gpubox.errors import GpuboxError

DRIVER_FILE = Path("/proc/driver/nvidia/version")
IDLE_MIB = 1024  # a card without a compute process shows 0 on an H200; display and persistence contexts stay well below


def has_nvidia_driver() -> bool:
    """Whether a kernel module is loaded. The file exists exactly then, in containers too (NVIDIA driver README)."""
    return DRIVER_FILE.exists()


def busy_gpus() -> str:
    """GPUs whose used memory is above the idle level, as '0: 5894 MiB, …'; empty without a driver.

    Raises GpuboxError when there is a driver but nvidia-smi gives no answer: unknown is not idle.
    """
    if not has_nvidia_driver():
        return ""
    command = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GpuboxError(f"nvidia-smi gave no answer: {error}", hint="check the driver on the node") from None
    if done.returncode != 0:
        text = (done.stdout + done.stderr).strip()
        raise GpuboxError(f"nvidia-smi failed ({done.returncode}): {text}", hint="check the driver on the node")
    used = parse_used_memory(done.stdout)
    return ", ".join(f"{index}: {mib} MiB" for index, mib in used.items() if mib > IDLE_MIB)


def parse_used_memory(text: str) -> dict[int, int]:
    """Used MiB by GPU index from CSV lines 'index, memory.used' without header and units. Raises GpuboxError."""
    used: dict[int, int] = {}
    for line in filter(str.strip, text.splitlines()):
        try:
            index, mib = line.split(",")
            used[int(index)] = int(mib)
        except ValueError:
            raise GpuboxError(f"nvidia-smi printed {line!r}, expected 'index, MiB'") from None
    return used

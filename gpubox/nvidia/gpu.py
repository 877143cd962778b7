"""What the box knows of its GPUs, from the kernel's driver file and nvidia-smi."""

from __future__ import annotations

import subprocess
from pathlib import Path

from gpubox.errors import GpuboxError
from gpubox.nvidia.driver import loaded_version

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
    used = parse_used_memory(_query("index,memory.used"))
    return ", ".join(f"{index}: {mib} MiB" for index, mib in used.items() if mib > IDLE_MIB)


def gpu_uuids() -> tuple[str, ...]:
    """The GPUs by index; empty without a driver. Raises GpuboxError as busy_gpus does."""
    return tuple(line.strip() for line in _query("uuid").splitlines()) if has_nvidia_driver() else ()


def gpu_names() -> tuple[str, ...]:
    """The same, as nvidia-smi names the product."""
    return tuple(line.strip() for line in _query("name").splitlines()) if has_nvidia_driver() else ()


def driver_version() -> str:
    """The loaded module's version; empty without one."""
    return (loaded_version(DRIVER_FILE.read_text(encoding="utf-8")) or "unknown") if has_nvidia_driver() else ""


def _query(fields: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GpuboxError(f"nvidia-smi gave no answer: {error}", hint="check the driver on the node") from None
    if done.returncode != 0:
        text = (done.stdout + done.stderr).strip()
        raise GpuboxError(f"nvidia-smi failed ({done.returncode}): {text}", hint="check the driver on the node")
    return done.stdout


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

"""A stand-in for the driver's libcuda.so.1, for machines without an NVIDIA driver.

It is not a driver: the CUDA kernel wheels link libcuda.so.1 and cannot even be imported without one, while the engine's
CPU mode never calls it. Every function returns CUDA_ERROR_NO_DEVICE. On a host with a driver it would hide the real,
so `refuse_on_nvidia_host` is called before it is built or used.

A driver is a kernel module, and the kernel lists its modules in /sys/module, loaded or built in, to containers too; no
file of ours can add one there. /proc/driver/nvidia and /dev/nvidia* prove less: a device node outlives its module, and
the lab lays out both for containers without a GPU. They are asked only where sysfs is not mounted.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from gpubox.build.elf import read_linkage, shared_libraries, undefined_symbols
from gpubox.errors import GpuboxError, RefusedError

SONAME = "libcuda.so.1"
STANDIN = Path("overlay") / "lib" / SONAME  # below a stack's directory
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE in cuda.h

_DRIVER_FUNCTION = re.compile(r"^cu[A-Z]\w*$")
_MODULES = "sys/module"
_MODULE = f"{_MODULES}/nvidia"
_WITHOUT_SYSFS = ("proc/driver/nvidia/version", "dev/nvidiactl")


def refuse_on_nvidia_host(what: str, root: Path = Path("/")) -> None:
    """Raises RefusedError when this host has an NVIDIA driver. `what` begins the message; `root` is / but in tests."""
    traces = (_MODULE,) if (root / _MODULES).is_dir() else _WITHOUT_SYSFS
    for trace in traces:
        if (root / trace).exists():
            raise RefusedError(
                f"{what}: this host has an NVIDIA driver (/{trace} exists), and the libcuda stand-in would hide it",
                hint="deploy this host without the overlay; it is for machines without a GPU",
            )


def driver_symbols(directory: Path) -> list[str]:
    """The driver functions wanted by the libraries below `directory` that link libcuda.so.1, sorted."""
    wanted: set[str] = set()
    for path in shared_libraries(directory):
        linkage = read_linkage(path)
        if linkage is not None and SONAME in linkage.needed:
            wanted.update(filter(_DRIVER_FUNCTION.match, undefined_symbols(path)))
    return sorted(wanted)


def build_standin(directory: Path, symbols: list[str]) -> Path:
    """Compile `directory`/libcuda.so.1 with one function for each symbol. Raises GpuboxError without a C compiler."""
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / SONAME
    source = "".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in symbols)
    # No build id and no debug information: equal symbols give an equal file.
    command = ["gcc", "-shared", "-fPIC", "-s", "-w", "-Wl,--build-id=none", f"-Wl,-soname,{SONAME}", "-x", "c", "-"]
    try:
        run = subprocess.run([*command, "-o", library], input=source, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise GpuboxError(
            "gcc is missing; the libcuda stand-in is compiled here", hint="apt install gcc libc6-dev"
        ) from None
    if run.returncode != 0:
        raise GpuboxError("gcc failed on the libcuda stand-in", hint="apt install gcc libc6-dev", detail=run.stderr)
    return library

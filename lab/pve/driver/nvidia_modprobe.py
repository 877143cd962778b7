#!/usr/bin/python3 -Es
"""A stand-in for nvidia-modprobe @VERSION@, after its source (github.com/NVIDIA/nvidia-modprobe).

Kept: no flag loads nvidia; -c makes a GPU's node (255: nvidiactl); -u loads nvidia_uvm and makes -c's node of uvm and
its tools' node; -m loads nvidia-modeset and makes its node; -f makes the node of a capability; it says nothing and
exits 1 when the module does not load. Mode and owner of the nodes are the driver's parameters.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

PROC = Path("/proc")
DEV = Path("/dev")
NVIDIA_MAJOR = 195
MODESET_MINOR = 254
CONTROL_MINOR = 255
LONG = {"create-nvidia-device-file": "c", "unified-memory": "u", "modeset": "m", "nvidia-capability-device-file": "f"}


def usage_error() -> None:
    print("\nERROR: Invalid commandline, please run `nvidia-modprobe --help` for usage information.\n", file=sys.stderr)
    sys.exit(1)


def parse(arguments: list[str]) -> tuple[list[int], list[str], set[str]]:
    """Minors, capability files, flags."""
    minors: list[int] = []
    capabilities: list[str] = []
    flags: set[str] = set()
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        letter = LONG.get(name, "") if word.startswith("--") else word[1:2]
        attached = value if word.startswith("--") else word[2:]
        if letter in ("u", "m") and not attached and word.startswith("-"):
            flags.add(letter)
        elif letter in ("c", "f") and word.startswith("-"):
            given = attached if attached or equals else (waiting.pop(0) if waiting else "")
            if letter == "f":
                capabilities.append(given)
            elif re.fullmatch(r"\d+", given):
                minors.append(int(given))
            else:
                usage_error()
        else:
            usage_error()
    return minors, capabilities, flags


def load(module: str) -> None:
    done = subprocess.run(["/sbin/modprobe", module], capture_output=True, check=False)
    if done.returncode:
        sys.exit(1)


def major_of(name: str) -> int:
    found = re.search(rf"^\s*(\d+) {re.escape(name)}$", (PROC / "devices").read_text(), re.MULTILINE)
    if found is None:
        sys.exit(1)
    return int(found[1])


def make_node(path: Path, major: int, minor: int, mode: int) -> None:
    """Right as it is, or made anew."""
    number = os.makedev(major, minor)
    if path.exists():
        state = path.stat()
        right = stat.S_ISCHR(state.st_mode) and state.st_rdev == number and stat.S_IMODE(state.st_mode) == mode
        if right:
            return
        path.unlink()
    path.parent.mkdir(mode=0o755, exist_ok=True)
    os.mknod(path, stat.S_IFCHR | mode, number)
    path.chmod(mode)


def device_mode() -> int:
    text = (PROC / "driver/nvidia/params").read_text()
    found = re.search(r"^DeviceFileMode: (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0o666


def make_capability(path: str) -> None:
    text = Path(path).read_text() if Path(path).exists() else ""
    values = dict(re.findall(r"^(DeviceFile\w+): (\d+)$", text, re.MULTILINE))
    if "DeviceFileMinor" not in values:
        sys.exit(1)
    node = DEV / f"nvidia-caps/nvidia-cap{values['DeviceFileMinor']}"
    make_node(node, major_of("nvidia-caps"), int(values["DeviceFileMinor"]), int(values.get("DeviceFileMode", "256")))


def main() -> None:
    os.umask(0)
    minors, capabilities, flags = parse(sys.argv[1:])
    if "u" in flags:
        load("nvidia-uvm")
        for minor in minors:
            make_node(DEV / "nvidia-uvm", major_of("nvidia-uvm"), minor, device_mode())
            make_node(DEV / "nvidia-uvm-tools", major_of("nvidia-uvm"), minor + 1, device_mode())
    else:
        load("nvidia")
        for minor in minors:
            name = {CONTROL_MINOR: "nvidiactl", MODESET_MINOR: "nvidia-modeset"}.get(minor, f"nvidia{minor}")
            make_node(DEV / name, NVIDIA_MAJOR, minor, device_mode())
    if "m" in flags:
        load("nvidia-modeset")
        make_node(DEV / "nvidia-modeset", NVIDIA_MAJOR, MODESET_MINOR, device_mode())
    for capability in capabilities:
        make_capability(capability)


if __name__ == "__main__":
    main()

"""Stand-ins for modprobe and modinfo where nvidia's modules are meant; everything else goes to the real kmod.

Kept: the messages for a module that is not there, `modprobe -r`, `-a`, options of modprobe.d for nvidia_uvm, `modinfo
[-k KERNEL] [-F FIELD] nvidia`. Loading shows what the driver shows below /proc/driver, in /proc/devices and below
/sys/module. Not kept: /proc/modules, on a kernel that has none.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from . import machine

KMOD = "/bin/kmod"
NVIDIA = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm", "nvidia_peermem")
LOADED = machine.STATE / "modules"
DRIVER = Path("/proc/driver")
DEVICES = Path("/proc/devices")
SYS_MODULE = Path("/sys/module")
UVM_MAJORS = (511, 510, 509)  # dynamic on a real machine: another one at each boot here
CAPABILITIES = {"config": (1, 0o400), "monitor": (2, 0o444)}  # minor and mode, as recorded


def modprobe() -> None:
    arguments = sys.argv[1:]
    words = [word for word in arguments if not word.startswith("-")]
    flags = [word for word in arguments if word.startswith("-")]
    several = any(flag in ("-a", "--all", "-r", "--remove") for flag in flags)
    names = [word.replace("-", "_") for word in (words if several else words[:1])]
    if not names or not all(name in NVIDIA for name in names):
        os.execv(KMOD, ["modprobe", *arguments])
    try:
        for name in names:
            unload(name) if "-r" in flags or "--remove" in flags else load(name)
    except LookupError as error:
        if not {"-q", "--quiet"} & set(flags):
            print(f"modprobe: FATAL: {error.args[0]}", file=sys.stderr)
        sys.exit(1)


def modinfo() -> None:
    arguments = sys.argv[1:]
    words: list[str] = []
    options: dict[str, str] = {}
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if word in ("-k", "-F", "-b") and waiting:
            options[word] = waiting.pop(0)
        else:
            words.append(word)
    if [word.replace("-", "_") for word in words] not in [[name] for name in NVIDIA]:
        os.execv(KMOD, ["modinfo", *arguments])
    kernel = options.get("-k", machine.running_kernel())
    info = machine.module_info(kernel)
    if not info:
        print(f"modinfo: ERROR: Module {words[0]} not found.", file=sys.stderr)
        sys.exit(1)
    if "-F" in options:
        print(info.get(options["-F"], ""), end="\n" if options["-F"] in info else "")
    else:
        print(f"{'filename:':<16}{machine.module_file(kernel)}")
        for name, value in info.items():
            print(f"{name + ':':<16}{value}")


def loaded() -> list[str]:
    return sorted(file.name for file in LOADED.glob("*"))


def load(name: str) -> None:
    """Raises LookupError with modprobe's words when the module is not there."""
    kernel = machine.running_kernel()
    info = machine.module_info(kernel)
    if not info:
        raise LookupError(f"Module {name} not found in directory /lib/modules/{kernel}")
    if not (LOADED / "nvidia").exists():
        LOADED.mkdir(parents=True, exist_ok=True)
        _show_driver(info["version"], open_module=info["license"] != "NVIDIA")
        (LOADED / "nvidia").touch()
    (LOADED / name).touch()
    _show_devices()
    _show_modules(info["version"])


def unload(name: str) -> None:
    """Raises LookupError with modprobe's words."""
    present = loaded()
    if name not in present:
        raise LookupError(f"Module {name} is not currently loaded.")
    if name == "nvidia" and len(present) > 1:
        raise LookupError("Module nvidia is in use.")
    (LOADED / name).unlink()
    if name == "nvidia":
        for target in (DRIVER, DEVICES, SYS_MODULE):
            subprocess.run(["umount", target], check=False)
        for shown in ("driver", "sys-module"):
            shutil.rmtree(machine.STATE / shown, ignore_errors=True)
    else:
        _show_devices()


def _show_driver(version: str, *, open_module: bool) -> None:
    """What the driver shows below /proc/driver/nvidia, and the recordings that nvidia-smi replays beside it."""
    shown = machine.STATE / "driver"
    shutil.rmtree(shown, ignore_errors=True)
    nvidia = shown / "nvidia"
    nvidia.mkdir(parents=True)
    banner = machine.recorded("proc-driver-nvidia-version.txt")
    recorded = re.search(r"x86_64  (\S+)", banner)
    banner = banner.replace(recorded[1], version) if recorded else banner
    if not open_module:
        banner = banner.replace("Open Kernel Module for x86_64", "x86_64 Kernel Module")
    (nvidia / "version").write_text(banner)
    (nvidia / "params").write_text("ModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileGID: 0\nDeviceFileMode: 438\n")
    described = machine.recorded("nvidia-smi-q.xml")
    for gpu in machine.gpus():
        block = re.search(rf'<gpu id="0000{gpu.address}">.*?</gpu>', described, re.DOTALL)
        if gpu.address in machine.lost_gpus() or block is None:
            continue
        _write_information(nvidia / "gpus" / gpu.address, gpu.address, block[0], version)
    for name, (minor, mode) in CAPABILITIES.items():
        file = nvidia / "capabilities/mig" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: 1\n")
    (shown / "gpubox-lab").mkdir()
    for recording in machine.RECORDINGS.iterdir():
        shutil.copy(recording, shown / "gpubox-lab")
    subprocess.run(["mount", "--bind", shown, DRIVER], check=True)


def _write_information(directory: Path, address: str, block: str, version: str) -> None:
    """As nv-procfs.c of the open modules prints it; values from the recorded nvidia-smi -q -x."""

    def value(tag: str) -> str:
        found = re.search(rf"<{tag}>(.*?)</{tag}>", block)
        return found[1] if found else ""

    directory.mkdir(parents=True)
    lines = {
        "Model": value("product_name"),
        "IRQ": "-1",
        "GPU UUID": value("uuid"),
        "Video BIOS": value("vbios_version").lower(),
        "Bus Type": "PCIe",
        "Bus Location": address,
        "Device Minor": value("minor_number"),
        "GPU Firmware": version,
        "GPU Excluded": "No",
    }
    (directory / "information").write_text("".join(f"{name}: \t {text}\n" for name, text in lines.items()))


def _show_devices() -> None:
    """/proc/devices with the driver's numbers; that of uvm once uvm is loaded."""
    if os.path.ismount(DEVICES):  # Path.is_mount knows only directories
        subprocess.run(["umount", DEVICES], check=True)
    boots = int(machine.BOOTS.read_text())
    lines = [(195, "nvidia"), (195, "nvidiactl"), (241, "nvidia-caps")]
    if "nvidia_uvm" in loaded():
        lines.append((UVM_MAJORS[boots % len(UVM_MAJORS)], "nvidia-uvm"))
    own = "".join(f"{number:3} {name}\n" for number, name in sorted(lines))
    characters, separator, blocks = DEVICES.read_text().partition("\nBlock devices:")
    source = machine.STATE / "devices"
    source.write_text(f"{characters}{own}{separator}{blocks}")
    subprocess.run(["mount", "--bind", source, DEVICES], check=True)


def _show_modules(version: str) -> None:
    """/sys/module with the loaded modules, in place of the real ones.

    Links to those would need a second mount of them, and with one systemd does not come to the end of a reboot.
    """
    shown = machine.STATE / "sys-module"
    if not SYS_MODULE.is_mount():
        shown.mkdir(exist_ok=True)
        subprocess.run(["mount", "--bind", shown, SYS_MODULE], check=True)
    for name in loaded():
        (shown / name / "parameters").mkdir(parents=True, exist_ok=True)
        (shown / name / "version").write_text(f"{version}\n")
    if "nvidia_uvm" in loaded():
        value = "Y" if "uvm_disable_hmm=1" in _options("nvidia_uvm") else "N"
        (shown / "nvidia_uvm/parameters/uvm_disable_hmm").write_text(f"{value}\n")


def _options(module: str) -> str:
    text = "".join(file.read_text() for file in sorted(Path("/etc/modprobe.d").glob("*.conf")))
    return " ".join(re.findall(rf"^\s*options\s+{module}\s+(.*)$", text.replace("-", "_"), re.MULTILINE))

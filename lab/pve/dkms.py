"""A stand-in for dkms 3, in a package of its name: it keeps dkms's tree and messages, and builds nothing.

Kept: add, build, install, remove, autoinstall, status with -m -v -k --all, MODULE/VERSION; the tree in /var/lib/dkms;
a missing source, missing headers, and a build that fails: below 595, nvidia does not build on Linux 6.19 and newer.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from . import machine

TREE = Path("/var/lib/dkms")
SOURCES = Path("/usr/src")
ARCH = "x86_64"
TOO_NEW = (6, 19)
FIRST_FOR_NEW = 595


class Failure(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def status(module: str, version: str, kernel: str) -> list[str]:
    lines = []
    for directory in sorted(TREE.glob(f"{module or '*'}/{version or '*'}")):
        name = f"{directory.parent.name}/{directory.name}"
        built = sorted(found.parent.name for found in directory.glob(f"*/{ARCH}"))
        for release in built:
            if kernel in ("", release):
                state = "installed" if _installed(directory, release) else "built"
                lines.append(f"{name}, {release}, {ARCH}: {state}")
        if not built and not kernel:
            lines.append(f"{name}: added")
    return lines


def _installed(directory: Path, kernel: str) -> bool:
    return machine.module_info(kernel).get("version") == directory.name


def add(module: str, version: str) -> None:
    source = SOURCES / f"{module}-{version}"
    if not (source / "dkms.conf").exists():
        raise Failure(2, f"Error! Could not find module source directory.\nDirectory: {source} does not exist.")
    if (TREE / module / version).exists():
        text = f"Error! DKMS tree already contains: {module}/{version}\n"
        raise Failure(3, f"{text}You cannot add the same module/version combo more than once.")
    (TREE / module / version).mkdir(parents=True)
    (TREE / module / version / "source").symlink_to(source)


def build(module: str, version: str, kernel: str) -> None:
    tree = TREE / module / version
    if not tree.exists():
        add(module, version)
    if not (machine.MODULES / kernel / "build").exists():
        where = machine.MODULES / kernel
        raise Failure(
            21,
            f"Error! Your kernel headers for kernel {kernel} cannot be found at {where}/build or {where}/source.\n"
            f"Please install the linux-headers-{kernel} package or use the --kernelsourcedir option to tell DKMS "
            "where it's located.",
        )
    if machine.release_key(kernel)[:2] >= TOO_NEW and int(version.split(".", maxsplit=1)[0]) < FIRST_FOR_NEW:
        raise Failure(
            10,
            f"Error! Bad return status for module build on kernel: {kernel} ({ARCH})\n"
            f"Consult {tree}/build/make.log for more information.",
        )
    kind = (SOURCES / f"{module}-{version}" / "module-type").read_text().strip()
    built = tree / kernel / ARCH / "module/nvidia.ko"
    built.parent.mkdir(parents=True, exist_ok=True)
    licence = "Dual MIT/GPL" if kind == "open" else "NVIDIA"
    built.write_text(f"version={version}\nlicense={licence}\nvermagic={kernel} SMP preempt mod_unload modversions \n")


def install(module: str, version: str, kernel: str) -> None:
    built = TREE / module / version / kernel / ARCH / "module/nvidia.ko"
    if not built.exists():
        build(module, version, kernel)
    target = machine.module_file(kernel)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(built, target)


def remove(module: str, version: str, kernel: str) -> None:
    """From one kernel, or with "" from all."""
    tree = TREE / module / version
    if not tree.exists():
        text = f"Error! There are no instances of module: {module}\n{version} is not installed in the DKMS tree."
        raise Failure(3, text)
    for directory in tree.glob(f"{kernel or '*'}/{ARCH}"):
        release = directory.parent.name
        if _installed(tree, release):
            machine.module_file(release).unlink()
        shutil.rmtree(directory.parent)
    if not kernel:
        shutil.rmtree(tree)
        if not any((TREE / module).iterdir()):
            (TREE / module).rmdir()


def autoinstall(kernel: str) -> None:
    for directory in sorted(TREE.glob("*/*")):
        install(directory.parent.name, directory.name, kernel)


def parse(arguments: list[str]) -> tuple[str, str, str, str, bool]:
    """Action, module, version, kernel, --all."""
    values = {"-m": "", "-v": "", "-k": ""}
    words: list[str] = []
    everywhere = False
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if word in values and waiting:
            values[word] = waiting.pop(0)
        elif word == "--all":
            everywhere = True
        elif word == "--force":
            pass
        elif word.startswith("-"):
            raise Failure(2, f"Error! Unknown option: {word}")
        else:
            words.append(word)
    if len(words) > 1:
        values["-m"], _, values["-v"] = words[1].partition("/")
    return words[0] if words else "", values["-m"], values["-v"], values["-k"], everywhere


def run(arguments: list[str]) -> None:
    """Raises Failure."""
    action, module, version, kernel, everywhere = parse(arguments)
    if action not in ("status", "autoinstall", "add", "build", "install", "remove"):
        raise Failure(1, f"Error! Unknown action specified: {action!r}")
    if action in ("add", "build", "install", "remove") and not (module and version):
        raise Failure(1, f"Error! Arguments <module> and <module-version> are not specified.\nUsage: {action} ...")
    if action == "status":
        print("".join(f"{line}\n" for line in status(module, version, kernel)), end="")
    elif action == "autoinstall":
        autoinstall(kernel or machine.running_kernel())
    elif action == "add":
        add(module, version)
    elif action == "remove":
        remove(module, version, "" if everywhere else kernel or machine.running_kernel())
    else:
        (build if action == "build" else install)(module, version, kernel or machine.running_kernel())


def main() -> None:
    try:
        run(sys.argv[1:])
    except Failure as failure:
        print(failure.message, file=sys.stderr)
        sys.exit(failure.status)

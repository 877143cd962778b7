#!/usr/bin/python3 -Es
"""A stand-in for nvidia-smi @VERSION@: it replays recordings of a machine with real GPUs.

Kept: -L, --version, the plain table, --query-gpu and --query-compute-apps as CSV, -q -x, topo, nvlink -s, -i; exit
statuses; its messages without a driver, with a driver of another version, and without a GPU. As the real one run by
root it has nvidia-modprobe load the module and make the GPUs' nodes, where nvidia-modprobe is installed. A GPU is seen
when its device node can be opened. Not kept: everything that was not recorded, which fails with status 64.
"""

from __future__ import annotations

import csv
import errno
import os
import re
import subprocess
import sys
from pathlib import Path

VERSION = "@VERSION@"
PROC = Path("/proc/driver")  # /proc/driver/gpubox-lab: the recordings, put there by the stand-in kernel module
DEV = Path("/dev")
MODPROBE = Path("/usr/bin/nvidia-modprobe")
NOT_LOADED = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running.\n"
)


class Failure(Exception):
    """What is printed on standard output, and the exit status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


def recording(name: str) -> tuple[str, int]:
    """The recorded output of a command, and its status. Raises Failure when there is none."""
    file = PROC / "gpubox-lab" / name
    if not file.exists():
        raise Failure(64, f"nvidia-smi (stand-in of the lab): not recorded: {name}\n")
    lines = file.read_text().splitlines(keepends=True)
    status = re.fullmatch(r"\[rc=(\d+)\]\s*", lines[-1])
    if status is None:
        raise Failure(64, f"nvidia-smi (stand-in of the lab): {file} has no status\n")
    return "".join(lines[1:-1]), int(status[1])


def loaded_version() -> str:
    """Of the kernel module. Raises Failure when it is not loaded or another one than this program's."""
    banner = PROC / "nvidia/version"
    if not banner.exists() and MODPROBE.exists() and os.geteuid() == 0:
        subprocess.run([MODPROBE], check=False)
    if not banner.exists():
        raise Failure(9, NOT_LOADED)
    found = re.search(r"Module .*?(\d+\.\d+(?:\.\d+)?)\s", banner.read_text())
    version = found[1] if found else ""
    if version != VERSION:
        library = ".".join(VERSION.split(".")[:2])
        text = f"Failed to initialize NVML: Driver/library version mismatch\nNVML library version: {library}\n"
        raise Failure(18, text)
    return version


def openable(node: Path) -> int:
    """0, or the errno of opening it. Without a real driver ENXIO and ENODEV are all that an allowed open gets."""
    try:
        os.close(os.open(node, os.O_RDWR))
    except OSError as error:
        return 0 if error.errno in (errno.ENXIO, errno.ENODEV) else error.errno or errno.EIO
    return 0


def gpus() -> list[dict[str, str]]:
    """The GPUs that this machine or container can use: BDF, minor, and their place in the recordings."""
    loaded_version()
    known = []
    for position, file in enumerate(sorted((PROC / "nvidia/gpus").glob("*/information"))):
        minor = re.search(r"^Device Minor:\s*(\d+)", file.read_text(), re.MULTILINE)
        known.append({"bdf": file.parent.name, "minor": minor[1] if minor else "0", "recorded": str(position)})
    if MODPROBE.exists() and os.geteuid() == 0:
        wanted = [word for gpu in known for word in ("-c", gpu["minor"])]
        subprocess.run([MODPROBE, "-c", "255", *wanted], check=False)
    state = openable(DEV / "nvidiactl")
    if state == errno.ENOENT:
        raise Failure(9, NOT_LOADED)
    if state:
        raise Failure(255, "Failed to initialize NVML: Unknown Error\n")
    found = [gpu for gpu in known if openable(DEV / f"nvidia{gpu['minor']}") == 0]
    if not found:
        raise Failure(6, "No devices were found\n")
    return found


def recorded_fields() -> dict[str, dict[int, str]]:
    """Field -> place of the GPU -> value with its unit, from every recorded query; headers as "power.limit [W]"."""
    fields: dict[str, dict[int, str]] = {}
    for name in ("nvidia-smi-query-nounits.csv", "nvidia-smi-pcie-q.csv", "nvidia-smi-query.csv"):
        file = PROC / "gpubox-lab" / name
        if not file.exists():
            continue
        asked = re.match(r"\$ nvidia-smi --query-gpu=(\S+) --format=(\S+)", file.read_text())
        if asked is None:
            raise Failure(64, f"nvidia-smi (stand-in of the lab): {file} is no query\n")
        rows = list(csv.reader(recording(name)[0].splitlines(), skipinitialspace=True))
        header = asked[1].split(",") if "noheader" in asked[2] else rows.pop(0)
        for place, row in enumerate(rows):
            for title, value in zip(header, row, strict=True):
                fields.setdefault(title, {})[place] = value
    return fields


def query_gpus(fields: list[str], seen: list[dict[str, str]], *, header: bool, units: bool) -> str:
    """Raises Failure for a field that no recording has, in the words of the real one for one that does not exist."""
    recorded = recorded_fields()
    titles = {title.split(" ")[0]: title for title in sorted(recorded)}  # those with a unit come later, and win
    lines = []
    for field in fields:
        if field not in titles:
            raise Failure(2, f'Field "{field}" is not a valid field to query.\n\n')
    if header:
        lines.append(", ".join(titles[field] if units else titles[field].split(" ")[0] for field in fields))
    for index, gpu in enumerate(seen):
        place = int(gpu["recorded"])
        values = []
        for field in fields:
            value = recorded[titles[field]].get(place, "[N/A]")
            value = {"index": str(index), "driver_version": VERSION}.get(field, value)
            unit = re.search(r"\[(.+)\]", titles[field])
            values.append(value if units or unit is None else value.removesuffix(f" {unit[1]}"))
        lines.append(", ".join(values))
    return "".join(f"{line}\n" for line in lines)


def list_gpus(seen: list[dict[str, str]]) -> str:
    recorded = recording("nvidia-smi-L.txt")[0].splitlines()
    lines = [recorded[int(gpu["recorded"])] for gpu in seen]
    return "".join(re.sub(r"^GPU \d+", f"GPU {index}", line) + "\n" for index, line in enumerate(lines))


def selected(seen: list[dict[str, str]], wanted: str) -> list[dict[str, str]]:
    """-i: indices, bus addresses. Raises Failure when one of them is not there."""
    found = []
    for word in wanted.split(","):
        matching = [gpu for index, gpu in enumerate(seen) if word == str(index) or gpu["bdf"] in word.lower()]
        if not matching:
            raise Failure(6, "No devices were found\n")
        found += matching
    return found


def whole(name: str, seen: list[dict[str, str]]) -> str:
    """A recording that cannot be cut to fewer GPUs. Raises Failure when some are missing."""
    text, status = recording(name)
    everyone = len(recording("nvidia-smi-L.txt")[0].splitlines())
    if len(seen) != everyone:
        raise Failure(64, f"nvidia-smi (stand-in of the lab): recorded for {everyone} GPUs, here are {len(seen)}\n")
    if status:
        raise Failure(status, text)
    old = re.search(r"\d+\.\d+(\.\d+)?", recording("nvidia-smi-version.txt")[0])
    if old is None:
        return text
    return text.replace(old[0], VERSION.ljust(len(old[0])) if name == "nvidia-smi.txt" else VERSION)


def run(arguments: list[str]) -> str:
    """What goes to standard output. Raises Failure."""
    if arguments == ["--version"]:
        shown = whole("nvidia-smi-version.txt", gpus())
        return re.sub(r"(NVML version\s*: )\S+", rf"\g<1>{'.'.join(VERSION.split('.')[:2])}", shown)
    words = [word for argument in arguments for word in _split(argument)]
    options: dict[str, str] = {}
    plain = []
    while words:
        word = words.pop(0)
        if word in ("-i", "--id", "--format", "--query-gpu", "--query-compute-apps", "-p2p", "-pm", "-pl"):
            if not words:
                raise Failure(2, f"Option {word} requires an argument\n")
            options[word.replace("--id", "-i")] = words.pop(0)
        else:
            plain.append(word)
    seen = gpus()
    if "-i" in options:
        seen = selected(seen, options["-i"])
    return answer(plain, options, seen)


def answer(plain: list[str], options: dict[str, str], seen: list[dict[str, str]]) -> str:
    form = options.get("--format", "").split(",")
    tables = {(): "nvidia-smi.txt", ("-q", "-x"): "nvidia-smi-q.xml", ("topo", "-m"): "nvidia-smi-topo-m.txt"}
    tables[("nvlink", "-s")] = "nvidia-smi-nvlink.txt"
    if "--query-gpu" in options and "csv" in form:
        fields = options["--query-gpu"].split(",")
        return query_gpus(fields, seen, header="noheader" not in form, units="nounits" not in form)
    if "--query-compute-apps" in options and "csv" in form:
        text = recording("nvidia-smi-compute-apps.csv")[0]
        return text if "noheader" not in form else "".join(text.splitlines(keepends=True)[1:])
    if plain == ["topo"] and "-p2p" in options:
        kind = options["-p2p"]
        name = f"nvidia-smi-topo-p2p-{kind}.txt" if kind in "rwnap" else "nvidia-smi-topo-p2p-bad.txt"
        return whole(name, seen)
    if plain in (["-L"], ["--list-gpus"]):
        return list_gpus(seen)
    if "-pm" in options and not plain:
        return "".join(
            f"Persistence mode is already {'En' if options['-pm'] == '1' else 'Dis'}abled for GPU 0000{gpu['bdf']}.\n"
            for gpu in seen
        )
    if tuple(plain) in tables and set(options) <= {"-i"}:
        return whole(tables[tuple(plain)], seen)
    raise Failure(64, f"nvidia-smi (stand-in of the lab): not recorded: {' '.join(plain)} {options}\n")


def _split(argument: str) -> list[str]:
    name, equals, value = argument.partition("=")
    return [name, value] if equals and argument.startswith("-") else [argument]


def main() -> int:
    try:
        sys.stdout.write(run(sys.argv[1:]))
    except Failure as failure:
        sys.stdout.write(failure.text)
        return failure.status
    return 0


if __name__ == "__main__":
    sys.exit(main())

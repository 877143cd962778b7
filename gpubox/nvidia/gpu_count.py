"""How many GPUs a machine has, asked in several places that must agree; one rule for node, container and box.

They differ when a card fell off the bus, when the driver failed to start one, when nobody made the device nodes after
a boot, or when a container still names a card that is gone. A server would then run on fewer GPUs than it thinks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpubox.errors import RefusedError

NVIDIA_MAJOR = 195
# nvidia-modprobe makes them; a box is given ctl, uvm and uvm-tools beside its GPUs.
CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
_GPU_NODE = re.compile(r"/dev/nvidia(\d{1,4})")
_BUS_ID = re.compile(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]")
_DEVICE_NODE = re.compile(r"(/dev/nvidia\S*) ([0-9a-f]{1,8}) ([0-9a-f]{1,8})")


@dataclass(frozen=True)
class DeviceNode:
    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}:{self.minor}"


@dataclass(frozen=True)
class Gpus:
    """What a machine says of its GPUs.

    pci: addresses, in bus order; None where PCI cannot be seen, as in a container without sysfs. driver: address -> N
    of /dev/nvidiaN, None when the driver does not tell; empty while it is not loaded. nodes: the /dev/nvidia* that
    exist. listed: bus ids from nvidia-smi; None when it was not asked, or with what it said instead in `smi_error`.
    """

    pci: tuple[str, ...] | None = None
    driver: Mapping[str, int | None] = field(default_factory=dict)
    nodes: Mapping[str, DeviceNode] = field(default_factory=dict)
    listed: tuple[str, ...] | None = None
    smi_error: str = ""

    @property
    def gpu_nodes(self) -> list[int]:
        """N of each /dev/nvidiaN that is what its name says."""
        found = [(path, _GPU_NODE.fullmatch(path)) for path in self.nodes]
        numbers = [(path, int(match[1])) for path, match in found if match]
        return sorted(number for path, number in numbers if self.nodes[path] == DeviceNode(NVIDIA_MAJOR, number))

    @property
    def wanted_minors(self) -> list[int]:
        """N of /dev/nvidiaN for every GPU: the driver's word, else the nodes', else as many from 0 as PCI shows.

        The last is a guess, for a plan made before the driver is there; `check_gpu_count` stops what is built on a
        wrong one.
        """
        told = [minor for minor in self.driver.values() if minor is not None]
        return sorted(told) or self.gpu_nodes or list(range(len(self.pci or ())))

    @property
    def missing_nodes(self) -> list[str]:
        """Device nodes that boxes are given and that do not exist, or are another device."""
        present = self.gpu_nodes
        gpus = [f"/dev/nvidia{minor}" for minor in self.wanted_minors if minor not in present]
        return [*gpus, *(path for path in CONTROL_NODES if path not in self.nodes)]


class Configured(NamedTuple):
    """GPUs in the configuration of a container ("CT 101"); `gpus` is None before it has one."""

    container: str
    gpus: int | None


class CountProblem(NamedTuple):
    """`text` has every number, with the place that it is from; `hint` says what to do."""

    text: str
    hint: str

    def __str__(self) -> str:
        return f"{self.text}; {self.hint}"


def read_gpus(said: Mapping[str, Sequence[str]]) -> Gpus:
    """The readings in the lines of facts/gpus.py's script, values grouped by key.

    Never raises: a line that does not read as its key says is dropped.
    """
    driver = [value.split() for value in said.get("driver_gpu", ()) if value.strip()]
    return Gpus(
        pci=tuple(said.get("pci_gpu", ())) if "pci_read" in said else None,
        driver={words[0]: _minor(words[1:]) for words in driver},
        nodes=device_nodes(said.get("device_node", ())),
        listed=tuple(filter(_BUS_ID.fullmatch, said.get("smi_gpu", ()))) if "smi_ok" in said else None,
        smi_error=(said.get("smi_error") or [""])[-1],
    )


def device_nodes(lines: Iterable[str]) -> dict[str, DeviceNode]:
    """Lines 'path major minor', the numbers in hexadecimal as stat prints them."""
    found = [match for match in map(_DEVICE_NODE.fullmatch, lines) if match]
    return {match[1]: DeviceNode(int(match[2], 16), int(match[3], 16)) for match in found}


def gpu_paths(paths: Iterable[str]) -> set[str]:
    """Those of the paths that are /dev/nvidiaN."""
    return {path for path in paths if _GPU_NODE.fullmatch(path)}


def counts_text(gpus: Gpus, configured: Configured | None = None) -> str:
    """Every number and where it is from."""
    numbers = {
        "PCI": "not visible" if gpus.pci is None else len(gpus.pci),
        "driver": len(gpus.driver),
        "device nodes": len(gpus.gpu_nodes),
    }
    if configured is not None:
        place, number = f"configuration of {configured.container}", configured.gpus
        numbers[place] = "none yet" if number is None else number
    said = f"no answer ({gpus.smi_error})" if gpus.smi_error else "not asked (no driver is loaded)"
    numbers["nvidia-smi"] = said if gpus.listed is None else len(gpus.listed)
    return ", ".join(f"{place} {number}" for place, number in numbers.items())


def count_problem(gpus: Gpus, configured: Configured | None = None) -> CountProblem | None:
    """None when all places show the same GPUs, and at least one. The rule of every role and report.

    PCI that cannot be seen is judged by the driver's list. A configuration with fewer GPUs than PCI is no problem:
    those that the node got since are added.
    """
    there = len(gpus.driver) if gpus.pci is None else len(gpus.pci)
    named = (configured.gpus or 0) if configured is not None else 0
    same = there == len(gpus.driver) == len(gpus.gpu_nodes) == _listed(gpus) and named <= there
    if same and there and _nodes_fit(gpus):
        return None
    if not (there or gpus.driver or gpus.gpu_nodes or gpus.listed or named):
        title = "there is no GPU"
    else:
        title = "the device nodes are not those of the GPUs" if same else "the GPU counts differ"
    return CountProblem(f"{title}: {counts_text(gpus, configured)}", _hint(gpus, there, configured, named))


def check_gpu_count(node: str, gpus: Gpus, configured: Configured) -> None:
    """Raises RefusedError with all numbers when they differ. A node without GPUs may have containers without any."""
    if not (gpus.pci or gpus.driver or gpus.gpu_nodes or gpus.listed or configured.gpus):
        return
    if problem := count_problem(gpus, configured):
        raise RefusedError(f"{node}: {problem.text}", hint=problem.hint)


def _listed(gpus: Gpus) -> int | None:
    return None if gpus.listed is None else len(gpus.listed)


def _nodes_fit(gpus: Gpus) -> bool:
    """As many nodes as GPUs may still be the wrong ones: minors need not count from 0."""
    told = [minor for minor in gpus.driver.values() if minor is not None]
    return len(told) < len(gpus.driver) or sorted(told) == gpus.gpu_nodes


def _minor(words: list[str]) -> int | None:
    return int(words[0]) if len(words) == 1 and re.fullmatch("[0-9]{1,4}", words[0]) else None


def _hint(gpus: Gpus, there: int, configured: Configured | None, named: int) -> str:
    if named > there and configured is not None:
        return (
            f"{configured.container} names more GPUs than PCI shows: if one was taken out on purpose, take its devN "
            "out too (pct set ID --delete devN) and run again; if not, look for it: lspci -d 10de:, dmesg | grep Xid"
        )
    if not there:
        return "look for them: lspci -d 10de:; check slots, power and Above 4G decoding"
    if gpus.listed is None and not gpus.smi_error:
        return "install the driver on the node, and load it: deploy the node"
    if gpus.listed is None:
        return "make nvidia-smi answer first: it comes with the driver, and tells why it cannot use a GPU"
    if not len(gpus.driver) == len(gpus.listed) == there:
        return (
            "the driver does not run the GPUs that PCI shows: dmesg | grep -e NVRM -e Xid; one may need a cold boot, "
            "or is bound to vfio-pci for a VM"
        )
    names = ", ".join(f"/dev/nvidia{minor}" for minor in gpus.wanted_minors)
    return (
        f"the device nodes must be {names}: on the node nvidia-modprobe -c N makes one, and its unit does at boot; "
        "a container gets them by its devN"
    )

"""How many GPUs a node has, asked in four places that must agree.

They differ when a card fell off the bus, when the driver failed to start one, when nobody made the device nodes after
a boot, or when a container still names a card that is gone. A server would then run on fewer GPUs than it thinks.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field

from gpubox.errors import RefusedError

NVIDIA_MAJOR = 195
# nvidia-modprobe makes them; a box is given ctl, uvm and uvm-tools beside its GPUs.
CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
_DISPLAY_CLASSES = ("0300", "0302")  # VGA controller, 3D controller; a card's audio and USB functions are not GPUs
_GPU_NODE = re.compile(r"/dev/nvidia(\d+)")


@dataclass(frozen=True)
class DeviceNode:
    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}:{self.minor}"


@dataclass(frozen=True)
class NodeGpus:
    """What a node says of its GPUs.

    pci: slots, in bus order. minors: slot -> N of /dev/nvidiaN, from the driver; empty while it is not loaded.
    nodes: the /dev/nvidia* that exist. listed: how many nvidia-smi lists; None when there is no nvidia-smi.
    """

    pci: tuple[str, ...] = ()
    minors: dict[str, int] = field(default_factory=dict)
    nodes: dict[str, DeviceNode] = field(default_factory=dict)
    listed: int | None = None

    @property
    def gpu_nodes(self) -> list[int]:
        """N of each /dev/nvidiaN that is what its name says."""
        found = [(path, _GPU_NODE.fullmatch(path)) for path in self.nodes]
        numbers = [(path, int(match[1])) for path, match in found if match]
        return sorted(number for path, number in numbers if self.nodes[path] == DeviceNode(NVIDIA_MAJOR, number))

    @property
    def wanted_minors(self) -> list[int]:
        """N of /dev/nvidiaN for every GPU on PCI: the driver's word, else the nodes', else as many from 0.

        The last is a guess, for a plan made before the driver is there; `check_gpu_count` stops what is built on a
        wrong one.
        """
        if self.minors:
            return sorted(self.minors.values())
        return self.gpu_nodes or list(range(len(self.pci)))


def gpus_on_pci(lspci: Iterable[str]) -> tuple[str, ...]:
    """Slots of the GPUs in the output of `lspci -Dnmm -d 10de:`."""
    fields = [shlex.split(line) for line in lspci if line.strip()]
    return tuple(sorted(words[0] for words in fields if len(words) > 1 and words[1] in _DISPLAY_CLASSES))


def gpu_paths(paths: Iterable[str]) -> set[str]:
    """Those of the paths that are /dev/nvidiaN."""
    return {path for path in paths if _GPU_NODE.fullmatch(path)}


def check_gpu_count(node: str, gpus: NodeGpus, configured: int | None, container: str) -> None:
    """All four agree. `configured`: GPUs in the container's configuration; None before there is one.

    Raises RefusedError with all four numbers. A configuration with fewer GPUs than PCI is not refused: those that the
    node got since are added.
    """
    pci, nodes, listed = len(gpus.pci), len(gpus.gpu_nodes), gpus.listed
    if not (pci or nodes or configured or listed):
        return  # a node without GPUs
    wrong_nodes = bool(gpus.minors) and sorted(gpus.minors.values()) != gpus.gpu_nodes
    if pci == nodes == listed and (configured or 0) <= pci and not wrong_nodes:
        return
    numbers = (
        f"PCI {pci}, device nodes {nodes}, configuration of {container} {_number(configured, 'none yet')}, "
        f"nvidia-smi {_number(listed, 'not installed')}"
    )
    raise RefusedError(f"{node}: the GPU counts differ: {numbers}", hint=_hint(gpus, configured, container))


def _number(value: int | None, absent: str) -> str:
    return absent if value is None else str(value)


def _hint(gpus: NodeGpus, configured: int | None, container: str) -> str:
    pci = len(gpus.pci)
    if (configured or 0) > pci:
        return (
            f"{container} names more GPUs than PCI shows: if one was taken out on purpose, take its devN out too "
            "(pct set ID --delete devN) and run again; if not, look for it: lspci -d 10de:, dmesg | grep Xid"
        )
    if gpus.listed is None:
        return "install the driver on the node: with its nvidia-smi"
    if gpus.listed != pci:
        return (
            "the driver does not run the GPUs that PCI shows: dmesg | grep -e NVRM -e Xid; one may need a cold boot, "
            "or is bound to vfio-pci for a VM"
        )
    names = ", ".join(f"/dev/nvidia{minor}" for minor in sorted(gpus.minors.values())) or f"{pci} of /dev/nvidiaN"
    return f"the device nodes must be {names}: nvidia-modprobe -c N makes one; the node's unit does it at boot"

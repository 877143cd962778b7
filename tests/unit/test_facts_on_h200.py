"""What our scripts printed on a real GPU machine, read by the same code that reads a box and a node."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from facts.containers import Containers
from gpubox.nvidia import userland
from gpubox.nvidia.box_readings import BoxReadings, read_box
from gpubox.nvidia.gpu_count import DeviceNode, Gpus, count_problem
from gpubox.proxmox.node_readings import read_node

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures/facts-h200"
DRIVER = "580.159.04"


def lines(name: str) -> list[str]:
    return (FIXTURES / f"{name}.txt").read_text().splitlines()


def box() -> BoxReadings:
    said: defaultdict[str, list[str]] = defaultdict(list)
    for line in lines("box"):
        key, _, value = line.partition(" ")
        said[key].append(value)
    return read_box(said)


def test_the_gpu_counts_agree_and_cuda_starts() -> None:
    seen = box()
    assert seen.loaded == DRIVER
    assert count_problem(seen.gpus) is None
    assert userland.cuda_problems(seen) == []
    assert seen.uvm_major == "238"


def test_a_compat_package_of_the_toolkit_is_found() -> None:
    """H7: it came with the image of that machine."""
    assert [package.name for package in box().driver_packages] == ["cuda-compat-13-0"]


def test_all_three_read_the_same_gpus() -> None:
    gpus = Gpus(
        pci=("0000:00:06.0",),
        driver={"0000:00:06.0": 0},
        nodes={
            "/dev/nvidia-uvm": DeviceNode(238, 0),
            "/dev/nvidia-uvm-tools": DeviceNode(238, 1),
            "/dev/nvidia0": DeviceNode(195, 0),
            "/dev/nvidiactl": DeviceNode(195, 255),
        },
        listed=("00000000:00:06.0",),
    )
    assert box().gpus == Containers().process(lines("containers")).gpus == read_node(lines("node")).gpus == gpus
    assert (gpus.wanted_minors, gpus.gpu_nodes, gpus.missing_nodes) == ([0], [0], [])


def test_a_node_reads_its_driver() -> None:
    seen = read_node(lines("node"))
    assert (seen.loaded_driver, seen.loaded_open) == (DRIVER, True)
    assert count_problem(seen.gpus) is None

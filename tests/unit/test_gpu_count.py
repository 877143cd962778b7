"""The one rule on GPU counts, and the one reading that it judges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from facts import gpus as facts
from gpubox.errors import RefusedError
from gpubox.nvidia.gpu_count import (
    Configured,
    DeviceNode,
    Gpus,
    check_gpu_count,
    count_problem,
    counts_text,
    device_nodes,
    read_gpus,
)
from tests.gpus import gpus_of
from tests.node_machine import ADDRESSES, Machine, two_h200

TWO = gpus_of(ADDRESSES)
BLIND = replace(TWO, listed=None, smi_error="No devices were found")


def configured(gpus: int | None) -> Configured:
    return Configured("CT 101", gpus)


def without(path: str) -> Gpus:
    return replace(TWO, nodes={name: node for name, node in TWO.nodes.items() if name != path})


def driver(*minors: int | None) -> Gpus:
    return replace(TWO, driver=dict(zip(ADDRESSES, minors, strict=False)))


@pytest.mark.parametrize("known", [None, 0, 1, 2])
def test_counts_that_agree(known: int | None) -> None:
    """A configuration with fewer: one was added to the node, and is added to the container."""
    assert count_problem(TWO) is None
    check_gpu_count("pve1", TWO, configured(known))


@pytest.mark.parametrize(
    ("seen", "known", "numbers", "hint"),
    [
        (replace(driver(0), listed=("a",)), 2, "PCI 2, driver 1, device nodes 2, {} 2, nvidia-smi 1", "NVRM"),
        (driver(None), 2, "PCI 2, driver 1, device nodes 2, {} 2, nvidia-smi 2", "NVRM"),
        (replace(TWO, listed=("a",)), 2, "PCI 2, driver 2, device nodes 2, {} 2, nvidia-smi 1", "NVRM"),
        (
            without("/dev/nvidia1"),
            None,
            "PCI 2, driver 2, device nodes 1, {} none yet, nvidia-smi 2",
            "nvidia-modprobe",
        ),
        (gpus_of(ADDRESSES[:1]), 2, "PCI 1, driver 1, device nodes 1, {} 2, nvidia-smi 1", "taken out"),
        (
            BLIND,
            2,
            "PCI 2, driver 2, device nodes 2, {} 2, nvidia-smi no answer (No devices were found)",
            "answer first",
        ),
        (
            Gpus(pci=ADDRESSES),
            2,
            "PCI 2, driver 0, device nodes 0, {} 2, nvidia-smi not asked (no driver is loaded)",
            "install the driver",
        ),
        (Gpus(pci=(), listed=()), 1, "PCI 0, driver 0, device nodes 0, {} 1, nvidia-smi 0", "taken out"),
        (
            replace(TWO, nodes={**TWO.nodes, "/dev/nvidia2": DeviceNode(195, 2)}),
            2,
            "PCI 2, driver 2, device nodes 3, {} 2, nvidia-smi 2",
            "must be /dev/nvidia0, /dev/nvidia1:",
        ),
        (
            replace(TWO, pci=None, listed=("a",)),
            2,
            "PCI not visible, driver 2, device nodes 2, {} 2, nvidia-smi 1",
            "NVRM",
        ),
    ],
)
def test_counts_that_differ_stop_with_all_of_them(seen: Gpus, known: int | None, numbers: str, hint: str) -> None:
    said = numbers.format("configuration of CT 101")
    with pytest.raises(RefusedError) as refused:
        check_gpu_count("pve1", seen, configured(known))
    assert refused.value.message == f"pve1: the GPU counts differ: {said}"
    assert hint in refused.value.hint


@given(
    st.none() | st.lists(st.sampled_from(["a", "b", "c"]), unique=True),
    st.dictionaries(st.sampled_from(["a", "b", "c"]), st.none() | st.integers(0, 3)),
    st.sets(st.integers(0, 3)),
    st.none() | st.lists(st.sampled_from(["a", "b", "c"]), unique=True),
    st.none() | st.integers(0, 4),
)
def test_whatever_differs_every_number_is_told(
    pci: list[str] | None, told: dict[str, int | None], nodes: set[int], listed: list[str] | None, known: int | None
) -> None:
    seen = Gpus(
        pci=None if pci is None else tuple(pci),
        driver=told,
        nodes={f"/dev/nvidia{minor}": DeviceNode(195, minor) for minor in nodes},
        listed=None if listed is None else tuple(listed),
    )
    numbers = {len(told), len(nodes), *([] if pci is None else [len(pci)]), None if listed is None else len(listed)}
    problem = count_problem(seen, configured(known))
    if problem is None:
        assert len(numbers) == 1
        assert (known or 0) <= len(told) > 0
        return
    assert problem.hint
    text = problem.text
    assert ("PCI not visible" if pci is None else f"PCI {len(pci)}") in text
    assert f"driver {len(told)}, device nodes {len(nodes)}, configuration of CT 101 " in text
    assert text.endswith(
        "nvidia-smi not asked (no driver is loaded)" if listed is None else f"nvidia-smi {len(listed)}"
    )


def test_a_machine_without_gpus_is_a_problem_where_they_are_wanted() -> None:
    assert str(count_problem(Gpus(pci=()))).startswith(
        "there is no GPU: PCI 0, driver 0, device nodes 0, nvidia-smi not"
    )
    check_gpu_count("pve1", Gpus(pci=()), configured(0))


def test_pci_that_cannot_be_seen_is_judged_by_the_driver() -> None:
    assert count_problem(replace(TWO, pci=None)) is None
    assert counts_text(replace(TWO, pci=None)) == "PCI not visible, driver 2, device nodes 2, nvidia-smi 2"


def test_a_node_of_another_device_is_no_gpu() -> None:
    wrong = replace(TWO, nodes={**TWO.nodes, "/dev/nvidia1": DeviceNode(1, 3)})
    with pytest.raises(RefusedError, match="device nodes 1"):
        check_gpu_count("pve1", wrong, configured(1))
    assert wrong.missing_nodes == ["/dev/nvidia1"]


def test_minors_need_not_count_from_zero() -> None:
    problem = count_problem(driver(0, 5))
    assert problem is not None
    assert problem.text.startswith("the device nodes are not those of the GPUs: PCI 2, driver 2, device nodes 2,")
    assert "must be /dev/nvidia0, /dev/nvidia5:" in problem.hint
    assert driver(3, 1).wanted_minors == [1, 3]
    assert driver(None).wanted_minors == [0, 1], "the nodes' word where the driver tells nothing"
    assert Gpus(pci=("a", "b", "c")).wanted_minors == [0, 1, 2], "a guess before there is a driver"


# The reading.

KEYS = st.sampled_from(["pci_read", "pci_gpu", "driver_gpu", "device_node", "smi_ok", "smi_gpu", "smi_error"])


@given(st.dictionaries(KEYS, st.lists(st.text(max_size=30), min_size=1)))
def test_any_lines_are_a_reading_that_can_be_judged(said: dict[str, list[str]]) -> None:
    count_problem(read_gpus(said), configured(1))


NODES = st.dictionaries(
    st.from_regex(r"/dev/nvidia[a-z0-9-]{0,12}", fullmatch=True),
    st.builds(DeviceNode, st.integers(0, 4095), st.integers(0, (1 << 20) - 1)),
)


@given(NODES)
def test_device_nodes_round_trip(nodes: dict[str, DeviceNode]) -> None:
    assert device_nodes(f"{path} {node.major:x} {node.minor:x}" for path, node in nodes.items()) == nodes


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    yield two_h200(tmp_path)


def read(machine: Machine) -> Gpus:
    done = machine.run("\n".join([facts.SHELL, facts.COUNT, facts.ASK_SMI, "true"]))
    assert (done.returncode, done.stderr) == (0, "")
    said: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        said.setdefault(key, []).append(value)
    return read_gpus(said)


def pci_function(machine: Machine, address: str, **attributes: Any) -> None:
    for name, value in attributes.items():
        machine.file(f"/sys/bus/pci/devices/{address}/{name.rstrip('_')}", f"{value}\n")


def test_gpus_on_pci_are_display_controllers(machine: Machine) -> None:
    pci_function(machine, "0000:c1:00.0", vendor="0x10de", class_="0x030000")
    pci_function(machine, "0000:c1:00.1", vendor="0x10de", class_="0x040300")  # its audio
    pci_function(machine, "0000:05:00.0", vendor="0x10de", class_="0x068000")  # an NVSwitch
    pci_function(machine, "0000:02:00.0", vendor="0x1a03", class_="0x030000")  # the board's own graphics
    pci_function(machine, "0000:03:00.0", vendor="0x10de")
    assert read(machine).pci == (*ADDRESSES, "0000:c1:00.0")


def test_without_sysfs_pci_is_not_visible(machine: Machine) -> None:
    (machine.root / "sys").rename(machine.root / "no-sys")
    assert read(machine).pci is None


def test_a_gpu_whose_minor_the_driver_does_not_tell(machine: Machine) -> None:
    (machine.root / f"proc/driver/nvidia/gpus/{ADDRESSES[1]}/information").unlink()
    assert read(machine).driver == {ADDRESSES[0]: 0, ADDRESSES[1]: None}


def test_links_and_directories_are_no_device_nodes(machine: Machine) -> None:
    before = read(machine).nodes
    (machine.root / "dev/nvidia7").symlink_to("nvidia0")
    machine.file("/dev/nvidia-caps/nvidia-cap1", "f1 1")
    assert read(machine).nodes == before


def test_only_bus_ids_are_gpus_of_nvidia_smi(machine: Machine) -> None:
    machine.program("nvidia-smi", "echo 00000000:00:06.0; echo WARNING: something else; echo 00000000:C1:00.0")
    assert read(machine).listed == ("00000000:00:06.0", "00000000:C1:00.0")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo; echo Unable to determine the device handle; exit 15", "Unable to determine the device handle"),
        ("exit 9", "nothing in 90 s"),
    ],
)
def test_what_nvidia_smi_said_instead(machine: Machine, body: str, said: str) -> None:
    machine.program("nvidia-smi", body)
    assert (read(machine).listed, read(machine).smi_error) == (None, said)


def test_nvidia_smi_that_is_missing_is_said_only_with_a_driver(machine: Machine) -> None:
    (machine.bin / "nvidia-smi").unlink()
    assert read(machine).smi_error == "it is not installed"
    (machine.root / "proc/driver/nvidia/version").unlink()
    assert read(machine).smi_error == ""

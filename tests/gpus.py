"""What a machine says of its GPUs when all places agree."""

from __future__ import annotations

from collections.abc import Sequence

from gpubox.nvidia.gpu_count import NVIDIA_MAJOR, DeviceNode, Gpus

UVM_MAJOR = 510


def device_nodes(minors: Sequence[int]) -> dict[str, DeviceNode]:
    return {
        **{f"/dev/nvidia{minor}": DeviceNode(NVIDIA_MAJOR, minor) for minor in minors},
        "/dev/nvidiactl": DeviceNode(NVIDIA_MAJOR, 255),
        "/dev/nvidia-uvm": DeviceNode(UVM_MAJOR, 0),
        "/dev/nvidia-uvm-tools": DeviceNode(UVM_MAJOR, 1),
    }


def gpus_of(addresses: Sequence[str]) -> Gpus:
    minors = range(len(addresses))
    return Gpus(
        pci=tuple(addresses),
        driver=dict(zip(addresses, minors, strict=True)),
        nodes=device_nodes(minors),
        listed=tuple(f"0000{address}" for address in addresses),
    )

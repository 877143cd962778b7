"""The lab's hosts, and the container once more: by plain ssh into it."""

from runpy import run_path as _run_path

from lab.settings import guest_address as _guest_address

_lab = _run_path("inventories/lab.py")

proxmox_nodes = _lab["proxmox_nodes"]
gpu_boxes = _lab["gpu_boxes"]
ssh_boxes = [
    ("the-container", {**data, "ssh_hostname": str(_guest_address(name, 101))}) for name, data in proxmox_nodes
]

"""Your hosts. `pyinfra inventory.py debug-inventory` shows what pyinfra makes of this file.

A GPU box is a container on a Proxmox VE node, which the deploy makes, or any machine with sshd, bare metal included:

    proxmox_nodes = [("pve1", {"ssh_hostname": "pve1.example"})]
    gpu_boxes = ["@pct/pve1/101"]              # container 101 on the node pve1, through the node's ssh
    gpu_boxes = ["box.example"]                # an ssh host

A host may carry its own values, which win over group_data/:

    gpu_boxes = [("@pct/pve1/101", {"stack": "cuda128"})]
"""

proxmox_nodes: list[str] = []
gpu_boxes: list[str] = []

if not gpu_boxes:
    raise SystemExit("inventory.py: gpu_boxes is empty: name your hosts there (for a try without one: make demo)")

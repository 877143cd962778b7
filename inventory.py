"""Your hosts. Each name is an ssh host; `pyinfra inventory.py debug-inventory` shows what pyinfra makes of this file.

A host may carry its own values, which win over group_data/:

    gpu_boxes = [("box.example", {"ssh_user": "root", "stack": "cuda128"})]
"""

gpu_boxes: list[str] = []

if not gpu_boxes:
    raise SystemExit("inventory.py: gpu_boxes is empty: name your hosts there (for a try without one: make demo)")

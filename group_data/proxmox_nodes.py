"""Your values for every Proxmox VE node; docs/node.md explains each. A node's own value in the inventory wins."""

ssh_user = "root"

# NVIDIA's .run file: fetch it once, put it on the node, write its hash here. Your boxes use the same one.
# Or from apt, with "repository" and "key" in the place of "run" and "sha256": docs/driver.md
driver = {
    "version": "590.48.01",
    "run": "/root/NVIDIA-Linux-x86_64-590.48.01.run",
    "sha256": "b9e2f80693781431cc87f4cd29109e133dcecb50a50d6b68d4b3bf2d696bd689",
}
allow_reboot = False  # a deploy that needs a reboot says so and stops

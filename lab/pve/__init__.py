"""Stand-ins for the programs of a Proxmox VE node, installed into the lab's nodes (docs/lab-node.md).

They keep the syntax, the formats, the exit statuses and the error strings of pve-container 6, pve-manager 9 and
pve-storage 9, and make real LXC containers. Only Python's standard library: a node has no other.
"""

"""Stand-ins for pveversion, pvecm and ha-manager on a node without a cluster.

Kept: `pveversion [--verbose]`; `pvecm status|nodes` with the error of a node in no cluster; `ha-manager status` and
`crm-command node-maintenance enable|disable NODE`, which is recorded where the real one's manager records it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from . import config as conf
from . import machine, version

MANAGER = Path("/etc/pve/ha/manager_status")


def pveversion() -> None:
    words = sys.argv[1:]
    if any(word not in ("--verbose", "-verbose", "-v") for word in words):
        print("USAGE: pveversion [--verbose]", file=sys.stderr)
        sys.exit(255)
    kernel, pve = machine.running_kernel(), version.current()
    manager = f"{pve.manager}/{pve.repository_id}"
    if not words:
        print(f"pve-manager/{manager} (running kernel: {kernel})")
        return
    print(f"proxmox-ve: {pve.release}.0 (running kernel: {kernel})")
    print(f"pve-manager: {pve.manager} (running version: {manager})")


def pvecm() -> None:
    if sys.argv[1:2] in (["status"], ["nodes"]):
        message = "Corosync config '/etc/pve/corosync.conf' does not exist - is this node part of a cluster?"
        print(f"Error: {message}", file=sys.stderr)
        sys.exit(2)
    sys.exit("ERROR: the lab's pvecm knows status and nodes")


def ha_manager() -> None:
    words = sys.argv[1:]
    if words == ["status"]:
        print("quorum OK")
        return
    known = (["crm-command", "node-maintenance", "enable"], ["crm-command", "node-maintenance", "disable"])
    if len(words) != 4 or words[:3] not in known:
        sys.exit("ERROR: the lab's ha-manager knows status and crm-command node-maintenance enable|disable NODE")
    if words[3] != conf.node_name():
        print(f"400 Parameter verification failed.\nnode: no such cluster node '{words[3]}'", file=sys.stderr)
        sys.exit(255)
    MANAGER.parent.mkdir(exist_ok=True)
    state = "maintenance" if words[2] == "enable" else "online"
    status = {"manager_status": {"master_node": words[3]}, "node_status": {words[3]: state}, "service_status": {}}
    MANAGER.write_text(json.dumps(status, separators=(",", ":")))

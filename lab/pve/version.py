"""Which Proxmox VE the lab's node says it is: 8.4, as its system is Debian 12, unless somebody chose another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CHOICE = Path("/var/lib/gpubox-lab/pve")  # a key of KNOWN


@dataclass(frozen=True)
class Version:
    """hotplugs_devices: `pct set` adds a new devN to a running container at once."""

    manager: str
    release: str
    repository_id: str
    hotplugs_devices: bool


# Device hotplug came with pve-container 6.0.4 (Debian 13, PVE 9.0; its commit c702167). The newest one for PVE 8, 5.3.5
# on its branch stable-bookworm, has none.
KNOWN = {
    "8": Version("8.4.14", "8.4", "b502d23c55afcba1", hotplugs_devices=False),
    "9": Version("9.1.1", "9.1", "42db4a6cf33dac83", hotplugs_devices=True),
}


def current() -> Version:
    return KNOWN[CHOICE.read_text().strip() if CHOICE.exists() else "8"]

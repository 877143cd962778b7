"""What PVE tells of its containers: `pct list`, `pct status --verbose`, /nodes/NODE/lxc."""

from __future__ import annotations

import os
from pathlib import Path

from . import config as conf
from . import lxc
from .errors import PveError
from .options import ROOTFS
from .schema import parse_property_string

UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
Status = dict[str, str | int]


def guests() -> list[Status]:
    return [guest_status(vmid) for vmid in conf.vmids()]


def guest_status(vmid: str) -> Status:
    """One container, sizes in bytes and times in seconds. Raises PveError when there is none."""
    settings = conf.load(vmid).settings
    running = lxc.is_running(vmid)
    status: Status = {
        "cpu": 0,
        "cpus": int(settings.get("cores", os.cpu_count() or 1)),
        "disk": 0,
        "diskread": 0,
        "diskwrite": 0,
        "maxdisk": _disk_size(settings.get("rootfs", "")),
        "maxmem": int(settings.get("memory", "512")) * 1024**2,
        "maxswap": int(settings.get("swap", "0")) * 1024**2,
        "mem": 0,
        "name": settings.get("hostname", f"CT{vmid}"),
        "netin": 0,
        "netout": 0,
        "status": "running" if running else "stopped",
        "swap": 0,
        "type": "lxc",
        "uptime": 0,
        "vmid": int(vmid),
    }
    status |= {name: settings[name] for name in ("lock", "tags", "template") if name in settings}
    return status | (_of_running(vmid) if running else {})


def _of_running(vmid: str) -> Status:
    try:
        pid = lxc.init_pid(vmid)
        started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (PveError, OSError, IndexError):  # it has just stopped
        return {}
    return {"pid": pid, "uptime": max(0, int(uptime - started / os.sysconf("SC_CLK_TCK")))}


def _disk_size(rootfs: str) -> int:
    size = parse_property_string(ROOTFS, rootfs).get("size", "4G") if rootfs else "4G"
    unit = size[-1] if size[-1] in UNITS else ""
    return int(float(size.removesuffix(unit)) * UNITS[unit])

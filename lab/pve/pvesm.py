"""A stand-in for `pvesm`, Proxmox VE's command for storages (pve-storage 8). Kept: status, list, path, alloc, free."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping

from . import storage
from .cli import Command, Values
from .cli import main as run_cli
from .schema import STORAGE_ID, Parameter


def _status(values: Values, _rest: list[str]) -> None:
    rows = list(storage.storages().values())
    if "storage" in values:
        rows = [storage.storage(values["storage"])]
    if "content" in values:
        rows = [row for row in rows if set(row.content) & set(re.split(r"[,;\s]+", values["content"]))]
    width = max([len(row.name) for row in rows], default=0) + 1
    titles = ("Name", "Type", "Status", "Total", "Used", "Available", "%")
    print(f"{titles[0]:<{width}} {'Type':>10} {'Status':>10} {'Total':>15} {'Used':>15} {'Available':>15} {'%':>8}")
    for row in sorted(rows, key=lambda row: row.name):
        total, used, free = row.sizes() if row.enabled else (0, 0, 0)
        state = "active" if row.enabled else "disabled"
        share = f"{used * 100 / total if total else 0: 7.2f}%" if row.enabled else f"{'N/A':>8}"
        sizes = " ".join(f"{size // 1024:>15}" for size in (total, used, free))
        print(f"{row.name:<{width}} {row.kind:>10} {state:>10} {sizes} {share}")


def _list(values: Values, _rest: list[str]) -> None:
    where = storage.storage(values["storage"])
    rows = []
    for file in sorted(where.templates.glob("*.tar.*")) if where.kind == "dir" else []:
        form = {"zst": "tzst", "gz": "tgz", "xz": "txz"}.get(file.suffix[1:], "")
        if form:
            rows.append((f"{where.name}:vztmpl/{file.name}", form, "vztmpl", str(file.stat().st_size), ""))
    for volume in sorted(where.directory.glob("subvol-*-disk-*")) if where.kind != "dir" else []:
        rows.append((f"{where.name}:{volume.name}", "subvol", "rootdir", "0", volume.name.split("-")[1]))
    rows = [row for row in rows if values.get("content", row[2]) == row[2] and values.get("vmid", row[4]) == row[4]]
    names = max([len(row[0]) for row in rows], default=0)
    sizes = max([len(row[3]) for row in rows], default=0)
    print(f"{'Volid':<{names}} {'Format':<7} {'Type':<9} {'Size':>{sizes}} VMID")
    for name, form, kind, size, vmid in rows:
        print(f"{name:<{names}} {form:<7} {kind:<9} {size:>{sizes}} {vmid}".rstrip())


def _path(values: Values, _rest: list[str]) -> None:
    name, volume = storage.split_volume_id(values["volume"])
    print(storage.storage(name).volume_path(volume))


def _free(values: Values, _rest: list[str]) -> None:
    storage.free(values["volume"])
    print(f"Removed volume '{values['volume']}'")


_STORAGE = Parameter(check=STORAGE_ID)
_NEEDED = Parameter(optional=False, check=STORAGE_ID)
_WORD = Parameter()
_VOLUME = Parameter(optional=False)
COMMANDS: Mapping[str, Command] = {
    "status": Command(_status, (), {"storage": _STORAGE, "content": Parameter(is_list=True)}),
    "list": Command(_list, ("storage",), {"storage": _NEEDED, "content": _WORD, "vmid": _WORD}),
    "path": Command(_path, ("volume",), {"volume": _VOLUME}),
    "free": Command(_free, ("volume",), {"volume": _VOLUME}),
}


def main() -> None:
    sys.exit(run_cli("pvesm", COMMANDS, sys.argv[1:]))

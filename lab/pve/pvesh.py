"""A stand-in for `pvesh`, the command that speaks Proxmox VE's API (pve-manager).

Kept: the paths below, their keys, `--output-format`, --noborder ignored, error strings. What there is:
get /version, /nodes, /nodes/N/lxc, /nodes/N/lxc/ID/config|pending|status/current, /nodes/N/storage, /nodes/N/aplinfo;
create /nodes/N/startall|stopall, /nodes/N/lxc/ID/status/start|stop.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from . import config as conf
from . import guests, pct, storage
from .cli import Command, Values
from .cli import main as run_cli
from .errors import NOT_FOUND, PveError
from .options import BOOLEAN
from .schema import Parameter
from .status import guest_status
from .status import guests as guest_list
from .update import shown
from .version import current

Answer = object


def _version() -> Answer:
    pve = current()
    return {"release": pve.release, "repoid": pve.repository_id, "version": pve.manager}


def _nodes() -> Answer:
    name = conf.node_name()
    uptime = int(time.time() - Path("/proc/1").stat().st_mtime)
    return [{"id": f"node/{name}", "node": name, "status": "online", "type": "node", "uptime": uptime}]


def _config(vmid: str) -> Answer:
    config = shown(conf.load(vmid), current=False)
    raw = {"lxc": [list(line) for line in config.raw]} if config.raw else {}
    return {**config.settings, **raw, "digest": config.digest}


def _pending(vmid: str) -> Answer:
    config = conf.load(vmid)
    keys = sorted({*config.settings, *config.pending.settings} - {"delete"})
    rows = []
    for key in keys:
        row: dict[str, object] = {"key": key}
        row |= {"value": config.settings[key]} if key in config.settings else {}
        row |= {"pending": config.pending.settings[key]} if key in config.pending.settings else {}
        row |= {"delete": 1} if key in config.pending_deletes() else {}
        rows.append(row)
    return rows


def _storages() -> Answer:
    rows = []
    for where in storage.storages().values():
        total, used, available = where.sizes()
        rows.append(
            {
                "active": 1,
                "avail": available,
                "content": ",".join(where.content),
                "enabled": int(where.enabled),
                "shared": 0,
                "storage": where.name,
                "total": total,
                "type": where.kind,
                "used": used,
                "used_fraction": used / total if total else 0,
            }
        )
    return rows


NODE = r"/nodes/(?P<node>[^/]+)"
GET: Mapping[str, Callable[..., Answer]] = {
    "/version": _version,
    "/nodes": _nodes,
    f"{NODE}/version": _version,
    f"{NODE}/lxc": guest_list,
    rf"{NODE}/lxc/(?P<vmid>\d+)/config": _config,
    rf"{NODE}/lxc/(?P<vmid>\d+)/pending": _pending,
    rf"{NODE}/lxc/(?P<vmid>\d+)/status/current": guest_status,
    f"{NODE}/storage": _storages,
}
CREATE: Mapping[str, Callable[..., Answer]] = {
    f"{NODE}/startall": guests.start_all,
    f"{NODE}/stopall": guests.stop_all,
    rf"{NODE}/lxc/(?P<vmid>\d+)/status/start": pct.start,
    rf"{NODE}/lxc/(?P<vmid>\d+)/status/stop": lambda vmid: pct.stop(vmid, kill=True),
}


def _call(paths: Mapping[str, Callable[..., Answer]], verb: str, values: Values) -> None:
    path = "/" + values["api_path"].strip("/")
    for pattern, answer in paths.items():
        found = re.fullmatch(pattern, path)
        if found is None:
            continue
        words = found.groupdict()
        node = words.pop("node", conf.node_name())
        if node not in ("localhost", conf.node_name()):
            raise PveError(f"no such cluster node '{node}'")
        _print(answer(**words), values)
        return
    raise PveError(f"No '{verb}' handler defined for '{path}'", NOT_FOUND)


def _print(answer: Answer, values: Values) -> None:
    if answer is None or values.get("nooutput") == "1":
        return
    if values.get("output-format", "text") == "json-pretty":
        print(json.dumps(answer, indent=3, sort_keys=True))
    elif values.get("output-format", "text") == "json":
        print(json.dumps(answer, separators=(",", ":")))
    else:
        raise PveError("the lab's pvesh prints only --output-format json and json-pretty")


_PARAMETERS = {
    "api_path": Parameter(optional=False),
    "output-format": Parameter(enum=("text", "json", "json-pretty", "yaml")),
    "nooutput": BOOLEAN,
    "quiet": BOOLEAN,
    "noproxy": BOOLEAN,
    "human-readable": BOOLEAN,
}
COMMANDS: Mapping[str, Command] = {
    "get": Command(lambda values, _rest: _call(GET, "get", values), ("api_path",), _PARAMETERS),
    "create": Command(lambda values, _rest: _call(CREATE, "create", values), ("api_path",), _PARAMETERS),
}


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] == ["--nooutput"]:  # pvesh takes it before the command too
        arguments = [*arguments[1:], "--nooutput"]
    sys.exit(run_cli("pvesh", COMMANDS, arguments))

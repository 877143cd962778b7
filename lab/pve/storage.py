"""Storages of a node, as /etc/pve/storage.cfg names them.

`dir` storages are directories as on PVE. A `zfspool` storage is a plain directory here, /POOL, whose subvolumes are
directories: sizes are recorded and not enforced, and the only limit is that of the file system below.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from .config import ETC, node_name
from .errors import NOT_FOUND, PveError

GIB = 1024**3


@dataclass(frozen=True)
class Storage:
    name: str
    kind: str
    settings: dict[str, str]

    @property
    def content(self) -> list[str]:
        return self.settings.get("content", "").split(",")

    @property
    def directory(self) -> Path:
        return Path(self.settings["path"]) if self.kind == "dir" else Path("/") / self.settings["pool"]

    @property
    def enabled(self) -> bool:
        return "disable" not in self.settings

    @property
    def templates(self) -> Path:
        return self.directory / "template/cache"

    def sizes(self) -> tuple[int, int, int]:
        """Total, used, free in bytes."""
        state = os.statvfs(self.directory)
        free = state.f_bavail * state.f_frsize
        total = state.f_blocks * state.f_frsize
        return total, total - free, free

    def volume_path(self, volume: str) -> Path:
        if self.kind == "dir" and volume.startswith("vztmpl/"):
            return self.templates / volume.removeprefix("vztmpl/")
        return self.directory / "images" / volume if self.kind == "dir" else self.directory / volume


def storages() -> dict[str, Storage]:
    found: dict[str, Storage] = {}
    current: Storage | None = None
    for line in (ETC / "storage.cfg").read_text().splitlines():
        header = re.fullmatch(r"([a-z]+):\s*(\S+)\s*", line)
        setting = re.fullmatch(r"\s+([a-z_-]+)(?:\s+(.*?))?\s*", line)
        if header:
            current = found[header[2]] = Storage(header[2], header[1], {})
        elif setting and current:
            current.settings[setting[1]] = setting[2] or "1"
    return found


def storage(name: str) -> Storage:
    """An enabled storage. Raises PveError."""
    found = storages().get(name)
    if found is None:
        raise PveError(f"storage '{name}' does not exist")
    if not found.enabled:
        raise PveError(f"storage '{name}' is disabled")
    nodes = found.settings.get("nodes")
    if nodes and node_name() not in nodes.split(","):
        raise PveError(f"storage '{name}' is not available on node '{node_name()}'")
    return found


def split_volume_id(volume_id: str) -> tuple[str, str]:
    parsed = re.fullmatch(r"([a-zA-Z][a-zA-Z0-9._-]*[a-zA-Z0-9]):(.+)", volume_id)
    if parsed is None:
        raise PveError(f"unable to parse volume ID '{volume_id}'")
    return parsed[1], parsed[2]


def volume_path(volume_id: str) -> Path:
    name, volume = split_volume_id(volume_id)
    return storage(name).volume_path(volume)


def template_path(volume_id: str) -> Path:
    """The archive behind `local:vztmpl/NAME`. Raises PveError for another kind of volume, or a missing file."""
    name, volume = split_volume_id(volume_id)
    where = storage(name)
    if where.kind == "dir" and not re.fullmatch(r"vztmpl/[^/]+\.tar\.(gz|xz|zst|bz2)", volume):
        raise PveError(f"unable to parse directory volume name '{volume}'")
    if where.kind != "dir":
        raise PveError(f"unable to parse zfs volume name '{volume}'")
    found = where.volume_path(volume)
    if not found.is_file():
        raise PveError(f"volume '{volume_id}' does not exist", NOT_FOUND)
    return found


def allocate(name: str, vmid: str) -> str:
    """An empty volume for a container; its id. Raises PveError."""
    where = storage(name)
    if "rootdir" not in where.content:
        raise PveError(f"content type 'rootdir' is not available or configured on storage '{name}'")
    for number in range(256):
        base = f"subvol-{vmid}-disk-{number}"
        volume = f"{vmid}/{base}.subvol" if where.kind == "dir" else base
        directory = where.volume_path(volume)
        try:
            directory.mkdir(parents=where.kind == "dir")
        except FileExistsError:
            continue
        except OSError as error:
            raise PveError(f"zfs error: cannot create '{directory}': {error.strerror.lower()}") from error
        directory.chmod(0o755)
        return f"{name}:{volume}"
    raise PveError(f"unable to allocate an image name for VM {vmid} in storage '{name}'")


def volumes_of(vmid: str) -> list[str]:
    """Ids of the volumes that carry a container's number, on every storage that may hold them."""
    found = []
    for where in storages().values():
        if where.enabled and "rootdir" in where.content:
            below = where.directory / "images" / vmid if where.kind == "dir" else where.directory
            for directory in sorted(below.glob(f"subvol-{vmid}-disk-*")):
                volume = f"{vmid}/{directory.name}" if where.kind == "dir" else directory.name
                found.append(f"{where.name}:{volume}")
    return found


def free(volume_id: str) -> None:
    """Remove a volume and what is in it; fine when it is gone already."""
    directory = volume_path(volume_id)
    if directory.exists():
        shutil.rmtree(directory)

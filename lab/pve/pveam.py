"""A stand-in for `pveam`, Proxmox VE's command for container templates (pve-manager).

Kept: commands, output, error strings. The index is the directory that the lab fills with its templates, so nothing
is fetched from a network; `download` copies a file from there and checks its sha512.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from . import storage
from .cli import Command, Values
from .cli import main as run_cli
from .errors import PveError, verification_failed
from .schema import STORAGE_ID, Parameter

INDEX = Path("/usr/share/gpubox-lab/templates")  # NAME and NAME.json with section, sha512
UPDATED = Path("/var/lib/pve-manager/apl-info/gpubox-lab")


def _update(_values: Values, _rest: list[str]) -> None:
    UPDATED.parent.mkdir(parents=True, exist_ok=True)
    UPDATED.touch()
    print("update successful")


def _index() -> dict[str, dict[str, str]]:
    """Templates by name; empty before the first `pveam update`."""
    files = sorted(INDEX.glob("*.json")) if UPDATED.exists() else []
    return {file.stem: json.loads(file.read_text()) for file in files}


def _available(values: Values, _rest: list[str]) -> None:
    for name, entry in sorted(_index().items(), key=lambda item: (item[1]["section"], item[0])):
        if values.get("section", entry["section"]) == entry["section"]:
            print(f"{entry['section']:<15} {name}")


def _download(values: Values, _rest: list[str]) -> None:
    name = values["template"]
    entry = _index().get(name)
    if entry is None:
        raise verification_failed({"template": "no such template"})
    where = storage.storage(values["storage"])
    if "vztmpl" not in where.content:
        raise PveError(f"storage '{where.name}' does not support templates")
    target = where.templates / name
    print(f"downloading {INDEX / name} to {target}")
    if target.exists() and _sha512(target) == entry["sha512"]:
        print("OK, got correct file already, no need to download")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f"{name}.tmp_dwnl")
    try:
        shutil.copyfile(INDEX / name, new)
        print("calculating checksum...", end="", flush=True)
        found = _sha512(new)
        if found != entry["sha512"]:
            raise PveError(f"ERROR, checksum mismatch: got '{found}' != expect '{entry['sha512']}'")
        print("OK, checksum verified")
        new.replace(target)
    except OSError as error:
        raise PveError(f"download failed: {error.strerror}") from error
    finally:
        new.unlink(missing_ok=True)
    print(f"download of '{INDEX / name}' to '{target}' finished")


def _sha512(file: Path) -> str:
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha512").hexdigest()


def _list(values: Values, _rest: list[str]) -> None:
    where = storage.storage(values["storage"])
    if "vztmpl" not in where.content:
        raise PveError("Storage does not support templates!")
    print(f"{'NAME':<60} {'SIZE':<6}")
    for file in sorted(where.templates.glob("*.tar.*")):
        if file.suffix in (".gz", ".xz", ".zst"):
            print(f"{where.name + ':vztmpl/' + file.name:<60} {file.stat().st_size / 1024**2:<4.2f}MB")


def _remove(values: Values, _rest: list[str]) -> None:
    storage.template_path(values["template_path"]).unlink()


_STORAGE = Parameter(optional=False, check=STORAGE_ID)
_WORD = Parameter(optional=False, max_length=255)
COMMANDS: Mapping[str, Command] = {
    "update": Command(_update),
    "available": Command(_available, (), {"section": Parameter(enum=("system", "mail", "turnkeylinux"))}),
    "download": Command(_download, ("storage", "template"), {"storage": _STORAGE, "template": _WORD}),
    "list": Command(_list, ("storage",), {"storage": _STORAGE}),
    "remove": Command(_remove, ("template_path",), {"template_path": _WORD}),
}


def main() -> None:
    sys.exit(run_cli("pveam", COMMANDS, sys.argv[1:]))

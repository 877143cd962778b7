"""A stand-in for systemd-modules-load where nvidia's modules are named: the real one loads by library.

The unit keeps its name, so what is ordered after it is. Modules that are not nvidia's are left to the machine's kernel.
"""

from __future__ import annotations

import sys
from pathlib import Path

from . import kmod

DIRECTORIES = ("/etc/modules-load.d", "/run/modules-load.d", "/usr/local/lib/modules-load.d", "/usr/lib/modules-load.d")


def wanted() -> list[str]:
    """Names in the files, each once; a file hides those of its name in later directories."""
    files: dict[str, Path] = {}
    for directory in DIRECTORIES:
        for file in sorted(Path(directory).glob("*.conf")):
            files.setdefault(file.name, file)
    lines = [line.strip() for name in sorted(files) for line in files[name].read_text().splitlines()]
    lines += Path("/etc/modules").read_text().split("\n") if Path("/etc/modules").exists() else []
    return list(dict.fromkeys(line.replace("-", "_") for line in lines if line and line[0] not in "#;"))


def main() -> None:
    failed = False
    for name in wanted():
        if name not in kmod.NVIDIA:
            continue
        try:
            kmod.load(name)
            print(f"Inserted module '{name}'")
        except LookupError:
            print(f"Failed to find module '{name}'", file=sys.stderr)
            failed = True
    sys.exit(failed)

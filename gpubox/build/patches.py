"""Apply a stack's patches to installed wheels without touching the wheel cache."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from gpubox.errors import GpuboxError, InputError


def apply_patches(patches: list[Path], site_packages: Path) -> None:
    """Apply unified diffs (paths as in a/package/module.py) in order, exactly: no fuzz. Raises GpuboxError."""
    for patch in patches:
        for name in patched_files(patch.read_text(encoding="utf-8"), patch.name):
            unshare(site_packages / name)
        command = ["patch", "--batch", "--forward", "--fuzz=0", "--no-backup-if-mismatch", "--reject-file=-", "-p1"]
        try:
            run = subprocess.run(
                [*command, "-d", site_packages, "-i", patch], capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            raise GpuboxError("the command patch is missing", hint="apt install patch") from None
        if run.returncode != 0:
            raise GpuboxError(
                f"{patch.name}: does not apply to the locked wheels",
                hint="make the patch anew against the locked version",
                detail=run.stdout + run.stderr,
            )


def patched_files(diff: str, origin: str) -> list[str]:
    """The files that a diff changes. Raises InputError for a path that leaves the directory it is applied in."""
    names = [match[1] for match in re.finditer(r"^\+\+\+ b/([^\t\n]+)", diff, re.MULTILINE)]
    for name in names:
        if ".." in Path(name).parts:
            raise InputError(f"{origin}: changes {name!r}", hint="a patch changes files below site-packages only")
    if not names:
        raise InputError(f"{origin}: no line starts with '+++ b/'", hint="make it with `git diff`")
    return names


def unshare(path: Path) -> None:
    """Give `path` its own bytes: installed files are hard links into the wheel cache, which serves other stacks."""
    if path.exists():
        copy = path.with_name(f".{path.name}.unshared")
        shutil.copy2(path, copy)
        copy.replace(path)

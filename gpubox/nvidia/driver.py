"""The NVIDIA driver that the operator wants: one version, one file, by hash. And what the kernel says is loaded."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from gpubox.toml import Strict

Version = Annotated[str, Field(pattern=r"^\d+\.\d+(\.\d+)?$")]

# Closed: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  Wed Aug ..."
# Open:   "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  590.48.01  Release Build ..."
_BANNER = re.compile(r"^NVRM version: NVIDIA UNIX .*?Kernel Module .*?(?P<version>\d+\.\d+(?:\.\d+)?)\s", re.MULTILINE)


class DriverSettings(Strict):
    """`run` is where the host finds NVIDIA's .run file: an absolute path on it, or an https address."""

    version: Version
    run: Annotated[str, Field(pattern=r"^(/|https://).*\.run$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def loaded_version(banner: str) -> str | None:
    """The full version in /proc/driver/nvidia/version, of the open or the closed module; None without one."""
    found = _BANNER.search(banner)
    return found["version"] if found else None


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version or kernel release: '6.17.2-1-pve' -> (6, 17, 2, 1)."""
    head = re.match(r"\d+(?:[.-]\d+)*", version)
    return tuple(int(part) for part in re.split(r"[.-]", head[0])) if head else ()

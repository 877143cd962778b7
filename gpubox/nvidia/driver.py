"""The NVIDIA driver that the operator wants: one version, from one file by hash or from apt. And what is loaded.

Both ways end in the same thing and are looked at by the same rules: the open modules of exactly that version, built by
DKMS, and libraries of exactly that version.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from gpubox.nvidia.repository import RepositorySettings
from gpubox.toml import VARIANT, Strict

Version = Annotated[str, Field(pattern=r"^\d+\.\d+(\.\d+)?$")]

# Closed: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  Wed Aug ..."
# Open:   "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  590.48.01  Release Build ..."
_BANNER = re.compile(r"^NVRM version: NVIDIA UNIX .*?Kernel Module .*?(?P<version>\d+\.\d+(?:\.\d+)?)\s", re.MULTILINE)


class DriverSettings(Strict):
    """What both ways have: the full version, as in /proc/driver/nvidia/version."""

    version: Version


class RunFileDriver(DriverSettings):
    """`run` is where the host finds NVIDIA's .run file: an absolute path on it, or an https address."""

    run: Annotated[str, Field(pattern=r"^(/|https://).*\.run$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class PackagedDriver(RepositorySettings, DriverSettings):
    """apt packages of that version, of whatever revision (590.48.01-1), from one repository."""


def _way(value: Any) -> str | None:
    """Which of the two the operator means; None for both at once and for neither."""
    names = value if isinstance(value, dict) else value.__class__.model_fields if hasattr(value, "version") else ()
    ways = [way for way, keys in _KEYS.items() if any(key in names for key in keys)]
    return f"{VARIANT}{ways[0]}" if len(ways) == 1 else None


_KEYS = {"run": ("run", "sha256"), "repository": ("repository", "key", "suite", "components", "fingerprint")}
AnyDriver = Annotated[
    Annotated[RunFileDriver, Tag(f"{VARIANT}run")] | Annotated[PackagedDriver, Tag(f"{VARIANT}repository")],
    Discriminator(
        _way,
        custom_error_type="driver_way",
        custom_error_message="a version and either run and sha256 (NVIDIA's .run file) or repository (apt packages)",
    ),
]


def loaded_version(banner: str) -> str | None:
    """The full version in /proc/driver/nvidia/version, of the open or the closed module; None without one."""
    found = _BANNER.search(banner)
    return found["version"] if found else None


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version or kernel release: '6.17.2-1-pve' -> (6, 17, 2, 1)."""
    head = re.match(r"\d+(?:[.-]\d+)*", version)
    return tuple(int(part) for part in re.split(r"[.-]", head[0])) if head else ()

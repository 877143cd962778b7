"""The base image: a tarball made by mmdebstrap, kept as long as its recipe stays the same."""

from __future__ import annotations

import os
from pathlib import Path

from gpubox.canonical import short_digest
from lab.machine import apt_settings
from lab.mounts import remove_tree
from lab.progress import step
from lab.settings import CACHE
from lab.shell import ENDS_WITH_US, run

SUITE = "bookworm"  # its systemd 252 also boots where the host still mounts cgroup v1; newer ones refuse
PACKAGES = (
    "systemd,systemd-sysv,dbus,openssh-server,python3,python3-venv,ca-certificates,"
    "iproute2,procps,curl,g++,gcc,libc6-dev,libnuma1,python3-dev"
)
WORK = CACHE / ".building"


def recipe() -> list[str]:
    """Arguments of mmdebstrap; everything that decides what is in the image."""
    return [
        "--mode=root",
        "--variant=minbase",
        f"--include={PACKAGES}",
        *(f"--aptopt={line}" for line in apt_settings()),
        *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "info", "locale")),
        "--skip=cleanup/apt/lists",  # so that apt-get install works in a box at once
        SUITE,
    ]


def image_path() -> Path:
    """Where the tarball of the present recipe is, or will be."""
    return CACHE / f"image-{short_digest(recipe())}.tar"


def ensure_image() -> Path:
    """Build the tarball unless it is there, and remove those of older recipes."""
    image = image_path()
    if not image.exists():
        remove_tree(WORK)
        WORK.mkdir(parents=True)
        with step(f"building the base image {image.name} ({SUITE}; about two minutes, once)"):
            building = WORK / image.name
            run(*ENDS_WITH_US, "mmdebstrap", *recipe(), building, environment=os.environ | {"TMPDIR": str(WORK)})
            building.replace(image)
        remove_tree(WORK)
    for old in CACHE.glob("image-*.tar"):
        if old != image:
            old.unlink()
    return image

"""The images: tarballs kept as long as their recipes stay the same. mmdebstrap makes the base."""

from __future__ import annotations

import os
from pathlib import Path

from gpubox.canonical import short_digest
from lab import machine, node_packages
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
NODE_PACKAGES = (
    "lxc",
    "ifupdown",
    "bridge-utils",
    "zstd",
    "xz-utils",
    "kmod",
    "build-essential",
    "mokutil",
    "pciutils",
)
DIVERTED = ("/usr/bin/uname", "/usr/bin/lspci", "/sbin/modprobe", "/sbin/modinfo")  # stand-ins take their place
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
    _remove_others("image-*.tar", image)
    return image


def node_image_path() -> Path:
    """The same for a node: the base image and more packages."""
    return CACHE / f"node-{short_digest([*recipe(), *NODE_PACKAGES, *DIVERTED, *node_packages.recipe()])}.tar"


def ensure_node_image() -> Path:
    """Build the tarball of a node unless it is there."""
    base, image = ensure_image(), node_image_path()
    if not image.exists():
        root = WORK / "node"
        with step(f"building the node image {image.name} (base image and {len(NODE_PACKAGES)} packages, once)"):
            unpack(base, root)
            machine.carry_into(root)
            _add_repository(root)
            _install(root, NODE_PACKAGES)
            for program in DIVERTED:
                run("chroot", root, "dpkg-divert", "--quiet", "--local", "--rename", "--add", program)
            building = WORK / image.name
            run(*ENDS_WITH_US, "tar", "--create", "--numeric-owner", "--file", building, "--directory", root, ".")
            building.replace(image)
        remove_tree(WORK)
    _remove_others("node-*.tar", image)
    return image


def ensure_template() -> Path:
    """The base image as a container template, compressed."""
    base = ensure_image()
    template = CACHE / f"template-{base.stem.removeprefix('image-')}.tar.zst"
    if not template.exists():
        with step(f"compressing the base image as container template {template.name}"):
            WORK.mkdir(parents=True, exist_ok=True)
            building = WORK / template.name
            run(*ENDS_WITH_US, "zstd", "-q", "-3", "-T0", "-f", "-o", building, base)
            building.replace(template)
        remove_tree(WORK)
    _remove_others("template-*.tar.zst", template)
    _remove_others("template-*.sha512", template.with_name(f"{template.name}.sha512"))
    return template


def unpack(image: Path, root: Path) -> None:
    """Unpack a tarball into the fresh directory `root`."""
    remove_tree(root)
    root.mkdir(parents=True)
    extract = ("tar", "--extract", "--numeric-owner", "--preserve-permissions")
    run(*ENDS_WITH_US, *extract, "--file", image, "--directory", root)


def _add_repository(root: Path) -> None:
    """The lab's own repository, in which Proxmox's names are found."""
    directory = root / node_packages.REPOSITORY
    directory.mkdir(parents=True)
    source = f"deb [trusted=yes] file:/{node_packages.REPOSITORY} ./\n"
    (root / "etc/apt/sources.list.d/gpubox-lab.list").write_text(source)
    (directory / "Packages").touch()  # so that apt-get update goes on while dpkg-dev is still to come
    _install(root, ("dpkg-dev",))
    run("chroot", root, "sh", "-c", f"cd /{node_packages.REPOSITORY} && {{ {node_packages.build_script()} }}")


def _install(root: Path, packages: tuple[str, ...]) -> None:
    """Install packages into the file system below `root`; nothing is started there."""
    policy = root / "usr/sbin/policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    apt = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-y", "--no-install-recommends")
    run(*ENDS_WITH_US, "chroot", root, *apt, "update")
    run(*ENDS_WITH_US, "chroot", root, *apt, "install", *packages)
    run(*ENDS_WITH_US, "chroot", root, "apt-get", "clean")
    policy.unlink()


def _remove_others(pattern: str, kept: Path) -> None:
    for old in CACHE.glob(pattern):
        if old != kept:
            old.unlink()

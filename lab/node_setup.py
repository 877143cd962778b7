"""What makes the node image one node: stand-in programs and units, /etc/pve, the bridge, the template."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from gpubox.errors import GpuboxError
from lab import driver_run, image, node_packages
from lab.settings import GATEWAY, SUBNET, address, hardware_address
from lab.shell import run

SOURCE = Path(__file__).parent / "pve"
LIBRARY = Path("usr/lib/gpubox-lab")
SHARE = Path("usr/share/gpubox-lab")
TEMPLATE = "debian-12-standard_12.99-1_amd64.tar.zst"  # a version that Debian does not have

PROGRAMS = {  # path: module below lab/pve, and its function
    "usr/sbin/pct": "pct:main",
    "usr/bin/pveam": "pveam:main",
    "usr/bin/pvesh": "pvesh:main",
    "usr/sbin/pvesm": "pvesm:main",
    "usr/bin/pveversion": "cluster:pveversion",
    "usr/bin/pvecm": "cluster:pvecm",
    "usr/sbin/ha-manager": "cluster:ha_manager",
    "usr/share/lxc/hooks/lxc-pve-prestart-hook": "prestart:main",
    "usr/sbin/proxmox-boot-tool": "boot_tool:main",
    "usr/sbin/update-grub": "boot_tool:update_grub",
    "usr/sbin/update-initramfs": "boot_tool:update_initramfs",
    "usr/bin/lspci": "lspci:main",
    "sbin/modprobe": "kmod:modprobe",
    "sbin/modinfo": "kmod:modinfo",
    "usr/lib/gpubox-lab/boot": "boot:main",
    "usr/lib/gpubox-lab/modules-load": "modules_load:main",
    "usr/lib/gpubox-lab/dkms": "dkms:main",  # called by the package dkms
}
UNITS = ("gpubox-lab-boot.service", "pve-container@.service", "pve-guests.service")
DROP_INS = {"systemd-modules-load.service.d/gpubox-lab.conf": "modules-load.conf"}
ENABLED = ("gpubox-lab-boot.service", "pve-guests.service")
MASKED = ("lxc.service", "lxc-net.service", "lxc-monitord.service")

BARE = ("pve-manager", f"proxmox-kernel-{node_packages.RUNNING}-signed")  # installed before anybody deploys
NODE_GPUS = {"node1": "h200-x2", "node2": "h200", "testnode1": "h200-x2", "testnode2": "h200"}  # recordings

STORAGE = """\
dir: local
\tpath /var/lib/vz
\tcontent iso,vztmpl,backup

zfspool: local-zfs
\tpool rpool/data
\tsparse
\tcontent images,rootdir
"""


def furnish(root: Path, name: str) -> None:
    """Make the unpacked node image below `root` the node `name`."""
    _write(root, "etc/network/interfaces", interfaces(name))
    _write(root, "etc/hosts", f"127.0.0.1 localhost\n{address(name)} {name}.lab {name}\n")
    _write(root, "etc/default/grub", 'GRUB_DEFAULT=0\nGRUB_CMDLINE_LINUX_DEFAULT="quiet"\nGRUB_CMDLINE_LINUX=""\n')
    _make_pve(root, name)
    _install_programs(root)
    _install_units(root)
    shutil.copytree(SOURCE / "recordings" / NODE_GPUS[name], root / SHARE / "recordings")
    run("chroot", root, "apt-get", "-q", "-y", "install", *BARE)
    run("chroot", root, "update-grub")
    _offer_template(root)
    _offer_driver(root)


def interfaces(name: str) -> str:
    """/etc/network/interfaces as Proxmox's installer writes it: the address is on the bridge."""
    return f"""\
auto lo
iface lo inet loopback

iface eth0 inet manual

auto vmbr0
iface vmbr0 inet static
\taddress {address(name)}/{SUBNET.prefixlen}
\tgateway {GATEWAY}
\tbridge-ports eth0
\tbridge-stp off
\tbridge-fd 0
\tbridge-hw {hardware_address(name)}
"""


def template_sha512() -> str:
    """Of the template in the lab's cache. Raises GpuboxError when it is not there yet."""
    recorded = sorted(image.CACHE.glob("template-*.tar.zst.sha512"))
    if not recorded:
        raise GpuboxError("lab: the container template is not built yet", hint="python -m lab up node1")
    return recorded[-1].read_text().strip()


def _write(root: Path, path: str | Path, text: str, mode: int = 0o644) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    target.chmod(mode)


def _make_pve(root: Path, name: str) -> None:
    """/etc/pve as a node without a cluster has it. On a real node it is a FUSE file system; here it is a directory."""
    for directory in (
        f"etc/pve/nodes/{name}/lxc",
        f"etc/pve/nodes/{name}/qemu-server",
        "etc/pve/priv",
        "var/lib/vz/template/cache",
        "var/lib/vz/template/iso",
        "var/lib/vz/images",
        "var/lib/vz/dump",
        "rpool/data",
        "run/lock/lxc",
    ):
        (root / directory).mkdir(parents=True, exist_ok=True)
    for link in ("lxc", "qemu-server"):
        (root / "etc/pve" / link).symlink_to(f"nodes/{name}/{link}")
    (root / "etc/pve/local").symlink_to(f"nodes/{name}")
    _write(root, "etc/pve/storage.cfg", STORAGE)
    _write(root, "etc/pve/user.cfg", "user:root@pam:1:0:::root@lab.invalid:::\n")
    _write(root, "etc/pve/datacenter.cfg", "keyboard: en-us\n")
    members = {"nodename": name, "version": 0}
    _write(root, "etc/pve/.members", json.dumps(members, indent=1) + "\n")
    _write(root, "etc/pve/.version", json.dumps({"starttime": 0, "clinfo": 0, "vmlist": 1}, indent=1) + "\n")


def _install_programs(root: Path) -> None:
    library = root / LIBRARY / "pve"
    skipped = ("__pycache__", "driver", "recordings", "units", "hooks", "uname")
    shutil.copytree(SOURCE, library, ignore=shutil.ignore_patterns(*skipped))
    for path, entry in PROGRAMS.items():
        module, function = entry.split(":")
        launcher = f'#!/usr/bin/python3 -Es\nimport sys\n\nsys.path.insert(0, "/{LIBRARY}")\n'
        _write(root, path, f"{launcher}from pve.{module} import {function}\n\n{function}()\n", 0o755)
    run("chroot", root, "python3", "-m", "compileall", "-q", f"/{LIBRARY}")
    _write(root, "usr/bin/uname", (SOURCE / "uname").read_text(), 0o755)
    hooks = root / SHARE / "after-create.d"
    hooks.mkdir(parents=True, exist_ok=True)
    for hook in (SOURCE / "hooks").iterdir():
        shutil.copy(hook, hooks / hook.name)
        (hooks / hook.name).chmod(0o755)


def _install_units(root: Path) -> None:
    for unit in UNITS:
        _write(root, f"etc/systemd/system/{unit}", (SOURCE / "units" / unit).read_text())
    for path, source in DROP_INS.items():
        _write(root, f"etc/systemd/system/{path}", (SOURCE / "units" / source).read_text())
    run("chroot", root, "systemctl", "enable", *ENABLED)
    run("chroot", root, "systemctl", "mask", *MASKED)


def _offer_driver(root: Path) -> None:
    """Put the stand-in for NVIDIA's .run file where the lab's inventory names it."""
    target = root / driver_run.path_on_node().lstrip("/")
    target.write_bytes(driver_run.content())


def _offer_template(root: Path) -> None:
    """Put the template where the stand-in for pveam downloads from."""
    source = image.ensure_template()
    recorded = source.with_name(f"{source.name}.sha512")
    if not recorded.exists():
        with source.open("rb") as file:
            recorded.write_text(hashlib.file_digest(file, "sha512").hexdigest() + "\n")
    offered = root / SHARE / "templates" / TEMPLATE
    offered.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, offered)
    except OSError:  # another file system
        shutil.copyfile(source, offered)
    entry = {"section": "system", "sha512": recorded.read_text().strip()}
    offered.with_name(f"{TEMPLATE}.json").write_text(json.dumps(entry) + "\n")

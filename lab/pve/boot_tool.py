"""Stand-ins for proxmox-boot-tool, update-grub and update-initramfs, on a node that boots with GRUB from no synced ESP.

Kept: `kernel list|pin [--next-boot]|unpin`, `refresh`, `status`, their files below /etc/kernel, their lines; grub.cfg
gets each kernel with the command line of /etc/default/grub and its drop-ins, and the node's next boot takes it from
there; update-initramfs renews /boot/initrd.img-*.
"""

from __future__ import annotations

import subprocess
import sys

from . import boot, machine

UUIDS = "/etc/kernel/proxmox-boot-uuids"
PRIVATE = "Re-executing '{}' in new private mount namespace.."


def main() -> None:
    words = sys.argv[1:]
    if words[:2] == ["kernel", "list"]:
        return _list()
    if words[:2] == ["kernel", "pin"]:
        return _pin([word for word in words[2:] if word != "--next-boot"], once="--next-boot" in words)
    if words[:2] == ["kernel", "unpin"]:
        (machine.PINNED_ONCE if "--next-boot" in words else machine.PINNED).unlink(missing_ok=True)
        return _write_grub()
    if words[:1] == ["refresh"]:
        print("Running hook script 'proxmox-auto-removal'..\nRunning hook script 'zz-proxmox-boot'..")
        print(PRIVATE.format("/etc/kernel/postinst.d/zz-proxmox-boot"))
        return print(f"No {UUIDS} found, skipping ESP sync.")
    if words[:1] == ["status"]:
        print(PRIVATE.format("/usr/sbin/proxmox-boot-tool"))
        sys.exit(f"E: {UUIDS} does not exist.")
    sys.exit("USAGE: /usr/sbin/proxmox-boot-tool <commands> [ARGS]")


def _list() -> None:
    print("Manually selected kernels:\nNone.\n\nAutomatically selected kernels:")
    print("".join(f"{kernel}\n" for kernel in machine.kernels()), end="")
    for pin, title in ((machine.PINNED, "Pinned kernel:"), (machine.PINNED_ONCE, "Kernel pinned on next-boot:")):
        if pin.exists():
            print(f"\n{title}\n{pin.read_text().strip()}")


def _pin(words: list[str], *, once: bool) -> None:
    if len(words) != 1:
        sys.exit("E: <kernel-version> is mandatory")
    if words[0] not in machine.kernels():
        sys.exit(f"E: kernel '{words[0]}' is not installed")
    pin = machine.PINNED_ONCE if once else machine.PINNED
    before = pin.read_text().strip() if pin.exists() else words[0]
    if before != words[0]:
        print(f"Overriding previously pinned version '{before}' with '{words[0]}'")
    pin.parent.mkdir(parents=True, exist_ok=True)
    pin.write_text(f"{words[0]}\n")
    print(f"Setting '{words[0]}' as grub default entry and running update-grub.")
    _write_grub()


def update_grub() -> None:
    _write_grub()


def _write_grub() -> None:
    print("Generating grub configuration file ...")
    read = 'for f in /etc/default/grub /etc/default/grub.d/*.cfg; do [ ! -f "$f" ] || . "$f"; done\n'
    read += 'echo "$GRUB_CMDLINE_LINUX $GRUB_CMDLINE_LINUX_DEFAULT"'
    done = subprocess.run(["sh", "-c", read], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr or 1)
    arguments = " ".join(done.stdout.split())
    lines = []
    for kernel in reversed(machine.kernels()):
        print(f"Found linux image: /boot/vmlinuz-{kernel}\nFound initrd image: /boot/initrd.img-{kernel}")
        lines.append(f"linux /boot/vmlinuz-{kernel} root=/dev/mapper/pve-root ro {arguments}\n")
    boot.GRUB.parent.mkdir(parents=True, exist_ok=True)
    boot.GRUB.write_text("".join(lines))
    print("done")


def update_initramfs() -> None:
    words = sys.argv[1:]
    kernel = words[words.index("-k") + 1] if "-k" in words[:-1] else "all"
    if "-u" not in words and "-c" not in words:
        sys.exit("E: You must specify at least one of -c, -u, or -d.")
    releases = machine.kernels() if kernel == "all" else [kernel]
    for release in releases:
        image = machine.BOOT / f"initrd.img-{release}"
        if not (machine.BOOT / f"vmlinuz-{release}").exists():
            sys.exit(f"update-initramfs: /boot/vmlinuz-{release} is missing")
        print(f"update-initramfs: Generating {image}")
        image.write_text("stand-in for an initramfs\n")

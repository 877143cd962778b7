"""The lab's own apt repository for nodes: empty packages with the names that Proxmox's repository has.

A kernel package brings the files by which a kernel is known (/boot/vmlinuz-*, /lib/modules/*), headers bring the
directory that DKMS looks for, and dkms is a stand-in. Nothing in them can boot or build.
"""

from __future__ import annotations

from dataclasses import dataclass, field

KERNELS = ("6.8.12-10-pve", "6.8.12-15-pve", "6.14.11-3-pve", "7.0.2-6-pve")
RUNNING = KERNELS[0]  # installed on a bare node
REPOSITORY = "usr/share/gpubox-lab/apt"  # below the node's root

# DKMS builds for a kernel when its headers arrive, and again when an installed module meets a new kernel.
BUILD = "if [ -x /usr/sbin/dkms ]; then dkms autoinstall -k {kernel}; fi\n"
INITRAMFS = "update-initramfs -u -k {kernel} >/dev/null\nif [ -d /boot/grub ]; then update-grub >/dev/null; fi\n"


@dataclass(frozen=True)
class Package:
    """`files`: path to text. `postinst`: sh, run when it is configured."""

    name: str
    version: str
    depends: str = ""
    files: dict[str, str] = field(default_factory=dict)
    postinst: str = ""

    def control(self) -> str:
        depends = f"Depends: {self.depends}\n" if self.depends else ""
        return (
            f"Package: {self.name}\nVersion: {self.version}\nArchitecture: all\nMaintainer: gpubox lab\n{depends}"
            f"Description: stand-in of the gpubox lab for {self.name}\n"
        )


def packages() -> list[Package]:
    found = [
        Package("proxmox-default-kernel", "1.1.0", "proxmox-kernel-6.8"),
        Package("proxmox-default-headers", "1.1.0", "proxmox-headers-6.8"),
        Package("proxmox-kernel-6.8", "6.8.12-10", f"proxmox-kernel-{RUNNING}-signed"),
        Package("proxmox-headers-6.8", "6.8.12-10", f"proxmox-headers-{RUNNING}"),
        Package("pve-manager", "8.4.14"),
        Package(
            "dkms",
            "3.0.10-9~lab",
            files={"usr/sbin/dkms": '#!/bin/sh\nexec /usr/lib/gpubox-lab/dkms "$@"\n'},
        ),
    ]
    for kernel in KERNELS:
        version = kernel.removesuffix("-pve")
        image = {f"boot/vmlinuz-{kernel}": "stand-in for a kernel\n", f"lib/modules/{kernel}/modules.order": ""}
        headers = {f"usr/src/linux-headers-{kernel}/Makefile": "", f"lib/modules/{kernel}/build/Makefile": ""}
        after = INITRAMFS.format(kernel=kernel)
        found.append(Package(f"proxmox-kernel-{kernel}-signed", version, files=image, postinst=after))
        build = BUILD.format(kernel=kernel)
        found.append(Package(f"proxmox-headers-{kernel}", version, files=headers, postinst=build))
    return found


def recipe() -> list[str]:
    """All that decides what the repository holds."""
    return [repr(package) for package in packages()]


def build_script() -> str:
    """sh that builds the repository in the present directory, with dpkg-deb and dpkg-scanpackages."""
    lines = ["set -e"]
    for package in packages():
        contents = {**package.files, "DEBIAN/control": package.control()}
        if package.postinst:
            contents["DEBIAN/postinst"] = f'#!/bin/sh\nset -e\n[ "$1" = configure ] || exit 0\n{package.postinst}'
        for path, text in contents.items():
            lines.append(f"mkdir -p \"tree/$(dirname {path})\"\ncat >tree/{path} <<'END'\n{text}END")
            if path.startswith(("usr/sbin/", "DEBIAN/postinst")):
                lines.append(f"chmod 755 tree/{path}")
        lines.append("dpkg-deb --root-owner-group -Znone --build tree . >/dev/null\nrm -r tree")
    lines.append("dpkg-scanpackages -m . 2>/dev/null >Packages")
    return "\n".join(lines) + "\n"

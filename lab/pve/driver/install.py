#!/usr/bin/python3 -Es
"""A stand-in for nvidia-installer @VERSION@, inside a stand-in .run file. It installs no driver.

Kept: the options of the real one (github.com/NVIDIA/nvidia-installer, tag 590.48.01), refusing others; where files go;
on a host, DKMS and the initramfs; in a container (--no-kernel-modules), only programs and libraries; the abort when a
driver is loaded; the log file. Not kept: building anything but two small libraries, OpenGL, the uninstaller's backups.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

VERSION = "@VERSION@"
HERE = Path(__file__).resolve().parent
ROOT = Path("/")
LIBRARIES = Path("usr/lib/x86_64-linux-gnu")
OPTIONS = """
flags: accept-license advanced-options debug driver-info expert force-libglx-indirect help kernel-module-only
  kernel-modules-only no-abi-note no-backup no-cc-version-check no-check-for-alternate-installs no-distro-scripts
  no-drm no-kernel-module no-kernel-modules no-kernel-module-source no-libglx-indirect no-ncurses-color no-network
  no-nouveau-check no-nvidia-modprobe no-opengl-files no-peermem no-precompiled-interface no-questions no-recursion
  no-rpms no-runlevel-check no-sigwinch-workaround no-unified-memory no-wine-files no-x-check
  print-recommended-kernel-module-type run-nvidia-xconfig sanity silent skip-depmod skip-module-load
  skip-module-unload uninstall version
booleans: allow-installation-with-running-driver disable-nouveau dkms glvnd-egl-client glvnd-glx-client
  install-compat32-libs install-libglvnd install-vdpau-wrapper rebuild-initramfs systemd
values: application-profile-path compat32-chroot compat32-libdir compat32-prefix concurrency-level
  documentation-prefix kernel-include-path kernel-install-path kernel-module-build-directory
  kernel-module-source-dir kernel-module-source-prefix kernel-module-type kernel-name kernel-output-path
  kernel-source-path log-file-name module-signing-hash module-signing-key-path module-signing-public-key
  module-signing-script module-signing-secret-key module-signing-x509-hash opengl-libdir opengl-prefix
  override-file-type-destination proc-mount-point systemd-sleep-prefix systemd-sysconf-prefix systemd-unit-prefix
  tmpdir ui utility-libdir utility-prefix x-library-path x-module-path x-prefix x-sysconfig-path
"""
FLAGS, BOOLEANS, WITH_VALUE = (part.split() for part in re.split(r"\w+:", OPTIONS)[1:])
SHORT = {
    **{"a": "accept-license", "A": "advanced-options", "b": "no-backup", "d": "debug", "e": "expert", "h": "help"},
    **{"i": "driver-info", "j": "concurrency-level", "k": "kernel-name", "K": "kernel-module-only", "n": "no-rpms"},
    **{"m": "kernel-module-build-directory", "M": "kernel-module-type", "N": "no-network", "q": "no-questions"},
    **{"s": "silent", "v": "version", "X": "run-nvidia-xconfig", "z": "no-nouveau-check", "Z": "disable-nouveau"},
}


class Refused(Exception):
    pass


def parse(arguments: list[str]) -> dict[str, str]:
    """Options by their long name; "1" or "0" for booleans. Raises Refused as the real one's getopt complains."""
    found: dict[str, str] = {}
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            if not re.fullmatch(r"-[a-zA-Z]", word) or word[1] not in SHORT:
                raise Refused(f'invalid option: "{word}"')
            name = SHORT[word[1]]
        if name in WITH_VALUE:
            if not equals and not waiting:
                raise Refused(f'option "{word}" requires an argument')
            found[name] = value if equals else waiting.pop(0)
        elif name in FLAGS or name in BOOLEANS:
            found[name] = "1"
        elif name.removeprefix("no-") in BOOLEANS:
            found[name.removeprefix("no-")] = "0"
        else:
            raise Refused(f'unrecognized option: "{word}"')
    return found


class Installer:
    def __init__(self, options: dict[str, str]) -> None:
        self.options = options
        self.lines: list[str] = []

    def has(self, name: str) -> bool:
        return self.options.get(name) == "1"

    def log(self, line: str) -> None:
        self.lines.append(line)

    def write_log(self) -> None:
        file = ROOT / self.options.get("log-file-name", "/var/log/nvidia-installer.log").lstrip("/")
        text = "".join(f"-> {line}\n" for line in self.lines)
        file.write_text(f"nvidia-installer log file '{file}'\nnvidia-installer version: {VERSION}\n\n{text}")

    def run(self) -> None:
        """Raises Refused."""
        modules = not (self.has("no-kernel-modules") or self.has("no-kernel-module"))
        running = (ROOT / "proc/driver/nvidia/version").exists()
        if modules and running and not self.has("allow-installation-with-running-driver"):
            raise Refused(
                "An NVIDIA kernel module 'nvidia' appears to be already loaded in your kernel. This may be because it "
                "is in use (for example, by an X server, a CUDA program, or the NVIDIA Persistence Daemon), but this "
                "may also happen if your kernel was configured without support for module unloading."
            )
        if modules and self.has("dkms") and shutil.which("dkms") is None:
            raise Refused("Failed to find dkms on the system! Failed to install the kernel module through DKMS.")
        self.install_libraries()
        self.install_programs(modprobe=not self.has("no-nvidia-modprobe"))
        if modules:
            self.install_modules()
        self.log(f"Installation of the NVIDIA Accelerated Graphics Driver (version: {VERSION}) is now complete.")

    def install_libraries(self) -> None:
        directory = ROOT / LIBRARIES
        directory.mkdir(parents=True, exist_ok=True)
        for name in ("libcuda", "libnvidia-ml"):
            for old in directory.glob(f"{name}.so*"):
                old.unlink()
            real = directory / f"{name}.so.{VERSION}"
            soname = f"{name}.so.1"
            build = ["gcc", "-shared", "-fPIC", "-O1", "-s", "-Wl,--build-id=none", f"-Wl,-soname,{soname}"]
            done = subprocess.run([*build, "-o", real, HERE / f"{name}.c"], capture_output=True, text=True, check=False)
            if done.returncode:
                raise Refused(f"the stand-in could not build {real.name}: {done.stderr}")
            (directory / soname).symlink_to(real.name)
            self.log(f"Installed {real}")
        (directory / "libcuda.so").symlink_to("libcuda.so.1")
        subprocess.run(["/sbin/ldconfig"], check=False)

    def install_programs(self, *, modprobe: bool) -> None:
        names = ["nvidia-smi", "nvidia-persistenced", "nvidia-uninstall", *(["nvidia-modprobe"] if modprobe else [])]
        for name in names:
            target = ROOT / "usr/bin" / name
            target.unlink(missing_ok=True)
            shutil.copyfile(HERE / name, target)
            target.chmod(0o4755 if name == "nvidia-modprobe" else 0o755)
            self.log(f"Installed {target}")

    def install_modules(self) -> None:
        kernel = self.options.get("kernel-name") or self.capture("uname", "-r").strip()
        kind = self.options.get("kernel-module-type", "open")
        for old in (ROOT / "usr/src").glob("nvidia-*"):  # the previous driver is uninstalled first
            version = old.name.removeprefix("nvidia-")
            if version != VERSION:
                self.call("dkms", "remove", "-m", "nvidia", "-v", version, "--all")
                shutil.rmtree(old)
        source = ROOT / "usr/src" / f"nvidia-{VERSION}"
        source.mkdir(parents=True, exist_ok=True)
        (source / "module-type").write_text(f"{kind}\n")
        (source / "dkms.conf").write_text(
            f'PACKAGE_NAME="nvidia"\nPACKAGE_VERSION="{VERSION}"\nAUTOINSTALL="yes"\nBUILT_MODULE_NAME[0]="nvidia"\n'
        )
        if self.has("dkms"):
            self.call("dkms", "add", "-m", "nvidia", "-v", VERSION)
            self.call("dkms", "install", "-m", "nvidia", "-v", VERSION, "-k", kernel)
        else:
            self.call("dkms", "install", "-m", "nvidia", "-v", VERSION, "-k", kernel)
        if self.has("disable-nouveau"):
            for directory in ("etc/modprobe.d", "usr/lib/modprobe.d"):
                file = ROOT / directory / "nvidia-installer-disable-nouveau.conf"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text("# generated by nvidia-installer\nblacklist nouveau\noptions nouveau modeset=0\n")
        if self.has("rebuild-initramfs"):
            self.call("update-initramfs", "-u", "-k", kernel)
        if not self.has("skip-module-load") and kernel == self.capture("uname", "-r").strip():
            self.call("modprobe", "nvidia", may_fail=(ROOT / "proc/driver/nvidia/version").exists())

    def call(self, *words: str, may_fail: bool = False) -> None:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        self.log(f"Executing `{' '.join(words)}`: {done.stdout.strip()}")
        if done.returncode and not may_fail and words[1] != "add":
            raise Refused(f"Failed to execute `{' '.join(words)}`: {done.stdout.strip()}")

    @staticmethod
    def capture(*words: str) -> str:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def main(arguments: list[str]) -> int:
    try:
        options = parse(arguments)
    except Refused as refused:
        print(f"nvidia-installer: {refused}", file=sys.stderr)
        print("\nERROR: Invalid commandline, please run `nvidia-installer --help` for usage information.\n")
        return 1
    if "version" in options:
        print(f"\nnvidia-installer:  version {VERSION}\n  The NVIDIA Software Installer for Unix/Linux.\n")
        return 0
    if "print-recommended-kernel-module-type" in options:
        print("open")
        return 0
    if "silent" not in options:
        print("nvidia-installer (stand-in of the lab): only --silent is there", file=sys.stderr)
        return 1
    installer = Installer(options)
    try:
        installer.run()
    except Refused as refused:
        installer.log(f"ERROR: {refused}")
        print(f"\nERROR: {refused}\n\nERROR: Installation has failed.\n", file=sys.stderr)
        return 1
    finally:
        installer.write_log()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

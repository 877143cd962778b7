#!/usr/bin/python3 -Es
"""A stand-in for nvidia-uninstall @VERSION@: removes what the stand-in .run file installed. Kept: -s, --silent."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

VERSION = "@VERSION@"
PROGRAMS = ("nvidia-smi", "nvidia-modprobe", "nvidia-persistenced", "nvidia-uninstall")


def main() -> None:
    if not {"-s", "--silent"} & set(sys.argv[1:]):
        sys.exit("nvidia-uninstall (stand-in of the lab): only --silent is there")
    if shutil.which("dkms"):
        subprocess.run(["dkms", "remove", "-m", "nvidia", "-v", VERSION, "--all"], check=False)
    shutil.rmtree(f"/usr/src/nvidia-{VERSION}", ignore_errors=True)
    for library in Path("/usr/lib/x86_64-linux-gnu").glob("lib*"):
        if library.name.startswith(("libcuda.so", "libnvidia-ml.so")):
            library.unlink()
    for directory in ("/etc/modprobe.d", "/usr/lib/modprobe.d"):
        (Path(directory) / "nvidia-installer-disable-nouveau.conf").unlink(missing_ok=True)
    for name in PROGRAMS:
        (Path("/usr/bin") / name).unlink(missing_ok=True)


if __name__ == "__main__":
    main()

"""A stand-in for NVIDIA's .run file: self-extracting, the same bytes everywhere; it installs lab/pve/driver."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

SOURCE = Path(__file__).parent / "pve/driver"
VERSION = "590.48.01"
FILES = {  # name in the archive: file below SOURCE
    "install": "install.py",
    "nvidia-smi": "nvidia_smi.py",
    "nvidia-modprobe": "nvidia_modprobe.py",
    "nvidia-persistenced": "nvidia_persistenced.py",
    "nvidia-uninstall": "nvidia_uninstall.py",
    "libcuda.c": "libcuda.c",
    "libnvidia-ml.c": "libnvidia-ml.c",
}
CUDA_VERSIONS = {"570": 12080, "575": 12090, "580": 13000, "590": 13010, "595": 13020}  # cuDriverGetVersion by branch

HEADER = """\
#!/bin/sh
# The gpubox lab's stand-in for NVIDIA's Linux driver @VERSION@. It is no driver and holds nothing of NVIDIA's.
# As the real file it is a shell script with an archive behind it, and hands its options to nvidia-installer.
set -e
umask 022
work=$(mktemp -d "${TMPDIR:-/tmp}/nvidia-run.XXXXXX")
trap 'rm -rf "$work"' EXIT
echo 'Verifying archive integrity... OK'
printf 'Uncompressing NVIDIA Accelerated Graphics Driver for Linux-x86_64 @VERSION@'
tail -n +$(($(grep -an '^exit \\$status$' "$0" | head -n 1 | cut -d: -f1) + 1)) "$0" | tar -xf - -C "$work"
echo
status=0
python3 -Es "$work/install" "$@" || status=$?
exit $status
"""


def file_name(version: str = VERSION) -> str:
    return f"NVIDIA-Linux-x86_64-{version}.run"


def content(version: str = VERSION) -> bytes:
    """The file, byte for byte the same for one version and one commit."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, source in sorted(FILES.items()):
            data = filled((SOURCE / source).read_text(), version).encode()
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755
            tar.addfile(entry, io.BytesIO(data))
    return filled(HEADER, version).encode() + archive.getvalue()


def path_on_node(version: str = VERSION) -> str:
    """Where an operator would have put it."""
    return f"/root/{file_name(version)}"


def settings(version: str = VERSION) -> dict[str, str]:
    """`driver` for a host's data."""
    return {"version": version, "run": path_on_node(version), "sha256": sha256(version)}


def sha256(version: str = VERSION) -> str:
    return hashlib.sha256(content(version)).hexdigest()


def filled(text: str, version: str) -> str:
    """A file below SOURCE, for one version."""
    return text.replace("@VERSION@", version).replace("@CUDA@", str(CUDA_VERSIONS.get(version[:3], 13000)))

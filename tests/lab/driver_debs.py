"""Packages with the names and dependencies of NVIDIA's for Debian; in them is what the lab's .run file installs.

Kept: the split into packages; dependencies by lower bounds only; libcuda1 recommends what builds modules; nvidia-smi in
nvidia-driver-cuda; the module's package builds by DKMS for the running kernel, and takes that away again; the closed
twin conflicts with the open one; revisions. Not kept: some forty libraries that compute without a display also brings.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from lab.driver_run import SOURCE, filled
from tests.lab.apt_repository import Deb

LIBRARIES = "/usr/lib/x86_64-linux-gnu"
DKMS_CONF = """\
PACKAGE_NAME="nvidia"
PACKAGE_VERSION="{version}"
AUTOINSTALL="yes"
BUILT_MODULE_NAME[0]="nvidia"
"""
UNIT = """\
[Unit]
Description=NVIDIA Persistence Daemon
[Service]
Type=forking
ExecStart=/usr/bin/nvidia-persistenced --verbose
[Install]
WantedBy=multi-user.target
"""
ADDED = """\
[ "$1" = configure ] || exit 0
dkms add -m nvidia -v {version} || true
dkms install -m nvidia -v {version} -k "$(uname -r)"
"""
REMOVED = "dkms remove -m nvidia -v {version} --all || true\n"
LDCONFIG = {"postinst": "ldconfig\n", "postrm": "ldconfig\n"}


def driver(version: str, revision: str = "1", *, newer: bool = False) -> list[Deb]:
    """All packages of one driver. newer: it has one that the versions before had not."""
    full = f"{version}-{revision}"
    bound = f"(>= {version})"
    extra = [Deb("libnvidia-nvvm704", full)] if newer else []
    return [
        Deb(
            "nvidia-driver-cuda",
            full,
            ", ".join([f"libcuda1 {bound}", f"libnvidia-ml1 {bound}", *(f"{deb.name} {bound}" for deb in extra)]),
            files={"/usr/bin/nvidia-smi": _program("nvidia_smi", version)},
            modes={"/usr/bin/nvidia-smi": 0o755},
            fields={"Conflicts": "nvidia-smi"},
        ),
        _library("libcuda1", "libcuda", version, full),
        _library("libnvidia-ml1", "libnvidia-ml", version, full),
        *extra,
        _module("nvidia-kernel-open-dkms", "open", version, full),
        _module("nvidia-kernel-dkms", "closed", version, full),
        Deb("firmware-nvidia-gsp", full),
        _tool("nvidia-modprobe", version, full, mode=0o4755),
        _tool("nvidia-persistenced", version, full, unit={"/lib/systemd/system/nvidia-persistenced.service": UNIT}),
        Deb("nvidia-open", full, f"nvidia-driver-cuda {bound}, nvidia-kernel-open-dkms {bound}"),
        Deb("cuda-drivers", full, f"nvidia-driver-cuda {bound}, nvidia-kernel-dkms {bound}"),
    ]


def _library(package: str, name: str, version: str, full: str) -> Deb:
    real = f"{name}.so.{version}"
    links = {f"{LIBRARIES}/{name}.so.1": real}
    fields = {"Recommends": "nvidia-kernel-dkms | nvidia-kernel-open-dkms"} if package == "libcuda1" else {}
    built = _compiled(name, version)
    return Deb(package, full, files={f"{LIBRARIES}/{real}": built}, links=links, scripts=LDCONFIG, fields=fields)


def _module(package: str, kind: str, version: str, full: str) -> Deb:
    source = f"/usr/src/nvidia-{version}"
    other = "nvidia-kernel-dkms" if kind == "open" else "nvidia-kernel-open-dkms"
    return Deb(
        package,
        full,
        f"dkms, firmware-nvidia-gsp (>= {version}), nvidia-modprobe (>= {version})",
        files={
            f"{source}/dkms.conf": DKMS_CONF.format(version=version).encode(),
            f"{source}/module-type": f"{kind}\n".encode(),
        },
        scripts={"postinst": ADDED.format(version=version), "prerm": REMOVED.format(version=version)},
        fields={"Conflicts": other},
    )


def _tool(name: str, version: str, full: str, *, mode: int = 0o755, unit: dict[str, str] | None = None) -> Deb:
    path = f"/usr/bin/{name}"
    files = {path: _program(name.replace("-", "_"), version)}
    files |= {place: text.encode() for place, text in (unit or {}).items()}
    return Deb(name, full, files=files, modes={path: mode})


def _program(name: str, version: str) -> bytes:
    return filled((SOURCE / f"{name}.py").read_text(), version).encode()


def _compiled(name: str, version: str) -> bytes:
    """As install.py of the .run file builds it."""
    with tempfile.TemporaryDirectory() as directory:
        source, built = Path(directory) / f"{name}.c", Path(directory) / f"{name}.so"
        source.write_text(filled((SOURCE / f"{name}.c").read_text(), version))
        options = ["-shared", "-fPIC", "-O1", "-s", "-Wl,--build-id=none", f"-Wl,-soname,{name}.so.1"]
        subprocess.run(["gcc", *options, "-o", built, source], check=True)
        return built.read_bytes()

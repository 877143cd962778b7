"""What the lab takes from this machine: packages, and the way it reaches package registries."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpubox.errors import GpuboxError
from lab.progress import say, step
from lab.settings import CACHE
from lab.shell import run

PACKAGE_OF = {  # program: Debian/Ubuntu package
    "lxc-start": "lxc",
    "mmdebstrap": "mmdebstrap",
    "nft": "nftables",
    "ip": "iproute2",
    "ssh": "openssh-client",
    "findmnt": "util-linux",
    "setpriv": "util-linux",
    "tar": "tar",
    "zstd": "zstd",
    "gpg": "gnupg",  # signs the package repository of a test
}
DEBIAN_KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")  # Ubuntu does not have them at first

BOX_CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
CA_VARIABLES = re.compile(r"SSL_CERT_FILE|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|PIP_CERT")
CARRIED_VARIABLES = re.compile(
    r"(https?|ftp|no|all)_proxy|PIP_((EXTRA_)?INDEX_URL|TRUSTED_HOST|DEFAULT_TIMEOUT)"
    r"|UV_((DEFAULT_|EXTRA_)?INDEX(_URL)?|HTTP_TIMEOUT|NATIVE_TLS|SYSTEM_CERTS)",
    re.IGNORECASE,
)
CARRIED_FILES = ("/etc/pip.conf", "/etc/uv/uv.toml")
APT_SETTINGS = re.compile(r"Acquire::(https?::|Check-|Retries)")


def require_root() -> None:
    """Raises GpuboxError unless this process may make containers."""
    if os.geteuid() != 0:
        raise GpuboxError(
            "lab: making containers needs root",
            hint=f"sudo -E {sys.executable} -m lab ... (the make targets do this by themselves)",
        )


@contextmanager
def exclusive() -> Iterator[None]:
    """One change of the lab at a time. The lock is held on the cache directory itself, so that it leaves no file."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with locked(CACHE):
        yield


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """One holder at a time; says so when it waits."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with step("waiting for another lab command to end"):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def install_missing() -> None:
    """Install the Debian packages the lab needs; says which before it does."""
    missing = sorted(package for program, package in PACKAGE_OF.items() if shutil.which(program) is None)
    if not DEBIAN_KEYS.exists():
        missing.append("debian-archive-keyring")
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise GpuboxError(
            f"lab: these packages are missing: {', '.join(missing)}",
            hint="the lab installs them itself on Debian and Ubuntu; elsewhere install them by hand",
        )
    say(f"this machine lacks packages, installing with apt-get: {' '.join(missing)}")
    apt = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-y")
    with step(f"apt-get install {' '.join(missing)}"):
        run(*apt, "update")
        run(*apt, "install", "--no-install-recommends", *missing)


def box_environment() -> dict[str, str]:
    """Variables a box needs to reach package registries as this machine does."""
    carried = {
        name: value
        for name, value in os.environ.items()
        if CARRIED_VARIABLES.fullmatch(name) and not value.startswith("file:")
    }
    return carried | {name: BOX_CA_BUNDLE for name in os.environ if CA_VARIABLES.fullmatch(name)}


def apt_settings() -> list[str]:
    """How this machine's apt reaches its mirrors (proxy, retries, date checks), as lines of apt.conf."""
    return [line for line in run("apt-config", "dump").stdout.splitlines() if APT_SETTINGS.match(line)]


def resolver() -> str:
    """resolv.conf for a box: a stub that listens on this machine's loopback would be out of a box's reach."""
    upstream = Path("/run/systemd/resolve/resolv.conf")
    text = Path("/etc/resolv.conf").read_text()
    return upstream.read_text() if "127.0.0.53" in text and upstream.exists() else text


def carry_into(root: Path) -> None:
    """Give the file system below `root` this machine's certificates, resolver and client settings."""
    files = [Path(name) for name in CARRIED_FILES] + sorted(Path("/usr/local/share/ca-certificates").rglob("*.crt"))
    for file in files:
        if file.is_file():
            target = root / file.relative_to("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
    run("chroot", root, "update-ca-certificates")
    (root / "etc/resolv.conf").unlink(missing_ok=True)
    (root / "etc/resolv.conf").write_text(resolver())

    quoted = [f'{name}="{value}"' for name, value in sorted(box_environment().items())]
    (root / "etc/environment").write_text("".join(f"{line}\n" for line in quoted))  # ssh sessions, through pam_env
    drop_in = root / "etc/systemd/system.conf.d/lab.conf"  # services
    drop_in.parent.mkdir(parents=True, exist_ok=True)
    escaped = " ".join(f'"{line.replace(chr(34), "").replace("%", "%%")}"' for line in quoted)
    drop_in.write_text(f"[Manager]\nDefaultEnvironment={escaped}\n")

"""The lab's ssh key, and the host keys of its boxes. They live in .lab/ and go with the lab."""

from __future__ import annotations

import os
from pathlib import Path

from lab.mounts import remove_tree
from lab.settings import KNOWN_HOSTS, SSH_KEY, STATE
from lab.shell import run

HOST_KEY = "etc/ssh/ssh_host_ed25519_key"


def ensure_key() -> None:
    """Make .lab/ and the key pair unless they are there. Under sudo they belong to the user who called sudo."""
    STATE.mkdir(mode=0o700, exist_ok=True)
    if not SSH_KEY.exists():
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "gpubox-lab", "-f", SSH_KEY)
    KNOWN_HOSTS.touch()
    _give_to_caller()


def make_host_key(root: Path) -> None:
    """A host key of its own for the box whose file system is `root`; the image's keys would be the same everywhere."""
    for key in (root / "etc/ssh").glob("ssh_host_*_key*"):
        key.unlink()
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", root / HOST_KEY)


def authorize(root: Path, address: str) -> None:
    """Let this checkout's key into the box, and know the box's host key. Repeating it is fine."""
    authorized = root / "root/.ssh/authorized_keys"
    authorized.parent.mkdir(mode=0o700, exist_ok=True)
    authorized.write_bytes(SSH_KEY.with_suffix(".pub").read_bytes())
    authorized.chmod(0o600)
    others = [line for line in KNOWN_HOSTS.read_text().splitlines() if not line.startswith(f"{address} ")]
    host_key = (root / f"{HOST_KEY}.pub").read_text().strip()
    KNOWN_HOSTS.write_text("".join(f"{line}\n" for line in [*others, f"{address} {host_key}"]))


def ssh_options() -> list[str]:
    """Options that make ssh use the lab's key and host keys and nothing of the user's own."""
    settings = {
        "UserKnownHostsFile": KNOWN_HOSTS,
        "StrictHostKeyChecking": "yes",
        "IdentitiesOnly": "yes",
        "BatchMode": "yes",
        "ConnectTimeout": "10",
        "LogLevel": "ERROR",
    }
    return ["-F", "none", "-i", str(SSH_KEY), *(f"-o{name}={value}" for name, value in settings.items())]


def remove() -> None:
    remove_tree(STATE)


def _give_to_caller() -> None:
    owner = (int(os.environ.get("SUDO_UID", "-1")), int(os.environ.get("SUDO_GID", "-1")))
    for path in (STATE, *STATE.iterdir()):
        os.chown(path, *owner)

"""The ground a box stands on: packages, the service user, directories and files. Decided from one batched fact."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

from pyinfra import host
from pyinfra.api import StringCommand, operation
from pyinfra.operations import apt, files, server, systemd

from facts.box import box_state


@dataclass(frozen=True)
class Directory:
    path: str
    mode: str = "755"
    owner: str = "root"


@dataclass(frozen=True)
class File:
    path: str
    content: str
    mode: str = "644"

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()


@operation()
def packages(names: list[str]) -> Iterator[Any]:
    """Debian packages are installed; those that are stay at their version."""
    missing = [name for name in names if not box_state().has("package", name)]
    if not missing:
        host.noop("all packages are installed")
        return
    yield from apt.packages._inner(packages=missing, update=True, no_recommends=True)


@operation()
def waited_for() -> Iterator[Any]:
    """Changes nothing; every host gets here before any host goes on."""
    host.noop("all hosts are here")
    yield from ()


@operation()
def service_user(user: str, home: str) -> Iterator[Any]:
    """A system user that may log in nowhere, for the server to run as."""
    if box_state().get("user") == user:
        host.noop(f"user {user} exists")
        return
    yield from server.user._inner(user=user, system=True, home=home, create_home=False, shell="/usr/sbin/nologin")


@operation()
def directories(wanted: list[Directory]) -> Iterator[Any]:
    seen = box_state().directories
    wrong = [d for d in wanted if seen.get(d.path) != (d.mode, f"{d.owner}:{d.owner}")]
    if not wrong:
        host.noop("all directories are there")
    for directory in wrong:
        yield from files.directory._inner(
            path=directory.path, mode=directory.mode, user=directory.owner, group=directory.owner
        )


@operation()
def rendered_files(wanted: list[File], unwanted: Sequence[str] = ()) -> Iterator[Any]:
    yield from put_files(wanted, box_state().files, unwanted)


def put_files(
    wanted: list[File], seen: Mapping[str, tuple[str, str, str]], unwanted: Sequence[str] = ()
) -> Iterator[Any]:
    """Files as rendered, root's. `seen`: path -> (sha256, mode, owner:group) of what is there.

    unwanted: paths of ours that other settings had asked for.
    """
    wrong = [file for file in wanted if seen.get(file.path) != (file.sha256, file.mode, "root:root")]
    stale = [path for path in unwanted if path in seen]
    if not wrong and not stale:
        host.noop("all files are as rendered")
    if stale:
        yield StringCommand("rm", "-f", *stale)
    for file in wrong:
        yield from files.put._inner(
            src=StringIO(file.content),
            dest=file.path,
            mode=file.mode,
            user="root",
            group="root",
            create_remote_dir=True,
        )


@operation()
def units(enabled: list[str]) -> Iterator[Any]:
    """systemd knows the unit files as they are on disk, and starts these at boot. Starts and restarts nothing."""
    seen = box_state()
    missing = [unit for unit in enabled if not seen.has("enabled", f"{unit} enabled")]
    yield from enable_units(missing, reload=bool(seen.get("reload")))


def enable_units(missing: list[str], *, reload: bool) -> Iterator[Any]:
    """`missing`: those not enabled yet. `reload`: systemd has not read what is on disk."""
    if reload:
        yield StringCommand("systemctl", "daemon-reload")
    if not missing and not reload:
        host.noop("units are known and enabled")
    for unit in missing:
        yield from systemd.service._inner(service=unit, running=None, enabled=True)

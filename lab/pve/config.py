"""Container configurations below /etc/pve: read, written, locked as pve-container does it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

from .errors import NOT_FOUND, PveError
from .options import INTERNAL, SETTINGS
from .schema import parse_boolean

ETC = Path("/etc/pve")
LOCKS = Path("/run/lock/lxc")
LXC = "lxc"  # key of Section.settings' neighbour: raw lines, in order

_HEADER = re.compile(r"\[([a-z][a-z0-9_\-]+|pve:pending)\]\s*", re.IGNORECASE)
_RAW = re.compile(r"(lxc\.[a-z0-9_\-.]+)(?::|\s*=)\s*(.*?)\s*")
_SETTING = re.compile(r"([a-z][a-z_]*\d*):\s*(.+?)\s*")
_ENCODED = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) not in ":%")

_ALLOWED_RAW = re.compile(
    r"lxc\.(cgroup2?\..+|prlimit\..+|limit\..+|net\..+"
    r"|apparmor\.(profile|allow_incomplete|allow_nesting|raw)|selinux\.context|include|arch|uts\.name"
    r"|signal\.(halt|reboot|stop)|init\.(cmd|cwd|uid|gid|groups)|pty\.max|console\.(logfile|path)|tty\.max|devtty\.dir"
    r"|hook\.(autodev|pre-start|pre-mount|mount|start|stop|post-stop|clone|destroy|version)|autodev|kmsg"
    r"|mount\.(fstab|entry|auto)|rootfs\.mount|cap\.(drop|keep)|seccomp\.(profile|notify\.proxy|notify\.cookie)|idmap"
    r"|log\.(level|file)|start\.(auto|delay|order)|group|environment(\.runtime|\.hooks)?"
    r"|sysctl\.(fs\.mqueue|kernel\.(msgmax|msgmnb|msgmni|sem|shmall|shmmax|shmmni|shm_rmid_forced)))"
)
_REFUSED_RAW = {
    "lxc.rootfs.path": "lxc.rootfs.path is auto generated from rootfs",
    "lxc.rootfs.options": 'lxc.rootfs.options is not supported, please use mount point options in the "rootfs" key',
}


@dataclass
class Section:
    """The current settings, the pending ones, or a snapshot's."""

    settings: dict[str, str] = field(default_factory=dict)
    raw: list[tuple[str, str]] = field(default_factory=list)

    def indexed(self, prefix: str) -> dict[str, str]:
        """`net0`, `net1`, ... in the order of their numbers."""
        found = {name: value for name, value in self.settings.items() if re.fullmatch(rf"{prefix}\d+", name)}
        return dict(sorted(found.items(), key=lambda item: int(item[0].removeprefix(prefix))))


@dataclass
class Config(Section):
    """What a container's file says."""

    pending: Section = field(default_factory=Section)
    snapshots: dict[str, Section] = field(default_factory=dict)
    digest: str = ""

    def pending_deletes(self) -> list[str]:
        return [name.lstrip("!") for name in re.split(r"[,;\s]+", self.pending.settings.get("delete", "")) if name]

    def set_pending_deletes(self, names: list[str]) -> None:
        if names:
            self.pending.settings["delete"] = ",".join(sorted(names))
        else:
            self.pending.settings.pop("delete", None)


def node_name() -> str:
    return os.uname().nodename.split(".")[0]


def relative_path(vmid: str) -> str:
    return f"nodes/{node_name()}/lxc/{vmid}.conf"


def path(vmid: str) -> Path:
    return ETC / relative_path(vmid)


def load(vmid: str) -> Config:
    """Raises PveError when there is no such container."""
    try:
        return parse(vmid, path(vmid).read_text())
    except FileNotFoundError:
        message = f"Configuration file '{relative_path(vmid)}' does not exist"
        raise PveError(message, NOT_FOUND) from None


def store(vmid: str, config: Config) -> None:
    """Replace the file as a whole, as the cluster file system does."""
    target = path(vmid)
    new = target.with_suffix(f".conf.tmp.{os.getpid()}")
    new.write_text(render(config))
    new.replace(target)


def vmids() -> list[str]:
    directory = ETC / "nodes" / node_name() / "lxc"
    return sorted((file.stem for file in directory.glob("*.conf") if file.stem.isdigit()), key=int)


def parse(vmid: str, text: str) -> Config:
    """What PVE understands of `text`; what it does not is named on standard error and lost at the next write."""
    config = Config(digest=hashlib.sha1(text.encode()).hexdigest())
    section: Section = config
    description: dict[int, str] = {}
    described: dict[int, Section] = {}
    for line in text.splitlines():
        header = _HEADER.fullmatch(line)
        if not line.strip():
            continue
        if header:
            if header[1].lower() == "pve:pending":
                section = config.pending = Section()
            else:
                section = config.snapshots[header[1]] = Section()
        elif line.startswith("#"):
            described[id(section)] = section
            description[id(section)] = description.get(id(section), "") + unquote(line[1:]) + "\n"
        else:
            _parse_line(vmid, line, section, pending=section is config.pending)
    for key, where in described.items():
        where.settings["description"] = description[key]
    return config


def _parse_line(vmid: str, line: str, section: Section, *, pending: bool) -> None:
    raw = _RAW.fullmatch(line)
    setting = _SETTING.fullmatch(line)
    if raw:
        if raw[1] in _REFUSED_RAW:
            print(f"vm {vmid} - {raw[1]}: {_REFUSED_RAW[raw[1]]}", file=sys.stderr)
        elif not _ALLOWED_RAW.fullmatch(raw[1]):
            print(f"vm {vmid} - unable to parse config: {line}", file=sys.stderr)
        else:
            if raw[1].startswith("lxc.cgroup."):
                print(f"vm {vmid} - {raw[1]} is deprecated, this will be a hard error in the future!", file=sys.stderr)
            section.raw.append((raw[1], raw[2]))
    elif setting and setting[1] == "description":
        section.settings["description"] = section.settings.get("description", "") + unquote(setting[2])
    elif setting and setting[1] == "delete" and pending:
        section.settings["delete"] = setting[2]
    elif setting:
        section.settings[setting[1]] = _checked(vmid, setting[1], setting[2])
    else:
        print(f"vm {vmid} - unable to parse config: {line}", file=sys.stderr)


def _checked(vmid: str, name: str, value: str) -> str:
    parameter = (SETTINGS | INTERNAL).get(name)
    if parameter is None:
        print(f"vm {vmid} - unable to parse value of '{name}' - unknown setting '{name}'", file=sys.stderr)
        return value
    if parameter.kind == "boolean":
        value = parse_boolean(value) or value
    for message in parameter.errors(name, value).values():
        print(f"vm {vmid} - unable to parse value of '{name}' - {message.rstrip()}", file=sys.stderr)
    return value


def render(config: Config) -> str:
    """As PVE writes it: keys sorted, raw lines last, pending changes and snapshots below."""
    text = _render_section(config)
    if config.pending.settings or config.pending.raw:
        text += "\n[pve:pending]\n" + _render_section(config.pending)
    for name in sorted(config.snapshots):
        text += f"\n[{name}]\n" + _render_section(config.snapshots[name])
    return text


def encode(text: str) -> str:
    return quote(text, safe=_ENCODED)


def _render_section(section: Section) -> str:
    lines = [f"#{encode(line)}" for line in section.settings.get("description", "").splitlines()]
    lines += [f"{name}: {value}" for name, value in sorted(section.settings.items()) if name != "description"]
    lines += [f"{name}: {value}" for name, value in section.raw]
    return "".join(f"{line}\n" for line in lines)


@contextmanager
def locked(vmid: str, timeout: float = 10) -> Iterator[int]:
    """The lock that every change of a container holds; waits `timeout` seconds. Raises PveError after that.

    Gives the file descriptor: a child that has it holds the lock too.
    """
    LOCKS.mkdir(parents=True, exist_ok=True)
    file = LOCKS / f"pve-config-{vmid}.lock"
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("trying to acquire lock...", file=sys.stderr)
            _wait_for(descriptor, str(file), time.monotonic() + timeout)
            print(" OK", file=sys.stderr)
        yield descriptor
    finally:
        os.close(descriptor)


def _wait_for(descriptor: int, name: str, deadline: float) -> None:
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise PveError(f"can't lock file '{name}' - got timeout") from None
            time.sleep(0.1)


def check_lock(config: Config) -> None:
    """Raises PveError for a container that is locked by an operation, running or dead."""
    if "lock" in config.settings:
        raise PveError(f"CT is locked ({config.settings['lock']})")

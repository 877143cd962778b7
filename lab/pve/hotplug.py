"""The lab's own way to do what pve-container 6.0.4 and newer does for a new devN: add it to a running container.

Kept: a node made below passthrough/, bound over an empty file inside, allowed in the device cgroup; adding only.
Not kept: AppArmor's profile for it.
"""

from __future__ import annotations

import ctypes
import os
import stat
from pathlib import Path

from . import lxc
from .config import Config
from .errors import PveError

# The same numbers on every architecture of Linux but alpha; glibc of Debian 12 knows setns only.
OPEN_TREE, MOVE_MOUNT = 428, 429
AT_FDCWD, OPEN_TREE_CLONE = -100, 1
EMPTY_PATHS = 0x04 | 0x40  # MOVE_MOUNT_F_EMPTY_PATH, MOVE_MOUNT_T_EMPTY_PATH
LIBC = ctypes.CDLL(None, use_errno=True)


def plug(vmid: str, config: Config, device: dict[str, str]) -> None:
    """`device`: the parts of a devN. Raises PveError for what did not work; the container then lacks it."""
    node, state = lxc.make_node(vmid, config, device)
    pid = lxc.init_pid(vmid)
    try:
        bind(node, pid, device["path"], unprivileged=config.settings.get("unprivileged") == "1")
    except OSError as error:
        raise PveError(f"{error.strerror or error}: {device['path']}") from error
    allowed = "r" if device.get("deny-write") == "1" else "rw"
    rule = f"{'b' if stat.S_ISBLK(state.st_mode) else 'c'} {os.major(state.st_rdev)}:{os.minor(state.st_rdev)}"
    done = lxc.command("lxc-cgroup", "-n", vmid, "devices.allow", f"{rule} {allowed}")
    if done.returncode:
        raise PveError(done.stderr.strip())


def bind(source: Path, pid: int, target: str, *, unprivileged: bool) -> None:
    """Show `source` at `target` in the mount namespace of `pid`, made there when missing. Raises OSError."""
    tree = _checked(LIBC.syscall(OPEN_TREE, AT_FDCWD, bytes(source), OPEN_TREE_CLONE | os.O_CLOEXEC))
    try:
        if child := os.fork():
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code:
                raise OSError(code, os.strerror(code))
            return
        code = 1
        try:
            _bind_inside(tree, pid, target, unprivileged=unprivileged)
            code = 0
        except OSError as error:
            code = error.errno or 1
        finally:
            os._exit(code)
    finally:
        os.close(tree)


def _bind_inside(tree: int, pid: int, target: str, *, unprivileged: bool) -> None:
    """As the container's root: another user's files could not be made on its /dev."""
    mounts = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    if unprivileged:
        _checked(LIBC.setns(os.open(f"/proc/{pid}/ns/user", os.O_RDONLY), 0))
        os.setgid(0)
        os.setuid(0)
    place = Path(f"/proc/{pid}/root{target}")
    place.parent.mkdir(parents=True, exist_ok=True)
    over = os.open(place, os.O_CREAT | os.O_RDONLY)
    _checked(LIBC.setns(mounts, 0))
    _checked(LIBC.syscall(MOVE_MOUNT, tree, b"", over, b"", EMPTY_PATHS))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result

"""`pct create`, in PVE's order, so that one killed half-way leaves what PVE leaves.

1. a configuration of one line, `lock: create`; 2. an empty volume; 3. the template unpacked into it; 4. the
configuration without lock; 5. the first set-up inside (keys, host name); 6. the configuration with its defaults.
Killed (KILL) in 1-3: the lock and the volume stay, and `rootfs` is not in the configuration. Interrupted (TERM, INT),
or failed: volume and configuration are removed again.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from . import config as conf
from . import lxc, storage
from .config import Config
from .errors import PveError, verification_failed
from .options import MOUNT, NETWORK, ROOTFS, SETTINGS
from .schema import parse_property_string, print_property_string

TAR_FLAGS = ("--one-file-system", "-p", "--sparse", "--numeric-owner", "--xattrs", "--xattrs-include=user.*")
COMPRESSION = {"gz": "-z", "xz": "-J", "zst": "--zstd", "bz2": "-j"}
AFTER_CREATE = Path("/usr/share/gpubox-lab/after-create.d")  # the lab's own: programs, called with the new root
NEW_VOLUME = re.compile(r"([a-zA-Z][a-zA-Z0-9._-]*):(\d+(?:\.\d+)?)")


def create(vmid: str, values: dict[str, str]) -> None:
    """Make a container. `values`: parameters of the command, checked. Raises PveError."""
    values = {"unprivileged": "1"} | values
    default_storage = values.get("storage", "local")
    template = values["ostemplate"]
    password, keys = values.get("password", ""), values.get("ssh-public-keys", "")
    rootfs = values.get("rootfs", f"{default_storage}:4")
    if re.fullmatch(r"\d+(\.\d+)?", rootfs):
        rootfs = f"{default_storage}:{rootfs}"
    mounts = {name: value for name, value in values.items() if re.fullmatch(r"mp\d+", name)}
    if mounts and "rootfs" not in values:
        raise PveError("mount points configured, but 'rootfs' not set - aborting")
    if conf.path(vmid).exists():
        raise PveError(f"unable to create CT {vmid} - CT {vmid} already exists on node '{conf.node_name()}'")
    _check_storage(rootfs)
    storage.split_volume_id(template) if not template.startswith("/") else None
    config = Config(settings=_plain(values))
    for name, value in config.indexed("net").items():
        config.settings[name] = with_hardware_address(value)
    for value in config.indexed("dev").values():
        lxc.device_mode(parse_property_string(lxc.DEVICE, value).get("path", ""))
    if values["unprivileged"] == "1":
        config.settings["unprivileged"] = "1"
    else:
        config.settings.pop("unprivileged", None)
    with _failing_with(f"unable to create CT {vmid} - "), conf.locked(vmid) as lock, _interruptible():
        conf.store(vmid, Config(settings={"lock": "create"}))
        made: list[str] = []
        try:
            _fill(vmid, config, rootfs, mounts, made)
            _unpack(config, template, lock)
            _first_setup(vmid, config, password, keys)
        except BaseException:
            for volume in made:
                storage.free(volume)
            conf.path(vmid).unlink(missing_ok=True)
            raise
    if values.get("start") == "1":
        lxc.start(vmid, config)


def with_hardware_address(net: str) -> str:
    """A net setting with a MAC address of its own, from PVE's range, and its type, as PVE completes it."""
    keys = parse_property_string(NETWORK, net)
    chosen = "BC:24:11:" + ":".join(f"{random.randrange(256):02X}" for _ in range(3))
    return print_property_string(NETWORK, {"type": "veth", "hwaddr": chosen} | keys)


def allocate_volume(vmid: str, value: str, keys: dict, made: list[str]) -> str:  # type: ignore[type-arg]
    """`STORAGE:GiB` as an allocated volume with its size; other values unchanged. Adds to `made`."""
    parsed = parse_property_string(keys, value)
    new = NEW_VOLUME.fullmatch(parsed["volume"])
    if new is None:
        return print_property_string(keys, parsed)
    mebibytes = int(float(new[2]) * 1024)
    parsed["volume"] = storage.allocate(new[1], vmid)
    made.append(parsed["volume"])
    parsed["size"] = f"{mebibytes // 1024}G" if mebibytes % 1024 == 0 else f"{mebibytes}M"
    return print_property_string(keys, parsed)


def _plain(values: dict[str, str]) -> dict[str, str]:
    skipped = ("rootfs", "unprivileged")
    return {name: value for name, value in values.items() if name in SETTINGS and name not in skipped}


def _check_storage(rootfs: str) -> None:
    volume = parse_property_string(ROOTFS, rootfs)["volume"]
    if not volume.startswith("/"):
        name = storage.split_volume_id(volume)[0]
        if "rootdir" not in storage.storage(name).content:
            raise verification_failed({"storage": f"storage '{name}' does not support container directories"})


def _fill(vmid: str, config: Config, rootfs: str, mounts: dict[str, str], made: list[str]) -> None:
    config.settings["rootfs"] = allocate_volume(vmid, rootfs, dict(ROOTFS), made)
    for name, value in mounts.items():
        config.settings[name] = allocate_volume(vmid, value, dict(MOUNT), made)


def _unpack(config: Config, template: str, lock: int) -> None:
    root = lxc.root_directory(config)
    shifted = lxc.is_shifted(config)
    if shifted:
        os.chown(root, lxc.SHIFT, lxc.SHIFT)
    archive = _archive(template)
    print(f"extracting archive '{archive}'", flush=True)
    unpack = ["tar", "xpf", "-", COMPRESSION[archive.suffix.removeprefix(".")], "--totals", *TAR_FLAGS]
    unpack += ["-C", str(root), "--skip-old-files", "--anchored", "--exclude", "./dev/*"]
    if shifted:
        ids = [word for kind in "ug" for word in ("-m", f"{kind}:0:{lxc.SHIFT}:{lxc.SHIFTED}")]
        unpack = ["lxc-usernsexec", *ids, "--", *unpack]
    _run_reading(unpack, archive, lock)
    config.settings.setdefault("arch", "amd64")
    config.settings.setdefault("ostype", _os_type(root))


def _archive(template: str) -> Path:
    if template.startswith("/"):
        if not Path(template).is_file():
            raise PveError(f"can't find file '{template}'")
        return Path(template)
    return storage.template_path(template)


def _run_reading(words: list[str], archive: Path, lock: int) -> None:
    """The child holds the lock too: on PVE a worker goes on unpacking when the `pct` that began it is killed."""
    with archive.open("rb") as source, subprocess.Popen(words, stdin=source, pass_fds=[lock]) as process:
        try:
            status = process.wait()
        except BaseException:
            process.kill()
            raise
    if status:
        raise PveError(f"command '{' '.join(words)}' failed: exit code {status}")


def _os_type(root: Path) -> str:
    release = (root / "etc/os-release").read_text() if (root / "etc/os-release").exists() else ""
    found = re.search(r'^ID="?([a-z]+)', release, re.MULTILINE)
    if found is None or found[1] not in SETTINGS["ostype"].enum:
        raise PveError(f"unsupported distribution '{found[1] if found else ''}'")
    return found[1]


def _first_setup(vmid: str, config: Config, password: str, keys: str) -> None:
    conf.store(vmid, config)
    root = lxc.root_directory(config)
    (root / "etc/machine-id").write_text("")
    if password:
        subprocess.run(["chpasswd", "-R", str(root)], input=f"root:{password}\n", text=True, check=True)
    if keys:
        authorized = root / "root/.ssh/authorized_keys"
        authorized.parent.mkdir(mode=0o700, exist_ok=True)
        authorized.write_text(keys if keys.endswith("\n") else f"{keys}\n")
        authorized.chmod(0o600)
    lxc.write_identity(config, vmid, root)
    _make_host_keys(config, vmid, root)
    for hook in (hook for hook in sorted(AFTER_CREATE.glob("*")) if os.access(hook, os.X_OK)):
        subprocess.run([hook, str(root)], check=True)
    if lxc.is_shifted(config):
        _shift_what_we_wrote(root)
    config.settings.setdefault("hostname", f"CT{vmid}")
    config.settings.setdefault("memory", "512")
    config.settings.setdefault("swap", "512")
    conf.store(vmid, config)


def _make_host_keys(config: Config, vmid: str, root: Path) -> None:
    hostname = config.settings.get("hostname", "localhost").split(".")[0]
    for kind in ("ecdsa", "ed25519", "rsa"):
        name = f"ssh_host_{kind}_key"
        print(f"Creating SSH host key '{name}' - this may take some time ...", flush=True)
        file = root / "etc/ssh" / name
        for old in (file, file.with_suffix(".pub")):
            old.unlink(missing_ok=True)
        subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", f"root@{hostname}", "-f", file], check=True)
        shown = subprocess.run(["ssh-keygen", "-lf", file], capture_output=True, text=True, check=True).stdout.split()
        print(f"done: {shown[1]} root@{hostname}")


def _shift_what_we_wrote(root: Path) -> None:
    """Files that were written as the node's root belong to the container's root."""
    find = ["find", str(root), "-xdev", "-uid", "0", "-exec", "chown", "-h", f"{lxc.SHIFT}:{lxc.SHIFT}", "{}", "+"]
    subprocess.run(find, check=True)


@contextlib.contextmanager
def _failing_with(prefix: str) -> Iterator[None]:
    try:
        yield
    except PveError as error:
        raise PveError(prefix + error.message, error.status) from error
    except (OSError, subprocess.CalledProcessError, shutil.Error) as error:
        raise PveError(f"{prefix}{error}") from error


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """TERM and INT end a task with an error that is cleaned up after, as they do a worker of PVE."""

    def interrupt(_number: int, _frame: object) -> None:
        raise PveError("received interrupt")

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

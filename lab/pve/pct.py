"""A stand-in for `pct`, Proxmox VE's command for containers (pve-container 6), over the lab's own LXC.

Kept: commands, options, output, error strings, exit statuses (255 for a failed task), the configuration file with
pending changes and snapshots, the order of creation with its locks, a new devN in a running container (version.py says
from which PVE on). Not kept: quorum, HA, migration, backup, clones, taking snapshots, other hotplug, the firewall.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from . import config as conf
from . import lxc, storage
from .cli import REST, Command, Values
from .cli import main as run_cli
from .create import create
from .errors import PveError
from .options import BOOLEAN, INTEGER, MOUNT, ROOTFS, SETTINGS
from .schema import CONFIG_ID, STORAGE_ID, VMID, Parameter, each, parse_property_string
from .status import guest_status, guests
from .update import apply_pending, names, shown, update

PARAMETERS: Mapping[str, Parameter] = {"vmid": VMID}
WORDS = Parameter(optional=False)


def _list(_values: Values, _rest: list[str]) -> None:
    rows = guests()
    if rows:
        print(f"{'VMID':<10} {'Status':<10} {'Lock':<12} {'Name':<20}")
    for row in rows:
        print(f"{row['vmid']:<10} {row['status']:<10} {row.get('lock', ''):<12} {row['name']:<20}")


def _config(values: Values, _rest: list[str]) -> None:
    config = conf.load(values["vmid"])
    snapshot = values.get("snapshot")
    if snapshot is None:
        section: conf.Section = shown(config, current=values.get("current") == "1")
    elif snapshot in config.snapshots:
        section = config.snapshots[snapshot]
    else:
        raise PveError(f"snapshot '{snapshot}' does not exist")
    for name, value in sorted(section.settings.items()):
        print(f"{name}: {conf.encode(value) if name == 'description' else value}")
    for name, value in section.raw:
        print(f"{name}: {value}")


def _pending(values: Values, _rest: list[str]) -> None:
    config = conf.load(values["vmid"])
    deletes = config.pending_deletes()
    for name in sorted({*config.settings, *config.pending.settings} - {"delete"}):
        if name in config.settings:
            print(f"cur {name}: {config.settings[name]}")
        if name in config.pending.settings:
            print(f"new {name}: {config.pending.settings[name]}")
        elif name in deletes:
            print(f"del {name}: {config.settings.get(name, '')}")


def _status(values: Values, _rest: list[str]) -> None:
    conf.load(values["vmid"])
    status = guest_status(values["vmid"])
    if values.get("verbose") != "1":
        print(f"status: {status['status']}")
        return
    for name, value in sorted(status.items()):
        if name != "cpu":
            print(f"{name}: {value}")


def _create(values: Values, _rest: list[str]) -> None:
    keys = values.get("ssh-public-keys")
    if keys is not None:
        try:
            values["ssh-public-keys"] = Path(keys).read_text()
        except OSError as error:
            raise PveError(f"can't open '{keys}' - {error.strerror}") from error
    # One whose caller is gone ends at its next line, as a worker of PVE. Only meanwhile: tests call this in their own
    # process, which would die of any connection that is closed on it later.
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        create(values.pop("vmid"), values)
    finally:
        signal.signal(signal.SIGPIPE, before)


def _set(values: Values, _rest: list[str]) -> None:
    vmid = values.pop("vmid")
    digest = values.pop("digest", "")
    if not values:
        raise PveError("no options specified")
    delete, revert = names(values.pop("delete", "")), names(values.pop("revert", ""))
    update(vmid, values, delete=delete, revert=revert, digest=digest)


def start(vmid: str) -> None:
    """Raises PveError."""
    if lxc.is_running(vmid):
        raise PveError(f"CT {vmid} already running")
    with conf.locked(vmid):
        config = conf.load(vmid)
        if config.settings.get("template") == "1":
            raise PveError("you can't start a CT if it's a template")
        conf.check_lock(config)
        if config.pending.settings:
            apply_pending(vmid, config, running=False)
            conf.store(vmid, config)
        lxc.start(vmid, config)


def stop(vmid: str, *, kill: bool, timeout: int = 60, kill_after: bool = False) -> None:
    """Raises PveError."""
    if not lxc.is_running(vmid):
        raise PveError(f"CT {vmid} not running")
    with conf.locked(vmid):
        conf.check_lock(conf.load(vmid))
        lxc.stop(vmid, kill=kill, timeout=timeout, kill_after=kill_after)


def _start(values: Values, _rest: list[str]) -> None:
    start(values["vmid"])


def _stop(values: Values, _rest: list[str]) -> None:
    stop(values["vmid"], kill=True)


def _shutdown(values: Values, _rest: list[str]) -> None:
    timeout = int(values.get("timeout", "60"))
    stop(values["vmid"], kill=False, timeout=timeout, kill_after=values.get("forceStop") == "1")


def _reboot(values: Values, _rest: list[str]) -> None:
    conf.load(values["vmid"])
    stop(values["vmid"], kill=False, timeout=int(values.get("timeout", "60")), kill_after=True)
    start(values["vmid"])


def _running(vmid: str) -> None:
    conf.load(vmid)
    if not lxc.is_running(vmid):
        raise PveError(f"container '{vmid}' not running!")


def _exec(values: Values, rest: list[str]) -> None:
    vmid = values["vmid"]
    _running(vmid)
    if not rest:
        raise PveError("missing command")
    _attach(vmid, values, ["--", *rest])


def _enter(values: Values, _rest: list[str]) -> None:
    _running(values["vmid"])
    _attach(values["vmid"], values, [])


def _attach(vmid: str, values: Values, what: list[str]) -> None:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        os.environ.pop(name, None)
    os.environ["PATH"] = "/sbin:/bin:/usr/sbin:/usr/bin"
    keep = "--keep-env" if values.get("keep-env", "1") == "1" else "--clear-env"
    sys.stdout.flush()
    os.execvp("lxc-attach", ["lxc-attach", "-n", vmid, keep, *what])


def _push(values: Values, _rest: list[str]) -> None:
    vmid = values["vmid"]
    with conf.locked(vmid):
        if not lxc.is_running(vmid):
            raise PveError("can only push files to a running CT")
        conf.load(vmid)
        try:
            source = Path(values["file"]).open("rb")  # noqa: SIM115
        except OSError:
            raise PveError(f"failed to open {values['file']} for reading") from None
        with source:
            _copy(["lxc-attach", "-n", vmid, "--clear-env", "--"], values, source)


def _copy(prefix: list[str], values: Values, source: object) -> None:
    """Write standard input to the destination, with owner and mode as given, names looked up on that side."""
    script = 'umask 022; [ -e "$1" ] || : > "$1" || exit 1; [ -z "$2" ] || chmod "$2" "$1" || exit 1\n'
    script += '[ -z "$3$4" ] || chown "$3${4:+:$4}" "$1" || exit 1; exec cat > "$1"'
    perms = values.get("perms", "")
    perms = f"{int(perms, 16):o}" if perms.startswith("0x") else perms
    owner = (values.get("user", ""), values.get("group", ""))
    words = [*prefix, "sh", "-c", script, "sh", values["destination"], perms, *owner]
    done = subprocess.run(words, stdin=source, stderr=subprocess.PIPE, check=False)  # type: ignore[call-overload]
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().rpartition(": ")[2]
        raise PveError(f"failed to create file: {values['destination']}: {reason}")


def _pull(values: Values, _rest: list[str]) -> None:
    vmid = values["vmid"]
    with conf.locked(vmid):
        if not lxc.is_running(vmid):
            raise PveError("can only pull files from a running VM")
        inside = Path(f"/proc/{lxc.init_pid(vmid)}/root") / values["path"].lstrip("/")
        try:
            source = inside.open("rb")
        except OSError as error:
            raise PveError(f"failed to open {values['path']}: {error.strerror}") from None
        with source:
            _copy([], values, source)


def _unlock(values: Values, _rest: list[str]) -> None:
    with conf.locked(values["vmid"]):
        config = conf.load(values["vmid"])
        if "lock" not in config.settings:
            raise PveError("no lock found trying to remove any lock")
        del config.settings["lock"]
        conf.store(values["vmid"], config)


def _destroy(values: Values, _rest: list[str]) -> None:
    vmid = values["vmid"]
    config = conf.load(vmid)
    if config.settings.get("protection") == "1":
        raise PveError(f"can't remove CT {vmid} - protection mode enabled")
    conf.check_lock(config)
    with conf.locked(vmid):
        if lxc.is_running(vmid):
            if values.get("force") != "1":
                raise PveError(f"unable to destroy CT {vmid} - container is running")
            print(f"forced to stop CT {vmid} before destroying!", file=sys.stderr)
            lxc.stop(vmid, kill=True)
        volumes = [config.settings["rootfs"]] if "rootfs" in config.settings else []
        for volume in [*volumes, *config.indexed("mp").values()]:
            name = parse_property_string(ROOTFS | MOUNT | {"mp": Parameter()}, volume)["volume"]
            if not name.startswith("/"):
                storage.free(name)
        if values.get("destroy-unreferenced-disks") == "1":
            for name in storage.volumes_of(vmid):
                storage.free(name)
        conf.store(vmid, conf.Config(settings={"lock": "destroyed"}))
        shutil.rmtree(lxc.LXC / vmid, ignore_errors=True)
        if values.get("purge") == "1":
            print(f"purging CT {vmid} from related configurations..")
        conf.path(vmid).unlink()


def _list_snapshots(values: Values, _rest: list[str]) -> None:
    config = conf.load(values["vmid"])
    ordered = sorted(config.snapshots.items(), key=lambda item: int(item[1].settings.get("snaptime", "0")))
    for depth, (name, section) in enumerate(ordered):
        print(f"{'  ' * depth}`-> {name:<27} {section.settings.get('description', '').strip()}".rstrip())
    print(f"{'  ' * len(ordered)}`-> {'current':<27} You are here!")


def _with(arguments: tuple[str, ...] = ("vmid",), **parameters: Parameter) -> dict[str, Parameter]:
    named = {name.replace("_", "-"): parameter for name, parameter in parameters.items()}
    return {name: PARAMETERS.get(name, WORDS) for name in arguments if name != REST} | named


_COPY = {"user": Parameter(), "group": Parameter(), "perms": Parameter()}
_NAMES = Parameter(check=each(CONFIG_ID), is_list=True)
COMMANDS: Mapping[str, Command] = {
    "list": Command(_list),
    "config": Command(_config, ("vmid",), _with(current=BOOLEAN, snapshot=Parameter())),
    "pending": Command(_pending, ("vmid",), _with()),
    "status": Command(_status, ("vmid",), _with(verbose=BOOLEAN)),
    "set": Command(
        _set, ("vmid",), dict(SETTINGS) | _with(delete=_NAMES, revert=_NAMES, digest=Parameter(max_length=40))
    ),
    "create": Command(
        _create,
        ("vmid", "ostemplate"),
        dict(SETTINGS)
        | _with(
            ("vmid", "ostemplate"),
            password=Parameter(),
            storage=Parameter(check=STORAGE_ID),
            force=BOOLEAN,
            restore=BOOLEAN,
            unique=BOOLEAN,
            pool=Parameter(),
            ignore_unpack_errors=BOOLEAN,
            ssh_public_keys=Parameter(),
            bwlimit=Parameter("number"),
            start=BOOLEAN,
            ha_managed=BOOLEAN,
        ),
    ),
    "destroy": Command(_destroy, ("vmid",), _with(force=BOOLEAN, purge=BOOLEAN, destroy_unreferenced_disks=BOOLEAN)),
    "start": Command(_start, ("vmid",), _with(skiplock=BOOLEAN, debug=BOOLEAN)),
    "stop": Command(_stop, ("vmid",), _with(skiplock=BOOLEAN, overrule_shutdown=BOOLEAN)),
    "shutdown": Command(_shutdown, ("vmid",), _with(timeout=INTEGER, forceStop=BOOLEAN)),
    "reboot": Command(_reboot, ("vmid",), _with(timeout=INTEGER)),
    "exec": Command(_exec, ("vmid", REST), _with(keep_env=BOOLEAN)),
    "enter": Command(_enter, ("vmid",), _with(keep_env=BOOLEAN)),
    "push": Command(_push, ("vmid", "file", "destination"), _with(("vmid", "file", "destination"), **_COPY)),
    "pull": Command(_pull, ("vmid", "path", "destination"), _with(("vmid", "path", "destination"), **_COPY)),
    "unlock": Command(_unlock, ("vmid",), _with()),
    "listsnapshot": Command(_list_snapshots, ("vmid",), _with()),
}


def main() -> None:
    sys.exit(run_cli("pct", COMMANDS, sys.argv[1:]))

"""`pct set`: changes of a configuration, at once where PVE applies them at once, else pending until the next start."""

from __future__ import annotations

import re
import sys

from . import config as conf
from . import hotplug, lxc, version
from .config import Config
from .create import allocate_volume, with_hardware_address
from .errors import PveError, verification_failed
from .options import DEVICE, MOUNT, SETTINGS
from .schema import parse_property_string

FAST = ("description", "onboot", "startup", "protection", "hostname", "hookscript", "cores", "tags", "lock")
REQUIRED = ("memory", "rootfs", "ostype")


def names(text: str) -> list[str]:
    return [name for name in re.split(r"[,;\s]+", text) if name]


def update(vmid: str, values: dict[str, str], *, delete: list[str], revert: list[str], digest: str = "") -> None:
    """Change the settings of a container. Raises PveError."""
    with conf.locked(vmid):
        config = conf.load(vmid)
        conf.check_lock(config)
        if digest and digest != config.digest:
            raise PveError("detected modified configuration - file changed by other user? Try again.")
        _check_names(values, delete, revert)
        for name in revert:
            config.pending.settings.pop(name, None)
            config.set_pending_deletes([other for other in config.pending_deletes() if other != name])
        _queue_deletes(config, delete)
        _queue_values(config, values)
        apply_pending(vmid, config, running=lxc.is_running(vmid), only={*values, *delete})
        conf.store(vmid, config)


def _check_names(values: dict[str, str], delete: list[str], revert: list[str]) -> None:
    for kind, listed in (("revert", revert), ("delete", delete)):
        for name in listed:
            if name not in SETTINGS:
                raise verification_failed({kind: f"unknown option '{name}'"})
            if name in values:
                raise verification_failed({kind: f"you can't use '-{name}' and -{kind} {name}' at the same time"})


def _queue_deletes(config: Config, delete: list[str]) -> None:
    for name in delete:
        if name not in config.settings and name not in config.pending.settings:
            print(f"cannot delete '{name}' - not set in current configuration!", file=sys.stderr)
            continue
        if name in REQUIRED:
            raise PveError(f"unable to delete required option '{name}'")
        if name == "unprivileged":
            raise PveError(f"unable to delete read-only option: '{name}'")
        if config.settings.get("protection") == "1" and re.match(r"(mp|unused)\d", name):
            raise PveError(f"can't remove CT drive '{name}' - protection mode enabled")
        config.pending.settings.pop(name, None)
        config.set_pending_deletes([*{*config.pending_deletes(), name}])


def _queue_values(config: Config, values: dict[str, str]) -> None:
    for name, value in sorted(values.items()):
        if name == "unprivileged":
            raise PveError(f"unable to modify read-only option: '{name}'")
        if re.fullmatch(r"dev\d+", name):
            lxc.device_mode(parse_property_string(DEVICE, value).get("path", ""))
        config.pending.settings[name] = value
        config.set_pending_deletes([other for other in config.pending_deletes() if other != name])


def apply_pending(vmid: str, config: Config, *, running: bool, only: set[str] | None = None) -> None:
    """Move pending changes into the current settings: all of them in a stopped container, else those that can.

    Into a running container goes what needs no change there and, on PVE 9, a new devN; a devN to change or to take
    away waits there too. Not kept: PVE also applies mpN, netN, memory, swap and CPU limits at once.
    Raises PveError when a device could not be plugged in; nothing is written then.
    """
    for name in config.pending_deletes():
        if (only is None or name in only) and (not running or name in FAST):
            config.settings.pop(name, None)
    config.set_pending_deletes([name for name in config.pending_deletes() if name in config.settings])
    for name, value in sorted(config.pending.settings.items()):
        if name == "delete" or (only is not None and name not in only):
            continue
        if config.settings.get(name) == value:
            del config.pending.settings[name]
        elif not running or name in FAST:
            config.settings[name] = _completed(vmid, config, name, value)
            del config.pending.settings[name]
        elif re.fullmatch(r"dev\d+", name) and name not in config.settings and version.current().hotplugs_devices:
            _plug(vmid, config, name, value)
            config.settings[name] = value
            del config.pending.settings[name]


def _plug(vmid: str, config: Config, name: str, value: str) -> None:
    try:
        hotplug.plug(vmid, config, parse_property_string(DEVICE, value))
    except PveError as error:
        raise verification_failed({name: f"unable to hotplug {name}: {error}"}) from error


def _completed(vmid: str, config: Config, name: str, value: str) -> str:
    if re.fullmatch(r"net\d+", name):
        old = re.search(r"hwaddr=([^,]+)", config.settings.get(name, ""))
        return with_hardware_address(f"{value},hwaddr={old[1]}" if old and "hwaddr=" not in value else value)
    if re.fullmatch(r"mp\d+", name):
        return allocate_volume(vmid, value, dict(MOUNT), [])
    return value


def shown(config: Config, *, current: bool) -> Config:
    """The configuration as `pct config` shows it: with pending changes taken in, unless `current`."""
    settings = dict(config.settings)
    if not current:
        settings |= {name: value for name, value in config.pending.settings.items() if name != "delete"}
        for name in config.pending_deletes():
            settings.pop(name, None)
    return Config(settings=settings, raw=list(config.raw), digest=config.digest)

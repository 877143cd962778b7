"""From settings, GPUs and what is there: how a container is made, and what of it has to change.

Pure. `pct create` and `pct set` write PVE's own keys; raw `lxc.` lines, which no program of PVE can write, are planned
as a new text of the file. docs/container.md lists the keys that are ours; everything else is the operator's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpubox.container import ContainerConfig, is_true, parse_property, render_property
from gpubox.errors import RefusedError
from gpubox.nvidia.gpu_count import CONTROL_NODES, NVIDIA_MAJOR, DeviceNode, gpu_paths
from gpubox.proxmox.settings import ContainerSettings

MODELS = "/models"
MODESET = "/dev/nvidia-modeset"
RAW_LIMITS = {"lxc.prlimit.memlock": "unlimited", "lxc.prlimit.nofile": "1048576"}
CPUSET = "lxc.cgroup2.cpuset.cpus"

_OURS = ("hostname", "memory", "swap", "cores", "features", "onboot", "startup")
_OUR_DEVICE = re.compile(r"/dev/nvidia(\d+|ctl|-uvm|-uvm-tools)")
_INDEXED = re.compile(r"(dev|mp)(\d+)")
_SLOTS = 256  # of devN and of mpN
_PVE_DEFAULTS = {"memory": "512", "swap": "512"}  # MiB, of a configuration that does not say
_ALLOW = re.compile(r"c\s+(?P<major>\d+):\S+\s+[rwm]+")
_ALLOW_KEYS = ("lxc.cgroup.devices.allow", "lxc.cgroup2.devices.allow")
_DYNAMIC_MAJORS = (*range(234, 255), *range(384, 512))


@dataclass(frozen=True)
class SettingsPlan:
    """`arguments` of `pct set ID`, and what they change, a line each with - or + in front. Empty: nothing to do."""

    arguments: list[str]
    diff: list[str]


@dataclass(frozen=True)
class RawPlan:
    """The file as it must become. `limits`: those of the changes that a running container needs a restart for."""

    config: ContainerConfig
    diff: list[str]
    limits: list[str]


def create_arguments(vmid: int, settings: ContainerSettings, minors: Sequence[int]) -> list[str]:
    """What follows `pct`. The raw lines (`plan_raw`) cannot be given here and must follow."""
    network = {"name": "eth0", "bridge": settings.bridge, "ip": settings.address}
    if settings.gateway is not None:
        network["gw"] = settings.gateway
    values = {
        "hostname": settings.hostname,
        "ostype": settings.ostype,
        "unprivileged": "1" if settings.unprivileged else "0",
        "rootfs": f"{settings.storage}:{settings.disk_gib}",
        "memory": str(settings.memory_mib),
        "swap": "0",
        "features": "nesting=1",
        "onboot": "1",
        "startup": f"order={settings.startup_order}",
        "net0": render_property(network, ""),
    }
    if settings.models is not None:
        values["mp0"] = render_property(_models_mount(settings.models), "volume")
    for number, device in enumerate(_wanted_devices(settings, minors).values()):
        values[f"dev{number}"] = render_property(device, "path")
    return ["create", str(vmid), template_volume(settings), *_options(values)]


def template_volume(settings: ContainerSettings) -> str:
    return f"{settings.template_storage}:vztmpl/{settings.template}"


def plan_settings(
    config: ContainerConfig, settings: ContainerSettings, minors: Sequence[int], node_paths: Sequence[str] = ()
) -> SettingsPlan:
    """What `pct set` has to change. What is pending counts as done: it applies at the next start.

    node_paths: the /dev/nvidia* that the node has, for what an old-style line passes besides the GPUs.
    """
    is_now = config.intended
    changed = {
        **_changed_scalars(is_now, settings),
        **_changed_models(is_now, settings),
    }
    deleted = ["cores"] if settings.cpuset is not None and "cores" in is_now else []
    if minors:
        wanted = _wanted_devices(settings, minors)
        if MODESET in node_paths and any(source == MODESET for source in _old_mounts(config)):
            wanted.setdefault(MODESET, _device(MODESET, settings))
        devices, strays = _changed_devices(config, wanted)
        changed |= devices
        deleted += strays
    diff = []
    for key in sorted({*changed, *deleted}, key=_natural):
        diff += [f"- {key}: {is_now[key]}"] if key in is_now else []
        diff += [f"+ {key}: {changed[key]}"] if key in changed else []
    delete = ["--delete", ",".join(deleted)] if deleted else []
    return SettingsPlan([*_options(changed), *delete], diff)


def plan_raw(
    config: ContainerConfig, settings: ContainerSettings, minors: Sequence[int], uvm_major: int | None
) -> RawPlan:
    """Limits and CPUs are set; old-style passthrough goes, once devN gives what it gave (so: not without GPUs).

    uvm_major: of /dev/nvidia-uvm on the node now. An allow line of another dynamic major may be anybody's and stays.
    """
    new = config
    if minors:
        majors = {NVIDIA_MAJOR, *([] if uvm_major is None else [uvm_major])}
        new = new.without_lxc(lambda key, value: _is_old_mount(key, value) or _allowed_major(key, value) in majors)
    gone = _difference(config.lxc, new.lxc)
    for key, value in wanted_raw(settings).items():
        new = new.with_lxc(key, value)
    removed = [f"- {key}: {value}" for key, value in _difference(config.lxc, new.lxc)]
    added = [f"+ {key}: {value}" for key, value in _difference(new.lxc, config.lxc)]
    passthrough = [f"- {key}: {value}" for key, value in gone]
    return RawPlan(new, removed + added, added or [line for line in removed if line not in passthrough])


def wanted_raw(settings: ContainerSettings) -> dict[str, str]:
    return RAW_LIMITS | ({CPUSET: settings.cpuset} if settings.cpuset is not None else {})


def configured_gpus(config: ContainerConfig) -> int:
    """GPUs that the container gets at its next start, by devN or the old way."""
    devices = {entry.get("path", "") for entry in _devices(config.intended).values()}
    return len(gpu_paths({*devices, *_old_mounts(config)}))


def check_same_container(vmid: int, config: ContainerConfig, settings: ContainerSettings) -> None:
    """Raises RefusedError for whatever cannot be changed in a container that exists, or means another container."""
    problems = list(_problems(vmid, config, settings))
    if not problems:
        return
    (message, hint), *rest = problems
    raise RefusedError(message, hint=hint, detail="\n".join(f"{other}: {what}" for other, what in rest))


def notes(vmid: int, config: ContainerConfig, settings: ContainerSettings) -> list[str]:
    """What differs and stays as it is, and what a person can do about it."""
    return list(_notes(vmid, config, settings))


def restart_reasons(
    config: ContainerConfig,
    *,
    changed_raw: Sequence[str] = (),
    inside: Mapping[str, DeviceNode],
    nodes: Mapping[str, DeviceNode],
) -> list[str]:
    """Why the running container is not yet what its configuration says. Empty: no restart is needed.

    Read and not predicted: what PVE applies to a running container depends on its version (devN: docs/container.md).

    changed_raw: raw lines written since it started. inside: our device nodes in it. nodes: those of the node.
    """
    reasons = [
        f"{key}: {config.pending.get(key, 'removed')} (pending; is {config.values.get(key, 'not set')})"
        for key in sorted({*config.pending, *config.pending_deletes}, key=_natural)
        if _is_ours(config, key)
    ]
    reasons += [f"{line} (written; limits apply at a start)" for line in changed_raw]
    for device in _devices(config.values).values():
        path = device.get("path", "")
        if path not in nodes or not _OUR_DEVICE.fullmatch(path) or inside.get(path) == nodes[path]:
            continue
        seen = inside.get(path, "missing")
        reasons.append(f"{path} is {seen} inside and {nodes[path]} on the node (the module was loaded again)")
    return reasons


def _device(path: str, settings: ContainerSettings) -> dict[str, str]:
    return {"path": path, "mode": settings.devices_mode}


def _wanted_devices(settings: ContainerSettings, minors: Sequence[int]) -> dict[str, dict[str, str]]:
    paths = [f"/dev/nvidia{minor}" for minor in minors]
    return {path: _device(path, settings) for path in [*paths, *CONTROL_NODES]} if minors else {}


def _models_mount(source: str) -> dict[str, str]:
    return {"volume": source, "mp": MODELS, "ro": "1", "backup": "0"}


def _changed_scalars(is_now: dict[str, str], settings: ContainerSettings) -> dict[str, str]:
    wanted = {"memory": str(settings.memory_mib), "swap": "0"}
    changed = {key: value for key, value in wanted.items() if is_now.get(key, _PVE_DEFAULTS[key]) != value}
    if "hostname" not in is_now:
        changed["hostname"] = settings.hostname
    if not is_true(is_now.get("onboot")):
        changed["onboot"] = "1"
    features = parse_property(is_now.get("features", ""), "")
    if not is_true(features.get("nesting")):
        changed["features"] = render_property({**features, "nesting": "1"}, "")
    startup = parse_property(is_now.get("startup", ""), "order")
    if startup.get("order") != str(settings.startup_order):
        changed["startup"] = render_property({"order": "", **startup} | {"order": str(settings.startup_order)}, "")
    return changed


def _changed_models(is_now: dict[str, str], settings: ContainerSettings) -> dict[str, str]:
    """The mount at /models keeps what the operator added to it (shared, idmap, ...)."""
    if settings.models is None:
        return {}
    key, mount = _models_at(is_now) or (f"mp{_free(is_now, 'mp')}", {})
    wanted = mount | _models_mount(settings.models)
    same = mount and all(
        mount.get(part) == value or (part == "ro" and is_true(mount.get(part)))
        for part, value in wanted.items()
        if part != "backup"
    )
    if same and not is_true(mount.get("backup")):
        return {}
    return {key: render_property(wanted, "volume")}


def _changed_devices(config: ContainerConfig, wanted: dict[str, dict[str, str]]) -> tuple[dict[str, str], list[str]]:
    """devN to set and devN to delete. A wanted path keeps its number."""
    is_now = _devices(config.intended)
    taken = {**config.values, **config.intended}  # a number whose removal is pending is not free yet
    changed: dict[str, str] = {}
    kept: set[str] = set()
    for path, device in wanted.items():
        own = [key for key, entry in is_now.items() if entry.get("path") == path]
        right = [key for key in own if is_now[key] == device]
        key = (right or own or [f"dev{_free(taken | changed, 'dev')}"])[0]
        kept.add(key)
        if is_now.get(key) != device:
            changed[key] = render_property(device, "path")
    ours = [key for key, entry in is_now.items() if _OUR_DEVICE.fullmatch(entry.get("path", ""))]
    return changed, [key for key in ours if key not in kept]


def _devices(values: dict[str, str]) -> dict[str, dict[str, str]]:
    keys = sorted((key for key in values if re.fullmatch(r"dev\d+", key)), key=_natural)
    return {key: parse_property(values[key], "path") for key in keys}


def _models_at(values: dict[str, str]) -> tuple[str, dict[str, str]] | None:
    keys = sorted((key for key in values if re.fullmatch(r"mp\d+", key)), key=_natural)
    mounts = [(key, parse_property(values[key], "volume")) for key in keys]
    return next(((key, mount) for key, mount in mounts if mount.get("mp", "").rstrip("/") == MODELS), None)


def _free(values: dict[str, str], kind: str) -> int:
    return next(number for number in range(_SLOTS) if f"{kind}{number}" not in values)


def _is_ours(config: ContainerConfig, key: str) -> bool:
    found = _INDEXED.fullmatch(key)
    if found is None:
        return key in _OURS
    places = [values[key] for values in (config.pending, config.values) if key in values]
    if found[1] == "mp":
        return any(parse_property(text, "volume").get("mp", "").rstrip("/") == MODELS for text in places)
    return any(_OUR_DEVICE.fullmatch(parse_property(text, "path").get("path", "")) for text in places)


def _is_old_mount(key: str, value: str) -> bool:
    source = value.split(maxsplit=1)[0] if value else ""
    return key == "lxc.mount.entry" and (source == MODESET or _OUR_DEVICE.fullmatch(source) is not None)


def _old_mounts(config: ContainerConfig) -> list[str]:
    return [value.split()[0] for key, value in config.lxc if _is_old_mount(key, value)]


def _allowed_major(key: str, value: str) -> int | None:
    found = _ALLOW.fullmatch(value) if key in _ALLOW_KEYS else None
    return int(found["major"]) if found else None


def _problems(vmid: int, config: ContainerConfig, settings: ContainerSettings) -> Iterator[tuple[str, str]]:
    is_now = config.intended
    name = f"CT {vmid}"
    if is_true(is_now.get("template")):
        yield f"{name} is a template of PVE (template: 1) and cannot run", "give the box another vmid"
    if is_now.get("hostname", settings.hostname) != settings.hostname:
        yield (
            f"{name}: hostname is {is_now['hostname']!r}, wanted is {settings.hostname!r}: is it the right container?",
            f"correct the vmid in the inventory; or, if this container is meant, set hostname = {is_now['hostname']!r} "
            f"or rename it (pct set {vmid} --hostname {settings.hostname}), and run again",
        )
    anew = "or make it anew yourself (back it up, destroy it, run again): a deploy never destroys a container"
    unprivileged = is_true(is_now.get("unprivileged")) or any(key == "lxc.idmap" for key, _ in config.lxc)
    if unprivileged != settings.unprivileged:
        said = f"{unprivileged}" if "unprivileged" in is_now else f"{unprivileged} (no such line in its configuration)"
        yield (
            f"{name}: unprivileged is {said}, wanted is {settings.unprivileged}",
            f"set unprivileged = {unprivileged} for this box, {anew}",
        )
    if is_now.get("ostype", settings.ostype) != settings.ostype:
        yield (
            f"{name}: ostype is {is_now['ostype']!r}, wanted is {settings.ostype!r}",
            f"set ostype = {is_now['ostype']!r} for this box, {anew}",
        )
    volume = parse_property(is_now.get("rootfs", ""), "volume").get("volume", "")
    storage = volume.partition(":")[0]
    if volume and storage != settings.storage:
        yield (
            f"{name}: storage of rootfs is {storage!r}, wanted is {settings.storage!r}",
            f"set storage = {storage!r} for this box, or move it (pct move-volume {vmid} rootfs {settings.storage})",
        )
    models = _models_at(is_now)
    if settings.models is not None and models and not models[1].get("volume", "").startswith("/"):
        yield (
            f"{name}: {models[0]} mounts the volume {models[1].get('volume')!r} at {MODELS}, wanted is the node's "
            f"directory {settings.models!r}",
            f"remove models from this box's settings, or give that volume another place (pct set {vmid} --{models[0]})",
        )


def _notes(vmid: int, config: ContainerConfig, settings: ContainerSettings) -> Iterator[str]:
    size = parse_property(config.intended.get("rootfs", ""), "volume").get("size", "")
    if size and size != f"{settings.disk_gib}G":
        yield (
            f"CT {vmid}: disk_gib = {settings.disk_gib}, rootfs has {size}: it counts at creation only; "
            f"grow it by hand (pct resize {vmid} rootfs {settings.disk_gib}G); PVE shrinks none"
        )
    cpus = [value for key, value in config.lxc if key == CPUSET]
    if settings.cpuset is None and cpus:
        yield f"CT {vmid}: {CPUSET}: {cpus[-1]} stays: no cpuset is set for this box"
    for key, value in config.lxc:
        if (major := _allowed_major(key, value)) in _DYNAMIC_MAJORS:
            yield f"CT {vmid}: '{key}: {value}' stays; remove it by hand if {major} was nvidia-uvm in an earlier boot"
    others = [key for key in {*config.pending, *config.pending_deletes} if not _is_ours(config, key)]
    if others:
        yield f"CT {vmid}: changes by others are pending: {', '.join(sorted(others, key=_natural))}"


def _options(values: dict[str, str]) -> list[str]:
    return [word for key, value in values.items() for word in (f"--{key}", value)]


def _difference(of: list[tuple[str, str]], without: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Entries of the first list that the second lacks, each as often as it does."""
    left = list(without)
    missing = []
    for entry in of:
        if entry in left:
            left.remove(entry)
        else:
            missing.append(entry)
    return missing


def _natural(key: str) -> tuple[str, int]:
    """dev2 before dev10."""
    found = re.fullmatch(r"(.*?)(\d*)", key)
    assert found is not None
    return found[1], int(found[2] or 0)

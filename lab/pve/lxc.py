"""Run a container with real LXC: the file that lxc-start reads, the state, starting and stopping.

Kept of PVE: the unit pve-container@ID, /var/lib/lxc/ID/config made anew at each start, device nodes made in a
directory of their own and bound into the container, host name and resolver written before each start.
Not kept: the container's own network configuration. LXC sets the address itself (PVE does so for `host-managed`
interfaces), since the lab's template has no ifupdown; with ip=dhcp the interface gets no address.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import stat
import subprocess
import sys
from pathlib import Path

from .config import Config, load
from .errors import PveError
from .options import DEVICE, FEATURES, MOUNT, NETWORK, ROOTFS
from .schema import parse_property_string
from .storage import volume_path

LXC = Path("/var/lib/lxc")
RUN = Path("/run/pve")
SHIFT = 100000
SHIFTED = 65536
HOOK = "/usr/share/lxc/hooks/lxc-pve-prestart-hook"
DRIVER = Path("/proc/driver")  # one kernel: what its drivers say there is seen in every container


def command(*words: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout, check=False)


def is_running(vmid: str) -> bool:
    return any(f"@/var/lib/lxc/{vmid}/command" in line for line in Path("/proc/net/unix").read_text().splitlines())


def init_pid(vmid: str) -> int:
    """The container's first process, as a process of the node. Raises PveError when it does not run."""
    shown = command("lxc-info", "-n", vmid, "-pH").stdout.strip()
    if not shown:
        raise PveError(f"unable to get PID for CT {vmid} (not running?)")
    return int(shown)


def is_shifted(config: Config) -> bool:
    return config.settings.get("unprivileged") == "1" or any(name == "lxc.idmap" for name, _ in config.raw)


def device_mode(path: str) -> os.stat_result:
    """Raises PveError for what is no device."""
    try:
        state = os.stat(path)  # noqa: PTH116 (an operator's string, kept as it is in the messages)
    except FileNotFoundError:
        raise PveError(f"Device {path} does not exist") from None
    if not stat.S_ISCHR(state.st_mode) and not stat.S_ISBLK(state.st_mode):
        raise PveError(f"{path} is not a device")
    return state


def write_lxc_config(vmid: str, config: Config) -> None:
    """What lxc-start reads. Raises PveError, for a missing device above all."""
    settings = config.settings
    for needed in ("arch", "ostype"):
        if needed not in settings:
            raise PveError(f"missing '{needed}' - internal error")
    if "rootfs" not in settings:
        raise PveError("missing 'rootfs' configuration")
    features = parse_property_string(FEATURES, settings.get("features", ""))
    lines = [
        ("lxc.arch", settings["arch"]),
        ("lxc.include", "/usr/share/lxc/config/common.conf"),
        *([("lxc.include", "/usr/share/lxc/config/userns.conf")] if is_shifted(config) else []),
        *([("lxc.include", "/usr/share/lxc/config/nesting.conf")] if features.get("nesting") == "1" else []),
        ("lxc.apparmor.profile", "unconfined"),
        ("lxc.monitor.unshare", "1"),
        ("lxc.tty.max", settings.get("tty", "2")),
        ("lxc.environment", "TERM=linux"),
        ("lxc.uts.name", settings.get("hostname", f"CT{vmid}")),
        ("lxc.hook.pre-start", HOOK),
        ("lxc.rootfs.path", f"dir:{root_directory(config)}"),
        ("lxc.init.cmd", settings.get("entrypoint", "/sbin/init")),
    ]
    if settings.get("unprivileged") == "1" and not any(name == "lxc.idmap" for name, _ in config.raw):
        lines += [("lxc.idmap", f"{kind} 0 {SHIFT} {SHIFTED}") for kind in "ug"]
    lines += _limits(settings) + _devices(config, vmid) + _mounts(config) + _network(config, vmid)
    lines += [pair for name, value in config.raw for pair in _raw(name, value)]
    directory = LXC / vmid
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config").write_text("".join(f"{name} = {value}\n" for name, value in lines))


def _has_v1(controller: str) -> bool:
    return Path("/sys/fs/cgroup", controller).is_dir()


def _limits(settings: dict[str, str]) -> list[tuple[str, str]]:
    """Memory and swap, where this kernel has a controller for them; cgroup v1 counts memory and swap together."""
    memory = int(settings.get("memory", "512")) * 1024**2
    swap = int(settings.get("swap", "0")) * 1024**2
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        return [("lxc.cgroup2.memory.max", str(memory)), ("lxc.cgroup2.memory.swap.max", str(swap))]
    if not _has_v1("memory"):
        return []
    limits = [("lxc.cgroup.memory.limit_in_bytes", str(memory))]
    if Path("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes").exists():
        limits.append(("lxc.cgroup.memory.memsw.limit_in_bytes", str(memory + swap)))
    return limits


def _raw(name: str, value: str) -> list[tuple[str, str]]:
    """A raw line of the operator. Where the kernel has only cgroup v1, keys that both know are translated.

    A limit above what the lab's machine lets its root set is left out: a real node's root may set any.
    """
    if name.startswith("lxc.prlimit.") and not _may_set_limit(name.removeprefix("lxc.prlimit."), value):
        return []
    if not name.startswith("lxc.cgroup2.") or Path("/sys/fs/cgroup/cgroup.controllers").exists():
        return [(name, value)]
    key = name.removeprefix("lxc.cgroup2.")
    same_in_both = key.startswith(("cpuset.", "devices.")) and _has_v1(key.split(".")[0])
    return [(f"lxc.cgroup.{key}", value)] if same_in_both else []


def _may_set_limit(name: str, value: str) -> bool:
    """Whether this process could set it: within the hard limit, or privileged to raise that (CAP_SYS_RESOURCE)."""
    number = getattr(resource, f"RLIMIT_{name.upper()}", None)
    if number is None:
        return True  # LXC says what it thinks of that name
    wanted = [resource.RLIM_INFINITY if part == "unlimited" else int(part) for part in value.split(":")][-1]
    soft, hard = resource.getrlimit(number)
    if hard == resource.RLIM_INFINITY or (wanted != resource.RLIM_INFINITY and wanted <= hard):
        return True
    try:
        resource.setrlimit(number, (soft, wanted))
    except (ValueError, OSError):
        return False
    return True


def _devices(config: Config, vmid: str) -> list[tuple[str, str]]:
    group = "cgroup2" if Path("/sys/fs/cgroup/cgroup.controllers").exists() else "cgroup"
    lines = []
    for name, text in config.indexed("dev").items():
        device = parse_property_string(DEVICE, text)
        if "path" not in device:
            raise PveError(f"Path is not defined for passthrough device {name}")
        state = device_mode(device["path"])
        kind = "b" if stat.S_ISBLK(state.st_mode) else "c"
        number = f"{os.major(state.st_rdev)}:{os.minor(state.st_rdev)}"
        allowed = "r" if device.get("deny-write") == "1" else "rw"
        lines.append((f"lxc.{group}.devices.allow", f"{kind} {number} {allowed}"))
        source = passthrough(vmid) / device["path"].lstrip("/")
        lines.append(("lxc.mount.entry", f"{source} {device['path'].lstrip('/')} none bind,create=file 0 0"))
    if (DRIVER / "nvidia").is_dir():
        for seen in ("proc/driver", "proc/devices"):
            lines.append(("lxc.mount.entry", f"/{seen} {seen} none bind,ro,optional 0 0"))
    if Path("/sys/bus/pci/devices").is_mount():  # the devices of the machine that the node stands for
        lines.append(("lxc.mount.entry", "/sys/bus/pci/devices sys/bus/pci/devices none bind,ro,optional 0 0"))
    return lines


def _mounts(config: Config) -> list[tuple[str, str]]:
    lines = []
    for name, text in config.indexed("mp").items():
        mount = parse_property_string(MOUNT, text)
        source = mount["volume"]
        if not source.startswith("/"):
            source = str(volume_path(source))
        elif not Path(source).is_dir():
            raise PveError(f"cannot open directory {source}: No such file or directory ({name})")
        options = "rbind,ro" if mount.get("ro") == "1" else "rbind"
        target = mount["mp"].strip("/").replace(" ", r"\040")
        lines.append(("lxc.mount.entry", f"{source} {target} none {options},create=dir 0 0"))
    return lines


def _network(config: Config, vmid: str) -> list[tuple[str, str]]:
    lines = []
    for name, text in config.indexed("net").items():
        number = name.removeprefix("net")
        net = parse_property_string(NETWORK, text)
        keys = {"type": "veth", "veth.pair": f"veth{vmid}i{number}", "name": net["name"]}
        if "hwaddr" in net:
            keys["hwaddr"] = net["hwaddr"]
        if net.get("link_down") != "1":
            keys |= {"link": net.get("bridge", "vmbr0"), "flags": "up"}
        if net.get("ip", "dhcp") not in ("dhcp", "manual"):
            keys["ipv4.address"] = net["ip"]
        if "gw" in net:
            keys["ipv4.gateway"] = net["gw"]
        lines += [(f"lxc.net.{number}.{key}", value) for key, value in keys.items()]
    return lines


def root_directory(config: Config) -> Path:
    return volume_path(parse_property_string(ROOTFS, config.settings["rootfs"])["volume"])


def passthrough(vmid: str) -> Path:
    return LXC / vmid / "passthrough"


def prepare(vmid: str) -> None:
    """What PVE's pre-start hook does: makes the device nodes, writes host name and resolver."""
    config = load(vmid)
    shutil.rmtree(passthrough(vmid), ignore_errors=True)
    for text in config.indexed("dev").values():
        make_node(vmid, config, parse_property_string(DEVICE, text))
    write_identity(config, vmid, root_directory(config))


def make_node(vmid: str, config: Config, device: dict[str, str]) -> tuple[Path, os.stat_result]:
    """The device node that will be bound into the container, and the state of the one it stands for."""
    state = device_mode(device["path"])
    owner = SHIFT if is_shifted(config) else 0
    node = passthrough(vmid) / device["path"].lstrip("/")
    node.parent.mkdir(parents=True, exist_ok=True)
    node.unlink(missing_ok=True)
    os.mknod(node, stat.S_IFMT(state.st_mode) | 0o660, state.st_rdev)
    node.chmod(int(device.get("mode", "0660"), 8))
    os.chown(node, owner + int(device.get("uid", "0")), owner + int(device.get("gid", "0")))
    return node, state


def write_identity(config: Config, vmid: str, root: Path) -> None:
    """Host name, /etc/hosts and resolver inside `root`; the node's resolver when the container names none."""
    hostname = config.settings.get("hostname", f"CT{vmid}").split(".")[0]
    address = next((found[1] for found in [re.search(r"ip=([0-9.]+)", config.settings.get("net0", ""))] if found), "")
    (root / "etc/hostname").write_text(f"{hostname}\n")
    (root / "etc/hosts").write_text(f"127.0.0.1 localhost\n{address or '127.0.1.1'} {hostname}\n")
    servers = re.split(r"[,;\s]+", config.settings.get("nameserver", ""))
    own = "".join(f"nameserver {server}\n" for server in servers if server)
    resolver = root / "etc/resolv.conf"
    resolver.unlink(missing_ok=True)
    resolver.write_text(own or Path("/etc/resolv.conf").read_text())


def start(vmid: str, config: Config) -> None:
    """Start it and wait until LXC says that it runs. Raises PveError."""
    write_lxc_config(vmid, config)
    RUN.mkdir(exist_ok=True)
    log = RUN / f"ct-{vmid}.stderr"
    log.unlink(missing_ok=True)
    unit = f"pve-container@{vmid}"
    command("systemctl", "reset-failed", unit)
    _must("systemctl", "start", unit)
    while not is_running(vmid) and command("systemctl", "is-active", "--quiet", unit).returncode == 0:
        command("lxc-wait", "-n", vmid, "-s", "RUNNING", "-t", "1")
    command("lxc-wait", "-n", vmid, "-s", "RUNNING|STOPPED|ABORTING", "-t", "20")
    if command("lxc-info", "-n", vmid, "-sH").stdout.strip() != "RUNNING":
        if log.exists():
            sys.stderr.write(re.sub(rf"^lxc-start: {vmid}: ", "", log.read_text(), flags=re.MULTILINE))
        raise PveError(f"startup for container '{vmid}' failed")


def stop(vmid: str, *, kill: bool, timeout: int = 60, kill_after: bool = False) -> None:
    """Raises PveError when it still runs afterwards. `timeout` in seconds, for a clean shutdown."""
    how = ["--kill"] if kill else [*([] if kill_after else ["--nokill"]), "--timeout", str(timeout)]
    command("lxc-stop", "-n", vmid, *how)
    command("lxc-wait", "-n", vmid, "-s", "STOPPED", "-t", "5")
    if is_running(vmid):
        raise PveError("container did not stop")
    command("systemctl", "reset-failed", f"pve-container@{vmid}")  # lxc-start's status says how its init ended


def _must(*words: str) -> None:
    done = command(*words)
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise PveError(f"command '{' '.join(words)}' failed: exit code {done.returncode}")

"""A box: a container made from the base image, reached by ssh as a real box would be, or by lxc-attach when cut off."""

from __future__ import annotations

import shlex
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpubox.errors import GpuboxError
from lab import keys, machine, network, uv_cache
from lab.image import ensure_image, unpack
from lab.mounts import remove_tree
from lab.settings import (
    BRIDGE,
    CONTAINER_PREFIX,
    GATEWAY,
    LXC_ROOT,
    SUBNET,
    address,
    hardware_address,
    interface,
    lxc_lock,
)
from lab.shell import Completed, run

BOOT_SECONDS = 90
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Box:
    """One container. Its name must be one of HOST_NUMBERS."""

    name: str

    @property
    def address(self) -> str:
        return str(address(self.name))

    @property
    def container(self) -> str:
        return f"{CONTAINER_PREFIX}{self.name}"

    @property
    def directory(self) -> Path:
        return LXC_ROOT / self.container

    @property
    def rootfs(self) -> Path:
        """The box's file system seen from this machine; mounts made inside the box are not seen."""
        return self.directory / "rootfs"

    def exists(self) -> bool:
        return self.rootfs.exists()

    def is_running(self) -> bool:
        return run("lxc-info", "-n", self.container, "-sH", check=False).stdout.strip() == "RUNNING"

    def run(self, command: str, *, check: bool = True, timeout: float = 600, text: str = "") -> Completed:
        """Run a shell command as root inside the box through lxc-attach, so also with the network cut.

        `timeout` in seconds ends the command inside the box too. Raises GpuboxError as lab.shell.run does.
        """
        variables = {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8"} | machine.box_environment()
        settings = [f"--set-var={name}={value}" for name, value in variables.items()]
        inside = ("timeout", "--kill-after=5", str(timeout), "sh", "-c", command)
        attach = ("lxc-attach", "-n", self.container, "--clear-env", *settings, "--")
        return run(*attach, *inside, check=check, timeout=timeout + 15, text=text)

    def ssh(self, command: str, *, check: bool = True, timeout: float = 600) -> Completed:
        """Run a shell command over ssh as root, with the lab's key and the lab's known host keys."""
        return run("ssh", *keys.ssh_options(), f"root@{self.address}", command, check=check, timeout=timeout)

    def write(self, path: str | Path, text: str) -> None:
        """Write a file inside the running box, making its directory."""
        quoted = shlex.quote(str(path))
        self.run(f'mkdir -p "$(dirname {quoted})" && cat > {quoted}', text=text)

    def hard_stop(self) -> None:
        """End every process at once, as a power cut does (lxc-stop --kill)."""
        run("lxc-stop", "-n", self.container, "--kill", check=False)
        if self.is_running():
            raise GpuboxError(f"{self.name}: still running after lxc-stop --kill")

    def start(self) -> None:
        """Boot, and return when systemd has started everything and sshd answers. Fine when it runs already."""
        if not self.is_running():
            self._write_config()
            run("lxc-start", "-n", self.container, "--logfile", self.directory / "lxc.log", "--logpriority", "INFO")
        self._wait_until_booted()

    def cut_network(self) -> None:
        """Pull the cable: no ssh either, only `run`. A hard stop and start plugs it in again."""
        network.cut_network(self.name)

    def cut_internet(self) -> None:
        """The box can open no connection beyond the lab; ssh into it still works. Outlives a boot of the box."""
        network.cut_internet(address(self.name))

    @contextmanager
    def silenced_ssh(self) -> Iterator[None]:
        """Within the block ssh packets vanish, those of open connections too, and nobody is told; `run` still works."""
        pid = run("lxc-info", "-n", self.container, "-pH").stdout.strip()
        network.silence_ssh(pid)
        try:
            yield
        finally:
            network.restore_ssh(pid)

    def restore_network(self) -> None:
        """Undo both cuts; returns when sshd of a running box answers (the kernel takes seconds to look it up again)."""
        network.restore_network(self.name)
        if self.is_running():
            self._wait_until_booted()

    def limit_disk(self, path: str | Path, megabytes: int) -> None:
        """Mount an empty file system of `megabytes` MiB over `path`; what lay there is hidden until unlimit_disk.

        It lives in memory and in the box's mount namespace, so a stop of the box, and `down`, undo it.
        """
        quoted = shlex.quote(str(path))
        self.run(f"mkdir -p {quoted} && mount -t tmpfs -o size={megabytes}m,mode=755 gpubox-lab {quoted}")

    def unlimit_disk(self, path: str | Path) -> None:
        self.run(f"umount {shlex.quote(str(path))}")

    def ensure_image(self) -> Path:
        """The tarball that `create` unpacks, built if need be."""
        return ensure_image()

    def create(self, image: Path, *, wheels: bool) -> None:
        """Unpack the image and fill in what makes this box itself. Has its final name only when complete.

        `wheels`: with the lab's wheels, which are a hundred thousand links to make, and to remove one day.
        """
        building = self.directory / "rootfs.building"
        remove_tree(self.directory)
        unpack(image, building)
        self.directory.chmod(0o755)
        (building / "etc/hostname").write_text(f"{self.name}\n")
        (building / "etc/hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n")
        (building / "etc/machine-id").write_text("")  # filled at first boot: two boxes are two machines
        machine.carry_into(building)
        keys.make_host_key(building)
        self._furnish(building)
        if wheels:
            uv_cache.link_into(self._wheels_below(building))
        building.rename(self.rootfs)

    def wheel_roots(self) -> list[Path]:
        """File systems, seen from this machine, in which deploys have fetched wheels."""
        return [self.rootfs]

    def discard(self) -> None:
        """Stop the box, whatever state it is in, and put its files aside for Lab.sweep, which takes no time."""
        if self.directory.exists():
            self.hard_stop()
            self.directory.rename(LXC_ROOT / f".{self.container}-{time.time_ns()}")
        lxc_lock(self.container).unlink(missing_ok=True)
        if network.table_exists():
            network.restore_network(self.name)

    def _furnish(self, root: Path) -> None:
        """Add what this kind of box has beyond the image, to the file system below `root`."""

    def _wheels_below(self, root: Path) -> Path:
        """Where deploys look for wheels that were fetched before."""
        return uv_cache.cache_below(root)

    def _write_config(self) -> None:
        lines = self._config()
        (self.directory / "config").write_text("".join(f"{key} = {value}\n" for key, value in lines))

    def _config(self) -> list[tuple[str, object]]:
        """What lxc-start reads."""
        lines = {
            "lxc.include": "/usr/share/lxc/config/common.conf",
            "lxc.apparmor.profile": "unconfined",
            "lxc.uts.name": self.name,
            "lxc.rootfs.path": f"dir:{self.rootfs}",
            "lxc.net.0.type": "veth",
            "lxc.net.0.link": BRIDGE,
            "lxc.net.0.flags": "up",
            "lxc.net.0.veth.pair": interface(self.name),
            "lxc.net.0.hwaddr": hardware_address(self.name),
            "lxc.net.0.ipv4.address": f"{self.address}/{SUBNET.prefixlen}",
            "lxc.net.0.ipv4.gateway": GATEWAY,
        }
        return list(lines.items())

    def _wait_until_booted(self) -> None:
        deadline = time.monotonic() + BOOT_SECONDS
        state = "no answer"
        while time.monotonic() < deadline:
            state = self.run("systemctl is-system-running", check=False, timeout=20).stdout.strip() or state
            if state in ("running", "degraded") and self._sshd_answers():
                return
            time.sleep(0.2)
        log = self.run("systemctl list-jobs; journalctl -n 20 --no-pager", check=False, timeout=20).stdout
        raise GpuboxError(
            f"{self.name}: systemd is {state!r}, sshd answers: {self._sshd_answers()}, after {BOOT_SECONDS} s",
            hint=f"look at {self.directory / 'lxc.log'}, or start afresh: make demo-clean",
            detail=log,
        )

    def _sshd_answers(self) -> bool:
        try:
            with socket.create_connection((self.address, 22), timeout=2) as connection:
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False

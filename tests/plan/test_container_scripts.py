"""The shell scripts of the role `container` and of its fact, run for real against files of a test."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from pyinfra.api import StringCommand

from facts.containers import Containers, Target
from gpubox.container import parse
from gpubox.nvidia.gpu_count import DeviceNode, Gpus
from gpubox.proxmox.container_plan import plan_raw
from gpubox.proxmox.container_state import ContainerState, NodeState
from ops import pct
from tests.containers import CREATED, RAW, VMID, container_settings


@pytest.fixture
def sh(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script with the node's places moved below tmp_path and stand-in programs of tmp_path/bin first."""
    for directory in ("etc/pve/lxc", "etc/pve/qemu-server", "etc/pve/ha", "run/lock/lxc", "dev", "bin", "srv/models"):
        (tmp_path / directory).mkdir(parents=True)

    def run(script: str, **options: Any) -> subprocess.CompletedProcess[str]:
        for place in ("/etc/pve", "/run/"):
            script = script.replace(place, place.replace("/", f"{tmp_path}/", 1))
        environment = {
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
            "LC_ALL": "C.UTF-8",
            "GPUBOX_ROOT": str(tmp_path),
        }
        command = ["sh", "-c", script]
        return subprocess.run(command, env=environment, check=False, text=True, capture_output=True, **options)

    return run


def program(tmp_path: Path, name: str, body: str) -> None:
    path = tmp_path / "bin" / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def written(before: str, *, cpuset: str = "0-3") -> StringCommand:
    target = Target(VMID, container_settings(cpuset=cpuset), 360)
    plan = plan_raw(parse(before), target.settings, [0], 510)
    return pct._written(target, ContainerState(raw=before.encode()), plan)


def script_of(command: StringCommand) -> tuple[str, str]:
    """The script of `sh -c`, and what goes in on standard input."""
    return command.bits[2].obj, str(command.connector_arguments["_stdin"])


def run_written(sh: Callable[..., Any], command: StringCommand) -> subprocess.CompletedProcess[str]:
    script, stdin = script_of(command)
    return cast(subprocess.CompletedProcess[str], sh(script, input=stdin))


def test_raw_lines_are_written(sh: Callable[..., Any], tmp_path: Path) -> None:
    conf = tmp_path / "etc/pve/lxc/101.conf"
    conf.write_text(CREATED + "\n[snap]\nhostname: x\n")
    done = run_written(sh, written(conf.read_text()))
    assert done.returncode == 0, done.stderr
    assert conf.read_text() == CREATED + RAW + "lxc.cgroup2.cpuset.cpus: 0-3\n\n[snap]\nhostname: x\n"
    assert list(conf.parent.iterdir()) == [conf], "nothing is left beside it"
    assert not (tmp_path / "run/gpubox").exists(), "it does not run: no restart is due"


def test_a_configuration_that_changed_meanwhile_is_not_overwritten(sh: Callable[..., Any], tmp_path: Path) -> None:
    conf = tmp_path / "etc/pve/lxc/101.conf"
    conf.write_text(CREATED + "tags: mine\n")
    done = run_written(sh, written(CREATED))
    assert done.returncode != 0
    assert "detected modified configuration" in done.stderr
    assert conf.read_text() == CREATED + "tags: mine\n"


def test_half_a_text_is_not_written(sh: Callable[..., Any], tmp_path: Path) -> None:
    conf = tmp_path / "etc/pve/lxc/101.conf"
    conf.write_text(CREATED)
    script, stdin = script_of(written(CREATED))
    done = sh(script, input=stdin.splitlines()[0])
    assert done.returncode != 0
    assert "did not arrive whole" in done.stderr
    assert conf.read_text() == CREATED
    assert list(conf.parent.iterdir()) == [conf]


def test_the_lock_of_pve_is_respected(sh: Callable[..., Any], tmp_path: Path) -> None:
    conf = tmp_path / "etc/pve/lxc/101.conf"
    conf.write_text(CREATED)
    script, stdin = script_of(written(CREATED))
    lock = tmp_path / "run/lock/lxc/pve-config-101.lock"
    with lock.open("a") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        done = sh(script.replace("-w 10", "-w 0"), input=stdin)
        assert asked(sh).container(VMID).held
    assert done.returncode != 0
    assert "can't lock file" in done.stderr
    assert conf.read_text() == CREATED


def test_limits_written_into_a_running_container_are_remembered_for_that_run_of_it(
    sh: Callable[..., Any], tmp_path: Path
) -> None:
    conf = tmp_path / "etc/pve/lxc/101.conf"
    conf.write_text(CREATED)
    program(tmp_path, "lxc-info", f"echo {os.getpid()}")
    assert run_written(sh, written(CREATED)).returncode == 0
    now = conf.read_text()
    assert run_written(sh, written(now, cpuset="0-7")).returncode == 0
    changed = asked(sh).container(VMID).changed_raw
    assert changed[0] == "+ lxc.prlimit.memlock: unlimited", "what an earlier deploy wrote is not forgotten"
    assert changed[-1] == "+ lxc.cgroup2.cpuset.cpus: 0-7"
    program(tmp_path, "lxc-info", f"echo {os.getppid()}")
    assert asked(sh).container(VMID).changed_raw == (), "another run of it has them"
    program(tmp_path, "lxc-info", "exit 1")
    assert not asked(sh).container(VMID).running


def asked(sh: Callable[..., Any], models: str = "") -> NodeState:
    """What the fact's script says, as the fact reads it."""
    done = sh(Containers().command([(VMID, "local:vztmpl/debian.tar.zst", models, "")]))
    assert done.returncode == 0, done.stderr
    return Containers().process(done.stdout.splitlines())


def test_the_fact_of_a_bare_node(sh: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "stored").write_text("template")
    program(tmp_path, "pvesm", f"""case $1 in
      path) echo {tmp_path}/stored ;;
      status) printf 'Name Type Status Total\\nlocal dir active 1\\ntank zfspool inactive 1\\n' ;;
    esac""")  # fmt: skip
    program(tmp_path, "pct", "exit 1")
    seen = asked(sh, str(tmp_path / "srv/models"))
    assert seen.pve
    assert seen.storages == {"local": True, "tank": False}
    assert seen.gpus == Gpus()
    about = seen.container(VMID)
    assert about == ContainerState(template=hashlib.sha512(b"template").hexdigest())
    (tmp_path / "srv/link").symlink_to(tmp_path / "srv/models")
    assert asked(sh, str(tmp_path / "srv/link")).container(VMID).models == "link"
    assert asked(sh, "/nowhere").container(VMID).models == "missing"


def test_the_fact_of_a_node_with_gpus_and_a_container(sh: Callable[..., Any], tmp_path: Path) -> None:
    raw = b"#\xff\xc3\xbc\n" + CREATED.encode()
    (tmp_path / "etc/pve/lxc/101.conf").write_bytes(raw)
    (tmp_path / "etc/pve/ha/manager_status").write_text(f'{{"node_status":{{"{os.uname().nodename}":"maintenance"}}}}')
    for path, text in {
        "sys/bus/pci/devices/0000:c1:00.0/vendor": "0x10de",
        "sys/bus/pci/devices/0000:c1:00.0/class": "0x030200",
        "proc/driver/nvidia/version": "NVRM version: ...",
        "proc/driver/nvidia/gpus/0000:c1:00.0/information": "Model: \t\t NVIDIA H200\nDevice Minor: \t 3\n",
        "dev/nvidia3": "c3 3",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n")
    program(tmp_path, "nvidia-smi", "echo 00000000:C1:00.0")
    program(tmp_path, "pvesm", "echo asked though nothing is absent >&2; exit 1")
    program(tmp_path, "lxc-info", f"echo {os.getpid()}")
    seen = asked(sh)
    assert seen.gpus == Gpus(
        pci=("0000:c1:00.0",),
        driver={"0000:c1:00.0": 3},
        nodes={"/dev/nvidia3": DeviceNode(195, 3)},
        listed=("00000000:C1:00.0",),
    )
    assert seen.maintenance
    about = seen.container(VMID)
    assert about.raw == raw
    assert about.running
    assert not about.held


def test_device_numbers_are_hexadecimal() -> None:
    seen = Containers().process(
        ["device_node /dev/nvidiactl c3 ff", "inside 101 /dev/nvidia-uvm 1fe 0", "running 101 yes"]
    )
    assert seen.gpus.nodes == {"/dev/nvidiactl": DeviceNode(195, 255)}
    assert seen.container(VMID).inside == {"/dev/nvidia-uvm": DeviceNode(510, 0)}


def test_a_guest_elsewhere_is_seen(sh: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "etc/pve/qemu-server/101.conf").write_text("memory: 1\n")
    assert asked(sh).container(VMID).elsewhere == (f"{tmp_path}/etc/pve/qemu-server/101.conf",)


@pytest.mark.parametrize(("content", "rc"), [("right", 0), ("wrong", 1)])
def test_a_download_is_proved(sh: Callable[..., Any], tmp_path: Path, content: str, rc: int) -> None:
    program(tmp_path, "pveam", f"""case $1 in
      available) echo 'system  another.tar.zst  amd64' ;;
      update) touch {tmp_path}/updated ;;
      download) echo "got $2 $3"; printf %s {content} >{tmp_path}/stored ;;
    esac""")  # fmt: skip
    program(tmp_path, "pvesm", f"echo {tmp_path}/stored")
    sha512 = hashlib.sha512(b"right").hexdigest()
    done = sh(pct.DOWNLOAD.format(storage="local", template="debian.tar.zst", volume="local:vztmpl/x", sha512=sha512))
    assert done.returncode == rc, done.stderr
    assert "got local debian.tar.zst" in done.stdout
    assert (tmp_path / "updated").exists(), "the list did not know it"
    if rc:
        assert sha512 in done.stderr
        assert hashlib.sha512(b"wrong").hexdigest() in done.stderr

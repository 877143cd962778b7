"""The role of a Proxmox VE node on pyinfra's @fake connector, fed with what the real script prints on a machine.

Commands that matter are then run by sh on that machine: what is planned is also what works.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyinfra.api import Config, FileUploadCommand, FunctionCommand, Inventory, State
from pyinfra.api.connect import connect_all
from pyinfra.api.deploy import add_deploy
from pyinfra.api.exceptions import DeployError
from pyinfra.api.host import Host
from pyinfra.api.state import StateStage
from pyinfra.context import ctx_host, ctx_state
from pyinfra.facts.server import Os, Which

from facts.node import Node
from gpubox.nvidia.driver import PackagedDriver
from gpubox.proxmox.node import GRUB_DROP_IN, TOOLS, grub_drop_in
from ops.base import File
from ops.node import _digest
from roles.proxmox_node import preflight_node, proxmox_node, rendered
from tests.node_machine import KERNEL, NEWER, RECORDED_DRIVER, Machine, two_h200

ROOT = Path(__file__).resolve().parents[2]
RUN = "/var/tmp/NVIDIA-Linux-x86_64-580.159.04.run"
DATA = {"driver": {"version": RECORDED_DRIVER, "run": RUN, "sha256": "b" * 64}, "kernel": KERNEL}
OLD = "575.57.08"
Planned = list[tuple[str, list[Any]]]

NAMES = [
    "Node | Packages and headers",
    "Node | Files",
    "Node | Initramfs",
    f"Node | Driver {RECORDED_DRIVER}",
    "Node | Kernel pinned",
    "Node | Units enabled",
    "Node | Kernel command line",
    "Node | Reboot",
    "Node | Device nodes",
    "Node | Every GPU everywhere",
]
NEEDED = (*TOOLS, "proxmox-default-headers", f"proxmox-headers-{KERNEL}")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A converged node: the recorded pair of H200."""
    machine = two_h200(tmp_path)
    installed = "; ".join(f"echo 'installed {name}'" for name in NEEDED)
    machine.program("dpkg-query", f'case "$*" in *proxmox-default-headers*) {installed} ;; esac')
    stamp(machine, "pin", KERNEL)
    stamp(machine, "initramfs", *(file.content for file in rendered(None) if file.path.startswith("/etc/modprobe.d/")))
    return machine


def stamp(machine: Machine, name: str, *parts: str) -> None:
    machine.file(f"/var/lib/gpubox/node/{name}.applied", _digest(*parts) + "\n")


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Planned]]:
    def deploy(machine: Machine, written: list[File] | None = None, stage: str = "Prepare", **data: object) -> Planned:
        reads: list[str] = []

        def get_fact(self: Host, fact: type, *args: object, **kwargs: Any) -> object:
            reads.append(fact.__name__)
            if fact is Node:
                done = machine.run(Node().command(**{**kwargs, "files": []}))
                assert (done.returncode, done.stderr) == (0, "")
                files = rendered(None) if written is None else written
                return [*done.stdout.splitlines(), *(f"file {f.sha256} {f.mode} root:root {f.path}" for f in files)]
            known = {Os: "Linux", Which: "/usr/sbin/command"}
            return known[fact] if fact in known else getattr(fact(), "default", str)()

        monkeypatch.setattr(Host, "get_fact", get_fact)
        inventory = Inventory((["@fake/pve1"], {**DATA, **data}), proxmox_nodes=(["@fake/pve1"], {}))
        state = State(inventory, Config())
        state.cwd = str(ROOT)
        connect_all(state)
        state.set_stage(StateStage.Prepare)
        host = inventory.get_host("@fake/pve1")
        with ctx_state.use(state), ctx_host.use(host):
            add_deploy(state, proxmox_node, preflight_node())
            if stage == "Execute":
                state.set_stage(StateStage.Execute)
            done = [
                (next(iter(state.op_meta[h].names)), list(state.ops[host][h].command_generator()))
                for h in host.op_hash_order
            ]
        deploy.reads = reads  # type: ignore[attr-defined]
        return done

    yield deploy


def changing(plan: Planned) -> list[str]:
    return [name.removeprefix("Node | ") for name, commands in plan if commands]


def commands(plan: Planned, name: str) -> list[str]:
    return [str(command) for found, all_of_it in plan for command in all_of_it if found == f"Node | {name}"]


def stopped(plan: Planned, name: str) -> str:
    """What the operator is told by the operation that ends the deploy."""
    (command,) = [c for found, all_of_it in plan for c in all_of_it if found == f"Node | {name}"]
    assert isinstance(command, FunctionCommand)
    return str(command.args[0])


def upload_and_apply(plan: Planned, name: str) -> tuple[FileUploadCommand, str]:
    done = [c for found, all_of_it in plan for c in all_of_it if found == f"Node | {name}"]
    (upload,) = [c for c in done if isinstance(c, FileUploadCommand)]
    return upload, str(done[-1])


def test_order(planned: Callable[..., Planned], machine: Machine) -> None:
    assert [name for name, _ in planned(machine)] == NAMES


def test_a_converged_node_changes_nowhere_and_is_read_once(planned: Callable[..., Planned], machine: Machine) -> None:
    """H25: no change and no reboot in the second run."""
    assert changing(planned(machine)) == []
    assert planned.reads == ["Node"]  # type: ignore[attr-defined]


def test_a_converged_node_changes_nowhere_when_it_is_executed(
    planned: Callable[..., Planned], machine: Machine
) -> None:
    assert changing(planned(machine, stage="Execute")) == []


def test_a_bare_node(planned: Callable[..., Planned], tmp_path: Path) -> None:
    """As the installer leaves it: every operation has work but those that nothing asks for."""
    directory = tmp_path / "bare"
    directory.mkdir()
    bare = Machine(directory)
    bare.says("uname", KERNEL + "\n")
    bare.says("pveversion", "pve-manager/9.1.1/42db4a6cf33dac83\n")
    bare.file(f"/boot/vmlinuz-{KERNEL}")
    plan = planned(bare, written=[])
    assert changing(plan) == [
        "Packages and headers", "Files", "Initramfs", f"Driver {RECORDED_DRIVER}", "Kernel pinned", "Units enabled",
        "Device nodes",
    ]  # fmt: skip
    assert "--allow-installation-with-running-driver" not in commands(plan, f"Driver {RECORDED_DRIVER}")[0]


def test_kernel_pin_is_synced_to_where_it_boots_from(planned: Callable[..., Planned], machine: Machine) -> None:
    machine.file("/etc/kernel/proxmox-boot-pin", NEWER)
    (pin,) = commands(planned(machine), "Kernel pinned")
    assert f"proxmox-boot-tool kernel pin {KERNEL} && mkdir" in pin
    machine.file("/etc/kernel/proxmox-boot-uuids", "ABCD-1234\n")
    (pin,) = commands(planned(machine), "Kernel pinned")
    assert f"proxmox-boot-tool kernel pin {KERNEL} && proxmox-boot-tool refresh && mkdir" in pin


def test_a_pin_whose_sync_was_interrupted_is_repeated(planned: Callable[..., Planned], machine: Machine) -> None:
    (machine.root / "var/lib/gpubox/node/pin.applied").unlink()
    assert changing(planned(machine)) == ["Kernel pinned"]


def test_another_blacklist_rebuilds_the_initramfs_and_another_unit_does_not(
    planned: Callable[..., Planned], machine: Machine
) -> None:
    def changed(path: str) -> list[File]:
        return [
            File(f.path, f.content + "# edited\n", f.mode) if f.path.startswith(path) else f for f in rendered(None)
        ]

    assert changing(planned(machine, written=changed("/etc/systemd"))) == ["Files"]
    stamp(machine, "initramfs", "older options")
    plan = planned(machine, written=changed("/etc/modprobe.d"))
    assert changing(plan) == ["Files", "Initramfs"]
    assert "update-initramfs -u -k all &&" in commands(plan, "Initramfs")[0]


def test_an_older_driver_in_use_is_left_alone_until_a_reboot_is_allowed(
    planned: Callable[..., Planned], machine: Machine
) -> None:
    """H6: nothing moves under running boxes without permission."""
    older(machine)
    plan = planned(machine)
    said = stopped(plan, f"Driver {RECORDED_DRIVER}")
    assert f"driver {OLD} is loaded and boxes may be using it" in said
    assert "Nothing was changed" in said
    assert "allow_reboot = True" in said
    plan = planned(machine, allow_reboot=True)
    assert "--allow-installation-with-running-driver" in commands(plan, f"Driver {RECORDED_DRIVER}")[0]


def older(machine: Machine) -> None:
    version = machine.root / "proc/driver/nvidia/version"
    version.write_text(version.read_text().replace(RECORDED_DRIVER, OLD))
    machine.says("dkms", f"nvidia/{OLD}, {KERNEL}, x86_64: installed\n")
    machine.program("modinfo", f"case $4 in version) echo {OLD} ;; license) echo Dual MIT/GPL ;; esac")


def test_only_the_build_for_another_kernel_is_missing(planned: Callable[..., Planned], machine: Machine) -> None:
    """H5: the kernel to boot gets its module before anything reboots into it."""
    other = "6.14.11-4-pve"
    machine.file(f"/boot/vmlinuz-{other}")
    plan = planned(machine, kernel=other)
    build, check = commands(plan, f"Driver {RECORDED_DRIVER}")
    assert build == f"dkms install -m nvidia -v {RECORDED_DRIVER} -k {other}"
    assert f"modinfo -k {other} -F license nvidia" in check


def test_a_reboot_is_asked_for_with_reasons(planned: Callable[..., Planned], machine: Machine) -> None:
    machine.file("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm", "N\n")
    said = stopped(planned(machine), "Reboot")
    assert "nvidia_uvm is loaded with uvm_disable_hmm=0" in said
    assert "allow_reboot = True" in said


def test_a_reboot_that_is_allowed_and_safe(planned: Callable[..., Planned], machine: Machine) -> None:
    machine.file("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm", "N\n")
    done = commands(planned(machine, allow_reboot=True), "Reboot")
    assert any("reboot.applied" in command for command in done)
    assert any("sleep 1 && reboot" in command for command in done)


def test_no_reboot_into_a_kernel_without_the_module(planned: Callable[..., Planned], machine: Machine) -> None:
    """H5, although the operator allowed it."""
    machine.file("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm", "N\n")
    machine.file("/etc/kernel/next-boot-pin", NEWER)
    said = stopped(planned(machine, allow_reboot=True), "Reboot")
    assert "not rebooting" in said
    assert f"the next boot takes kernel {NEWER}" in said


def test_no_second_reboot_for_what_the_first_did_not_cure(planned: Callable[..., Planned], machine: Machine) -> None:
    machine.file("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm", "N\n")
    stamp(machine, "reboot", "nvidia_uvm is loaded with uvm_disable_hmm=0")
    said = stopped(planned(machine, allow_reboot=True), "Reboot")
    assert "a reboot for the same reasons did not help" in said


def test_kernel_arguments_are_added_to_grub_in_a_file_of_our_own(
    planned: Callable[..., Planned], machine: Machine
) -> None:
    name = "Kernel command line iommu=pt"
    plan = planned(machine, kernel_arguments=["iommu=pt"])
    assert changing(plan) == [name, "Reboot"]
    upload, apply = upload_and_apply(plan, name)
    assert upload.dest == GRUB_DROP_IN
    assert upload.src.getvalue() == grub_drop_in(["iommu=pt"])
    assert "update-grub && mkdir" in str(apply)
    assert "the kernel runs without iommu=pt" in stopped(plan, "Reboot")


def test_kernel_arguments_are_appended_for_systemd_boot(planned: Callable[..., Planned], machine: Machine) -> None:
    machine.says("proxmox-boot-tool", "ABCD-1234 is configured with: uefi (versions: 6.17.2-1-pve)\n")
    machine.file("/etc/kernel/cmdline", "root=ZFS=rpool/ROOT/pve-1 boot=zfs quiet\n")
    plan = planned(machine, kernel_arguments=["quiet", "iommu=pt"])
    upload, apply = upload_and_apply(plan, "Kernel command line quiet iommu=pt")
    assert upload.src.getvalue() == "root=ZFS=rpool/ROOT/pve-1 boot=zfs quiet iommu=pt\n"
    assert "proxmox-boot-tool refresh" in str(apply)
    assert "update-grub" not in str(apply)


def test_arguments_taken_back_take_our_file_away(planned: Callable[..., Planned], machine: Machine) -> None:
    stamp(machine, "cmdline", "iommu=pt")
    plan = planned(machine, written=[*rendered(None), File(GRUB_DROP_IN, grub_drop_in(["iommu=pt"]))])
    assert changing(plan) == ["Kernel command line"]
    assert commands(plan, "Kernel command line")[0] == f"rm -f {GRUB_DROP_IN}"


def test_device_nodes_that_are_gone_are_made_again(planned: Callable[..., Planned], machine: Machine) -> None:
    (machine.root / "dev/nvidia-uvm").unlink()
    plan = planned(machine)
    assert changing(plan) == ["Device nodes"]
    assert commands(plan, "Device nodes")[0].startswith("systemctl restart gpubox-nvidia-devices.service")


def test_a_count_that_differs_stops_the_deploy(planned: Callable[..., Planned], machine: Machine) -> None:
    machine.says("nvidia-smi", "00000000:00:06.0\n")
    said = stopped(planned(machine, stage="Execute"), "Every GPU everywhere")
    assert "PCI 2, driver 2, device nodes 2, nvidia-smi 1" in said


def test_settings_are_refused_by_key_and_value(planned: Callable[..., Planned], machine: Machine) -> None:
    with pytest.raises(DeployError, match=r"host @fake/pve1: unknown key 'alow_reboot'"):
        planned(machine, alow_reboot=True)
    with pytest.raises(DeployError, match=r"kernel 7\.0\.2-1-pve: driver 580\.159\.04 does not build on it"):
        planned(machine, kernel=NEWER)


# The driver from apt.

PACKAGED = {"version": RECORDED_DRIVER, "repository": "/srv/driver"}
PARTS = ("nvidia-driver-cuda", "libcuda1", "nvidia-kernel-open-dkms", "nvidia-modprobe", "nvidia-persistenced")
DRIVER = f"Driver {RECORDED_DRIVER}"


def from_apt(machine: Machine, version: str = RECORDED_DRIVER, selection: str = "hold") -> list[File]:
    """The converged node has its driver from apt; the files of that way."""
    machine.file("/etc/os-release", "ID=debian\nVERSION_ID=13\n")
    tools = "; ".join(f"echo 'installed {name}'" for name in NEEDED)
    parts = "; ".join(f"echo 'installed {selection} {version}-1 {name}'" for name in PARTS)
    body = f'case "$*" in *proxmox-default-headers*) {tools} ;; *nvidia*) {parts} ;; esac'
    machine.program("dpkg-query", body)
    return rendered(PackagedDriver.model_validate(PACKAGED))


def test_a_node_with_its_driver_from_apt_changes_nowhere(planned: Callable[..., Planned], machine: Machine) -> None:
    for stage in ("Prepare", "Execute"):
        plan = planned(machine, written=from_apt(machine), stage=stage, driver=PACKAGED)
        assert changing(plan) == []
        assert [name for name, _ in plan] == [*NAMES[:4], "Node | On hold", *NAMES[4:]]


def test_all_of_it_is_installed_by_version_and_built_for_the_kernel_that_will_boot(
    planned: Callable[..., Planned], machine: Machine
) -> None:
    """H5, H6: what is there already is named too, since the packages ask for each other by lower bounds."""
    written = from_apt(machine, OLD)
    older(machine)
    plan = planned(machine, written=written, driver=PACKAGED, allow_reboot=True)
    index, update, policy, simulation, install, build, check = commands(plan, DRIVER)
    assert "/srv/driver" in index
    assert "sourcelist=/etc/apt/sources.list.d/gpubox-driver.sources" in update
    for command in (policy, simulation, install):
        for name in PARTS:
            assert name in command
    assert f"nvidia-kernel-open-dkms={RECORDED_DRIVER}-*" in install
    assert "--allow-downgrades --allow-change-held-packages" in install
    assert "--simulate" in simulation
    assert f"dkms install -m nvidia -v {RECORDED_DRIVER} -k {KERNEL}" in build
    assert "Dual MIT/GPL" in check


def test_a_driver_of_apt_in_use_is_left_alone_until_a_reboot_is_allowed(
    planned: Callable[..., Planned], machine: Machine
) -> None:
    written = from_apt(machine, OLD)
    older(machine)
    said = stopped(planned(machine, written=written, driver=PACKAGED), DRIVER)
    assert f"driver {OLD} is loaded and boxes may be using it" in said


def test_packages_are_held_again(planned: Callable[..., Planned], machine: Machine) -> None:
    plan = planned(machine, written=from_apt(machine, selection="install"), driver=PACKAGED)
    assert changing(plan) == ["On hold"]
    assert commands(plan, "On hold") == [f"apt-mark hold {' '.join(sorted(PARTS))}"]


def test_h6_one_part_that_moved_is_found(planned: Callable[..., Planned], machine: Machine) -> None:
    """Although the loaded module, the one on disk and libcuda are right."""
    written = from_apt(machine)
    query = (machine.bin / "dpkg-query").read_text()
    moved = query.replace(f"{RECORDED_DRIVER}-1 nvidia-modprobe", f"{OLD}-1 nvidia-modprobe")
    machine.program("dpkg-query", moved)
    plan = planned(machine, written=written, driver=PACKAGED, allow_reboot=True)
    assert changing(plan) == [DRIVER]
    said = stopped(planned(machine, written=written, driver=PACKAGED, stage="Execute"), "Every GPU everywhere")
    assert f"package nvidia-modprobe is of version {OLD}-1, {RECORDED_DRIVER} is wanted" in said


def test_only_the_build_of_a_driver_of_apt_is_missing(planned: Callable[..., Planned], machine: Machine) -> None:
    other = "6.14.11-4-pve"
    machine.file(f"/boot/vmlinuz-{other}")
    build, _ = commands(planned(machine, written=from_apt(machine), kernel=other, driver=PACKAGED), DRIVER)
    assert build == f"dkms install -m nvidia -v {RECORDED_DRIVER} -k {other}"


def test_the_way_of_the_driver_is_not_changed_by_a_deploy(planned: Callable[..., Planned], machine: Machine) -> None:
    with pytest.raises(DeployError, match=r"a driver from a \.run file \(580\.159\.04\) is installed here"):
        machine.file("/etc/os-release", "ID=debian\nVERSION_ID=13\n")
        planned(machine, driver=PACKAGED)
    from_apt(machine)
    with pytest.raises(DeployError, match="apt has installed driver packages here: nvidia-driver-cuda, libcuda1"):
        planned(machine)


def test_a_repository_that_nobody_asks_for_any_more_is_taken_away(
    planned: Callable[..., Planned], machine: Machine
) -> None:
    source = next(file for file in rendered(PackagedDriver.model_validate(PACKAGED)) if ".sources" in file.path)
    plan = planned(machine, written=[*rendered(None), source])
    assert changing(plan) == ["Files"]
    assert commands(plan, "Files") == [f"rm -f {source.path}"]


def test_a_key_is_looked_at_before_anything_runs(
    planned: Callable[..., Planned], machine: Machine, tmp_path: Path
) -> None:
    key = tmp_path / "key.gpg"
    key.write_bytes(bytes([0x98, 4, 4, 1, 2, 3]))
    machine.file("/etc/os-release", "ID=debian\nVERSION_ID=12\n")
    (machine.root / f"usr/lib/x86_64-linux-gnu/libcuda.so.{RECORDED_DRIVER}").unlink()
    driver = {**PACKAGED, "repository": "https://mirror.example/", "key": str(key)}
    with pytest.raises(DeployError, match=r"driver\.key = .*: holds [0-9A-F]{40}, expected is EB693B30"):
        planned(machine, driver=driver)
    machine.file("/etc/os-release", "ID=debian\nVERSION_ID=11\n")
    with pytest.raises(DeployError, match="driver: this box is debian 11"):
        planned(machine, driver=driver)


# The driver's script, run by sh on the machine.

INSTALLER = '#!/bin/sh\necho "installer $*" >>"$LOG"\n'


def install_command(planned: Callable[..., Planned], machine: Machine, run: str, sha256: str) -> str:
    """The driver's first command on a node that has none, for a .run file at `run`."""
    (machine.root / "proc/driver/nvidia/version").unlink()
    machine.says("dkms", "")
    driver = {"version": RECORDED_DRIVER, "run": run, "sha256": sha256}
    return commands(planned(machine, driver=driver), f"Driver {RECORDED_DRIVER}")[0]


@pytest.fixture
def run_file(machine: Machine) -> tuple[Path, str]:
    content = INSTALLER.replace("$LOG", str(machine.log))
    path = machine.file("/NVIDIA-Linux-x86_64-580.159.04.run", content)
    return path, hashlib.sha256(content.encode()).hexdigest()


def test_the_installer_runs_when_its_hash_is_right(
    planned: Callable[..., Planned], machine: Machine, run_file: tuple[Path, str]
) -> None:
    path, sha256 = run_file
    done = machine.run(install_command(planned, machine, str(path), sha256))
    assert (done.returncode, done.stderr) == (0, "")
    (call,) = machine.calls()
    options = {
        "--silent",
        "--dkms",
        "--kernel-module-type=open",
        f"--kernel-name={KERNEL}",
        "--no-install-compat32-libs",
    }
    assert options <= set(call.split())


def test_a_file_of_another_hash_is_never_executed(
    planned: Callable[..., Planned], machine: Machine, run_file: tuple[Path, str]
) -> None:
    path, sha256 = run_file
    done = machine.run(install_command(planned, machine, str(path), "c" * 64))
    assert done.returncode == 1
    assert sha256 in done.stderr
    assert "c" * 64 in done.stderr
    assert machine.calls() == []


def test_a_file_that_is_not_there(planned: Callable[..., Planned], machine: Machine) -> None:
    done = machine.run(install_command(planned, machine, "/nowhere/x.run", "c" * 64))
    assert (done.returncode, "no such file here" in done.stderr) == (1, True)


def fetching(planned: Callable[..., Planned], machine: Machine, path: Path, sha256: str) -> str:
    """The command for an address, whose curl copies `path`; what it fetches goes below the machine's root."""
    machine.records("curl", f'while [ "$1" != --output ]; do shift; done\ncat {path} >"$2"')
    script = install_command(planned, machine, "https://mirror.invalid/NVIDIA-Linux-x86_64-580.159.04.run", sha256)
    return script.replace("/var/lib/gpubox/driver", f"{machine.root}/var/lib/gpubox/driver")


def test_a_fetched_file_is_verified_then_kept(
    planned: Callable[..., Planned], machine: Machine, run_file: tuple[Path, str]
) -> None:
    script = fetching(planned, machine, *run_file)
    done = machine.run(script)
    assert (done.returncode, done.stderr) == (0, "")
    assert machine.run(script).returncode == 0
    assert [call.split()[0] for call in machine.calls()] == ["curl", "installer", "installer"]
    assert "--proto =https" in machine.calls()[0]


def test_a_fetched_file_of_another_hash_is_neither_kept_nor_executed(
    planned: Callable[..., Planned], machine: Machine, run_file: tuple[Path, str]
) -> None:
    path, _ = run_file
    done = machine.run(fetching(planned, machine, path, "c" * 64))
    assert done.returncode == 1
    assert not (machine.root / f"var/lib/gpubox/driver/{path.name}").exists()
    assert [call.split()[0] for call in machine.calls()] == ["curl"]


@pytest.mark.parametrize(
    ("version", "license_text", "status"),
    [
        (RECORDED_DRIVER, "Dual MIT/GPL", 0),
        (RECORDED_DRIVER, "NVIDIA", 1),
        ("580.159.03", "Dual MIT/GPL", 1),
        ("", "", 1),
    ],
)
def test_what_dkms_built_is_looked_at_before_any_reboot(
    planned: Callable[..., Planned], machine: Machine, version: str, license_text: str, status: int
) -> None:
    """H4 and H1: the closed flavour and a version that differs in its last number fail here."""
    machine.says("dkms", "")
    (machine.root / "proc/driver/nvidia/version").unlink()
    check = commands(planned(machine), f"Driver {RECORDED_DRIVER}")[1]
    machine.program("modinfo", f"case $4 in version) echo '{version}' ;; license) echo '{license_text}' ;; esac")
    done = machine.run(check)
    assert done.returncode == status
    assert ("the only ones that run a Blackwell GPU" in done.stderr) == bool(status)

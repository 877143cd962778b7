"""The node's scripts, run by sh on a machine laid out from recordings, and the parser of what they print."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from facts.node import Node
from gpubox.nvidia.gpu_count import DeviceNode, Gpus
from gpubox.proxmox.node import DEVICES_UNIT, UNITS
from gpubox.proxmox.node_readings import AerCount, DkmsEntry, ModuleFile, NodeReadings, read_node
from roles.proxmox_node import rendered
from tests.node_machine import ADDRESSES, FIXTURES, H200, KERNEL, NEWER, RECORDED_DRIVER, Machine, recorded, two_h200

DEVICES_SCRIPT = next(file.content for file in rendered(None) if file.path.endswith("/gpubox-nvidia-devices"))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    yield two_h200(tmp_path)


def read(machine: Machine, files: tuple[str, ...] = (), kernel: str = "") -> NodeReadings:
    done = machine.run(Node().command(files=files, kernel=kernel))
    assert (done.returncode, done.stderr) == (0, "")
    return read_node(done.stdout.splitlines())


def test_what_a_pair_of_h200_says(machine: Machine) -> None:
    seen = read(machine)
    assert (seen.release, seen.pin, seen.kernels) == (KERNEL, KERNEL, (KERNEL, NEWER))
    assert seen.pve.startswith("pve-manager/9.1.1/")
    assert (seen.loaded_driver, seen.loaded_open) == (RECORDED_DRIVER, True)
    assert seen.loaded_modules == ("nvidia_uvm", "nvidia")
    assert seen.modules == (ModuleFile(kernel=KERNEL, version=RECORDED_DRIVER, license="Dual MIT/GPL"),)
    assert seen.dkms == (DkmsEntry(module="nvidia", version=RECORDED_DRIVER, kernel=KERNEL, status="installed"),)
    assert seen.libcuda == (RECORDED_DRIVER,)
    assert [(card.address, card.device, card.width, card.max_width) for card in seen.cards] == [
        (address, "2335", 16, 16) for address in ADDRESSES
    ]
    assert seen.cards[0].bar_bytes == 256 << 30
    assert [(card.iommu, card.parents) for card in seen.cards] == [
        ("identity", ("0000:00:01.0",)),
        ("identity", ("0000:00:02.0",)),
    ]
    assert seen.gpus == Gpus(
        pci=ADDRESSES,
        driver=dict(zip(ADDRESSES, (0, 1), strict=True)),
        nodes={
            "/dev/nvidia-uvm": DeviceNode(238, 0),
            "/dev/nvidia-uvm-tools": DeviceNode(238, 1),
            "/dev/nvidia0": DeviceNode(195, 0),
            "/dev/nvidia1": DeviceNode(195, 1),
            "/dev/nvidiactl": DeviceNode(195, 255),
        },
        listed=("00000000:00:06.0", "00000000:00:07.0"),
    )
    assert (seen.secure_boot, seen.root_fs, seen.hmm_disabled) == ("disabled", "ext4", "Y")
    assert (seen.aer, seen.aer_read, seen.xids, seen.kernel_log_read) == ((), True, (), True)
    assert seen.units_active == UNITS


def test_an_empty_machine_says_little_and_does_not_fail(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.says("uname", "6.8.12-4-pve\n")
    seen = read(machine)
    assert (seen.release, seen.bootloaders, seen.cards, seen.gpus) == ("6.8.12-4-pve", ("grub",), (), Gpus())
    assert not (seen.acs_read or seen.aer_read or seen.kernel_log_read)


def test_nvidia_smi_is_not_called_before_the_module_is_loaded(machine: Machine) -> None:
    """As root it would load the module and make nodes that the next boot will lack."""
    (machine.root / "proc/driver/nvidia/version").unlink()
    machine.records("nvidia-smi")
    assert read(machine).gpus.listed is None
    assert machine.calls() == []


def test_nvidia_smi_that_finds_nothing(machine: Machine) -> None:
    machine.says("nvidia-smi", recorded(H200 / "nvidia-smi-no-gpu.txt"), status=6)
    seen = read(machine)
    assert (seen.gpus.listed, seen.gpus.smi_error) == (None, "No devices were found")


def test_kernel_log_of_a_card_off_the_bus(machine: Machine) -> None:
    machine.says("journalctl", recorded(FIXTURES / "blackwell/kernel-log-xid-79.txt"))
    assert [line for line in read(machine).xids if "Xid" in line] == [
        "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (PF FLR)",
    ]


def test_kernel_log_of_closed_modules_on_blackwell(machine: Machine) -> None:
    machine.says("journalctl", recorded(FIXTURES / "blackwell/kernel-log-closed-modules.txt"))
    assert "NVRM: GPU 000f:01:00.0: RmInitAdapter failed! (0x62:0x1a:2631)" in read(machine).xids


def test_bridges_whose_acs_redirects(machine: Machine) -> None:
    machine.says("lspci", (FIXTURES / "proxmox/lspci-acs.txt").read_text())
    seen = read(machine)
    assert (seen.acs_redirecting, seen.acs_read) == (("0000:00:00.0", "0000:00:01.0"), True)


def test_boot_loader_of_zfs_on_efi(machine: Machine) -> None:
    machine.says("proxmox-boot-tool", recorded(FIXTURES / "proxmox/proxmox-boot-tool-status.txt"))
    assert read(machine).bootloaders == ("systemd-boot",)


def test_error_counters(machine: Machine) -> None:
    real = machine.root / f"sys/bus/pci/devices/{ADDRESSES[1]}"
    (real / "aer_dev_fatal").write_text("SDES 1\nTOTAL_ERR_FATAL 1\n")
    assert read(machine).aer == (AerCount(address=ADDRESSES[1], correctable=0, nonfatal=0, fatal=1),)


def test_files_and_an_initramfs_older_than_they(machine: Machine) -> None:
    path = "/etc/modprobe.d/gpubox-nvidia.conf"
    target = machine.file(path, "options x\n")
    initrd = machine.root / f"boot/initrd.img-{KERNEL}"
    for age, stale in ((10, True), (-10, False)):
        when = target.stat().st_mtime - age
        os.utime(initrd, (when, when))
        seen = read(machine, files=(path,))
        assert (list(seen.files), seen.initrd_stale) == ([path], stale)


def test_packages_are_asked_by_pattern_and_not_by_files_of_the_working_directory(machine: Machine) -> None:
    machine.file("nvidia-driver-of-my-own.run")
    machine.records("dpkg-query", "echo 'installed dkms'; echo 'config-files curl'")
    assert read(machine).packages == ("dkms",)
    assert any(" nvidia* " in call for call in machine.calls())


@pytest.mark.parametrize(
    ("line", "entry"),
    [
        ("nvidia/590.48.01, 6.17.2-1-pve, x86_64: installed", ("590.48.01", "6.17.2-1-pve", "installed")),
        ("nvidia, 590.48.01, 6.8.12-4-pve, x86_64: installed", ("590.48.01", "6.8.12-4-pve", "installed")),
        ("nvidia/590.48.01: added", ("590.48.01", "", "added")),
        (
            "nvidia/590.48.01, 6.17.2-1-pve, x86_64: installed (WARNING! Diff between built and installed module!)",
            ("590.48.01", "6.17.2-1-pve", "installed"),
        ),
    ],
)
def test_dkms_lines_of_both_major_versions(line: str, entry: tuple[str, str, str]) -> None:
    (seen,) = read_node([f"dkms {line}"]).dkms
    assert (seen.version, seen.kernel, seen.status) == entry


KEYS = [
    "release",
    "card",
    "card_parents",
    "pci_read",
    "pci_gpu",
    "driver_gpu",
    "device_node",
    "aer",
    "module",
    "dkms",
    "file",
    "stamp",
    "banner",
    "smi_gpu",
    "smi_ok",
    "smi_error",
    "nonsense",
]
Values = st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=60)


@given(st.lists(st.builds(lambda key, value: f"{key} {value}", st.sampled_from(KEYS), Values) | Values, max_size=30))
def test_any_output_reads(lines: list[str]) -> None:
    read_node(lines)


Words = st.from_regex(r"[a-z0-9.:-]{1,12}", fullmatch=True)


@given(st.lists(st.tuples(Words, Words, st.integers(0, 64), st.integers(0, 64), st.integers(0, 1 << 40)), max_size=9))
def test_cards_round_trip(cards: list[tuple[str, str, int, int, int]]) -> None:
    lines = [f"card {address} {device} {width} {most} {bar} -" for address, device, width, most, bar in cards]
    assert [(c.address, c.device, c.width, c.max_width, c.bar_bytes) for c in read_node(lines).cards] == cards


# The unit's script (H2, H5 of the node). Its nodes are made by the stand-in for nvidia-modprobe, with mknod: root only.
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mknod needs root")


def with_nvidia_modprobe(machine: Machine, uvm: bool = True) -> None:
    """As the real one reads its arguments: one call makes nodes of GPUs, or with -u those of uvm."""
    for node in (machine.root / "dev").iterdir():
        node.unlink()
    machine.records("modprobe")
    made = "mknod {dev}/nvidia-uvm c 238 0; mknod {dev}/nvidia-uvm-tools c 238 1" if uvm else "true"
    machine.records(
        "nvidia-modprobe",
        f"""dev={machine.root}/dev; uvm=
for word in "$@"; do [ "$word" = -u ] && uvm=yes; done
if [ -n "$uvm" ]; then {made.format(dev=f"{machine.root}/dev")}; exit 0; fi
while [ $# -gt 0 ]; do
  case $1 in
    -c) if [ "$2" = 255 ]; then mknod $dev/nvidiactl c 195 255; else mknod $dev/nvidia$2 c 195 "$2"; fi; shift ;;
    -m) mknod $dev/nvidia-modeset c 195 254 ;;
  esac
  shift
done""",
    )


@needs_root
def test_every_device_node_is_made(machine: Machine) -> None:
    with_nvidia_modprobe(machine)
    done = machine.run(DEVICES_SCRIPT)
    assert (done.returncode, done.stderr) == (0, "")
    assert {node.name for node in (machine.root / "dev").iterdir()} == {
        "nvidia0", "nvidia1", "nvidiactl", "nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools",
    }  # fmt: skip
    assert machine.calls() == [
        "modprobe nvidia",
        "modprobe nvidia_uvm",
        "nvidia-modprobe -c 255 -c 0 -c 1 -m",
        "nvidia-modprobe -u -c 0",
    ]


@needs_root
def test_minors_are_the_drivers_not_the_order_of_addresses(machine: Machine) -> None:
    with_nvidia_modprobe(machine)
    machine.file(f"/proc/driver/nvidia/gpus/{ADDRESSES[0]}/information", "Device Minor: \t 5\n")
    assert machine.run(DEVICES_SCRIPT).returncode == 0
    assert (machine.root / "dev/nvidia5").exists()
    assert not (machine.root / "dev/nvidia0").exists()


@needs_root
def test_a_missing_node_fails_the_unit_by_name(machine: Machine) -> None:
    with_nvidia_modprobe(machine, uvm=False)
    done = machine.run(DEVICES_SCRIPT)
    assert done.returncode == 1
    assert "missing after nvidia-modprobe: /dev/nvidia-uvm /dev/nvidia-uvm-tools" in done.stderr


@needs_root
def test_a_gpu_that_the_driver_does_not_run_fails_the_unit_after_the_others_have_nodes(machine: Machine) -> None:
    with_nvidia_modprobe(machine)
    (machine.root / f"proc/driver/nvidia/gpus/{ADDRESSES[1]}/information").unlink()
    done = machine.run(DEVICES_SCRIPT)
    assert done.returncode == 1
    assert "PCI shows 2 GPUs, the driver 1" in done.stderr
    assert (machine.root / "dev/nvidia0").exists()
    assert (machine.root / "dev/nvidia-uvm").exists()


def test_a_driver_that_runs_no_gpu_fails_the_unit(machine: Machine) -> None:
    machine.records("modprobe")
    machine.records("nvidia-modprobe")
    for address in ADDRESSES:
        (machine.root / f"proc/driver/nvidia/gpus/{address}/information").unlink()
    done = machine.run(DEVICES_SCRIPT)
    assert (done.returncode, "PCI shows 2 GPUs, the driver 0" in done.stderr) == (1, True)
    assert not [call for call in machine.calls() if call.startswith("nvidia-modprobe")]


def test_a_module_that_does_not_load_fails_the_unit(machine: Machine) -> None:
    machine.program("modprobe", "exit 1")
    done = machine.run(DEVICES_SCRIPT)
    assert (done.returncode, "module nvidia does not load" in done.stderr) == (1, True)


def test_the_unit_is_ordered_before_the_guests_and_keeps_none_of_them_from_starting() -> None:
    """H2. A guest without GPUs must start on a node whose GPUs are broken."""
    unit = next(file.content for file in rendered(None) if file.path.endswith(f"/{DEVICES_UNIT}"))
    assert "Before=pve-guests.service" in unit
    assert "After=systemd-modules-load.service nvidia-persistenced.service" in unit
    assert not [line for line in unit.splitlines() if line.startswith(("RequiredBy=", "BindsTo="))]

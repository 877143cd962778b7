"""Rules of a node: which kernel, is the driver there, what waits for a reboot, what forbids it; and the report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubox.errors import GpuboxError, InputError, RefusedError
from gpubox.nvidia.box_readings import Package
from gpubox.nvidia.driver import numbers
from gpubox.nvidia.gpu_count import Gpus
from gpubox.proxmox.node import (
    KERNEL_LIMITS,
    built_for,
    check_node,
    driver_installed,
    grub_drop_in,
    kernel_limit,
    next_kernel,
    packages,
    pending_reboot,
    problems_in_service,
    reboot_refusals,
    wanted_kernel,
)
from gpubox.proxmox.node_readings import AerCount, Card, DkmsEntry, ModuleFile, NodeReadings
from gpubox.proxmox.node_report import RULES, Check, as_json, as_text, report, verdict
from gpubox.proxmox.settings import NodeSettings
from tests.gpus import gpus_of
from tests.node_machine import FIXTURES, recorded

DRIVER = "590.48.01"
OPEN = Package("install", f"{DRIVER}-1", "nvidia-open")
KERNEL = "6.17.2-1-pve"
NEWER = "7.0.2-1-pve"
SETTINGS = {
    "driver": {"version": DRIVER, "run": "/root/NVIDIA-Linux-x86_64-590.48.01.run", "sha256": "b" * 64},
    "kernel": KERNEL,
}


def settings(**changes: Any) -> NodeSettings:
    return NodeSettings.model_validate({**SETTINGS, **changes})


def blackwell_addresses() -> list[str]:
    """Cards as a public log shows them."""
    return [line.split()[0] for line in recorded(FIXTURES / "blackwell/lspci-nn.txt").splitlines()]


def node(**changes: Any) -> NodeReadings:
    """A converged node with two RTX PRO 6000 Blackwell."""
    cards = tuple(
        Card(
            address=a, device="2bb5", width=16, max_width=16, bar_bytes=128 << 30, iommu="identity", parents=(f"p{i}",)
        )
        for i, a in enumerate(blackwell_addresses())
    )
    values: dict[str, Any] = {
        "release": KERNEL,
        "pve": f"pve-manager/9.1.1/42db4a6cf33dac83 (running kernel: {KERNEL})",
        "kernels": (KERNEL, NEWER),
        "initrds": (KERNEL, NEWER),
        "pin": KERNEL,
        "bootloaders": ("grub",),
        "command_line": "root=/dev/mapper/pve-root ro quiet",
        "dkms": (DkmsEntry(module="nvidia", version=DRIVER, kernel=KERNEL, status="installed"),),
        "modules": (ModuleFile(kernel=KERNEL, version=DRIVER, license="Dual MIT/GPL"),),
        "loaded_modules": ("nvidia_uvm", "nvidia"),
        "loaded_driver": DRIVER,
        "loaded_open": True,
        "hmm_disabled": "Y",
        "libcuda": (DRIVER,),
        "gpus": gpus_of(blackwell_addresses()),
        "cards": cards,
        "secure_boot": "disabled",
        "acs_read": True,
        "aer_read": True,
        "root_fs": "ext4",
        "kernel_log_read": True,
        "units_enabled": ("nvidia-persistenced.service", "gpubox-nvidia-devices.service"),
        "units_active": ("nvidia-persistenced.service", "gpubox-nvidia-devices.service"),
    }
    return NodeReadings(**{**values, **changes})


def gpus(**changes: Any) -> dict[str, Any]:
    return {"gpus": replace(node().gpus, **changes)}


def without_nodes(*paths: str) -> dict[str, Any]:
    return gpus(nodes={path: number for path, number in node().gpus.nodes.items() if path not in paths})


def bare(**changes: Any) -> NodeReadings:
    """A node as Proxmox's installer leaves it, on its newest kernel."""
    values: dict[str, Any] = {
        "release": KERNEL,
        "pve": "pve-manager/9.1.1/42db4a6cf33dac83",
        "kernels": (KERNEL,),
        "initrds": (KERNEL,),
        "bootloaders": ("grub",),
        "gpus": Gpus(pci=tuple(blackwell_addresses())),
        "cards": node().cards,
        "secure_boot": "disabled",
    }
    return NodeReadings(**{**values, **changes})


def test_a_converged_node_has_nothing_to_do_and_nothing_pending() -> None:
    seen, wanted = node(), settings()
    check_node(wanted, seen)
    assert driver_installed(wanted.driver, KERNEL, seen)
    assert pending_reboot(wanted, seen) == []
    assert reboot_refusals(wanted, seen) == []
    assert problems_in_service(wanted, seen) == []


@pytest.mark.parametrize("table_row", KERNEL_LIMITS)
def test_the_table_of_kernels_gives_reasons(table_row: Any) -> None:
    assert "#" in table_row.reference
    assert table_row.reason


@pytest.mark.parametrize(
    ("driver", "kernel", "builds"),
    [
        ("590.48.01", "6.17.2-1-pve", True),
        ("590.48.01", "6.18.9-1-pve", True),
        ("590.48.01", "6.19", False),
        ("590.48.01", "6.19.0-1-pve", False),
        ("590.48.01", "7.0.2-6-pve", False),
        ("595.45.04", "7.0.2-6-pve", True),
        ("550.163.01", "6.17.13-2-pve", False),
        ("580.95.05", "6.17.13-2-pve", True),
    ],
)
def test_which_kernels_a_driver_builds_on(driver: str, kernel: str, builds: bool) -> None:
    assert (kernel_limit(driver, kernel) is None) == builds


def test_a_kernel_that_the_driver_does_not_build_on_is_refused_with_what_to_pin() -> None:
    seen = bare(release=NEWER, kernels=(KERNEL, NEWER))
    with pytest.raises(InputError) as error:
        check_node(settings(kernel=None), seen)
    assert NEWER in str(error.value)
    assert "linux-tkg#1186" in str(error.value)
    assert f"on this node: {KERNEL}" in str(error.value)
    check_node(settings(kernel=KERNEL), seen)


def test_the_kernel_that_is_pinned_without_an_order() -> None:
    """A kernel upgrade must not take the GPUs away (H5): the running kernel is pinned, an older pin is kept."""
    assert wanted_kernel(settings(kernel=None), bare()) == KERNEL
    assert wanted_kernel(settings(kernel=None), bare(pin="6.14.11-4-pve")) == "6.14.11-4-pve"
    assert wanted_kernel(settings(kernel="6.8.12-4-pve"), bare(pin="6.14.11-4-pve")) == "6.8.12-4-pve"


def test_next_kernel() -> None:
    unpinned = node(pin="", kernels=("6.8.12-4-pve", "6.17.2-1-pve", "6.17.13-2-pve", "6.8.12-13-pve"))
    assert next_kernel(unpinned) == "6.17.13-2-pve"
    assert next_kernel(node()) == KERNEL
    assert next_kernel(node(next_boot_pin=NEWER)) == NEWER


def test_packages_bring_the_metapackage_and_a_kernel_that_is_not_there() -> None:
    assert {"proxmox-default-headers", f"proxmox-headers-{KERNEL}", "dkms"} <= set(packages(settings(), bare()))
    wanted = packages(settings(kernel="6.14.11-4-pve"), bare())
    assert {"proxmox-headers-6.14.11-4-pve", "proxmox-kernel-6.14.11-4-pve-signed"} <= set(wanted)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"pve": ""}, InputError, "not a Proxmox VE node"),
        ({"user": "admin"}, RefusedError, "connected as admin, who is not root"),
        ({"secure_boot": "enabled"}, RefusedError, "Secure Boot is on"),
        ({"driver_packages": (OPEN,)}, RefusedError, "apt has installed driver packages here: nvidia-open"),
    ],
)
def test_what_is_refused_before_anything_runs(changes: dict[str, Any], error: type[GpuboxError], said: str) -> None:
    with pytest.raises(error, match=said):
        check_node(settings(), bare(**changes))


def test_a_driver_that_does_not_know_the_card_is_refused() -> None:
    old = {**SETTINGS["driver"], "version": "570.124.06"}  # type: ignore[dict-item]
    with pytest.raises(InputError, match=r"does not know the RTX PRO 6000 Blackwell at 0000:42:00\.0"):
        check_node(settings(driver=old), bare())


@pytest.mark.parametrize("argument", ["a b", 'x="y"', "$(reboot)", "a`b`", "a\\b", "", "iommu=pt\n", "it's"])
def test_arguments_that_grub_would_read_as_shell_are_refused(argument: str) -> None:
    with pytest.raises(InputError, match="is not one argument"):
        check_node(settings(kernel_arguments=[argument]), bare())


def test_usual_arguments_are_taken() -> None:
    usual = [
        "iommu=pt",
        "pcie_aspm=off",
        "pci=disable_acs_redir=pci:8086:352a",
        "amd_iommu=on",
        "console=ttyS0,115200n8",
    ]
    check_node(settings(kernel_arguments=usual), bare())
    assert '="$GRUB_CMDLINE_LINUX_DEFAULT iommu=pt pcie_aspm=off' in grub_drop_in(usual)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"modules": (ModuleFile(kernel=KERNEL, version=DRIVER, license="NVIDIA"),)}, "closed (H4)"),
        ({"modules": (ModuleFile(kernel=KERNEL, version="590.48.02", license="Dual MIT/GPL"),)}, "last number (H1)"),
        ({"modules": ()}, "no module on disk"),
        ({"libcuda": ("590.44.01",)}, "other libraries (H1)"),
        ({"libcuda": (DRIVER, "580.159.04")}, "two sets of libraries"),
        ({"dkms": ()}, "not by DKMS: the next kernel would have none"),
        ({"dkms": (DkmsEntry(module="nvidia", version=DRIVER, kernel=KERNEL, status="built"),)}, "built only"),
        (
            {"dkms": (DkmsEntry(module="nvidia", version=DRIVER, kernel=NEWER, status="installed"),)},
            "other kernel (H5)",
        ),
    ],
)
def test_an_installation_that_is_not_whole(changes: dict[str, Any], why: str) -> None:
    assert not driver_installed(settings().driver, KERNEL, node(**changes)), why
    assert reboot_refusals(settings(), node(**changes)), why


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"release": NEWER}, f"kernel {NEWER} runs, {KERNEL} is pinned"),
        ({"loaded_driver": "580.159.04"}, "driver 580.159.04 (open) is loaded, 590.48.01 (open) is wanted"),
        ({"loaded_driver": "590.48.02"}, "590.48.02"),
        ({"loaded_open": False}, "driver 590.48.01 (closed) is loaded"),
        ({"loaded_modules": ("nouveau",)}, "nouveau is loaded"),
        ({"loaded_modules": ("nova_core",)}, "nova_core is loaded"),
        ({"hmm_disabled": "N"}, "uvm_disable_hmm=0"),
    ],
)
def test_what_waits_for_a_reboot(changes: dict[str, Any], said: str) -> None:
    (reason,) = pending_reboot(settings(), node(**changes))
    assert said in reason


def test_a_command_line_waits_for_a_reboot_until_the_kernel_runs_with_it() -> None:
    wanted = settings(kernel_arguments=["iommu=pt", "quiet"])
    assert pending_reboot(wanted, node()) == ["the kernel runs without iommu=pt"]
    assert pending_reboot(wanted, node(command_line="quiet iommu=pt")) == []


def test_a_bare_node_waits_for_no_reboot() -> None:
    """The installer loads the module itself; H25: no reboot that nothing asks for."""
    assert pending_reboot(settings(), bare()) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"next_boot_pin": NEWER}, f"takes kernel {NEWER}"),
        ({"pin": ""}, f"takes kernel {NEWER}"),
        ({"initrds": (NEWER,)}, "no initramfs"),
        ({"kernels": (NEWER,)}, "no image"),
        ({"initrd_stale": True}, "older than the module options"),
    ],
)
def test_a_reboot_is_refused_unless_it_comes_back_with_gpus(changes: dict[str, Any], said: str) -> None:
    assert any(said in refusal for refusal in reboot_refusals(settings(), node(**changes)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (gpus(listed=("00000000:42:00.0",)), "PCI 2, driver 2, device nodes 2, nvidia-smi 1; the driver does not run"),
        (gpus(listed=None, smi_error="No devices were found"), "nvidia-smi no answer (No devices were found)"),
        ({"gpus": Gpus(pci=())}, "there is no GPU: PCI 0, driver 0, device nodes 0, nvidia-smi not asked"),
        (without_nodes("/dev/nvidia1"), "PCI 2, driver 2, device nodes 1, nvidia-smi 2; the device nodes must be"),
        (without_nodes("/dev/nvidia1"), "device nodes are missing: /dev/nvidia1"),
        (
            without_nodes("/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"),
            "device nodes are missing: /dev/nvidia-uvm, /dev/nvidia-uvm-tools",
        ),
        ({"loaded_driver": ""}, "driver (none) is loaded"),
        ({"units_enabled": ()}, "not started at boot"),
    ],
)
def test_what_keeps_boxes_from_the_gpus(changes: dict[str, Any], said: str) -> None:
    assert any(said in problem for problem in problems_in_service(settings(), node(**changes)))


@given(st.lists(st.integers(0, 999), min_size=1, max_size=5), st.sampled_from([".", "-"]))
def test_numbers_of_a_version(parts: list[int], separator: str) -> None:
    assert numbers(separator.join(map(str, parts)) + "-pve") == tuple(parts)


@given(st.text(max_size=20))
def test_any_text_has_numbers(text: str) -> None:
    assert all(isinstance(part, int) for part in numbers(text))


# The report.


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_a_healthy_node_passes_every_rule() -> None:
    checks = report(node())
    assert {check.name: check.verdict for check in checks if check.verdict != "pass"} == {}
    assert len(checks) == len(RULES) == len(by_name(checks))


def test_a_bare_node_fails_nothing() -> None:
    """Nothing is wrong with it: it is not deployed yet."""
    assert verdict(report(bare(acs_read=True))) == "warn"


def test_a_node_that_does_not_answer_fails() -> None:
    assert [(check.name, check.verdict) for check in report(NodeReadings())] == [("node", "fail")]


def cards(**changes: Any) -> dict[str, Any]:
    return {"cards": tuple(card.model_copy(update=changes) for card in node().cards)}


@pytest.mark.parametrize(
    ("changes", "name", "wanted"),
    [
        ({"pve": "pve-manager/7.4-3/9002ab8a"}, "Proxmox VE", "fail"),
        ({"secure_boot": "enabled"}, "Secure Boot", "warn"),
        ({"secure_boot": "enabled", "loaded_driver": ""}, "Secure Boot", "fail"),
        ({"secure_boot": ""}, "Secure Boot", "warn"),
        ({"root_fs": "zfs"}, "root file system", "warn"),
        (cards(width=8), "PCIe width", "warn"),
        (cards(max_width=0, width=0), "PCIe width", "warn"),
        (cards(bar_bytes=256 << 20), "Resizable BAR", "warn"),
        (cards(iommu="DMA-FQ"), "IOMMU", "warn"),
        (cards(iommu=""), "IOMMU", "pass"),
        ({"acs_redirecting": ("p1",)}, "ACS", "warn"),
        ({"acs_redirecting": ("somewhere-else",)}, "ACS", "pass"),
        ({"acs_read": False}, "ACS", "warn"),
        ({"aer": (AerCount(address="a", correctable=3, nonfatal=0, fatal=0),)}, "PCIe errors", "pass"),
        ({"aer": (AerCount(address="a", correctable=101, nonfatal=0, fatal=0),)}, "PCIe errors", "warn"),
        ({"aer": (AerCount(address="a", correctable=0, nonfatal=1, fatal=0),)}, "PCIe errors", "warn"),
        ({"aer": (AerCount(address="a", correctable=0, nonfatal=0, fatal=1),)}, "PCIe errors", "fail"),
        (gpus(listed=("00000000:42:00.0",)), "number of GPUs", "fail"),
        (gpus(listed=None, smi_error="No devices were found"), "number of GPUs", "fail"),
        (gpus(pci=None), "number of GPUs", "warn"),
        ({"gpus": Gpus(pci=())}, "number of GPUs", "fail"),
        (without_nodes("/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"), "device nodes", "fail"),
        ({"units_enabled": ()}, "device nodes", "fail"),
        ({"loaded_driver": "590.44.01"}, "driver", "fail"),
        ({"libcuda": ("590.48.02",)}, "driver", "fail"),
        ({"driver_packages": (OPEN,)}, "driver", "fail"),
        ({"driver_packages": (OPEN._replace(selection="hold"),)}, "driver", "pass"),
        ({"driver_packages": (OPEN._replace(selection="hold"),), "run_file": True}, "driver", "fail"),
        ({"driver_packages": (Package("hold", "590.44.01-1", "libcuda1"),)}, "driver", "fail"),
        ({"modules": (ModuleFile(kernel=KERNEL, version=DRIVER, license="NVIDIA"),)}, "open modules", "fail"),
        ({"loaded_open": False}, "open modules", "fail"),
        ({"loaded_modules": ("nouveau",)}, "other GPU drivers", "fail"),
        ({"hmm_disabled": "N"}, "uvm_disable_hmm", "warn"),
        ({"pin": ""}, "next kernel", "fail"),
        ({"pin": "6.14.11-4-pve"}, "next kernel", "fail"),
        ({"xids": ("NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.",)}, "kernel log", "fail"),
        ({"kernel_log_read": False}, "kernel log", "warn"),
    ],
)
def test_verdicts(changes: dict[str, Any], name: str, wanted: str) -> None:
    check = by_name(report(node(**changes)))[name]
    assert check.verdict == wanted
    assert bool(check.why) == bool(check.do) == (wanted != "pass")


def test_text_and_json_say_the_same() -> None:
    checks = report(node(root_fs="zfs"))
    text, data = as_text("pve1", checks), json.loads(as_json("pve1", checks))
    assert text.startswith("pve1: warn\n")
    assert "\n" not in as_json("pve1", checks)
    assert (data["host"], data["verdict"]) == ("pve1", "warn")
    for check in data["checks"]:
        assert f"{check['verdict']:<4}  {check['name']}: {check['reading']}" in text


def test_the_recorded_license_is_the_open_one() -> None:
    line = recorded(FIXTURES / "blackwell/modinfo-license.txt").strip()
    module = ModuleFile(kernel=KERNEL, version=DRIVER, license=line.partition(":")[2].strip())
    assert driver_installed(settings().driver, KERNEL, node(modules=(module,)))


def test_h5_h6_no_reboot_while_a_package_of_the_driver_is_another_or_half_installed() -> None:
    """Module, build and libcuda are right; what the other libraries are, the next boot would find out."""
    wanted = settings(driver={"version": DRIVER, "repository": "/srv/driver"})
    names = ("nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-modprobe", "nvidia-persistenced", "libcuda1")
    right = tuple(Package("hold", f"{DRIVER}-1", name) for name in names)
    seen = node(system="debian 13", driver_packages=right)
    check_node(wanted, seen)
    assert reboot_refusals(wanted, seen) == []
    assert problems_in_service(wanted, seen) == []
    for wrong in (right[4]._replace(version="590.44.01-1"), right[4]._replace(selection="half-configured")):
        seen = node(system="debian 13", driver_packages=(*right[:4], wrong))
        assert reboot_refusals(wanted, seen) == [
            f"driver {DRIVER} (open) is not installed and built for kernel {KERNEL}"
        ]
        assert len(problems_in_service(wanted, seen)) == 1


def test_built_for_is_exact() -> None:
    assert built_for(DRIVER, KERNEL, node())
    assert not built_for("590.48", KERNEL, node())


def test_fixtures_name_their_machine() -> None:
    for file in [*(FIXTURES / "blackwell").iterdir(), *(FIXTURES / "proxmox").iterdir()]:
        assert Path(file).read_text().startswith("# "), file.name

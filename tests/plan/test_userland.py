"""The role nvidia_userland: what it runs on a box, what it refuses, and when it does nothing."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from pyinfra.api.state import StateStage

from facts.box import BoxState
from gpubox.nvidia.driver import RunFileDriver
from gpubox.settings import Settings
from gpubox.specs.plan import plan_box
from ops.run_file import install_script
from ops.userland import OPTIONS
from roles import cuda_toolkit, proxmox_node
from roles.box import rendered
from roles.nvidia_userland import files, nvidia_userland
from tests.plan.gpu_roles import DATA, ROOT, planned

DRIVER = {"version": "590.48.01", "run": "/models/NVIDIA-Linux-x86_64-590.48.01.run", "sha256": "b9" * 32}
SETTINGS = Settings.model_validate({**DATA, "driver": DRIVER})
SOURCE, PINS, LIBRARIES, CUDA = (
    f"NVIDIA userland | {name}"
    for name in ("One source of the driver", "Driver kept from apt", "Driver libraries 590.48.01", "CUDA starts")
)
BANNER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (builder@)"


def box(*, loaded: str | None = "590.48.01", libraries: str | None = "590.48.01") -> BoxState:
    """A container with two GPUs on which all holds, but for the versions."""
    gpus = ["0000:41:00.0", "0000:c1:00.0"]
    state = BoxState(
        many={
            "os": ["debian 12"],
            "container": ["lxc"],
            "pci_read": ["yes"],
            "pci_gpu": gpus,
            "driver_gpu": [f"{address} {minor}" for minor, address in enumerate(gpus)],
            "device_node": ["/dev/nvidia0 c3 0", "/dev/nvidia1 c3 1"],
            "smi_ok": ["yes"],
            "smi_gpu": [f"0000{address}" for address in gpus],
            "cuda": ["gpubox " + json.dumps({"init": 0, "devices": 2})],
        }
    )
    if loaded:
        state.many["driver"] = [BANNER.format(loaded)]
    if libraries:
        state.many["driver_library"] = [libraries]
    state.files = {file.path: (file.sha256, file.mode, "root:root") for file in files(SETTINGS)}
    return state


def test_without_a_driver_in_the_settings_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    result = planned(monkeypatch, nvidia_userland, box(loaded=None, libraries=None))
    assert result.commands == {}
    assert result.reads == 0


@pytest.mark.parametrize("stage", [StateStage.Prepare, StateStage.Execute])
def test_a_converged_box_changes_nowhere_and_is_read_once(monkeypatch: pytest.MonkeyPatch, stage: StateStage) -> None:
    result = planned(monkeypatch, nvidia_userland, box(), stage=stage, driver=DRIVER)
    assert list(result.commands) == [SOURCE, PINS, LIBRARIES, CUDA]
    assert result.changing == []
    assert result.reads == (1 if stage == StateStage.Prepare else 2), "once in each phase"


@pytest.mark.parametrize("libraries", [None, "580.159.04"])
def test_libraries_are_installed_from_the_run_file(monkeypatch: pytest.MonkeyPatch, libraries: str | None) -> None:
    result = planned(monkeypatch, nvidia_userland, box(libraries=libraries), stage=StateStage.Prepare, driver=DRIVER)
    assert result.changing == [LIBRARIES]
    (command,) = result.commands[LIBRARIES]
    for option in (*OPTIONS, "--no-kernel-modules", DRIVER["run"], DRIVER["sha256"]):
        assert option in command
    assert "curl" not in command


def test_the_pins_come_before_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = box(libraries=None)
    seen.files = {}
    result = planned(monkeypatch, nvidia_userland, seen, stage=StateStage.Prepare, driver=DRIVER)
    assert result.changing == [PINS, LIBRARIES]
    assert "Pin-Priority: -1" in result.uploads["/etc/apt/preferences.d/gpubox-driver"]
    assert "/etc/apt/apt.conf.d/52gpubox-driver" in result.uploads


def test_an_address_is_fetched_with_curl_which_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    address = {**DRIVER, "run": "https://mirror.example/NVIDIA-Linux-x86_64-590.48.01.run"}
    result = planned(monkeypatch, nvidia_userland, box(libraries=None), driver=address)
    assert any("apt-get" in command and "curl" in command for command in result.commands[LIBRARIES][:-1])
    assert "--proto '\"'\"'=https'\"'\"'" in result.commands[LIBRARIES][-1]
    seen = box(libraries=None)
    seen.many["command"] = ["curl"]
    assert len(planned(monkeypatch, nvidia_userland, seen, driver=address).commands[LIBRARIES]) == 1


@pytest.mark.parametrize("loaded", ["590.48.02", "580.159.04"])
def test_h1_another_loaded_version_stops_with_both(monkeypatch: pytest.MonkeyPatch, loaded: str) -> None:
    result = planned(monkeypatch, nvidia_userland, box(loaded=loaded, libraries=None), driver=DRIVER)
    assert result.changing[0] == LIBRARIES
    assert len(result.commands[LIBRARIES]) == 1, "nothing runs beside the refusal"
    assert "590.48.01" in result.refused[LIBRARIES]
    assert loaded in result.refused[LIBRARIES]


def test_a_node_without_a_driver_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    result = planned(monkeypatch, nvidia_userland, box(loaded=None, libraries=None), driver=DRIVER)
    assert "node of this container has no NVIDIA driver" in result.refused[LIBRARIES]


def test_a_driver_from_apt_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = box(libraries="590.48.01")
    seen.many["driver_package"] = ["hold 590.48.01-1 libcuda1"]
    result = planned(monkeypatch, nvidia_userland, seen, driver=DRIVER)
    assert result.changing[0] == SOURCE
    assert "apt-get purge --allow-change-held-packages libcuda1" in result.refused[SOURCE]


def test_h2_cuda_that_does_not_start_stops_and_is_not_judged_before_everything_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = box()
    seen.many["cuda"] = ['gpubox {"init": 999}', 'root {"init": 999}']
    seen.many["uvm_major"] = ["238"]
    prepare = planned(monkeypatch, nvidia_userland, seen, stage=StateStage.Prepare, driver=DRIVER)
    assert prepare.changing == []
    execute = planned(monkeypatch, nvidia_userland, seen, driver=DRIVER)
    assert "nvidia-smi works, so it is uvm: /dev/nvidia-uvm is missing here" in execute.refused[CUDA]


def test_a_bare_metal_machine_gets_the_whole_driver_as_a_node_does(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = box(loaded=None, libraries=None)
    seen.many["container"] = ["none"]
    node = ["release 6.8.0-90-generic", "bootloader grub", "kernel 6.8.0-90-generic"]
    result = planned(monkeypatch, nvidia_userland, seen, stage=StateStage.Prepare, node=node, driver=DRIVER)
    names = [name.removeprefix("NVIDIA userland | ") for name in result.commands]
    assert names == [
        "One source of the driver",
        "Driver kept from apt",
        "Compiler, dkms, headers",
        "Files",
        "Initramfs",
        "Driver 590.48.01",
        "Units enabled",
        "Reboot",
        "Device nodes",
        "Every GPU everywhere",
        "Driver libraries 590.48.01",
        "CUDA starts",
    ]
    assert "linux-headers-6.8.0-90-generic" in result.commands["NVIDIA userland | Compiler, dkms, headers"][-1]
    driver = "".join(result.commands["NVIDIA userland | Driver 590.48.01"])
    assert "--dkms" in driver
    assert "--kernel-module-type=open" in driver
    assert "proxmox" not in "".join(command for commands in result.commands.values() for command in commands)


def test_a_bare_metal_machine_with_the_driver_is_only_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = box()
    seen.many["container"] = ["none"]
    result = planned(monkeypatch, nvidia_userland, seen, driver=DRIVER)
    assert list(result.commands) == [SOURCE, PINS, LIBRARIES, CUDA]
    assert result.changing == []


# --- from apt ---

PACKAGED = {"version": "590.48.01", "repository": "/models/debs"}
HOLD = "NVIDIA userland | On hold"


def packaged_box(*, modules: bool = False, selection: str = "hold", names: Sequence[str] = ("libcuda1",)) -> BoxState:
    """A converged container, or with `modules` a converged machine of its own, whose driver is from apt."""
    seen = box()
    settings = Settings.model_validate({**DATA, "driver": PACKAGED})
    wanted = files(settings, bare_metal=modules)
    seen.files = {file.path: (file.sha256, file.mode, "root:root") for file in wanted}
    all_of_it = ["nvidia-driver-cuda", *names]
    if modules:
        seen.many["container"] = ["none"]
        all_of_it += ["nvidia-kernel-open-dkms", "nvidia-modprobe", "nvidia-persistenced"]
    seen.many["driver_package"] = [f"{selection} 590.48.01-1 {name}" for name in all_of_it]
    return seen


@pytest.mark.parametrize("modules", [False, True])
@pytest.mark.parametrize("stage", [StateStage.Prepare, StateStage.Execute])
def test_a_box_with_its_driver_from_apt_changes_nowhere(
    monkeypatch: pytest.MonkeyPatch, stage: StateStage, modules: bool
) -> None:
    result = planned(monkeypatch, nvidia_userland, packaged_box(modules=modules), stage=stage, driver=PACKAGED)
    assert list(result.commands) == [SOURCE, PINS, LIBRARIES, HOLD, CUDA]
    assert result.changing == []


def test_a_container_gets_the_libraries_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """H7: no dkms, nothing that needs a kernel."""
    seen = packaged_box()
    seen.many["driver_package"] = []
    del seen.many["driver_library"]
    result = planned(monkeypatch, nvidia_userland, seen, stage=StateStage.Prepare, driver=PACKAGED)
    assert result.changing == [LIBRARIES]
    *_, install = result.commands[LIBRARIES]
    assert install.split()[-1] == "'nvidia-driver-cuda=590.48.01-*'"
    assert "--no-install-recommends" in install


def test_h6_a_part_off_hold_or_of_another_version_is_put_right(monkeypatch: pytest.MonkeyPatch) -> None:
    result = planned(monkeypatch, nvidia_userland, packaged_box(selection="install"), driver=PACKAGED)
    assert result.commands[HOLD] == ["apt-mark hold libcuda1 nvidia-driver-cuda"]
    seen = packaged_box()
    seen.many["driver_package"][1] = "hold 595.58.03-1 libcuda1"
    result = planned(monkeypatch, nvidia_userland, seen, stage=StateStage.Prepare, driver=PACKAGED)
    assert result.changing == [LIBRARIES]
    assert "libcuda1=590.48.01-*" in result.commands[LIBRARIES][-1]


def test_h1_packages_of_another_version_than_the_loaded_one_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = packaged_box()
    seen.many["driver"] = [BANNER.format("590.44.01")]
    seen.many["driver_package"] = []
    result = planned(monkeypatch, nvidia_userland, seen, driver=PACKAGED)
    assert len(result.commands[LIBRARIES]) == 1, "nothing runs beside the refusal"
    assert "has 590.44.01 loaded" in result.refused[LIBRARIES]


def test_libraries_of_a_run_file_are_not_replaced_by_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    result = planned(monkeypatch, nvidia_userland, box(), driver=PACKAGED)
    assert result.changing[0] == SOURCE
    assert "a driver from a .run file (590.48.01) is installed here" in result.refused[SOURCE]


def test_a_bare_metal_machine_gets_the_whole_driver_from_apt(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = packaged_box(modules=True)
    seen.many["driver_package"] = []
    for key in ("driver", "driver_library"):
        del seen.many[key]
    node = ["release 6.1.0-9-amd64", "os debian 12", "bootloader grub", "kernel 6.1.0-9-amd64"]
    result = planned(monkeypatch, nvidia_userland, seen, stage=StateStage.Prepare, node=node, driver=PACKAGED)
    *_, install, build, _ = result.commands["NVIDIA userland | Driver 590.48.01"]
    for name in ("nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-modprobe", "nvidia-persistenced"):
        assert f"{name}=590.48.01-*" in install
    assert "dkms install -m nvidia -v 590.48.01 -k 6.1.0-9-amd64" in build


def test_toolkits_beside_a_driver_from_apt_have_the_same_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both roles write the file; what one writes the other leaves."""
    toolkits = {"repository": "/models/debs"}
    plan = plan_box(ROOT, Settings.model_validate({**DATA, "driver": PACKAGED, "toolkits": toolkits}))
    for bare_metal in (False, True):
        own = {file.path: file.content for file in files(plan.settings, bare_metal=bare_metal)}
        theirs = {file.path: file.content for file in cuda_toolkit.files(plan, bare_metal=bare_metal)}
        assert own.items() <= theirs.items()
        assert "Pin: version 590.48.01-*" in own["/etc/apt/preferences.d/gpubox-driver"]


@pytest.mark.parametrize("driver", [DRIVER, PACKAGED])
def test_a_file_that_both_kinds_of_host_have_is_the_same_on_a_machine_that_is_both(driver: dict[str, str]) -> None:
    """Bare metal gets a node's files and a box's; two that differ would be written anew by every deploy."""
    settings = Settings.model_validate({**DATA, "driver": driver})
    node = {file.path: file.content for file in proxmox_node.rendered(settings.driver)}
    box = {file.path: file.content for file in [*rendered(settings), *files(settings, bare_metal=True)]}
    assert {path for path in node.keys() & box.keys() if node[path] != box[path]} == set()
    assert node.keys() & box.keys()


# --- the install script, run for real with a .run file of our own ---

RUN = """#!/bin/sh
for word in "$@"; do
  case $word in --log-file-name=*) log=${word#*=} ;; esac
done
echo "$@" >ARGUMENTS
echo "the reason" >"$log"
exit STATUS
"""


def run_install(tmp_path: Path, status: int = 0, sha256: str = "") -> subprocess.CompletedProcess[str]:
    run = tmp_path / "nvidia driver.run"
    run.write_text(RUN.replace("ARGUMENTS", shlex.quote(str(tmp_path / "arguments"))).replace("STATUS", str(status)))
    got = subprocess.run(["sha256sum", run], capture_output=True, text=True, check=True).stdout.split()[0]
    driver = RunFileDriver(version="590.48.01", run=str(run), sha256=sha256 or got)
    script = install_script(driver, OPTIONS).replace("/var/log/", f"{tmp_path}/")
    return subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)


def test_the_run_file_is_executed_with_the_options(tmp_path: Path) -> None:
    done = run_install(tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "arguments").read_text().split()[:-1] == OPTIONS


def test_a_run_file_of_another_hash_is_not_executed(tmp_path: Path) -> None:
    done = run_install(tmp_path, sha256="c" * 64)
    assert done.returncode == 1
    assert "c" * 64 in done.stderr
    assert "not executed" in done.stderr
    assert not (tmp_path / "arguments").exists()


def test_a_failed_installer_shows_its_log(tmp_path: Path) -> None:
    done = run_install(tmp_path, status=3)
    assert done.returncode == 1
    assert "the reason" in done.stderr

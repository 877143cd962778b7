"""The driver from apt: settings, names, pins as apt reads them, what may stand beside it, and apt's plans."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubox.errors import GpuboxError, InputError, RefusedError
from gpubox.nvidia import driver_packages
from gpubox.nvidia.box_readings import Package
from gpubox.nvidia.driver import PackagedDriver, RunFileDriver
from gpubox.nvidia.driver_packages import Found, Policy, choose, read_policy
from gpubox.nvidia.repository import SYSTEMS, Key, steps
from gpubox.settings import Settings, load_node_settings, load_settings

VERSION = "590.48.01"
MIRROR = {"version": VERSION, "repository": "https://mirror.example/debian12/", "key": "keys/nvidia.pub"}
RUN_FILE = {"version": VERSION, "run": "/root/NVIDIA-Linux-x86_64-590.48.01.run", "sha256": "a" * 64}
DRIVER = PackagedDriver.model_validate(MIRROR)
RUN = RunFileDriver.model_validate(RUN_FILE)
BOX = {"stack": "cuda128", "server": "smollm2"}
HOST = ("nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-modprobe", "nvidia-persistenced")


def packages(*names: str, version: str = f"{VERSION}-1", selection: str = "hold") -> tuple[Package, ...]:
    return tuple(Package(selection, version, name) for name in names)


def node(*there: Package, **changes: Any) -> Found:
    values: dict[str, Any] = {"system": "debian 12", "run_file": False, "libraries": (), "modules": True}
    return Found(packages=there, **{**values, **changes})


# --- settings -----------------------------------------------------------------------------------


def test_both_ways_are_read_in_both_places() -> None:
    assert load_node_settings({"driver": MIRROR}, "pve1").driver == DRIVER
    assert load_node_settings({"driver": RUN_FILE}, "pve1").driver == RUN
    assert load_settings({**BOX, "driver": MIRROR}, "box1").driver == DRIVER
    assert load_settings({**BOX, "driver": {"version": VERSION, "repository": "/srv/debs"}}, "box1").driver is not None
    assert Settings.model_validate({**BOX, "driver": DRIVER}).driver == DRIVER, "also as a model"


EITHER = "either run and sha256 (NVIDIA's .run file) or repository (apt packages)"


@pytest.mark.parametrize(
    ("driver", "said"),
    [
        ({"version": VERSION}, EITHER),
        ({**MIRROR, **RUN_FILE}, EITHER),
        ({**RUN_FILE, "key": "k"}, EITHER),
        ("590.48.01", EITHER),
        (None, "driver"),
        ({**MIRROR, "version": "590"}, "driver.version = '590'"),
        ({**MIRROR, "version": "590.48.01-1"}, "driver.version = '590.48.01-1'"),
        ({**RUN_FILE, "sha256": "1"}, "driver.sha256 = '1'"),
        ({"version": VERSION, "run": "/x.run"}, "key 'driver.sha256' is missing"),
        ({"version": VERSION, "repository": "https://m/"}, "needs key"),
        ({**MIRROR, "repository": "mirror"}, "driver.repository = 'mirror'"),
        ({**MIRROR, "components": ["main"]}, "components go with"),
        ({**MIRROR, "fingerprnt": "A" * 40}, "unknown key 'driver.fingerprnt'"),
        ({**MIRROR, "fingerprnt": "A" * 40}, "did you mean 'fingerprint'?"),
        ({**RUN_FILE, "sha526": "1"}, "did you mean 'sha256'?"),
    ],
)
def test_what_is_neither_is_said_by_key(driver: object, said: str) -> None:
    for load, data in ((load_node_settings, {"driver": driver}), (load_settings, {**BOX, "driver": driver})):
        if driver is None and load is load_settings:
            continue  # a box may have none
        with pytest.raises(InputError) as caught:
            load(data, "host9")  # type: ignore[operator]
        assert "host host9: " in str(caught.value)
        assert said in str(caught.value)
        assert "variant:" not in str(caught.value)


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_container_gets_no_package_that_builds_modules(system: str) -> None:
    libraries = driver_packages.wanted(DRIVER, system, modules=False)
    everything = driver_packages.wanted(DRIVER, system, modules=True)
    assert set(libraries) < set(everything)
    assert not any("dkms" in name for name in libraries)
    assert [name for name in everything if "dkms" in name] == [name for name in everything if "open" in name]
    for name in everything:
        assert driver_packages.is_driver(name)
        assert not driver_packages.is_closed(name)


def test_older_branches_have_other_names_on_ubuntu() -> None:
    older = DRIVER.model_copy(update={"version": "580.159.04"})
    with pytest.raises(InputError, match=r"590 and newer, or NVIDIA's \.run file"):
        driver_packages.wanted(older, "ubuntu 24.04", modules=True)
    assert driver_packages.wanted(older, "debian 12", modules=True) == HOST


@pytest.mark.parametrize(
    ("name", "closed"),
    [
        ("nvidia-kernel-dkms", True),
        ("nvidia-kernel-open-dkms", False),
        ("nvidia-dkms", True),
        ("nvidia-dkms-open", False),
        ("nvidia-dkms-580", True),
        ("nvidia-dkms-580-open", False),
        ("nvidia-dkms-580-server", True),
        ("nvidia-dkms-580-server-open", False),
        ("nvidia-kernel-source-580", True),
        ("nvidia-kernel-source-open", False),
        ("cuda-drivers", True),
        ("cuda-drivers-580", True),
        ("nvidia-open", False),
        ("libcuda1", False),
    ],
)
def test_h4_names_of_the_closed_modules(name: str, closed: bool) -> None:
    assert driver_packages.is_closed(name) == closed


def test_what_has_a_life_of_its_own_is_no_part_of_a_driver() -> None:
    """As a Debian machine with driver and container toolkit lists them."""
    there = (
        *packages("nvidia-driver-cuda", "libcuda1"),
        *packages("nvidia-container-toolkit", "libnvidia-container1", version="1.19.0-1"),
        *packages("libnvidia-egl-xcb1", version="1:1.0.5-1"),
        *packages("nvidia-driver-pinning-590", version="590-1"),
        *packages("cuda-compat-13-0"),
        *packages("linux-image-amd64", version="612.1.2-1"),
    )
    assert [package.name for package in driver_packages.parts(there)] == ["nvidia-driver-cuda", "libcuda1"]


# --- what may stand beside it -------------------------------------------------------------------


def check(driver: PackagedDriver | RunFileDriver, found: Found) -> None:
    driver_packages.check_source(driver, Key("", (SYSTEMS["debian 12"],)), found)


def test_nothing_is_in_the_way_on_a_bare_host_and_on_a_converged_one() -> None:
    for found in (node(), node(libraries=()), node(*packages(*HOST), libraries=(VERSION,))):
        check(DRIVER, found)
    check(RUN, node(run_file=True, libraries=(VERSION,)))
    check(RUN, node(*packages("nvidia-container-toolkit", version="1.19.0-1")))


@pytest.mark.parametrize("modules", [True, False])
def test_the_other_way_is_refused_with_what_to_do(modules: bool) -> None:
    with pytest.raises(RefusedError, match="packages here: nvidia-driver-cuda, libcuda1") as caught:
        check(RUN, node(*packages("nvidia-driver-cuda", "libcuda1"), modules=modules))
    assert "apt-get purge --allow-change-held-packages nvidia-driver-cuda libcuda1" in caught.value.hint
    for found in (node(run_file=True), node(libraries=("590.44.01",)), node(*packages(*HOST), run_file=True)):
        with pytest.raises(RefusedError, match=r"a driver from a \.run file") as caught:
            check(DRIVER, found)
        assert "nvidia-uninstall --silent" in caught.value.hint


def test_a_half_installed_package_is_no_run_file() -> None:
    """Its library is on disk; DKMS failed in the configuration of another one."""
    broken = packages("nvidia-kernel-open-dkms", selection="half-configured")
    found = node(*packages("libcuda1", selection="unpacked"), *broken, libraries=(VERSION,))
    check(DRIVER, found)
    assert "package nvidia-kernel-open-dkms is half-configured" in driver_packages.problems(DRIVER, found)


def test_h4_h7_closed_modules_and_compat_libraries_are_refused() -> None:
    with pytest.raises(RefusedError, match=r"closed modules are installed: nvidia-kernel-dkms, cuda-drivers"):
        check(DRIVER, node(*packages(*HOST, "nvidia-kernel-dkms", "cuda-drivers")))
    for driver in (DRIVER, RUN):
        with pytest.raises(RefusedError, match="cuda-compat-13-0: its libcuda is for older drivers"):
            check(driver, node(*packages("cuda-compat-13-0")))


def test_a_system_or_a_key_that_is_not_the_repositorys() -> None:
    with pytest.raises(RefusedError, match=r"driver: this box is debian 11"):
        check(DRIVER, node(system="debian 11"))
    with pytest.raises(InputError, match=r"driver\.key = 'keys/nvidia.pub': holds .*, expected is"):
        check(DRIVER, node(system="debian 13"))
    check(RUN, node(system="debian 11"))


def test_h6_every_part_must_be_of_the_version() -> None:
    assert driver_packages.problems(DRIVER, node(*packages(*HOST, "libcuda1"))) == []
    assert driver_packages.problems(RUN, node()) == []
    moved = node(*packages(*HOST[:3], "libcuda1"), *packages("libnvidia-ml1", version="595.58.03-1"))
    assert driver_packages.problems(DRIVER, moved) == [
        "package nvidia-persistenced is not installed",
        "package libnvidia-ml1 is of version 595.58.03-1, 590.48.01 is wanted",
    ]
    assert driver_packages.unheld([*packages("b"), *packages("libcuda1", "nvidia-smi", selection="install")]) == [
        "libcuda1",
        "nvidia-smi",
    ]


# --- what apt makes of the pins -----------------------------------------------------------------

OFFERED = {
    "nvidia-driver-cuda": ("590.44.01-1", "590.48.01-1", "595.58.03-1"),
    "nvidia-kernel-open-dkms": ("590.48.01-1", "595.58.03-1"),
    "nvidia-kernel-dkms": ("590.48.01-1",),
    "nvidia-dkms-580-open": ("590.48.01-0ubuntu1",),
    "libcuda1": ("590.48.01-1", "595.58.03-1"),
    "nvidia-settings": ("595.58.03-1",),
    "nvidia-container-toolkit": ("1.19.0-1",),
    "cuda-drivers": ("590.48.01-1",),
    "cuda-13-0": ("13.0.2-1",),
    "cuda-compat-13-0": ("590.48.01-1",),
    "cuda-toolkit-13-0": ("13.0.1-1",),
}


def candidates(directory: Path, files: dict[str, str]) -> dict[str, str]:
    """What apt would install of each package, asked of the apt of this machine."""
    if shutil.which("apt-cache") is None:
        pytest.skip("no apt here")
    for path in ("lists/partial", "preferences.d", "archives/partial", "repository"):
        (directory / path).mkdir(parents=True, exist_ok=True)
    entries = [
        f"Package: {name}\nVersion: {version}\nArchitecture: amd64\nMaintainer: x <x@x>\nFilename: ./{name}.deb\n"
        f"Size: 1\nSHA256: {'0' * 64}\nDescription: x\n"
        for name, versions in OFFERED.items()
        for version in versions
    ]
    (directory / "repository/Packages").write_text("\n".join(entries))
    (directory / "sources.list").write_text(f"deb [trusted=yes] file:{directory}/repository ./\n")
    (directory / "status").touch()
    (directory / "preferences.d/driver").write_text(files[driver_packages.PLACE.preferences])
    settings = {
        **{"Dir::Etc::sourcelist": "sources.list", "Dir::Etc::preferencesparts": "preferences.d"},
        **{"Dir::State::lists": "lists", "Dir::State::status": "status", "Dir::Cache": "."},
    }
    options = [f"-o{name}={directory / value}" for name, value in settings.items()]
    options += ["-oDir::Etc::sourceparts=-", "-oDir::Etc::preferences=-", "-oAPT::Architecture=amd64"]
    options += ["-oAPT::Architectures=amd64", "-oAPT::Sandbox::User=", "-oAPT::Update::Post-Invoke::="]
    subprocess.run(["apt-get", *options, "update"], check=True, capture_output=True)
    done = subprocess.run(
        ["apt-cache", *options, "policy", *OFFERED], check=True, capture_output=True, text=True, env={"LC_ALL": "C"}
    )
    return {name: policy.candidate for name, policy in read_policy(done.stdout).items()}


NONE = "(none)"


def test_the_pins_of_a_host_let_apt_take_one_version_and_open_modules_alone(tmp_path: Path) -> None:
    assert candidates(tmp_path, driver_packages.protective_files(DRIVER, modules=True)) == {
        "nvidia-driver-cuda": "590.48.01-1",
        "nvidia-kernel-open-dkms": "590.48.01-1",
        "nvidia-kernel-dkms": NONE,
        "nvidia-dkms-580-open": "590.48.01-0ubuntu1",
        "libcuda1": "590.48.01-1",
        "nvidia-settings": NONE,
        "nvidia-container-toolkit": NONE,
        "cuda-drivers": NONE,
        "cuda-13-0": NONE,
        "cuda-compat-13-0": NONE,
        "cuda-toolkit-13-0": "13.0.1-1",
    }


def test_the_pins_of_a_container_let_nothing_build_modules(tmp_path: Path) -> None:
    found = candidates(tmp_path, driver_packages.protective_files(DRIVER, modules=False))
    assert [name for name, candidate in found.items() if candidate != NONE] == [
        "nvidia-driver-cuda",
        "libcuda1",
        "cuda-toolkit-13-0",
    ]


@pytest.mark.parametrize("driver", [RUN, None])
def test_h6_no_driver_at_all_comes_from_apt_beside_a_run_file(tmp_path: Path, driver: RunFileDriver | None) -> None:
    files = driver_packages.protective_files(driver, modules=True)
    found = candidates(tmp_path, files)
    assert [name for name, candidate in found.items() if candidate != NONE] == ["cuda-toolkit-13-0"]
    for name in ("nvidia", "libnvidia", "libcuda", "cuda"):
        assert f'"{name}";' in files[driver_packages.UNATTENDED]


# --- apt's answers ------------------------------------------------------------------------------

# Words and layout of apt 2.6.
POLICY = """\
nvidia-driver-cuda:
  Installed: 595.58.03-1
  Candidate: 590.48.01-2
  Version table:
 *** 595.58.03-1 -1
        500 https://mirror.example/debian12 / Packages
        100 /var/lib/dpkg/status
     590.48.01-2 1001
        500 https://mirror.example/debian12 / Packages
     590.48.01-1 1001
        500 https://mirror.example/debian12 / Packages
        500 https://other.example stable/main amd64 Packages
libnvidia-nvvm704:
  Installed: 595.58.03-1
  Candidate: 595.58.03-1
  Version table:
 *** 595.58.03-1 -1
        100 /var/lib/dpkg/status
nvidia-settings:
  Installed: (none)
  Candidate: (none)
  Version table:
     595.58.03-1 -1
        500 https://mirror.example/debian12 / Packages
"""


def test_policy_is_read_by_package() -> None:
    assert read_policy(POLICY) == {
        "nvidia-driver-cuda": Policy("590.48.01-2", ("595.58.03-1", "590.48.01-2", "590.48.01-1")),
        "libnvidia-nvvm704": Policy("595.58.03-1", ()),
        "nvidia-settings": Policy("(none)", ("595.58.03-1",)),
    }


@given(st.text())
def test_any_text_is_read_as_policy(text: str) -> None:
    read_policy(text)
    read_policy(POLICY + text)


def test_all_of_the_driver_moves_together_and_what_it_no_longer_has_goes() -> None:
    there = packages("nvidia-driver-cuda", "libnvidia-nvvm704", version="595.58.03-1")
    there += packages("nvidia-container-toolkit", version="1.19.0-1")
    words = choose(DRIVER, ["nvidia-driver-cuda"], there, read_policy(POLICY))
    assert words == ["nvidia-driver-cuda=590.48.01-*", "libnvidia-nvvm704-"]


def test_a_version_that_the_repository_does_not_have_names_those_that_it_has() -> None:
    older = DRIVER.model_copy(update={"version": "590.44.01"})
    with pytest.raises(InputError, match=r"has no nvidia-driver-cuda of it") as caught:
        choose(older, ["nvidia-driver-cuda"], (), read_policy(POLICY))
    assert caught.value.hint == "it has: 590.48.01-1, 590.48.01-2, 595.58.03-1"
    with pytest.raises(InputError, match="has no libnvidia-compute of it") as caught:
        choose(DRIVER, ["libnvidia-compute"], (), read_policy(POLICY))
    assert "is it NVIDIA's repository for this system?" in caught.value.hint


def test_another_pin_that_decides_first_is_said() -> None:
    other = POLICY.replace("Candidate: 590.48.01-2", "Candidate: 595.58.03-1")
    with pytest.raises(RefusedError, match=r"apt would take 595\.58\.03-1 of nvidia-driver-cuda, not 590\.48\.01"):
        choose(DRIVER, ["nvidia-driver-cuda"], (), read_policy(other))


PLAN = "Inst libcuda1 [595.58.03-1] (590.48.01-1 localhost [amd64])\nConf libcuda1 (590.48.01-1 localhost [amd64])\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "Inst libnvidia-ml1 (595.58.03-1 x [amd64])",
            "install a driver that is not 590.48.01: libnvidia-ml1 595.58.03-1",
        ),
        ("Inst nvidia-kernel-dkms (590.48.01-1 x [amd64])", "install the closed modules: nvidia-kernel-dkms"),
        ("Inst linux-image-6.1.0-9-amd64 (6.1 x [amd64])", "install packages for a kernel: linux-image-6.1.0-9-amd64"),
        ("Remv proxmox-ve [9.0.0]", "remove: proxmox-ve"),
    ],
)
def test_what_apt_may_not_do(line: str, said: str) -> None:
    driver_packages.check_simulation(DRIVER, PLAN, [], modules=True)
    with pytest.raises(RefusedError, match=re.escape(f"apt would {said}; nothing was changed")):
        driver_packages.check_simulation(DRIVER, PLAN + line + "\n", [], modules=True)


def test_dkms_is_for_hosts_and_a_part_that_is_to_leave_may_leave() -> None:
    plan = PLAN + "Inst dkms (3.0 x [all])\n"
    driver_packages.check_simulation(DRIVER, plan, [], modules=True)
    with pytest.raises(RefusedError, match="packages for a kernel: dkms"):
        driver_packages.check_simulation(DRIVER, plan, [], modules=False)
    leaving = PLAN + "Remv libnvidia-nvvm704 [595.58.03-1]\n"
    driver_packages.check_simulation(DRIVER, leaving, ["libnvidia-nvvm704-"], modules=True)
    with pytest.raises(RefusedError, match="remove: libnvidia-nvvm704"):
        driver_packages.check_simulation(DRIVER, leaving, [], modules=True)


def test_steps_of_other_architectures_and_forms_are_read() -> None:
    text = "Inst libcuda1:i386 (590.48.01-1 x [i386])\nRemv x [1] [y:amd64 ]\nConf z (1)\nInst a [1] (2 o [all]) []\n"
    assert [tuple(step) for step in steps(text)] == [
        ("Inst", "libcuda1", "590.48.01-1"),
        ("Remv", "x", ""),
        ("Inst", "a", "2"),
    ]


@given(st.text())
def test_any_output_of_apt_is_explained(output: str) -> None:
    assert driver_packages.explain(DRIVER, output, ["a"]).message.startswith("driver")
    try:
        driver_packages.check_simulation(DRIVER, output, [], modules=False)
    except GpuboxError:
        assert "Inst " in output or "Remv " in output


def test_what_the_packages_lack_is_named() -> None:
    output = (
        "The following packages have unmet dependencies:\n nvidia-driver-cuda : Depends: nvidia-kernel-dkms but it is "
        "not installable\n                      Depends: libegl1 (>= 1) but it is not going to be installed\n"
    )
    assert "cannot install: libegl1, nvidia-kernel-dkms" in driver_packages.explain(DRIVER, output, []).message

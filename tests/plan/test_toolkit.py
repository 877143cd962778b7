"""The role cuda_toolkit: which commands in which order, and what stops before anything changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyinfra.api.exceptions import DeployError
from pyinfra.api.state import StateStage

from facts.box import BoxState
from gpubox.errors import InputError
from gpubox.settings import Settings
from gpubox.specs.plan import plan_box
from roles.cuda_toolkit import cuda_toolkit, files
from tests.plan.gpu_roles import DATA, ROOT, Planned, planned

DIRECTORY = {"repository": "/srv/debs"}
NAMES = ["System and key", "Repository and pins", "Toolkits", "On hold", "Nothing but toolkits"]
SYSTEM, FILES, INSTALL, HOLD, PROOF = (f"CUDA toolkits | {name}" for name in NAMES)
# A version 4 packet with a body of four bytes: enough to have a fingerprint.
KEY = bytes([0x98, 4, 4, 1, 2, 3])


@pytest.fixture
def mirror(tmp_path: Path) -> dict[str, object]:
    (tmp_path / "key.gpg").write_bytes(KEY)
    return {"repository": "https://mirror.example/cuda/", "key": str(tmp_path / "key.gpg")}


def box(settings: dict[str, object]) -> BoxState:
    """A container on which all holds."""
    plan = plan_box(ROOT, Settings.model_validate({**DATA, "toolkits": settings}))
    packages = ["hold 13.0.1-1 cuda-toolkit-13-0", "hold 12.8.1-1 cuda-toolkit-12-8", "hold 12.8.93-1 cuda-nvcc-12-8"]
    return BoxState(
        many={
            "os": ["debian 12"],
            "container": ["lxc"],
            "cuda_package": packages,
            "toolkit_home": ["/usr/local/cuda-12.8", "/usr/local/cuda-13.0"],
        },
        files={file.path: (file.sha256, file.mode, "root:root") for file in files(plan)},
    )


def test_without_toolkits_in_the_settings_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned(monkeypatch, cuda_toolkit, BoxState()).commands == {}


@pytest.mark.parametrize("stage", [StateStage.Prepare, StateStage.Execute])
def test_a_converged_box_changes_nowhere_and_is_read_once(monkeypatch: pytest.MonkeyPatch, stage: StateStage) -> None:
    result = planned(monkeypatch, cuda_toolkit, box(DIRECTORY), stage=stage, toolkits=DIRECTORY)
    assert list(result.commands) == [SYSTEM, FILES, INSTALL, HOLD, PROOF]
    assert result.changing == []
    assert result.reads == (1 if stage == StateStage.Prepare else 2), "once in each phase"


def bare() -> BoxState:
    return BoxState(many={"os": ["debian 12"], "container": ["lxc"]})


def installs(result: Planned) -> list[str]:
    return [" ".join(command.split()) for command in result.commands[INSTALL]]


def test_both_toolkits_by_exact_version_after_a_simulation(
    monkeypatch: pytest.MonkeyPatch, mirror: dict[str, object]
) -> None:
    result = planned(monkeypatch, cuda_toolkit, bare(), stage=StateStage.Prepare, toolkits=mirror)
    assert result.changing == [SYSTEM, FILES, INSTALL], "the key is not NVIDIA's, so it would stop at the first"
    ours, update, simulation, install = installs(result)
    assert update.endswith("apt-get -q -y -o DPkg::Lock::Timeout=300 update 2>&1")
    assert "sourcelist=/etc/apt/sources.list.d/gpubox-cuda.sources" in ours
    assert "APT::Update::Error-Mode=any" in ours
    for command in (simulation, install):
        assert "cuda-toolkit-13-0=13.0.1-1 cuda-toolkit-12-8=12.8.1-1" in command
        assert "--no-install-recommends" in command
    assert "--simulate" in simulation
    assert "--simulate" not in install


def test_one_that_is_missing_is_installed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = box(DIRECTORY)
    del seen.many["cuda_package"][1]
    result = planned(monkeypatch, cuda_toolkit, seen, stage=StateStage.Prepare, toolkits=DIRECTORY)
    assert result.changing == [INSTALL]
    index, *_, install = installs(result)
    assert "dpkg-deb --field" in index
    assert "cuda-toolkit-12-8=12.8.1-1" in install
    assert "cuda-toolkit-13-0" not in install


def test_what_an_upgrade_would_move_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = box(DIRECTORY)
    seen.many["cuda_package"][2] = "install 12.8.93-1 cuda-nvcc-12-8"
    result = planned(monkeypatch, cuda_toolkit, seen, toolkits=DIRECTORY)
    assert result.commands[HOLD] == ["apt-mark hold cuda-nvcc-12-8"]


def test_offline_only_our_own_repository_is_asked(monkeypatch: pytest.MonkeyPatch, mirror: dict[str, object]) -> None:
    result = planned(monkeypatch, cuda_toolkit, bare(), toolkits=mirror, offline=True)
    assert len(installs(result)) == 3


@pytest.mark.parametrize("system", ["debian 11", "fedora 42"])
def test_another_system_stops_before_anything_changes(monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    seen = bare()
    seen.many["os"] = [system]
    result = planned(monkeypatch, cuda_toolkit, seen, toolkits=DIRECTORY)
    assert result.changing[0] == SYSTEM
    assert system in result.refused[SYSTEM]


def test_a_key_that_is_not_the_expected_one_stops_first(
    monkeypatch: pytest.MonkeyPatch, mirror: dict[str, object]
) -> None:
    result = planned(monkeypatch, cuda_toolkit, bare(), toolkits=mirror)
    assert result.changing[0] == SYSTEM
    assert "expected is EB693B3035CD5710E231E123A4B469963BF863CC" in result.refused[SYSTEM]


def test_a_container_that_does_not_exist_yet_gets_a_plan(
    monkeypatch: pytest.MonkeyPatch, mirror: dict[str, object]
) -> None:
    result = planned(monkeypatch, cuda_toolkit, BoxState(), stage=StateStage.Prepare, toolkits=mirror)
    assert result.refused == {}
    assert result.changing == [FILES, INSTALL]


def test_a_key_file_that_is_not_there(monkeypatch: pytest.MonkeyPatch, mirror: dict[str, object]) -> None:
    with pytest.raises((InputError, DeployError), match="No such file"):
        planned(monkeypatch, cuda_toolkit, bare(), toolkits={**mirror, "key": "keys/none.asc"})


def test_h7_what_came_with_a_toolkit_stops_the_deploy(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = box(DIRECTORY)
    seen.many["loader_directory"] = ["/etc/ld.so.conf.d/z.conf /usr/local/cuda-13.0/compat"]
    seen.many["kernel_package"] = ["dkms"]
    result = planned(monkeypatch, cuda_toolkit, seen, toolkits=DIRECTORY)
    assert result.changing == [PROOF]
    assert "2 reasons" in result.refused[PROOF]

"""A stack with files that only named indexes have: refused before anything runs, or built from exactly those."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pyinfra.api.exceptions import DeployError

from facts.box import BoxState
from gpubox.settings import Settings
from gpubox.specs.plan import plan_box
from tests.plan.test_roles import Planned, planned  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
DATA: dict[str, object] = {"stack": "cuda130", "standby_stacks": [], "python": "3.12"}
INDEXES = {
    "pytorch-cu130": "https://mirror/whl/cu130",
    "sgl-cu130": "https://mirror/kernels",
    "other": "https://mirror/o",
}


def bare() -> BoxState:
    seen = BoxState()
    seen.many["command"] = ["python3", "python3.12"]
    return seen


def build_command(done: Planned) -> str:
    (commands,) = [commands for name, commands in done if "Stack cuda130" in name]
    return commands[-1]


def test_an_index_without_an_address_is_refused_before_anything_runs(planned: Callable[..., Planned]) -> None:  # noqa: F811
    with pytest.raises(DeployError, match=r"comes from the index 'sgl-cu130', which has no address"):
        planned(bare(), **DATA)


def test_a_stack_that_is_built_needs_no_index(planned: Callable[..., Planned]) -> None:  # noqa: F811
    seen = bare()
    settings = Settings.model_validate({**DATA, "server": "smollm2", "overlay": "cpu"})
    seen.many["stacks"] = [spec.id for spec in plan_box(ROOT, settings).stacks]
    assert planned(seen, **DATA)


def test_the_box_gets_the_addresses_that_its_stack_names_and_no_others(planned: Callable[..., Planned]) -> None:  # noqa: F811
    command = build_command(planned(bare(), **DATA, indexes=INDEXES))
    assert "--index pytorch-cu130=https://mirror/whl/cu130" in command
    assert "--index sgl-cu130=https://mirror/kernels" in command
    assert "other" not in command


def test_a_wheelhouse_takes_the_place_of_indexes(planned: Callable[..., Planned]) -> None:  # noqa: F811
    seen = bare()
    with pytest.raises(DeployError, match="no such directory on the box"):
        planned(seen, **DATA, wheelhouse="/srv/wheelhouse", offline=True)
    seen.one["wheelhouse"] = "/srv/wheelhouse"
    command = build_command(planned(seen, **DATA, wheelhouse="/srv/wheelhouse", offline=True))
    assert "--wheelhouse /srv/wheelhouse --offline" in command

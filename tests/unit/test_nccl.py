"""One verdict on peer-to-peer drives NCCL and the engine: no profile can say half of it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gpubox.settings import Settings
from gpubox.specs.nccl import OWNED_ARGUMENTS, OWNED_ENVIRONMENT, VERDICTS, Nccl
from gpubox.specs.server import Server
from gpubox.specs.settled import settle
from gpubox.toml import validate
from tests.unit.engine_cases import PLAIN, Base, changed, table


@given(
    st.fixed_dictionaries(
        {"profile": st.sampled_from(sorted(VERDICTS))},
        optional={
            "multicast": st.booleans(),
            "custom_all_reduce": st.booleans(),
            "p2p_level": st.sampled_from(["NVL", "PHB", "SYS"]),
            "min_channels": st.integers(1, 64),
            "max_channels": st.integers(1, 64),
            "buffer_mib": st.integers(1, 256),
            "graph_file": st.just("/etc/nccl.xml"),
            "cumem": st.booleans(),
        },
    )
)
def test_no_profile_disables_half_of_peer_to_peer(values: dict[str, Any]) -> None:
    try:
        nccl = Nccl.model_validate(values)
    except ValidationError:
        return
    environment, arguments = nccl.environment(), nccl.arguments()
    if environment.get("NCCL_P2P_DISABLE") == "1":
        assert arguments["disable_custom_all_reduce"]
        assert "NCCL_P2P_LEVEL" not in environment
    if not arguments.get("disable_custom_all_reduce"):
        assert nccl.verdict.p2p
        assert nccl.verdict.custom_all_reduce
    assert (environment["NCCL_NVLS_ENABLE"] == "1") == bool(arguments.get("enable_nccl_nvls")) == nccl.multicast
    assert set(environment) <= OWNED_ENVIRONMENT, "what a profile sets is refused by hand"
    assert set(arguments) <= OWNED_ARGUMENTS


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"profile": "no-p2p", "custom_all_reduce": True}, "does not go with 'no-p2p'"),
        ({"profile": "no-p2p", "p2p_level": "SYS"}, "does not go with 'no-p2p'"),
        ({"profile": "no-p2p", "multicast": True}, "does not go with 'no-p2p'"),
        ({"profile": "pcie-only", "multicast": True}, "does not go with 'pcie-only'"),
        ({"profile": "pcie-only", "custom_all_reduce": True}, "does not go with 'pcie-only'"),
        ({"profile": "nvlink", "min_channels": 8, "max_channels": 4}, "more than max_channels"),
        ({"profile": "auto"}, "profile"),
        ({}, "profile"),
        ({"profile": "nvlink", "graph_file": "relative.xml"}, "graph_file"),
    ],
)
def test_contradictions_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Nccl.model_validate(values)


@pytest.mark.parametrize(("one", "both"), list(itertools.product([True, False], repeat=2)))
def test_the_renderer_rejects_one_half_without_the_other(one: bool, both: bool) -> None:
    """By hand on a box of one GPU, where no profile is asked for."""
    halves = {"environment/NCCL_P2P_DISABLE": "1", "engine/disable_custom_all_reduce": True}
    chosen = halves if both else dict([list(halves.items())[one]])
    single = changed(PLAIN.profile, {"engine/tp_size": 1, "nccl": None, "hardware": None, **chosen})
    rules = [finding.rule for finding in Base(single).findings()]
    assert rules == ([] if both else ["half-disabled-p2p"])


def test_the_boxs_own_verdict_wins_over_the_profiles() -> None:
    server = validate(Server, PLAIN.profile, "x")
    nccl = Settings.model_validate({"stack": "a", "server": "b", "nccl": {"profile": "no-p2p"}}).nccl
    settled = settle(server, PLAIN.stack, table("0.5.9"), nccl=nccl)
    assert settled.environment["NCCL_P2P_DISABLE"] == "1"
    assert settled.arguments.get("disable_custom_all_reduce")


def test_multicast_stays_off_unless_it_is_asked_for() -> None:
    assert Nccl(profile="nvlink").environment() == {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    assert Nccl(profile="nvlink", multicast=True).environment() == {"NCCL_NVLS_ENABLE": "1"}

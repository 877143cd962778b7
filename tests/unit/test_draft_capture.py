"""Which layers are captured: the table of the engine's versions, and ids found for layers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from gpubox.drafts.capture import HOOKS, RULES, default_layers, eager_layers, encode, graph_layers
from gpubox.drafts.contract import LLAMA, MLA, loaded_name
from gpubox.specs import patch_names

K2_5 = 61  # layers
VERSIONS = [Version(text) for text in ("0.5.7", "0.5.9", "0.5.10.post1", "0.5.11", "0.5.12.post1", "0.5.13", "0.5.23")]


@pytest.mark.parametrize(
    ("ids", "version", "eager", "graph"),
    [
        # Kimi-K2.5, by the hooks of models/deepseek_v2.py and the order of graph capture in each release.
        ([2, 30, 58], "0.5.9", [3, 31, 59], [2, 30, 58]),
        ([2, 30, 58], "0.5.10.post1", [3, 31, 59], [2, 30, 58]),
        ([2, 30, 58], "0.5.11", [3, 31, 59], [3, 31, 59]),
        ([2, 30, 58], "0.5.12.post1", [3, 31, 59], [3, 31, 59]),
        ([2, 30, 58], "0.5.13", [2, 30, 58], [2, 30, 58]),
        ([2, 30, 58], "0.5.23", [2, 30, 58], [2, 30, 58]),
        ([3, 31, 59], "0.5.9", [4, 32, 60], [2, 30, 58]),
        ([3, 31, 59], "0.5.12", [4, 32, 60], [4, 32, 60]),
        ([3, 31, 59], "0.5.13", [3, 31, 59], [3, 31, 59]),
        ([1, 29, 57], "0.5.9", [2, 30, 58], [2, 30, 58]),
        ([1, 29, 57], "0.5.11", [2, 30, 58], [2, 30, 58]),
        ([1, 29, 57], "0.5.23", [2, 30, 58], [2, 30, 58]),
        (None, "0.5.9", [2, 30, 58], [2, 30, 58]),
        (None, "0.5.23", [2, 30, 58], [2, 30, 58]),
    ],
)
def test_kimi_k2_5(ids: list[int] | None, version: str, eager: list[int], graph: list[int]) -> None:
    assert eager_layers(ids, "deepseek", Version(version), K2_5) == eager
    assert graph_layers(ids, "deepseek", Version(version), K2_5, ()) == graph


def test_patched_graphs_follow_the_ids() -> None:
    assert graph_layers([2, 30, 58], "deepseek", Version("0.5.9"), K2_5, {patch_names.GRAPH_LAYERS}) == [3, 31, 59]


@pytest.mark.parametrize(
    ("family", "version", "ids", "layers"),
    [
        ("llama", "0.5.23", [1, 14, 26], [2, 15, 27]),
        ("llama", "0.5.23", [2, 15, 27], [3, 16, 28]),
        ("gpt-oss", "0.5.16", [2, 15, 30], [3, 16, 31]),
        ("gpt-oss", "0.5.17", [2, 15, 30], [2, 15, 30]),
        ("gpt-oss", "0.5.17", [1, 14, 26], [2, 15, 27]),
    ],
)
def test_other_families(family: str, version: str, ids: list[int], layers: list[int]) -> None:
    assert eager_layers(ids, family, Version(version), 30) == layers


@given(
    family=st.sampled_from(sorted(RULES)),
    version=st.sampled_from(VERSIONS),
    layers=st.integers(8, 200),
    data=st.data(),
)
def test_encoded_ids_give_the_layers(family: str, version: Version, layers: int, data: st.DataObject) -> None:
    """Whatever was trained, above the embedding: either ids that give exactly it, or none."""
    entered = sorted(data.draw(st.sets(st.integers(1, layers - 1), min_size=1, max_size=5)))
    ids = encode(entered, family, version, layers)
    if ids is None:
        assert family != "llama"
    else:
        assert eager_layers(ids, family, version, layers) == entered


@given(version=st.sampled_from(VERSIONS), layers=st.integers(8, 200))
def test_the_default_layers_have_ids_that_no_version_reads_otherwise(version: Version, layers: int) -> None:
    default = default_layers(layers)
    assert encode(default, "deepseek", version, layers) == [index - 1 for index in default]


def test_every_family_has_rules_from_the_oldest_version_on() -> None:
    for hook in HOOKS.values():
        since = [version for version, _ in RULES[hook.family]]
        assert since == sorted(since)
        assert since[0] == VERSIONS[0]


@pytest.mark.parametrize(
    ("stored", "architecture", "version", "loaded"),
    [
        ("layers.0.mlp.up_proj.weight", LLAMA, "0.5.11", "layers.0.mlp.up_proj.weight"),
        ("layers.0.mlp.up_proj.weight", LLAMA, "0.5.12", "midlayer.mlp.up_proj.weight"),
        ("model.layers.0.mlp.up_proj.weight", LLAMA, "0.5.12", "midlayer.mlp.up_proj.weight"),
        ("midlayer.mlp.up_proj.weight", LLAMA, "0.5.9", "midlayer.mlp.up_proj.weight"),
        ("layers.1.mlp.up_proj.weight", LLAMA, "0.5.17", "layers.1.mlp.up_proj.weight"),
        ("model.lm_head.weight", LLAMA, "0.5.17", "model.lm_head.weight"),
        ("aux_norm_mid.weight", LLAMA, "0.5.17", "fc_norm.1.weight"),
        ("layers.0.mlp.up_proj.weight", MLA, "0.5.12", "midlayer.mlp.up_proj.weight"),
        ("model.layers.0.mlp.up_proj.weight", MLA, "0.5.12", "model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_names_as_the_loader_takes_them(stored: str, architecture: str, version: str, loaded: str) -> None:
    assert loaded_name(stored, architecture, Version(version)) == loaded

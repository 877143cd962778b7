"""Every rule breaks by one change of a valid profile, gives exactly one finding, and names that place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpubox.errors import InputError
from gpubox.specs.engine_rules import BY_NAME, RULES
from gpubox.specs.rule import Rule
from gpubox.specs.server import Server
from gpubox.specs.settled import settle
from gpubox.specs.stack import Overlay, Stack
from gpubox.toml import validate
from tests.unit.engine_cases import (
    BASES,
    CUDA12,
    EAGLE3,
    HOPPER,
    HOPPER_NEW,
    HOPPER_OLD,
    HOPPER_PATCHED,
    NO_P2P,
    ONE_GPU,
    PATCHED,
    PLAIN,
    SPECULATING,
    TREE,
    Base,
    changed,
    stack,
    table,
)

ACCEPT = {"prompts": ["a", "b", "c"]}

ROOT = Path(__file__).resolve().parents[2]
LONGER = {"engine/context_length": 262_145, "environment/SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
TRITON_PAGES = {"engine/attention_backend": "triton", "engine/page_size": 64}
FUSED = {"engine/enable_flashinfer_allreduce_fusion": True}
BOTH_HALVES = {"environment/NCCL_P2P_DISABLE": "1", "engine/disable_custom_all_reduce": True}
ADAPTIVE = {
    "engine/speculative_adaptive": True,
    "engine/speculative_num_steps": None,
    "engine/speculative_num_draft_tokens": None,
}

# Rule, valid profile, the one change (of the profile, or another stack), where the finding has to point.
MUTATIONS: list[tuple[str, Base, dict[str, Any] | Stack, str]] = [
    ("out-of-range", PLAIN, {"engine/context_length": 0}, "engine.context_length"),
    ("out-of-range", PLAIN, {"engine/mem_fraction_static": 1.0}, "engine.mem_fraction_static"),
    ("out-of-range", PLAIN, {"engine/page_size": -1}, "engine.page_size"),
    ("out-of-range", PLAIN, {"engine/chunked_prefill_size": -2}, "engine.chunked_prefill_size"),
    ("context-beyond-model", PLAIN, {"engine/context_length": 262_145}, "engine.context_length"),
    ("prefill-in-pages", PLAIN, {"engine/page_size": 3}, "engine.chunked_prefill_size"),
    (
        "priority-policy",
        Base(changed(PLAIN.profile, {"engine/enable_priority_scheduling": True})),
        {"engine/schedule_policy": "lpm"},
        "engine.schedule_policy",
    ),
    ("dense-tp", PLAIN, {"engine/moe_dense_tp_size": 2}, "engine.moe_dense_tp_size"),
    ("ranks-per-node", PLAIN, {"engine/nnodes": 3}, "engine.nnodes"),
    (
        "data-parallel-nodes",
        Base(changed(PLAIN.profile, {"engine/nnodes": 2})),
        {"engine/dp_size": 2},
        "engine.dp_size",
    ),
    ("remote-code", PLAIN, {"engine/trust_remote_code": False}, "engine.trust_remote_code"),
    ("remote-code", PLAIN, {"engine/trust_remote_code": None}, "engine.trust_remote_code"),
    ("quantization-by-hand", PLAIN, {"engine/quantization": "gptq"}, "engine.quantization"),
    ("low-precision-kv", PLAIN, {"engine/kv_cache_dtype": "fp8_e4m3"}, "engine.kv_cache_dtype"),
    ("low-precision-kv", PLAIN, {"engine/kv_cache_dtype": "fp4_e2m1"}, "engine.kv_cache_dtype"),
    (
        "environment-overwritten",
        PLAIN,
        {"environment/CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        "environment.CUDA_DEVICE_MAX_CONNECTIONS",
    ),
    ("draft-kind", SPECULATING, {"engine/speculative_algorithm": "EAGLE"}, "engine.speculative_algorithm"),
    ("draft-kind", SPECULATING, {"engine/speculative_algorithm": "NEXTN"}, "engine.speculative_algorithm"),
    ("draft-kind", SPECULATING, {"draft/kind": "eagle"}, "engine.speculative_algorithm"),
    ("draft-missing", SPECULATING, {"draft": None}, "draft"),
    ("algorithm-name", HOPPER_NEW, {"engine/speculative_algorithm": "EAGLE-3"}, "engine.speculative_algorithm"),
    ("draft-unused", SPECULATING, {"engine/speculative_algorithm": None}, "draft"),
    ("draft-unused", SPECULATING, {"engine/speculative_algorithm": "NGRAM"}, "draft"),
    ("speculation-off", PLAIN, {"engine/speculative_num_steps": 3}, "engine.speculative_num_steps"),
    ("accept-length-unproved", SPECULATING, {"probes/accept_length": None}, "probes.accept_length"),
    ("accept-length-of-nothing", PLAIN, {"probes/accept_length": ACCEPT}, "probes.accept_length"),
    ("speculation-triple", SPECULATING, {"engine/speculative_num_steps": None}, "engine.speculative_eagle_topk"),
    ("speculation-triple", SPECULATING, {"engine/speculative_eagle_topk": None}, "engine.speculative_num_steps"),
    ("speculation-triple", SPECULATING, {"engine/speculative_num_draft_tokens": None}, "engine.speculative_num_steps"),
    (
        "draft-tokens-of-a-chain",
        SPECULATING,
        {"engine/speculative_num_draft_tokens": 8},
        "engine.speculative_num_draft_tokens",
    ),
    (
        "draft-tokens-of-a-tree",
        TREE,
        {"engine/speculative_num_draft_tokens": 12},
        "engine.speculative_num_draft_tokens",
    ),
    (
        "tree-in-pages",
        Base(changed(TREE.profile, {"engine/attention_backend": "triton"})),
        {"engine/page_size": 64},
        "engine.page_size",
    ),
    (
        "tree-on-trtllm-mha",
        Base(changed(TREE.profile, {"engine/attention_backend": None})),
        {"engine/decode_attention_backend": "trtllm_mha"},
        "engine.decode_attention_backend",
    ),
    (
        "tree-on-flashinfer-mla",
        TREE,
        {"engine/speculative_draft_attention_backend": "flashinfer"},
        "engine.speculative_eagle_topk",
    ),
    ("tree-on-spec-v2", TREE, {"environment/SGLANG_ENABLE_SPEC_V2": "True"}, "environment.SGLANG_ENABLE_SPEC_V2"),
    ("spec-v2-is-gone", HOPPER_NEW, {"environment/SGLANG_ENABLE_SPEC_V2": "1"}, "environment.SGLANG_ENABLE_SPEC_V2"),
    ("speculation-and-mixed-chunk", SPECULATING, {"engine/enable_mixed_chunk": True}, "engine.enable_mixed_chunk"),
    (
        "speculation-and-pipeline",
        Base(changed(HOPPER_NEW.profile, {"hardware": HOPPER | {"gpus": 16}}), stack()),
        {"engine/pp_size": 2},
        "engine.pp_size",
    ),
    (
        "speculation-and-dp-attention",
        Base(changed(PLAIN.profile, {"engine/speculative_algorithm": "NGRAM", "probes/accept_length": ACCEPT})),
        {"engine/enable_dp_attention": True},
        "engine.enable_dp_attention",
    ),
    ("running-requests", SPECULATING, {"engine/max_running_requests": None}, "engine.max_running_requests"),
    (
        "draft-inherits-backend",
        HOPPER_OLD,
        {"engine/speculative_draft_attention_backend": "flashmla"},
        "engine.speculative_draft_attention_backend",
    ),
    (
        "draft-inherits-backend",
        Base(changed(HOPPER_OLD.profile, {"engine/attention_backend": "flashmla"}), stack()),
        {"engine/speculative_draft_attention_backend": None},
        "engine.attention_backend",
    ),
    (
        "draft-backend-name",
        SPECULATING,
        {"engine/speculative_draft_attention_backend": "trition"},
        "engine.speculative_draft_attention_backend",
    ),
    (
        "draft-inherits-quantization",
        Base(changed(SPECULATING.profile, {"model/facts/quantization": "none"})),
        {"engine/quantization": "fp8"},
        "engine.quantization",
    ),
    ("token-map-ignored", SPECULATING, {"engine/speculative_token_map": "/srv/map.pt"}, "engine.speculative_token_map"),
    (
        "speculative-moe-runner",
        SPECULATING,
        {"engine/speculative_moe_runner_backend": "flashinfer_trtllm"},
        "engine.speculative_moe_runner_backend",
    ),
    (
        "fusion-and-eagle3",
        HOPPER_OLD,
        {"engine/enable_flashinfer_allreduce_fusion": True},
        "engine.enable_flashinfer_allreduce_fusion",
    ),
    (
        "adaptive-falls-back",
        Base(TREE.profile, stack("0.5.17")),
        {"engine/speculative_adaptive": True},
        "engine.speculative_adaptive",
    ),
    (
        "adaptive-config-alone",
        HOPPER_NEW,
        {"engine/speculative_adaptive_config": "/srv/steps.json"},
        "engine.speculative_adaptive_config",
    ),
    ("draft-memory", SPECULATING, {"engine/mem_fraction_static": 0.995}, "engine.mem_fraction_static"),
    ("sm120-attention", SPECULATING, {"engine/attention_backend": "fa3"}, "engine.attention_backend"),
    ("sm120-attention", PLAIN, {"engine/decode_attention_backend": "trtllm_mla"}, "engine.decode_attention_backend"),
    ("sm120-flashinfer-graphs", CUDA12, {"engine/attention_backend": "flashinfer"}, "engine.attention_backend"),
    (
        "sm120-fusion",
        PATCHED,
        {"engine/enable_flashinfer_allreduce_fusion": True},
        "engine.enable_flashinfer_allreduce_fusion",
    ),
    ("sm120-symmetric-memory", PLAIN, {"engine/enable_torch_symm_mem": True}, "engine.enable_torch_symm_mem"),
    ("sm120-moe-runner", PLAIN, {"engine/moe_runner_backend": "flashinfer_trtllm"}, "engine.moe_runner_backend"),
    ("sm120-vision-attention", PLAIN, {"engine/mm_attention_backend": None}, "engine.mm_attention_backend"),
    ("sm120-triton-prefill", PLAIN, {"engine/chunked_prefill_size": 16_384}, "engine.chunked_prefill_size"),
    ("sm120-triton-prefill", PLAIN, {"engine/chunked_prefill_size": -1}, "engine.chunked_prefill_size"),
    ("sm120-graph-sizes", PLAIN, {"engine/cuda_graph_max_bs": None}, "engine.cuda_graph_max_bs"),
    ("gpu-count", SPECULATING, {"engine/tp_size": 16}, "engine.tp_size"),
    ("weights-do-not-fit", PLAIN, {"engine/mem_fraction_static": 0.55}, "engine.mem_fraction_static"),
    ("weights-do-not-fit", PLAIN, {"engine/tp_size": 4}, "engine.mem_fraction_static"),
    ("context-beyond-kv-cache", PLAIN, {"engine/mem_fraction_static": 0.70}, "engine.context_length"),
    ("nccl-profile", PLAIN, {"nccl": None}, "nccl"),
    ("nccl-by-hand", PLAIN, {"environment/NCCL_P2P_DISABLE": "1"}, "environment.NCCL_P2P_DISABLE"),
    ("nccl-by-hand", PLAIN, {"engine/disable_custom_all_reduce": True}, "engine.disable_custom_all_reduce"),
    ("half-disabled-p2p", ONE_GPU, {"environment/NCCL_P2P_DISABLE": "1"}, "environment.NCCL_P2P_DISABLE"),
    ("half-disabled-p2p", ONE_GPU, {"engine/disable_custom_all_reduce": True}, "engine.disable_custom_all_reduce"),
    ("kernels-without-p2p", NO_P2P, {"engine/enable_mscclpp": True}, "engine.enable_mscclpp"),
    (
        "kernels-without-p2p",
        NO_P2P,
        {"environment/SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"},
        "environment.SGLANG_ENABLE_PCIE_IPC_ALLREDUCE",
    ),
    (
        "expandable-segments",
        HOPPER_NEW,
        {"environment/PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        "environment.PYTORCH_CUDA_ALLOC_CONF",
    ),
    ("kimi-k25-eagle3-hooks", SPECULATING, stack(patches=()), "engine.speculative_algorithm"),
    ("sm120-cuda", SPECULATING, stack(cuda=12, version_of_cuda="12.6"), "hardware.capability"),
]
IDS = [f"{rule}-{number}" for number, (rule, *_) in enumerate(MUTATIONS)]


@pytest.mark.parametrize("name", sorted(BASES))
def test_the_profiles_that_are_broken_below_are_valid(name: str) -> None:
    assert BASES[name].findings() == []


@pytest.mark.parametrize(("rule", "base", "change", "place"), MUTATIONS, ids=IDS)
def test_one_mistake_is_one_finding_that_names_its_place(
    rule: str, base: Base, change: dict[str, Any] | Stack, place: str
) -> None:
    assert base.findings() == [], "valid before"
    broken = replace(base, stack=change).findings() if isinstance(change, Stack) else base.findings(change)
    assert [(finding.rule, finding.place) for finding in broken] == [(rule, place)]
    assert broken[0].file == f"servers/{base.profile['name']}.toml"
    assert broken[0].severity == BY_NAME[rule].severity
    assert BY_NAME[rule].reason in broken[0].problem
    assert BY_NAME[rule].fix in broken[0].fix


def test_every_rule_is_broken_by_a_mutation() -> None:
    assert {rule for rule, *_ in MUTATIONS} == set(BY_NAME)
    assert len(BY_NAME) == len(RULES), "no two rules of one name"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_says_why_from_where_and_what_to_do(rule: Rule) -> None:
    assert min(map(len, (rule.reason, rule.source, rule.fix))) > 10
    override = ", may be overridden" if rule.overridable else ""
    row = f"| `{rule.name}` | {rule.severity}{override} | {rule.reason} | {rule.fix} | {rule.source} |"
    assert row in (ROOT / "docs" / "servers.md").read_text().splitlines()


# What lifts a rule: another version, a patch of the stack, another machine.
LIFTED: list[tuple[str, Base, dict[str, Any]]] = [
    ("a patch lifts fusion with EAGLE3", HOPPER_PATCHED, {"engine/enable_flashinfer_allreduce_fusion": True}),
    ("0.5.14 and newer capture after the all-reduce", HOPPER_NEW, {"engine/enable_flashinfer_allreduce_fusion": True}),
    ("hooks are in 0.5.10 and newer", Base(EAGLE3, stack("0.5.17", patches=())), {}),
    ("FlashInfer with CUDA 13", SPECULATING, {"engine/attention_backend": "flashinfer"}),
    ("a longer context asked for", PLAIN, LONGER),
    ("triton takes trees in pages in 0.5.17", Base(TREE.profile, stack("0.5.17")), TRITON_PAGES),
    ("a patch opens fusion for SM120", Base(PLAIN.profile, stack(patches=("02-allreduce-fusion-sm120.patch",))), FUSED),
    ("the value that the engine sets anyway", PLAIN, {"environment/CUDA_DEVICE_MAX_CONNECTIONS": "8"}),
    ("both halves without a profile on one GPU", ONE_GPU, BOTH_HALVES),
    ("newer engines take the algorithm in any case", HOPPER_NEW, {"engine/speculative_algorithm": "eagle3"}),
    ("adaptive needs no triple", HOPPER_NEW, ADAPTIVE),
]


@pytest.mark.parametrize(("why", "base", "change"), LIFTED, ids=[why for why, *_ in LIFTED])
def test_what_lifts_a_rule(why: str, base: Base, change: dict[str, Any]) -> None:
    assert base.findings(change) == [], why


def problem(base: Base, change: dict[str, Any], **options: Any) -> str:
    server = validate(Server, changed(base.profile, change), "servers/x.toml")
    with pytest.raises(InputError) as caught:
        settle(server, base.stack, table(base.stack.engine.version), **options)
    return str(caught.value)


def test_the_message_names_file_field_reason_fix_and_stack() -> None:
    lines = problem(PLAIN, {"engine/kv_cache_dtype": "fp8_e5m2"}).splitlines()
    assert lines[0].startswith(
        "servers/kimi-k2.5.toml: engine.kv_cache_dtype: is 'fp8_e5m2' for a checkpoint in int4: "
    )
    assert lines[0].endswith("[low-precision-kv], with stack world (sglang 0.5.9)")
    assert lines[1].startswith("  what to do: remove kv_cache_dtype")
    assert '[overrides] low-precision-kv = "reason"' in lines[1]


def test_several_mistakes_are_told_at_once() -> None:
    text = problem(PLAIN, {"engine/kv_cache_dtype": "fp8_e5m2", "nccl": None})
    assert "[low-precision-kv]" in text
    assert "[nccl-profile]" in text


REASON = "measured: the answers of our own set do not change"


def test_an_override_lets_the_rule_pass_and_is_kept_for_the_report() -> None:
    change = {"engine/kv_cache_dtype": "fp8_e4m3", "overrides/low-precision-kv": REASON}
    settled = settle(validate(Server, changed(PLAIN.profile, change), "x"), PLAIN.stack, table("0.5.9"))
    assert settled.overrides == {"low-precision-kv": REASON}
    assert settled.warnings == []


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ({"overrides/low-precision-k": REASON}, "did you mean 'low-precision-kv'?"),
        ({"overrides/draft-missing": REASON}, "cannot be overridden"),
    ],
)
def test_an_override_of_what_is_no_rule_or_may_not_be_broken(override: dict[str, Any], says: str) -> None:
    assert says in problem(PLAIN, override)


def test_an_override_needs_a_reason() -> None:
    with pytest.raises(InputError, match=r"overrides\.low-precision-kv"):
        validate(Server, changed(PLAIN.profile, {"overrides/low-precision-kv": ""}), "servers/x.toml")


def test_an_override_of_a_rule_that_is_kept_is_a_warning_and_not_in_the_release() -> None:
    server = validate(Server, changed(PLAIN.profile, {"overrides/low-precision-kv": REASON}), "x")
    settled = settle(server, PLAIN.stack, table("0.5.9"))
    assert settled.overrides == {}
    assert [finding.place for finding in settled.warnings] == ["overrides.low-precision-kv"]


def test_a_mistake_in_an_overlay_names_the_overlay() -> None:
    overlay = Overlay(name="cpu", description="", engine={"page_size": 0})
    (finding,) = PLAIN.findings(overlay=overlay)
    assert (finding.file, finding.place) == ("overlays/cpu/overlay.toml", "engine.page_size")


def test_a_mistake_in_a_stacks_environment_names_the_stack() -> None:
    base = Base(PLAIN.profile, stack(environment={"NCCL_P2P_DISABLE": "1"}))
    (finding,) = base.findings()
    assert (finding.file, finding.place) == ("stacks/world/stack.toml", "environment.NCCL_P2P_DISABLE")


def test_on_the_cpu_overlay_no_rule_of_gpus_speaks() -> None:
    overlay = Overlay(name="cpu", description="", engine={"device": "cpu", "attention_backend": "torch_native"})
    assert ONE_GPU.findings({"hardware": HOPPER | {"capability": "12.0"}}, overlay=overlay) == []

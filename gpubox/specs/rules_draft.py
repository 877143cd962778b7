"""Rules of speculation drafts: that algorithm, target and draft are made for each other."""

from __future__ import annotations

from gpubox.specs import patch_names
from gpubox.specs.rule import FUSION, Case, Fault, rule

ARGS_059 = "sglang 0.5.9 server_args.py, _handle_speculative_decoding"
WANTS_DRAFT = frozenset({"EAGLE3", "STANDALONE"})
KIND_OF = {"EAGLE3": "eagle3", "EAGLE": "eagle", "NEXTN": "eagle", "STANDALONE": "standalone"}
# Those of sglang 0.5.17, which takes any case and lists none in its parser; 0.5.9 lists its own.
ALGORITHMS = frozenset({*KIND_OF, "NGRAM", "DFLASH", "DSPARK", "FROZEN_KV_MTP"})
MLA_ONLY = frozenset({"trtllm_mla", "cutlass_mla", "flashmla", "nsa", "dsa"})


def draft_backend(case: Case) -> tuple[str, str] | None:
    """The argument that decides the draft's attention backend, and the backend."""
    for name in ("speculative_draft_attention_backend", "decode_attention_backend", "attention_backend"):
        if value := case.get(name):
            return name, str(value)
    return None


@rule(
    "algorithm-name",
    reason="the engine looks the name up only when it starts, and no stack has a plugin that registers another",
    source="sglang 0.5.17 speculative/spec_info.py",
    fix=f"name one of {', '.join(sorted(ALGORITHMS))}",
)
def algorithm_name(case: Case) -> Fault | None:
    if case.algorithm is None or case.algorithm in ALGORITHMS:
        return None
    return Fault("speculative_algorithm", f"is {case.get('speculative_algorithm')!r}")


@rule(
    "draft-kind",
    reason="EAGLE with an EAGLE-3 draft is accepted and silently drops the layers that the draft was trained on",
    source=ARGS_059,
    fix="name the algorithm that the draft was trained for: EAGLE3 for an EAGLE-3 draft",
)
def draft_kind(case: Case) -> Fault | None:
    kind = KIND_OF.get(case.algorithm or "")
    if case.draft is None or kind is None or case.draft.kind == kind:
        return None
    return Fault("speculative_algorithm", f"is {case.algorithm!r}, and [draft] kind is {case.draft.kind!r}")


@rule(
    "draft-missing",
    reason="without a draft the engine loads the target a second time and crashes",
    source="sglang#36528",
    fix="add [draft] with path or build, or remove speculative_algorithm",
)
def without_draft(case: Case) -> Fault | None:
    if case.algorithm in WANTS_DRAFT and case.draft is None:
        return Fault("draft", f"is missing: speculative_algorithm is {case.algorithm!r}")
    return None


@rule(
    "draft-unused",
    reason="the draft would be loaded by nothing",
    source=ARGS_059,
    fix='set speculative_algorithm = "EAGLE3" for an EAGLE-3 draft, or remove [draft]',
)
def draft_unused(case: Case) -> Fault | None:
    if case.draft is None or case.algorithm not in (None, "NGRAM"):
        return None
    return Fault("draft", f"is given, and speculative_algorithm is {case.algorithm or 'not set'}")


@rule(
    "draft-inherits-backend",
    reason="a Llama-style draft cannot run on a backend made for MLA: the server fails at its start",
    source="sglang#23490",
    fix='set speculative_draft_attention_backend, such as "triton"',
)
def inherited(case: Case) -> Fault | None:
    chosen = draft_backend(case)
    if case.draft is None or case.draft.attention != "mha" or chosen is None or chosen[1] not in MLA_ONLY:
        return None
    return Fault(chosen[0], f"is {chosen[1]!r}, and the draft, which has no MLA, gets it too")


@rule(
    "draft-backend-name",
    reason="the engine takes any text here and fails when the target has been loaded",
    source="sglang speculative/draft_utils.py",
    fix="name one of the attention backends",
)
def draft_backend_name(case: Case) -> Fault | None:
    value = case.get("speculative_draft_attention_backend")
    known = case.arguments.table.arguments.get("attention_backend")
    if value is None or known is None or known.choices is None or value in known.choices:
        return None
    return Fault("speculative_draft_attention_backend", f"is {value!r}; known: {', '.join(map(str, known.choices))}")


@rule(
    "draft-inherits-quantization",
    reason="a bf16 draft would be read as quantized",
    source="sglang 0.5.9 server_args.py, _handle_missing_default_values",
    fix='set speculative_draft_model_quantization = "unquant"',
)
def draft_quantization(case: Case) -> Fault | None:
    if case.draft and case.get("quantization") and case.get("speculative_draft_model_quantization") is None:
        return Fault("quantization", "is set, and the draft takes it over")
    return None


@rule(
    "token-map-ignored",
    reason="EAGLE3 ignores it: the draft's own d2t table decides",
    source="sglang speculative/eagle_worker.py",
    fix="remove speculative_token_map",
)
def token_map(case: Case) -> Fault | None:
    if case.algorithm == "EAGLE3" and case.get("speculative_token_map"):
        return Fault("speculative_token_map", "is set together with EAGLE3")
    return None


@rule(
    "speculative-moe-runner",
    reason="the engine refuses this runner for a draft",
    source=ARGS_059,
    fix='remove it, or set "auto"',
)
def moe_runner(case: Case) -> Fault | None:
    if case.get("speculative_moe_runner_backend") == "flashinfer_trtllm":
        return Fault("speculative_moe_runner_backend", "is 'flashinfer_trtllm'")
    return None


@rule(
    "kimi-k25-eagle3-hooks",
    reason="the server fails with AttributeError after the target has been loaded; the hooks came with 0.5.10",
    source="sglang#19689",
    fix=f"add a patch {patch_names.HOOKS} to the stack, or serve from a stack with a newer engine",
)
def kimi_hooks(case: Case) -> Fault | None:
    if case.facts.architecture != "KimiK25ForConditionalGeneration" or case.algorithm != "EAGLE3":
        return None
    if not case.before("0.5.10") or case.patched(patch_names.HOOKS):
        return None
    return Fault("speculative_algorithm", f"is EAGLE3, and {case.arguments.table.title} has no hooks for Kimi-K2.5")


@rule(
    "fusion-and-eagle3",
    reason="every rank captures its own partial sum of the hidden states: accept lengths fall",
    source="sglang 0.5.9 models/deepseek_v2.py and layers/communicator.py; corrected in 0.5.14",
    fix=f"remove the fusion, or add the patch {patch_names.CAPTURE_AFTER_REDUCE} to the stack",
)
def fused_capture(case: Case) -> Fault | None:
    place = next((name for name in FUSION if case.get(name)), None)
    if place is None or case.algorithm != "EAGLE3" or not case.deepseek:
        return None
    if not case.before("0.5.14") or case.patched(patch_names.CAPTURE_AFTER_REDUCE):
        return None
    return Fault(place, f"is set together with EAGLE3 on {case.facts.architecture}")


@rule(
    "draft-memory",
    reason="this version takes the draft's weights from what mem_fraction_static leaves",
    source="sglang 0.5.9 model_executor/model_runner.py",
    fix="lower mem_fraction_static",
)
def draft_memory(case: Case) -> Fault | None:
    fraction, draft, hardware = case.get("mem_fraction_static"), case.draft, case.hardware
    if fraction is None or draft is None or draft.weight_bytes is None or hardware is None or not case.before("0.5.10"):
        return None
    left, needed = (1 - fraction) * hardware.memory_bytes, draft.weight_bytes / case.gpus
    if left > needed:
        return None
    return Fault(
        "mem_fraction_static",
        f"is {fraction}: {left / 1e9:.1f} GB of a GPU are left, the draft's weights take {needed / 1e9:.1f} GB",
    )


RULES = (
    algorithm_name,
    draft_kind,
    without_draft,
    draft_unused,
    inherited,
    draft_backend_name,
    draft_quantization,
    token_map,
    moe_runner,
    kimi_hooks,
    fused_capture,
    draft_memory,
)

"""Rules of speculative decoding. Most mistakes start, answer, and are slow: the engine says little or nothing."""

from __future__ import annotations

from gpubox.specs.rule import Case, Fault, rule
from gpubox.specs.rules_draft import ARGS_059, draft_backend

HOOK_0517 = "sglang 0.5.17 arg_groups/speculative_hook.py"
TRIPLE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
EAGLE = frozenset({"EAGLE", "EAGLE3", "NEXTN", "STANDALONE"})  # the algorithms that draft a chain or a tree
TREES_IN_PAGES = frozenset({"flashinfer", "fa3"})


def _tree(case: Case) -> bool:
    return case.algorithm in EAGLE and case.number("speculative_eagle_topk", 1) > 1


@rule(
    "speculation-off",
    reason="the engine ignores it without a word",
    source=ARGS_059,
    fix="set speculative_algorithm, or remove it",
)
def off(case: Case) -> Fault | None:
    if case.algorithm is not None or case.draft is not None:
        return None
    given = [name for name in (*TRIPLE, "speculative_adaptive") if case.get(name) is not None]
    return Fault(given[0], "is set, and speculative_algorithm is not") if given else None


@rule(
    "speculation-triple",
    reason="steps, topk and draft tokens go together; with some of them the engine ends with a bare assertion",
    source=ARGS_059,
    fix="set all three, or none",
)
def triple(case: Case) -> Fault | None:
    missing = [name for name in TRIPLE if case.get(name) is None]
    if case.algorithm not in EAGLE or not missing or len(missing) == len(TRIPLE) or case.get("speculative_adaptive"):
        return None
    given = next(name for name in TRIPLE if name not in missing)
    return Fault(given, f"is set without {' and '.join(missing)}")


@rule(
    "draft-tokens-of-a-chain",
    reason="the engine rewrites it to steps + 1 and only logs that",
    source=ARGS_059,
    fix="set speculative_num_draft_tokens to speculative_num_steps + 1",
)
def chain(case: Case) -> Fault | None:
    steps, topk, tokens = (case.get(name) for name in TRIPLE)
    if case.algorithm in EAGLE and topk == 1 and steps is not None and tokens is not None and tokens != steps + 1:
        return Fault(
            "speculative_num_draft_tokens", f"is {tokens}, and with topk 1 and {steps} steps it is {steps + 1}"
        )
    return None


@rule(
    "draft-tokens-of-a-tree",
    reason="the engine ends with 'selected index k out of range'",
    source="sglang speculative/eagle_utils.py: topk + (steps - 1) * topk^2 + 1",
    fix="lower speculative_num_draft_tokens, or raise steps or topk",
)
def tree_size(case: Case) -> Fault | None:
    steps, topk, tokens = (case.get(name) for name in TRIPLE)
    if case.algorithm not in EAGLE or not _tree(case) or steps is None or tokens is None:
        return None
    limit = topk + (steps - 1) * topk**2 + 1
    if tokens <= limit:
        return None
    return Fault("speculative_num_draft_tokens", f"is {tokens}; a tree of {steps} steps and topk {topk} has {limit}")


@rule(
    "tree-in-pages",
    reason="a tree of drafts in pages of more than one token gives wrong results with most attention backends",
    source=f"{ARGS_059}; {HOOK_0517}",
    fix="set page_size = 1, or speculative_eagle_topk = 1",
)
def tree_pages(case: Case) -> Fault | None:
    backends = TREES_IN_PAGES if case.before("0.5.17") else TREES_IN_PAGES | {"triton"}
    if not _tree(case) or case.number("page_size", 1) <= 1 or case.get("attention_backend") in backends:
        return None
    return Fault("page_size", f"is {case.get('page_size')} with speculative_eagle_topk above 1")


@rule(
    "tree-on-trtllm-mha",
    reason="that backend drafts chains only",
    source=ARGS_059,
    fix="set speculative_eagle_topk = 1, or another backend",
)
def tree_backend(case: Case) -> Fault | None:
    place = next((name for name, value in case.attention_backends.items() if value == "trtllm_mha"), None)
    return Fault(place, "is 'trtllm_mha' with speculative_eagle_topk above 1") if place and _tree(case) else None


@rule(
    "tree-on-flashinfer-mla",
    reason="FlashInfer's MLA backend drafts chains only",
    source="sglang layers/attention/flashinfer_mla_backend.py",
    fix="set speculative_eagle_topk = 1, or another speculative_draft_attention_backend",
)
def tree_flashinfer_mla(case: Case) -> Fault | None:
    chosen = draft_backend(case)
    if chosen and chosen[1] == "flashinfer" and case.facts.attention == "mla" and _tree(case):
        return Fault(
            "speculative_eagle_topk", f"is above 1, and the draft's attention is flashinfer's for MLA ({chosen[0]})"
        )
    return None


@rule(
    "tree-on-spec-v2",
    reason="the overlapped worker of this version drafts chains only",
    source=ARGS_059,
    fix="remove SGLANG_ENABLE_SPEC_V2, or set speculative_eagle_topk = 1",
)
def tree_v2(case: Case) -> Fault | None:
    if _tree(case) and case.switched_on("SGLANG_ENABLE_SPEC_V2") and case.before("0.5.11"):
        return Fault("environment.SGLANG_ENABLE_SPEC_V2", "is on with speculative_eagle_topk above 1")
    return None


@rule(
    "spec-v2-is-gone",
    severity="warning",
    reason="from 0.5.14 the overlapped worker is the only one",
    source=HOOK_0517,
    fix="remove SGLANG_ENABLE_SPEC_V2; disable_overlap_schedule gives the synchronous one",
)
def v2_gone(case: Case) -> Fault | None:
    if "SGLANG_ENABLE_SPEC_V2" in case.environment and not case.before("0.5.14"):
        return Fault("environment.SGLANG_ENABLE_SPEC_V2", "does nothing in this version")
    return None


@rule(
    "speculation-and-mixed-chunk",
    reason="speculation turns it off and only logs that",
    source=ARGS_059,
    fix="remove enable_mixed_chunk",
)
def mixed_chunk(case: Case) -> Fault | None:
    if case.algorithm and case.get("enable_mixed_chunk"):
        return Fault("enable_mixed_chunk", "is set together with speculation")
    return None


@rule(
    "speculation-and-pipeline",
    reason="the engine refuses speculation with pipeline parallelism",
    source="sglang 0.5.9 server_args.py, check_server_args",
    fix="set pp_size = 1 and a larger tp_size, or serve without speculation",
)
def pipeline(case: Case) -> Fault | None:
    if case.algorithm and case.number("pp_size", 1) > 1:
        return Fault("pp_size", f"is {case.get('pp_size')} together with speculation")
    return None


@rule(
    "speculation-and-dp-attention",
    reason="the engine refuses this algorithm with data-parallel attention",
    source=ARGS_059,
    fix="remove enable_dp_attention, or use EAGLE3",
)
def dp_attention(case: Case) -> Fault | None:
    if case.algorithm in ("STANDALONE", "NGRAM") and case.get("enable_dp_attention"):
        return Fault("enable_dp_attention", f"is set together with {case.algorithm}")
    return None


@rule(
    "running-requests",
    reason="the engine would set it to 48, and two arms of a comparison would differ in it",
    source=ARGS_059,
    fix="set max_running_requests to what the box has to bear",
)
def running(case: Case) -> Fault | None:
    if case.algorithm and case.get("max_running_requests") is None:
        return Fault("max_running_requests", "is not set, and speculation is on")
    return None


@rule(
    "adaptive-falls-back",
    reason="the engine falls back to fixed speculation and only logs that",
    source="sglang 0.5.17 speculative/adaptive_spec_params.py",
    fix="use EAGLE3 with speculative_eagle_topk = 1 and without these, or remove speculative_adaptive",
)
def adaptive(case: Case) -> Fault | None:
    if not case.get("speculative_adaptive") or case.algorithm is None:
        return None
    if case.algorithm not in ("EAGLE", "EAGLE3"):
        return Fault("speculative_adaptive", f"is set with {case.algorithm}")
    if case.number("speculative_eagle_topk", 1) != 1:
        return Fault("speculative_adaptive", "is set with speculative_eagle_topk above 1")
    stop = ("enable_dp_attention", "enable_multi_layer_eagle", "enable_two_batch_overlap", "enable_pdmux")
    other = next((name for name in stop if case.get(name)), None)
    return Fault("speculative_adaptive", f"is set with {other}") if other else None


@rule(
    "adaptive-config-alone",
    reason="the engine reads the file only with speculative_adaptive",
    source=HOOK_0517,
    fix="set speculative_adaptive = true, or remove the file",
)
def adaptive_config(case: Case) -> Fault | None:
    if case.get("speculative_adaptive_config") and not case.get("speculative_adaptive"):
        return Fault("speculative_adaptive_config", "is set without speculative_adaptive")
    return None


@rule(
    "accept-length-unproved",
    reason="a wrong draft, or one that the engine does not feed, serves and answers; only its accept length shows it",
    source="sglang#25673 (accept below 0.02, no error); measured on an H200: 1.02 with random weights",
    fix="add [probes.accept_length] with three or more prompts; docs/health.md",
)
def accept_length(case: Case) -> Fault | None:
    if case.algorithm is None or case.server.probes.accept_length is not None:
        return None
    return Fault("probes.accept_length", "is missing, and the server speculates")


@rule(
    "accept-length-of-nothing",
    reason="the probe fails on a server that does not speculate",
    source="gpubox/health/accept_length.py",
    fix="remove the table, or set speculative_algorithm",
)
def accept_length_of_nothing(case: Case) -> Fault | None:
    if case.algorithm is not None or case.draft is not None or case.server.probes.accept_length is None:
        return None
    return Fault("probes.accept_length", "is given, and speculative_algorithm is not set")


RULES = (
    accept_length,
    accept_length_of_nothing,
    off,
    triple,
    chain,
    tree_size,
    tree_pages,
    tree_backend,
    tree_flashinfer_mla,
    tree_v2,
    v2_gone,
    mixed_chunk,
    pipeline,
    dp_attention,
    running,
    adaptive,
    adaptive_config,
)

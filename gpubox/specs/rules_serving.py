"""Rules of serving: numbers in their range, arguments that contradict each other, and the quality of the answers."""

from __future__ import annotations

from gpubox.specs.rule import Case, Fault, rule

CHECK_059 = "sglang 0.5.9 server_args.py, check_server_args"
INFINITE = float("inf")

# Lowest and highest value, both allowed; a fraction's ends are told in the rule itself.
BOUNDS: dict[str, tuple[float, float]] = {
    "context_length": (1, INFINITE),
    "tp_size": (1, 1024),
    "pp_size": (1, 1024),
    "dp_size": (1, 1024),
    "ep_size": (1, 1024),
    "nnodes": (1, 1024),
    "node_rank": (0, 1023),
    "base_gpu_id": (0, 1023),
    "gpu_id_step": (1, 1023),
    "max_running_requests": (1, INFINITE),
    "max_queued_requests": (1, INFINITE),
    "max_total_tokens": (1, INFINITE),
    "max_prefill_tokens": (1, INFINITE),
    "chunked_prefill_size": (-1, INFINITE),
    "page_size": (1, 1024),
    "schedule_conservativeness": (0, INFINITE),
    "cuda_graph_max_bs": (1, 65_536),
    "watchdog_timeout": (1, INFINITE),
    "soft_watchdog_timeout": (1, INFINITE),
    "dist_timeout": (1, INFINITE),
    "decode_log_interval": (1, INFINITE),
    "speculative_num_steps": (1, 64),
    "speculative_eagle_topk": (1, 64),
    "speculative_num_draft_tokens": (1, 1024),
}
FRACTIONS = ("mem_fraction_static",)
LOW_PRECISION = ("fp8", "fp4", "mxfp8", "nvfp4")


@rule(
    "out-of-range",
    reason="the engine does not check it, or only after the weights have been loaded",
    source="gpubox/specs/rules_serving.py, BOUNDS",
    fix="give a value in the range",
)
def out_of_range(case: Case) -> Fault | None:
    for name, (low, high) in BOUNDS.items():
        value = case.get(name)
        if value is not None and not low <= value <= high:
            return Fault(
                name,
                f"is {value}; allowed: {low} and more" if high == INFINITE else f"is {value}; allowed: {low} to {high}",
            )
    for name in FRACTIONS:
        value = case.get(name)
        if value is not None and not 0 < value < 1:
            return Fault(name, f"is {value}; allowed: above 0 and below 1")
    return None


@rule(
    "context-beyond-model",
    reason="the engine refuses it, or with the variable set lets positions run where the model was never trained",
    source="sglang configs/model_config.py",
    fix="lower context_length to the model's, or set SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 in [environment]",
)
def context_beyond_model(case: Case) -> Fault | None:
    length, limit = case.get("context_length"), case.facts.context_length
    if (
        length is None
        or limit is None
        or length <= limit
        or case.switched_on("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN")
    ):
        return None
    return Fault("context_length", f"is {length}, the model's is {limit}")


@rule(
    "prefill-in-pages",
    reason="the engine asserts that a chunk is a whole number of pages",
    source=CHECK_059,
    fix="set chunked_prefill_size to a multiple of page_size, or to -1",
)
def prefill_in_pages(case: Case) -> Fault | None:
    chunk, page = case.number("chunked_prefill_size", -1), case.number("page_size", 1)
    if chunk > 0 and page > 0 and chunk % page:
        return Fault("chunked_prefill_size", f"is {chunk}, page_size is {page}")
    return None


@rule(
    "priority-policy",
    reason="the engine asserts that priorities are scheduled by fcfs or lof",
    source=CHECK_059,
    fix='set schedule_policy = "fcfs" or "lof"',
)
def priority_policy(case: Case) -> Fault | None:
    policy = case.get("schedule_policy") or "fcfs"
    if case.get("enable_priority_scheduling") and policy not in ("fcfs", "lof"):
        return Fault("schedule_policy", f"is {policy!r} together with enable_priority_scheduling")
    return None


@rule(
    "dense-tp",
    reason="this version takes 1 or nothing",
    source=CHECK_059,
    fix="remove moe_dense_tp_size, or set it to 1",
)
def dense_tp(case: Case) -> Fault | None:
    value = case.get("moe_dense_tp_size")
    return Fault("moe_dense_tp_size", f"is {value}") if value not in (None, 1) and case.before("0.5.10") else None


@rule(
    "ranks-per-node",
    reason="the engine asserts that every node gets the same number of ranks",
    source=CHECK_059,
    fix="set nnodes to a divisor of tp_size * pp_size",
)
def ranks_per_node(case: Case) -> Fault | None:
    nodes = case.number("nnodes", 1)
    return Fault("nnodes", f"is {nodes}, and there are {case.gpus} ranks") if nodes > 0 and case.gpus % nodes else None


@rule(
    "data-parallel-nodes",
    reason="the engine refuses several replicas over several nodes without data-parallel attention",
    source=CHECK_059,
    fix="set enable_dp_attention = true, or dp_size = 1 and a gateway over several boxes",
)
def data_parallel_nodes(case: Case) -> Fault | None:
    if case.number("dp_size", 1) > 1 and case.number("nnodes", 1) > 1 and not case.get("enable_dp_attention"):
        return Fault("dp_size", f"is {case.get('dp_size')} over {case.get('nnodes')} nodes")
    return None


@rule(
    "remote-code",
    reason="Kimi's configuration and tokenizer are code of the checkpoint",
    source="the model's config.json, auto_map",
    fix="set trust_remote_code = true",
)
def remote_code(case: Case) -> Fault | None:
    if (case.facts.architecture or "").startswith("Kimi") and not case.get("trust_remote_code"):
        return Fault("trust_remote_code", f"is not set for {case.facts.architecture}")
    return None


@rule(
    "quantization-by-hand",
    reason="the checkpoint says how it is quantized, and another method reads its weights wrongly",
    source="sglang configs/model_config.py",
    fix="remove quantization",
    overridable=True,
)
def quantization_by_hand(case: Case) -> Fault | None:
    if case.get("quantization") and case.facts.quantization not in (None, "none"):
        return Fault("quantization", f"is {case.get('quantization')!r} for a checkpoint in {case.facts.quantization}")
    return None


@rule(
    "low-precision-kv",
    reason="a KV cache below 16 bits costs an INT4 model noticeable quality, and in SGLang also speed",
    source="the deployment that this project follows",
    fix='remove kv_cache_dtype, or set "bfloat16"',
    overridable=True,
)
def low_precision_kv(case: Case) -> Fault | None:
    dtype = str(case.get("kv_cache_dtype") or "")
    if case.facts.quantization == "int4" and dtype.startswith(LOW_PRECISION):
        return Fault("kv_cache_dtype", f"is {dtype!r} for a checkpoint in int4")
    return None


@rule(
    "environment-overwritten",
    severity="warning",
    reason="the engine sets it at its start, whatever it was",
    source="sglang entrypoints/engine.py, _set_envs_and_config",
    fix="remove it: it has no effect",
)
def environment_overwritten(case: Case) -> Fault | None:
    for name, value in case.arguments.table.overwritten_environment.items():
        if case.environment.get(name, value) != value:
            return Fault(
                f"environment.{name}", f"is {case.environment[name]!r}, the engine makes it {value or 'its own'}"
            )
    return None


RULES = (
    *(out_of_range, context_beyond_model, prefill_in_pages, priority_policy, dense_tp, ranks_per_node),
    *(data_parallel_nodes, remote_code, quantization_by_hand, low_precision_kv, environment_overwritten),
)

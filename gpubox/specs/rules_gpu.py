"""Rules of GPUs: capability 12 (SM120), memory, and how GPUs reach each other."""

from __future__ import annotations

from packaging.version import Version

from gpubox.specs import patch_names
from gpubox.specs.nccl import NEEDS_P2P_ARGUMENTS, NEEDS_P2P_ENVIRONMENT, OWNED_ARGUMENTS, OWNED_ENVIRONMENT
from gpubox.specs.rule import FUSION, Case, Fault, rule

SM120 = 12
NOT_FOR_SM120 = frozenset({"trtllm_mla", "fa3", "flashmla", "cutlass_mla"})
MOE_NOT_FOR_SM120 = frozenset({"flashinfer_trtllm", "deep_gemm"})
TRITON_PREFILL_TOKENS = 12_288  # beyond it blocks were seen to want more than SM120's 101,376 bytes of shared memory


@rule(
    "sm120-cuda",
    reason="CUDA before 12.8 has no code for this GPU",
    source="sglang utils/common.py, is_blackwell_supported",
    fix="serve from a stack with CUDA 12.8 or newer",
)
def sm120_cuda(case: Case) -> Fault | None:
    cuda = case.stack.cuda
    if case.capability != SM120 or cuda is None or Version(cuda.version) >= Version("12.8"):
        return None
    return Fault(
        "hardware.capability", f"is {case.hardware and case.hardware.capability}, the stack has CUDA {cuda.version}"
    )


@rule(
    "sm120-attention",
    reason="the backend has no kernels for capability 12: the server fails at its start",
    source="sglang#24633, flashinfer#3263; fa3, flashmla and cutlass_mla are for capabilities 9 and 10",
    fix='use "triton", or "flashinfer" with CUDA 13',
)
def sm120_attention(case: Case) -> Fault | None:
    names = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    for name in (*names, "speculative_draft_attention_backend"):
        if case.capability == SM120 and case.get(name) in NOT_FOR_SM120:
            return Fault(name, f"is {case.get(name)!r} on capability 12")
    return None


@rule(
    "sm120-flashinfer-graphs",
    reason="FlashInfer's attention was seen to hang in CUDA graph capture there",
    source="the deployment on CUDA 12.8 that this project follows",
    fix='use "triton", a stack with CUDA 13, or disable_cuda_graph = true',
    overridable=True,
)
def sm120_flashinfer(case: Case) -> Fault | None:
    cuda = case.stack.cuda
    if case.capability != SM120 or cuda is None or cuda.linked_major != 12 or case.get("disable_cuda_graph"):
        return None
    place = next((name for name, value in case.attention_backends.items() if value == "flashinfer"), None)
    return Fault(place, "is 'flashinfer' on capability 12 with CUDA 12") if place else None


@rule(
    "sm120-fusion",
    reason="the engine's gate leaves capability 12 out: old versions ignore it silently, 0.5.14 and newer refuse it",
    source="sglang layers/communicator.py, flashinfer_comm_fusion.py; FlashInfer's own list of majors is 9 and 10",
    fix=f"remove it, or add the patch {patch_names.FUSION_SM120} to the stack "
    "and measure: on PCIe it was seen to be slower",
)
def sm120_fusion(case: Case) -> Fault | None:
    place = next((name for name in FUSION if case.get(name)), None)
    if place is None or case.capability != SM120 or case.patched(patch_names.FUSION_SM120):
        return None
    return Fault(place, "is set on capability 12")


@rule(
    "sm120-symmetric-memory",
    reason="before 0.5.14 the engine ends with KeyError: 12, since then it turns it off",
    source="sglang#24548",
    fix=f"remove it, or add the patch {patch_names.SYMM_MEM_SM120} to the stack",
)
def sm120_symmetric_memory(case: Case) -> Fault | None:
    if case.capability != SM120 or not case.get("enable_torch_symm_mem") or case.patched(patch_names.SYMM_MEM_SM120):
        return None
    return Fault("enable_torch_symm_mem", "is set on capability 12")


@rule(
    "sm120-moe-runner",
    reason="the runner has no kernels for capability 12",
    source="sglang layers/moe: flashinfer_trtllm is for capability 10, DeepGEMM for 9 and 10",
    fix='remove it: "auto" takes Marlin for INT4',
)
def sm120_moe_runner(case: Case) -> Fault | None:
    if case.capability == SM120 and case.get("moe_runner_backend") in MOE_NOT_FOR_SM120:
        return Fault("moe_runner_backend", f"is {case.get('moe_runner_backend')!r} on capability 12")
    return None


@rule(
    "sm120-vision-attention",
    severity="warning",
    reason="Triton's kernel wants 131,072 bytes of shared memory, the GPU has 101,376, and the warm-up sends an image",
    source="sglang#27962",
    fix='set mm_attention_backend = "sdpa"',
)
def sm120_vision(case: Case) -> Fault | None:
    if case.capability == SM120 and case.facts.multimodal and case.get("mm_attention_backend") in (None, "triton_attn"):
        return Fault("mm_attention_backend", "is Triton's on capability 12")
    return None


@rule(
    "sm120-triton-prefill",
    severity="warning",
    reason="Triton's prefill was seen to run out of shared memory beyond about 12,288 tokens",
    source="the deployment that this project follows",
    fix="lower chunked_prefill_size to 8192",
)
def sm120_triton_prefill(case: Case) -> Fault | None:
    chunk = case.get("chunked_prefill_size")
    backend = case.get("prefill_attention_backend") or case.get("attention_backend") or "triton"
    whole = chunk == -1  # prefill in one piece, however long
    if case.capability != SM120 or backend != "triton" or chunk is None or not (whole or chunk > TRITON_PREFILL_TOKENS):
        return None
    return Fault("chunked_prefill_size", f"is {chunk} with Triton's attention on capability 12")


@rule(
    "sm120-graph-sizes",
    severity="warning",
    reason="with four GPUs and more the engine captures graphs up to 512 requests: minutes of start, and memory",
    source="sglang 0.5.9 server_args.py, _handle_gpu_memory_settings",
    fix="set cuda_graph_max_bs to max_running_requests or less",
)
def sm120_graph_sizes(case: Case) -> Fault | None:
    given = any(case.get(name) for name in ("cuda_graph_max_bs", "cuda_graph_bs", "disable_cuda_graph"))
    if case.capability != SM120 or case.number("tp_size", 1) < 4 or given:
        return None
    return Fault("cuda_graph_max_bs", "is not set")


@rule(
    "gpu-count",
    reason="the engine ends with 'invalid device ordinal' after most of its start",
    source="seen with sglang 0.5.17",
    fix="set tp_size to the GPUs that there are",
)
def gpu_count(case: Case) -> Fault | None:
    if case.hardware is None or case.gpus <= case.hardware.gpus or case.get("nnodes"):
        return None
    return Fault("tp_size", f"asks for {case.gpus} GPUs, and [hardware] has {case.hardware.gpus}")


@rule(
    "weights-do-not-fit",
    reason="the fraction holds weights and KV cache: at or below the weights' share the server cannot start",
    source="sglang model_executor/model_runner.py: 'Not enough memory. Please try to increase --mem-fraction-static'",
    fix="raise mem_fraction_static, or remove it and let the engine choose",
)
def weights_fit(case: Case) -> Fault | None:
    fraction, share = case.get("mem_fraction_static"), _weights_share(case)
    if fraction is None or share is None or fraction > share:
        return None
    return Fault("mem_fraction_static", f"is {fraction}; the weights alone take {share:.3f} of each GPU")


@rule(
    "context-beyond-kv-cache",
    severity="warning",
    reason="a request of the full context length can never run",
    source="KV tokens = (fraction * memory - weights) / bytes per token",
    fix="raise mem_fraction_static or lower context_length",
)
def context_fits(case: Case) -> Fault | None:
    fraction, share, length = case.get("mem_fraction_static"), _weights_share(case), case.get("context_length")
    per_token = case.facts.kv_bytes_per_token
    if None in (fraction, share, length, per_token) or case.hardware is None or fraction <= share:
        return None
    tokens = int((fraction - share) * case.hardware.memory_bytes / per_token)
    return (
        None if tokens >= length else Fault("context_length", f"is {length}; the KV cache holds about {tokens} tokens")
    )


def _weights_share(case: Case) -> float | None:
    """The part of each GPU's memory that the weights take."""
    if case.facts.weight_bytes is None or case.hardware is None or case.get("device") == "cpu":
        return None
    return case.facts.weight_bytes / case.gpus / case.hardware.memory_bytes


@rule(
    "nccl-profile",
    reason="how GPUs reach each other is the machine's, and a wrong guess hangs or costs half the speed",
    source="rtx6kpro#15; docs/servers.md",
    fix='add [nccl] with profile = "pcie-only", "nvlink" or "no-p2p", or set nccl in the box\'s settings',
)
def nccl_profile(case: Case) -> Fault | None:
    return Fault("nccl", f"is missing, and {case.gpus} GPUs work together") if case.gpus > 1 and not case.nccl else None


@rule(
    "nccl-by-hand",
    reason="the profile of [nccl] decides it, together with the engine's own kernels: one without the other hangs",
    source="rtx6kpro#15, vllm#51513",
    fix="remove it and set the key of [nccl]",
)
def nccl_by_hand(case: Case) -> Fault | None:
    if case.nccl is None:
        return None
    name = next((name for name in sorted(OWNED_ENVIRONMENT) if name in case.environment), None)
    argument = next((name for name in sorted(OWNED_ARGUMENTS) if case.by_hand(name)), None)
    place = f"environment.{name}" if name else argument
    return Fault(place, f"is written by hand beside the profile {case.nccl.profile!r}") if place else None


@rule(
    "half-disabled-p2p",
    reason="NCCL passes and the engine's all-reduce kernels wait for ever, or the other way round",
    source="rtx6kpro#15, rtx6kpro#21, vllm#51513",
    fix='remove it and add [nccl] with profile = "no-p2p"',
)
def half_disabled(case: Case) -> Fault | None:
    off_in_nccl, off_in_engine = case.switched_on("NCCL_P2P_DISABLE"), bool(case.get("disable_custom_all_reduce"))
    if case.nccl is not None or off_in_nccl == off_in_engine:
        return None
    if off_in_nccl:
        return Fault("environment.NCCL_P2P_DISABLE", "is on without disable_custom_all_reduce")
    return Fault("disable_custom_all_reduce", "is set without NCCL_P2P_DISABLE=1")


@rule(
    "kernels-without-p2p",
    reason="its kernels copy from GPU to GPU themselves, which the profile 'no-p2p' says is broken: they would hang",
    source="rtx6kpro#15",
    fix="remove it, or choose the profile that the machine really has",
)
def kernels_without_p2p(case: Case) -> Fault | None:
    if case.nccl is None or case.nccl.verdict.p2p:
        return None
    argument = next((name for name in NEEDS_P2P_ARGUMENTS if case.get(name)), None)
    name = next((name for name in NEEDS_P2P_ENVIRONMENT if case.switched_on(name)), None)
    place = argument or (f"environment.{name}" if name else None)
    return Fault(place, "is on with the profile 'no-p2p'") if place else None


@rule(
    "expandable-segments",
    severity="warning",
    reason="expandable segments were seen to crash all-reduce kernels that share memory between processes",
    source="the rtx6kpro wiki",
    fix="remove expandable_segments, or set custom_all_reduce = false in [nccl]",
)
def expandable_segments(case: Case) -> Fault | None:
    if "expandable_segments:True" not in case.environment.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        return None
    shared = case.switched_on("SGLANG_ENABLE_PCIE_IPC_ALLREDUCE") or (case.nccl and case.nccl.uses_custom_all_reduce)
    return Fault("environment.PYTORCH_CUDA_ALLOC_CONF", "has expandable_segments:True") if shared else None


RULES = (
    *(sm120_cuda, sm120_attention, sm120_flashinfer, sm120_fusion, sm120_symmetric_memory, sm120_moe_runner),
    *(sm120_vision, sm120_triton_prefill, sm120_graph_sizes, gpu_count, weights_fit, context_fits),
    *(nccl_profile, nccl_by_hand, half_disabled, kernels_without_p2p, expandable_segments),
)

"""Exercises for patches/sglang-0.5.9, run by a stack's own Python on the wheel's files with and without the patches.

    python patch_exercises.py PATCHED_ROOT

Prints one JSON object: {"unpatched": {EXERCISE: null or the error's text}, "patched": {...}}. The wheel's own code
runs, on CPU; the compute capability is faked, and so are the kernels that only a GPU has. Where ranks must agree there
are two processes and the engine's own tensor-parallel group over gloo. What both trees import is imported once, before
they fork.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

SHARED = (
    "torch._inductor.compile_fx",
    "torchvision",
    "transformers",
    "flashinfer",
    "openai",
    "aiohttp",
    "scipy.special",
)
SHARED += ("compressed_tensors", "IPython", "gguf", "torchao.quantization", "xgrammar", "torch.distributed.checkpoint")
MAJORS = (8, 9, 10, 12)
RANKS = 2


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what modules print at import is not our answer
    for name in SHARED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    site = Path(importlib.import_module("torch").__file__).parents[1]
    trees = {"unpatched": site, "patched": Path(sys.argv[1])}
    readers = {label: in_fork(partial(exercise, tree)) for label, tree in trees.items()}
    json.dump({label: read() for label, read in readers.items()}, out)


def exercise(tree: Path) -> dict[str, str | None]:
    sys.path.insert(0, str(tree))
    loaded = importlib.import_module("sglang.srt.model_executor.model_runner")
    assert Path(loaded.__file__).is_relative_to(tree), loaded.__file__
    torch().set_num_threads(1)
    alone = (kimi_hooks, fusion_gate, symmetric_memory, layers_in_graphs, layers_in_warm_up, vision_blocks)
    results = {work.__name__: attempt(work) for work in alone}
    results["flashinfer_targets"] = attempt(lambda: flashinfer_targets(tree))
    return results | on_two_ranks(declined_fusion, declined_symmetric_memory, capture_under_fusion)


# --- what each patch changes ---


def kimi_hooks() -> None:
    """01: the class hands to its language model what EAGLE-3 asks of it."""
    kimi = module("models.kimi_k25")
    target = bare(kimi.KimiK25ForConditionalGeneration, language_model=language_model())
    weight = torch().nn.Parameter(torch().ones(2, 3))
    target.set_eagle3_layers_to_capture([2, 30, 58])
    assert target.language_model.model.layers_to_capture == [3, 31, 59]
    embed, head = target.get_embed_and_head()
    assert embed is target.language_model.model.embed_tokens.weight
    assert head is target.language_model.lm_head.weight
    with mock.patch("torch.cuda.synchronize"):
        target.set_embed_and_head(weight, weight)
    assert target.language_model.lm_head.weight is weight


def fusion_gate() -> None:
    """02: the flag opens the fused all-reduce on 9, 10 and 12, and nothing else does."""
    for major, flag in itertools.product(MAJORS, (False, True)):
        gate = communicator_of(major)
        arguments(enable_flashinfer_allreduce_fusion=flag)
        gate._is_flashinfer_available = True
        with mock.patch.object(gate, "is_dp_attention_enabled", return_value=False):
            seen = [gate.apply_flashinfer_allreduce_fusion(tokens) for tokens in (0, 1, 2048, 2049)]
        expect(f"capability {major}, flag {flag}", [False, *[flag and major >= 9] * 2, False], [bool(x) for x in seen])
        with mock.patch.object(gate, "is_dp_attention_enabled", return_value=True):
            assert not gate.apply_flashinfer_allreduce_fusion(1)


def symmetric_memory() -> None:
    """03: 12 is known and does without multicast; 9 and 10 need it still."""
    symm = module("distributed.device_communicators.torch_symm_mem")
    multicast, none = 4096, 0
    cases = {(12, 8, none): True, (12, 8, multicast): True, (12, 2, none): True, (12, 3, none): False}
    cases |= {(major, 8, pointer): pointer != none for major in (9, 10) for pointer in (none, multicast)}
    cases |= {(8, 8, multicast): False}
    for (major, ranks, pointer), enabled in cases.items():
        with symmetric_memory_of(symm, major, ranks, pointer) as used:
            communicator = symm.TorchSymmMemCommunicator(group=SimpleNamespace(group_name="tp"), device=0)
            expect(f"capability {major}, {ranks} ranks, multicast {pointer}", enabled, not communicator.disabled)
            if enabled:
                communicator.all_reduce(torch().ones(4, dtype=torch().bfloat16))
                expect(f"kernel of {major}", ["multimem" if major in (9, 10) else "two_shot"], used)


def layers_in_graphs() -> None:
    """04: when graphs are captured, the model captures the draft's layers."""
    runner = module("model_executor.cuda_graph_runner")
    target = language_model()
    seen = []
    fakes = dict.fromkeys(("require_gathered_buffer", "require_mlp_tp_gather", "require_mlp_sync"), lambda *_: False)
    fakes |= dict.fromkeys(("require_attn_tp_gather", "is_nsa_enable_prefill_cp"), lambda *_: False)
    fakes |= dict.fromkeys(("get_attention_tp_size", "get_attention_tp_rank"), lambda: 1)
    fakes |= dict.fromkeys(
        ("DeepEPCudaGraphRunnerAdapter", "TboCudaGraphRunnerPlugin", "GraphInputBuffers"), mock.Mock()
    )
    fakes |= {"get_batch_sizes_to_capture": lambda *_: ([1], []), "model_capture_mode": contextlib.nullcontext}
    fakes |= {"DllmConfig": mock.Mock(from_server_args=lambda _: None), "log_info_on_rank0": mock.Mock()}
    with (
        mock.patch.multiple(runner, **fakes),
        mock.patch.object(runner.CudaGraphRunner, "capture", lambda _: seen.append(target.model.layers_to_capture)),
    ):
        runner.CudaGraphRunner(model_runner_of(target))
    expect("layers at capture", [[3, 31, 59]], seen)


def layers_in_warm_up() -> None:
    """04: and so does the pass that tunes kernels before."""
    runner = module("model_executor.model_runner")
    target = language_model()
    with (
        mock.patch.object(runner, "require_mlp_tp_gather", side_effect=StopIteration),
        contextlib.suppress(StopIteration),
    ):
        runner.ModelRunner._dummy_run(model_runner_of(target), batch_size=1)
    expect("layers in the warm-up", [3, 31, 59], target.model.layers_to_capture)


def vision_blocks() -> None:
    """06: blocks of 64 rows on 12 and on old cards, 128 on 9 and 10."""
    kernel = module("layers.attention.triton_ops.prefill_attention")
    query = torch().zeros(300, 16, 72)
    lengths = torch().tensor([300])
    for major, rows in {8: 64, 9: 128, 10: 128, 12: 64}.items():
        launch = mock.MagicMock()
        fakes = {"_is_cuda": True, "CUDA_CAPABILITY": (major, 0), "_fwd_kernel": launch}
        with mock.patch.multiple(kernel, create=True, **fakes):
            kernel.context_attention_fwd(query, query, query, query, lengths, lengths, 300, is_causal=False)
        used = launch.__getitem__.return_value.call_args.kwargs
        expect(f"rows on capability {major}", (rows, rows), (used["BLOCK_M"], used["BLOCK_N"]))
        expect(f"grid on capability {major}", (1, 16, -(-300 // rows)), launch.__getitem__.call_args.args[0])


def flashinfer_targets(tree: Path) -> None:
    """07: the all-reduce kernels are compiled for 12 too."""
    name = "flashinfer.jit.comm_exercised"
    comm = from_file(name, tree / "flashinfer" / "jit" / "comm.py")
    for majors in ([12], [9, 10, 12]):
        context = comm.current_compilation_context
        targets = {(major, "0a") for major in majors}
        with mock.patch.object(context, "TARGET_CUDA_ARCHS", targets), mock.patch.object(comm, "gen_jit_spec") as spec:
            comm.gen_trtllm_comm_module()
        flags = " ".join(spec.call_args.kwargs["extra_cuda_cflags"])
        expect("targets", [True] * len(majors), [f"code=sm_{major}0a" in flags for major in majors])


def declined_fusion(rank: int) -> None:
    """02: when FlashInfer declines, the norm is of the whole sum."""
    norm = module("layers.layernorm").RMSNorm(8)
    residual = torch().arange(16.0).reshape(2, 8)
    wanted = norm.forward_native(part(0, 2, 8) + part(1, 2, 8), residual.clone())
    fusion = "sglang.srt.layers.flashinfer_comm_fusion.flashinfer_allreduce_residual_rmsnorm"
    for addition in (None, torch().ones(2, 8)):
        if addition is not None:
            wanted = norm.forward_native(part(0, 2, 8) + part(1, 2, 8), residual + addition)
        with mock.patch(fusion, return_value=(None, None)):
            found = norm.forward_with_allreduce_fusion(part(rank, 2, 8), residual.clone(), addition)
        for one, other in zip(wanted, found, strict=True):
            same("norm of the sum", one, other)


def declined_symmetric_memory(rank: int) -> None:
    """03: what the communicator declines is summed by torch.distributed, in place."""
    symm = module("distributed.device_communicators.torch_symm_mem")
    group = module("distributed").get_tp_group()
    communicator = symm.TorchSymmMemCommunicator.__new__(symm.TorchSymmMemCommunicator)
    vars(communicator).update(disabled=False, dtype=torch().bfloat16, max_size=64)
    communicator.all_reduce = lambda tensor, *, out=None: torch().empty_like(tensor)
    with mock.patch.multiple(group, pynccl_comm=None, torch_symm_mem_comm=communicator):
        for dtype, size in ((torch().float32, 4), (torch().bfloat16, 1000)):
            tensor = part(rank, 1, size).to(dtype)
            group._all_reduce_in_place(tensor)
            same(f"{size} of {dtype}", part(0, 1, size).to(dtype) + part(1, 1, size).to(dtype), tensor)


def capture_under_fusion(rank: int) -> None:
    """05: what the draft gets is the sum over ranks, fused or not, and the same on each rank."""
    plain_last, plain = run_model(rank, fused=False)
    fused_last, fused = run_model(rank, fused=True)
    same("the model's own output", plain_last, fused_last)
    expect("captured layers", (2, 2), (len(plain), len(fused)))
    for one, other in zip(plain, fused, strict=True):
        same("captured hidden states", one, other)
        total = other.clone()
        torch().distributed.all_reduce(total)
        same("captured on every rank", other * RANKS, total)


# --- a small target, made of the wheel's own model loop, layers, communicators and norms ---


def run_model(rank: int, *, fused: bool) -> Any:
    """Hidden states and captured states of four layers, whose attention and MLP give this rank's part of a sum."""
    models, communicator = module("models.deepseek_v2"), module("layers.communicator")
    arguments(enable_flashinfer_allreduce_fusion=fused)
    vars(communicator).update(_is_sm90_supported=True, _is_flashinfer_available=True)
    depth, width, tokens = 4, 8, 3
    model = bare(models.DeepseekV2Model, layers_to_capture=[1, 3], start_layer=0, end_layer=depth)
    vars(model).update(pp_group=SimpleNamespace(is_first_rank=True, is_last_rank=True), enable_a2a_moe=False)
    vars(model).update(first_k_dense_replace=0, llama_4_scaling_config=None, cp_size=None)
    model.embed_tokens = lambda ids: part(5, len(ids), width)
    model.norm = module("layers.layernorm").RMSNorm(width)
    model.layers = [small_layer(models, communicator, number, depth, width, rank) for number in range(depth)]
    batch = SimpleNamespace(input_ids=torch().arange(tokens), can_run_tbo=False, nsa_cp_metadata=None)
    batch.forward_mode = SimpleNamespace(is_idle=lambda: False, is_context_parallel_extend=lambda: False)
    fusion = "sglang.srt.layers.flashinfer_comm_fusion.flashinfer_allreduce_residual_rmsnorm"
    with torch().no_grad(), mock.patch(fusion, gloo_allreduce_residual_rmsnorm):
        return model.forward(batch.input_ids, batch.input_ids, batch)


def small_layer(models: Any, communicator: Any, number: int, depth: int, width: int, rank: int) -> Any:
    norms = [module("layers.layernorm").RMSNorm(width) for _ in range(2)]
    full, attention = communicator.ScatterMode.FULL, communicator.ScatterMode.TP_ATTN_FULL
    modes = communicator.LayerScatterModes(attention, attention, full, attention, attention)
    attend, mix = (part(10 * number + 2 * rank + step, width, width) for step in (1, 2))
    reduce = module("distributed").tensor_model_parallel_all_reduce

    def mlp(states: Any, batch: Any, fuse: bool, *_: Any) -> Any:
        return states @ mix if fuse else reduce(states @ mix)

    layer = bare(models.DeepseekV2DecoderLayer, nsa_enable_prefill_cp=False, mlp=mlp)
    layer.self_attn = lambda *, hidden_states, **_: hidden_states @ attend
    layer.layer_communicator = communicator.LayerCommunicator(modes, *norms, is_last_layer=number == depth - 1)
    return layer


def gloo_allreduce_residual_rmsnorm(input_tensor: Any, residual: Any, weight: Any, eps: float, **_: Any) -> Any:
    """What FlashInfer's kernel computes: sum over ranks, plus residual, and its norm."""
    total = input_tensor.clone()
    torch().distributed.all_reduce(total)
    total += residual
    return total * (total.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight, total


def part(seed: int, rows: int, columns: int) -> Any:
    return torch().rand(rows, columns, generator=torch().Generator().manual_seed(seed))


# --- fakes ---


def language_model() -> Any:
    """The wheel's DeepSeek class with 61 layers' worth of configuration and no layer."""
    embed = SimpleNamespace(weight=torch().ones(1))
    model = bare(module("models.deepseek_v2").DeepseekV3ForCausalLM, lm_head=SimpleNamespace(weight=torch().ones(1)))
    model.pp_group = SimpleNamespace(is_last_rank=True)
    model.config = SimpleNamespace(num_hidden_layers=61)
    model.model = SimpleNamespace(layers_to_capture=[], embed_tokens=embed)
    return model


def model_runner_of(target: Any) -> Any:
    algorithm = module("speculative.spec_info").SpeculativeAlgorithm.EAGLE3
    runner = mock.MagicMock(spec_algorithm=algorithm, eagle_use_aux_hidden_state=True, device="cpu", model=target)
    runner.configure_mock(eagle_aux_hidden_state_layer_ids=[2, 30, 58], is_draft_worker=False, dp_size=1)
    runner.server_args.configure_mock(enable_torch_compile=False, enable_lora=False, enable_return_hidden_states=False)
    runner.server_args.configure_mock(enable_pdmux=False, speculative_num_draft_tokens=4)
    return runner


def communicator_of(major: int) -> Any:
    """layers/communicator.py, executed anew as on a GPU of this compute capability."""
    utils, common = module("utils"), module("utils.common")
    supported = [common.is_sm90_supported, common.is_sm100_supported, common.is_sm120_supported]
    for check in supported:
        check.cache_clear()
    capability = mock.patch("torch.cuda.get_device_capability", return_value=(major, 0))
    on_cuda = [mock.patch.object(where, "is_cuda", lambda: True) for where in (utils, common)]
    try:
        with capability, on_cuda[0], on_cuda[1], mock.patch("torch.version.cuda", "12.8"):
            return from_file("sglang.srt.layers.communicator_exercised", Path(module("layers.communicator").__file__))
    finally:
        for check in supported:
            check.cache_clear()


@contextlib.contextmanager
def symmetric_memory_of(symm: Any, major: int, ranks: int, pointer: int) -> Iterator[list[str]]:
    """GPUs of a compute capability whose rendezvous gives `pointer`; yields the kernels that were used."""
    used: list[str] = []
    memory = mock.Mock(empty=lambda size, **_: torch().zeros(size, dtype=torch().bfloat16))
    memory.rendezvous.return_value = SimpleNamespace(multicast_ptr=pointer)
    kernels = {f"{name}_all_reduce_": (lambda *_, name=name: used.append(name)) for name in ("multimem", "two_shot")}
    with (
        mock.patch.multiple(symm, create=True, torch_symm_mem=memory, torch_symm_mem_available=True),
        mock.patch("torch.cuda.set_device"),
        mock.patch("torch.cuda.get_device_capability", return_value=(major, 0)),
        mock.patch("torch.distributed.get_world_size", return_value=ranks),
        mock.patch.multiple("torch.ops.symm_mem", create=True, **kernels),
    ):
        yield used


def arguments(**flags: bool) -> None:
    """The engine's global arguments."""
    off = {
        "speculative_algorithm": "EAGLE3",
        "enable_piecewise_cuda_graph": True,
        "enable_nsa_prefill_context_parallel": False,
    }
    module("server_args")._global_server_args = SimpleNamespace(**off, **flags)


# --- tools ---


def torch() -> Any:
    return sys.modules["torch"]


def module(name: str) -> Any:
    return importlib.import_module(f"sglang.srt.{name}")


def bare(cls: Any, **attributes: Any) -> Any:
    """An instance of a torch module class without its constructor."""
    made = cls.__new__(cls)
    torch().nn.Module.__init__(made)
    vars(made).update(attributes)
    return made


def from_file(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made  # dataclasses look their module up
    spec.loader.exec_module(made)
    return made


def expect(what: str, wanted: object, found: object) -> None:
    assert wanted == found, f"{what}: wanted {wanted}, found {found}"


def same(what: str, wanted: Any, found: Any) -> None:
    assert torch().allclose(wanted, found, atol=1e-5), f"{what}: off by up to {(wanted - found).abs().max().item():.3g}"


def attempt(work: Callable[[], object]) -> str | None:
    try:
        work()
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return None


def in_fork(work: Callable[[], object]) -> Callable[[], Any]:
    """Start `work` in a child; the function returned waits for its result."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            with os.fdopen(writer, "w") as stream:
                json.dump(work(), stream)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.close(writer)

    def result() -> Any:
        with os.fdopen(reader) as stream:
            text = stream.read()
        os.waitpid(child, 0)
        return json.loads(text) if text else {"start": "the child ended without a result; its error is above"}

    return result


def on_two_ranks(*exercises: Callable[[int], None]) -> dict[str, str | None]:
    """Run `exercises` in the engine's tensor-parallel group of two processes; the first rank that fails tells."""
    with tempfile.NamedTemporaryFile() as meeting:
        place = f"file://{meeting.name}"

        def rank(number: int) -> dict[str, str | None]:
            join_group(number, place)
            return {work.__name__: attempt(partial(work, number)) for work in exercises}

        readers = [in_fork(partial(rank, number)) for number in range(RANKS)]
        first, second = (read() for read in readers)
    return {name: first.get(name) or second.get(name) for name in first | second}


def join_group(rank: int, place: str) -> None:
    distributed, attention = module("distributed"), module("layers.dp_attention")
    arguments(enable_flashinfer_allreduce_fusion=False)
    distributed.set_custom_all_reduce(False)
    distributed.init_distributed_environment(
        world_size=RANKS, rank=rank, local_rank=rank, distributed_init_method=place, backend="gloo"
    )
    with mock.patch.object(module("distributed.device_communicators.pynccl"), "PyNcclCommunicator"):
        distributed.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    vars(attention).update(_ATTN_TP_RANK=rank, _ATTN_TP_SIZE=RANKS, _ATTN_DP_SIZE=1, _ATTN_DP_RANK=0)


if __name__ == "__main__":
    main()

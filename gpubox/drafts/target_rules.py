"""The target's files, as far as a draft depends on them: its size, and the embedding and head that it lends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gpubox.drafts.case import Case, TargetWeights
from gpubox.drafts.findings import Finding, failed, passed, warned
from gpubox.weights.safetensors import mentions, read_header

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"


def target_weights(directory: Path) -> TargetWeights:
    """A target of 64 shards has 200,000 tensors: only headers that name what is wanted are parsed.

    Raises BrokenError for a shard without a header. Whether the target is whole is a question of its own.
    """
    paths = sorted(directory.glob("*.safetensors"))
    wanted = (EMBEDDING, HEAD)
    shapes: dict[str, set[tuple[int, ...]]] = {name: set() for name in wanted}
    for path in paths:
        if not mentions(path, [f'{name}"'.encode() for name in wanted]):
            continue
        for stored, info in read_header(path).tensors.items():
            for name in wanted:
                if stored == name or stored.endswith(f".{name}"):
                    shapes[name].add(info.shape)
    return TargetWeights(len(paths), sum(path.stat().st_size for path in paths), shapes)


def target_files(case: Case) -> Iterator[Finding]:
    """The embedding that the draft shares, and the head where it has none."""
    weights = case.target_weights
    if not weights.shards:
        yield warned("target files", "no *.safetensors beside the target's config.json: only that was compared")
        return
    lent = [EMBEDDING] if case.shares_embedding else []
    if case.config.draft_vocab_size is None:
        lent.append(HEAD)
    shape = (case.target.vocab_size, case.target.hidden_size)
    for name in lent:
        found = weights.shapes[name]
        if found and shape not in found:
            yield failed(
                "target files",
                f"its {name} is {list(min(found))}, its config.json says {list(shape)}",
                why="the draft is served with the target's tensor",
                fix="config.json and weights of the target are not of one model",
            )
            return
        if not found and not (name == HEAD and weights.shapes[EMBEDDING]):  # a tied head is not stored
            yield warned(
                "target files", f"no shard holds {name}, which the draft borrows", fix="verify the target's files"
            )
            return
    yield passed("target files", f"{weights.shards} shards, {_size(weights.nbytes)}")


def memory(case: Case) -> Iterator[Finding]:
    """Weights and key-value pool of the draft come out of what mem_fraction_static leaves (sglang 0.5.9)."""
    serving, config = case.serving, case.config
    ranks = serving.tensor_parallel or 1
    weights = case.checkpoint.weight_bytes
    if serving.gpu_bytes is None or serving.memory_fraction is None:
        yield passed("memory", f"draft {_size(weights)}; room beside the target not checked")
        return
    rest = serving.gpu_bytes * (1 - serving.memory_fraction)
    heads = config.num_key_value_heads or config.num_attention_heads
    width = 2 * heads * (config.head_dim or config.hidden_size // config.num_attention_heads)
    if not case.is_llama:
        width = ((config.kv_lora_rank or 0) + (config.qk_rope_head_dim or 0)) * ranks  # each rank holds all of it
    pool = (serving.context_length or case.target.max_position_embeddings) * config.num_hidden_layers * width * 2
    needed = (weights + pool) / ranks
    said = f"draft needs {_size(needed)} a GPU with one full context, mem_fraction_static leaves {_size(rest)}"
    if needed > rest:
        yield failed("memory", said, why="out of memory after the target was loaded", fix="a lower mem_fraction_static")
    else:
        yield passed("memory", said)


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


CHECKS = (target_files, memory)

"""Checks of a draft's tensors by their headers: every parameter of the engine's class filled once, in its shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gpubox.drafts.case import Case
from gpubox.drafts.contract import (
    D2T,
    EMBEDDING,
    FC_BIAS,
    FC_NORM,
    FURTHER_LAYER,
    HEAD,
    INPUT_NORM,
    OUTPUT_BIAS,
    REQUIRED,
    SEVERAL_LAYERS,
    T2D,
    Tensor,
    loaded_name,
    size,
)
from gpubox.drafts.findings import Finding, failed, passed, warned
from gpubox.weights.safetensors import shown

FLOATS = ("BF16", "F16", "F32")
IGNORED = "rotary_emb.inv_freq"  # computed by the engine


def expected(case: Case) -> dict[str, Tensor]:
    """What the loader must be able to fill, by loaded name; empty for a class that is not known."""
    config = case.config
    tensors = list(REQUIRED.get(config.architecture, ()))
    if not tensors:
        return {}
    for layer in range(1, config.num_hidden_layers if case.serves_several_layers else 1):
        tensors += [Tensor(item.name.format(layer=layer), item.shape) for item in FURTHER_LAYER]
    if config.draft_vocab_size is not None and not config.tie_word_embeddings:
        tensors.append(HEAD)
    if not case.shares_embedding:
        tensors.append(EMBEDDING)
    if config.bias:
        tensors.append(FC_BIAS)
    if case.is_llama and (config.bias or config.attention_bias):
        tensors.append(OUTPUT_BIAS)
    if config.wants_fc_norm:
        tensors += [Tensor(FC_NORM.name.format(index=index), FC_NORM.shape) for index in range(config.captured_layers)]
    if config.wants_norm_before_fc:
        tensors.append(INPUT_NORM)
    return {tensor.name: tensor for tensor in tensors}


def loaded(case: Case) -> dict[str, list[str]]:
    """Stored names by the name under which the loader of this version takes them."""
    found: dict[str, list[str]] = {}
    for stored in case.checkpoint.where:
        found.setdefault(loaded_name(stored, case.config.architecture, case.version), []).append(stored)
    return found


def names(case: Case) -> Iterator[Finding]:
    wanted, found = expected(case), loaded(case)
    if not wanted:
        return
    missing = [name for name in wanted if name not in found]
    renamed = [stored for stored in case.checkpoint.where if stored.startswith(("layers.0.", "model.layers.0."))]
    if missing:
        old = bool(renamed) and case.version < SEVERAL_LAYERS
        skipped = f"{shown(renamed[0])} and its like are skipped before {SEVERAL_LAYERS}; " if old else ""
        yield failed(
            "tensors",
            f"{len(missing)} of {len(wanted)} are missing: {_some(missing)}",
            why=f"{skipped}what nothing fills keeps its random start, without a word: accept length about 1",
            fix="gpubox draft convert renames them" if old else "export the draft again",
            reference="sglang models/llama_eagle3.py load_weights",
        )
    elif twice := [stored for name, stored in found.items() if name in wanted and len(stored) > 1]:
        yield failed("tensors", f"{_some(twice[0])} load into the same parameter", why="the last one read wins")
    else:
        yield passed("tensors", f"all {len(wanted)} are there")


def unread(case: Case) -> Iterator[Finding]:
    wanted = expected(case)
    known = {*wanted, HEAD.name, EMBEDDING.name, D2T, T2D}
    extra = [
        stored for name, all_stored in loaded(case).items() if name not in known for stored in all_stored
        if not stored.endswith(IGNORED)
    ]  # fmt: skip
    if not wanted:
        return
    if norms := [name for name in extra if any(part in name for part in ("fc_norm", "input_norm", "aux_norm"))]:
        yield failed(
            "unread tensors",
            f"{_some(norms)}: trained with a norm that config.json does not ask for",
            why="the engine skips tensors that it does not know, without a word",
            fix="set norm_before_fc (input_norm) or fc_norm in config.json, as the training had it",
        )
    elif extra:
        yield warned(
            "unread tensors",
            f"the engine skips {_some(extra)}",
            fix="nothing if they are of the training only; gpubox draft convert drops verifier_*",
        )
    else:
        yield passed("unread tensors", "none")


def shapes(case: Case) -> Iterator[Finding]:
    wanted, found, sizes = expected(case), loaded(case), case.config.sizes()
    if case.config.quantization_config is not None or not wanted:
        return
    optional = {EMBEDDING.name: EMBEDDING, HEAD.name: HEAD}
    wrong = []
    for name, tensor in {**optional, **wanted}.items():
        try:
            shape = tuple(size(word, sizes) for word in tensor.shape.split())
        except KeyError:
            continue  # a size of MLA is missing: "attention" says so
        wrong += [
            f"{shown(stored)} is {list(info.shape)}, not {list(shape)}"
            for stored in found.get(name, ()) if (info := case.checkpoint.info(stored)).shape != shape
        ]  # fmt: skip
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        yield failed(
            "shapes",
            wrong[0] + more,
            why="the engine fails when it loads the draft, after the target",
            fix="config.json and weights are not of one export",
        )
    else:
        yield passed("shapes", "as config.json says")


def types(case: Case) -> Iterator[Finding]:
    if case.config.quantization_config is not None:
        return
    wanted, found = expected(case), loaded(case)
    used = Counter(case.checkpoint.info(stored).dtype for name in wanted for stored in found.get(name, ()))
    if strange := sorted(used.keys() - set(FLOATS)):
        yield failed(
            "types",
            f"weights of type {', '.join(strange)}",
            why="without a quantization_config they are taken for plain numbers",
            fix="export in bfloat16",
        )
    elif len(used) > 1:
        yield warned("types", f"mixed: {', '.join(f'{count} {dtype}' for dtype, count in used.most_common())}")
    else:
        yield passed("types", ", ".join(used) or "no weights")


def _some(items: list[str]) -> str:
    text = ", ".join(shown(item) for item in items[:3])
    return text + (f" and {len(items) - 3} more" if len(items) > 3 else "")


CHECKS = (names, unread, shapes, types)

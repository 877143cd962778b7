"""Checks of a draft's config.json against the engine and the target: classes, sizes, norms, positions."""

from __future__ import annotations

from collections.abc import Iterator

from gpubox.drafts.case import Case
from gpubox.drafts.config import context_length, rotary_base
from gpubox.drafts.contract import (
    AUX_NORMS,
    NEW_ROTARY_SPELLING,
    NEWEST,
    NORM_BEFORE_FC,
    REQUIRED,
    SEVERAL_LAYERS,
    SINCE,
)
from gpubox.drafts.findings import Finding, failed, passed, warned
from gpubox.specs import patch_names
from gpubox.weights.safetensors import shown

LOADER = "sglang models/llama_eagle3.py, models/kimi_k25_eagle3.py"


def engine(case: Case) -> Iterator[Finding]:
    if case.version > NEWEST:
        yield warned(
            "engine",
            f"version {case.version} is newer than what was read for these checks ({NEWEST})",
            fix="compare its models/llama_eagle3.py with the tables of gpubox/drafts/contract.py",
        )
    else:
        yield passed("engine", f"checked for version {case.version}")


def file_format(case: Case) -> Iterator[Finding]:
    if case.foreign_format:
        yield failed(
            "format",
            f"config.json is of the library {case.foreign_format}",
            why="the engine does not look into it and would start from other sizes",
            fix="gpubox draft convert; the findings below are of the config that it would write",
        )
    else:
        yield passed("format", "flat config")


def architecture(case: Case) -> Iterator[Finding]:
    name = case.config.architecture
    if name not in REQUIRED:
        yield failed(
            "architecture",
            f"{shown(name)} is no EAGLE-3 draft class of the engine",
            why="the engine would not start, or load it as something else",
            fix=f"one of {', '.join(REQUIRED)}",
            reference=LOADER,
        )
    elif case.version < SINCE[name]:
        yield failed("architecture", f"{name} exists from {SINCE[name]} on", fix="a stack with that version")
    else:
        yield passed("architecture", name)


def layers(case: Case) -> Iterator[Finding]:
    count = case.config.num_hidden_layers
    if count > 1 and not case.serves_several_layers:
        since = f"{SEVERAL_LAYERS} on" if case.is_llama else "no version on"
        yield failed("layers", f"num_hidden_layers is {count}; more than one is served from {since}", reference=LOADER)
    else:
        yield passed("layers", f"{count}")


def hidden_size(case: Case) -> Iterator[Finding]:
    config, target = case.config, case.target
    if case.is_llama and "target_hidden_size" in case.raw and case.raw["target_hidden_size"] is None:
        yield failed(
            "hidden size",
            "target_hidden_size is null",
            why="the Llama class multiplies it by the number of captured layers and fails at start",
            fix="remove the key, or gpubox draft convert",
            reference=LOADER,
        )
    elif config.target_width != target.hidden_size:
        said = "target_hidden_size" if config.target_hidden_size else "hidden_size"
        yield failed(
            "hidden size",
            f"{said} is {config.target_width}, the target has {target.hidden_size}",
            why="fc takes the target's hidden states",
            fix="this draft belongs to another target"
            if config.target_hidden_size
            else "set target_hidden_size if the draft was trained on this target",
        )
    elif config.captured_layers * config.target_width == config.hidden_size:
        yield failed(
            "hidden size",
            f"{config.captured_layers} layers of {config.target_width} are as wide as the draft",
            why="the engine tells by the width whether fc is still to be applied, and would leave it out",
            reference="sglang#21272",
        )
    else:
        own = "" if case.shares_embedding else f", the draft {config.hidden_size} with an embedding of its own"
        yield passed("hidden size", f"target {target.hidden_size}{own}")


def vocabulary(case: Case) -> Iterator[Finding]:
    config, target = case.config, case.target
    if config.vocab_size != target.vocab_size:
        yield failed(
            "vocabulary",
            f"vocab_size is {config.vocab_size}, the target has {target.vocab_size}",
            why="the embedding is the target's, and proposed tokens are its ids",
            fix="correct config.json if only the number is wrong; otherwise it is another target's draft",
        )
    elif "draft_vocab_size" not in case.raw and case.is_llama and not config.tie_word_embeddings:
        yield failed(
            "vocabulary",
            "draft_vocab_size is missing",
            why="the Llama class reads it without a default and fails at start; null means the target's head",
            fix="gpubox draft convert, or write the rows of lm_head.weight there",
            reference=LOADER,
        )
    elif config.draft_vocabulary > config.vocab_size:
        yield failed("vocabulary", f"draft_vocab_size {config.draft_vocab_size} is more than vocab_size")
    elif config.tie_word_embeddings and config.draft_vocabulary != config.vocab_size:
        yield failed(
            "vocabulary",
            f"tie_word_embeddings is true, but draft_vocab_size is {config.draft_vocab_size}",
            why="the engine would take the embedding for the head, with other tokens in its rows",
            fix="set tie_word_embeddings to false",
        )
    elif config.tie_word_embeddings is None and not case.is_llama:
        yield warned(
            "vocabulary",
            "tie_word_embeddings is missing",
            why="what it then is depends on model_type and on the transformers version",
            fix="set it to false",
        )
    else:
        yield passed("vocabulary", f"{config.draft_vocabulary} of {config.vocab_size} tokens")


def attention(case: Case) -> Iterator[Finding]:
    config, ranks = case.config, case.serving.tensor_parallel
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    problem = ""
    if heads % kv_heads:
        problem = f"{heads} heads are no multiple of {kv_heads} key-value heads"
    elif config.head_dim is None and config.hidden_size % heads:
        problem = f"hidden_size {config.hidden_size} is no multiple of {heads} heads, and head_dim is missing"
    elif ranks and heads % ranks:
        problem = f"{heads} heads cannot be split over {ranks} GPUs"
    elif ranks and case.is_llama and kv_heads % ranks and ranks % kv_heads:
        problem = f"{kv_heads} key-value heads can neither be split over {ranks} GPUs nor repeated evenly"
    elif ranks and config.intermediate_size % ranks:
        problem = f"intermediate_size {config.intermediate_size} cannot be split over {ranks} GPUs"
    elif not case.is_llama and (missing := [key for key in _MLA_SIZES if getattr(config, key) is None]):
        problem = f"{missing[0]} is missing"
    if problem:
        yield failed("attention", problem, why="the engine fails at start, after the target was loaded")
    else:
        split = f", over {ranks} GPUs" if ranks else ""
        yield passed("attention", f"{heads} heads, {kv_heads} key-value heads{split}")


_MLA_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


def positions(case: Case) -> Iterator[Finding]:
    """The server's context length is copied to the draft."""
    served = case.serving.context_length or context_length(case.target)
    own = context_length(case.config)
    if own < served:
        whose = "of the server" if case.serving.context_length else "of the target, which no --context-length limits"
        yield failed(
            "positions",
            f"max_position_embeddings allows {own} tokens; the context {whose} has {served}",
            why="the engine refuses to start, after it loaded the target; where allowed, acceptance falls beyond",
            fix=f"serve with a context length of at most {own}, or train the draft on longer text",
            reference="sglang#6783",
        )
    else:
        yield passed("positions", f"{own} tokens, {served} served")


def rotary(case: Case) -> Iterator[Finding]:
    new = case.version >= NEW_ROTARY_SPELLING
    own, target = rotary_base(case.config, new_spelling=new), rotary_base(case.target, new_spelling=True)
    if own is None:
        unread = rotary_base(case.config, new_spelling=True) is not None
        yield failed(
            "rotary base",
            "rope_theta is missing" + "; this version does not read rope_parameters" * unread,
            why="the engine would use 10000, whatever the draft was trained with",
            fix="gpubox draft convert writes both spellings" if unread else "set it to what the draft was trained with",
            reference="speculators#574",
        )
    elif own != target:
        yield warned(
            "rotary base",
            f"rope_theta is {own:g}, the target has {target:g}" if target else f"rope_theta is {own:g}",
            why="right only if the draft was trained with it: losing it costs acceptance, the more the longer the text",
            fix="compare with the training's configuration",
            reference="SpecForge#265",
        )
    else:
        yield passed("rotary base", f"{own:g}, as the target")


def weight_type(case: Case) -> Iterator[Finding]:
    own, target = case.config.weight_type, case.target.weight_type
    if case.serving.dtype not in (None, "auto"):
        yield passed("weight type", f"{case.serving.dtype}, by --dtype")
    elif own is None or own == "float32":
        yield failed(
            "weight type",
            f"torch_dtype is {own or 'missing'}",
            why=f"the engine then computes the draft in float16, the target in {target or 'its own type'}",
            fix=f'set "torch_dtype": "{target or "bfloat16"}" in config.json',
            reference="sglang configs/model_config.py _get_and_verify_dtype",
        )
    elif target and own != target:
        yield failed(
            "weight type",
            f"torch_dtype is {shown(own)}, the target's {shown(target)}",
            why="hidden states of the one go into layers of the other",
            fix=f'set "torch_dtype": "{target}" in config.json; weights are converted when loaded',
        )
    else:
        yield passed("weight type", shown(own))


def quantization(case: Case) -> Iterator[Finding]:
    if case.config.quantization_config is None:
        yield passed("quantization", "none")
    elif case.serving.quantized_on_purpose:
        yield warned("quantization", "quantized, as you say; shapes and types of its linear layers were not checked")
    else:
        yield failed(
            "quantization",
            "config.json has a quantization_config",
            why="a draft is small: quantizing it saves little and costs acceptance",
            fix="remove the key if the weights are not quantized; --quantized if it is meant",
        )


def norm_before_residual(case: Case) -> Iterator[Finding]:
    if not case.config.norm_before_residual:
        yield passed("norm_before_residual", "false: the residual is the state before hidden_norm")
    elif patch_names.NORM_BEFORE_RESIDUAL in case.patches:
        yield passed("norm_before_residual", f"true, served by the patch {patch_names.NORM_BEFORE_RESIDUAL}")
    else:
        yield failed(
            "norm_before_residual",
            "true: the draft was trained with the normed state as residual",
            why=f"no version up to {NEWEST} does that: it serves with other numbers and low acceptance, without a word",
            fix=f"train with norm_before_residual = false, or serve with the patch {patch_names.NORM_BEFORE_RESIDUAL}",
            reference="sglang models/llama_eagle3.py: no such option",
        )


def norms_before_fc(case: Case) -> Iterator[Finding]:
    """input_norm over all captured layers at once, fc_norm over each."""
    config = case.config
    if config.wants_norm_before_fc and (case.version < NORM_BEFORE_FC or not case.is_llama):
        yield failed(
            "norms before fc",
            "norm_before_fc is true",
            why=f"the Llama class applies it from {NORM_BEFORE_FC} on, the MLA class never; unread, it is left out",
            fix=f"an engine from {NORM_BEFORE_FC} on, or train without",
            reference="sglang#32334",
        )
    elif config.wants_fc_norm and case.version < AUX_NORMS:
        yield failed(
            "norms before fc",
            "fc_norm is true",
            why=f"applied from {AUX_NORMS} on; before, it is left out without a word",
            fix=f"an engine from {AUX_NORMS} on, or train without",
        )
    else:
        wanted = {"norm_before_fc": config.wants_norm_before_fc, "fc_norm": config.wants_fc_norm}
        yield passed("norms before fc", ", ".join(name for name, on in wanted.items() if on) or "none")


def norm_output(case: Case) -> Iterator[Finding]:
    """Which state the next draft step gets."""
    wanted = case.config.norm_output
    if wanted is None:
        yield passed("norm_output", "absent: the next step gets the state before the last norm")
    elif wanted and case.version < AUX_NORMS:
        yield failed(
            "norm_output",
            "true: the next step shall get the normed state",
            why=f"read from {AUX_NORMS} on; before, acceptance falls from the second step on",
            fix=f"an engine from {AUX_NORMS} on, or train without",
        )
    else:
        yield warned(
            "norm_output",
            f"{str(wanted).lower()}: trainers mean two different things by it",
            why="speculators and engine: the next step gets the normed state; SpecForge 0.2.0: norm before the head",
            fix="a draft of SpecForge 0.2.0 must not have the key; one of speculators may",
            reference="SpecForge#879",
        )


CHECKS = (
    *(engine, file_format, architecture, layers, hidden_size, vocabulary, attention, positions, rotary, weight_type),
    *(quantization, norm_before_residual, norms_before_fc, norm_output),
)

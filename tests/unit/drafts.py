"""Small EAGLE-3 drafts and a target with the structure of Kimi-K2.5, written as real files."""

from __future__ import annotations

import copy
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpubox.weights.safetensors import TensorInfo, encode_header, nbytes

HIDDEN, VOCABULARY, DRAFT_VOCABULARY, LAYERS = 16, 64, 24, 61
HEADS, KV_HEADS, HEAD, INNER = 4, 2, 4, 32

TARGET = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 4096,
        "rope_theta": 50000.0,
        "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 64},
        "dtype": "bfloat16",
    },
}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "draft_vocab_size": DRAFT_VOCABULARY,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 50000.0,
    "max_position_embeddings": 4096,
    "bias": False,
    "torch_dtype": "bfloat16",
    "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 29, 57]},
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"],
    "auto_map": {"": "config.Eagle3SpeculatorConfig"},
    "draft_vocab_size": DRAFT_VOCABULARY,
    "dtype": "float32",
    "eagle_aux_hidden_state_layer_ids": None,
    "norm_before_fc": False,
    "norm_before_residual": False,
    "speculators_config": {"algorithm": "eagle3", "verifier": {"architectures": []}},
    "speculators_model_type": "eagle3",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        **{key: CONFIG[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")},
        **{key: CONFIG[key] for key in ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps")},
        "attention_bias": False,
        "model_type": "llama",
        "num_hidden_layers": 1,
        "rope_scaling": None,
        "rope_theta": 50000.0,
        "vocab_size": VOCABULARY,
    },
}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 6, "qk_rope_head_dim": 2, "qk_nope_head_dim": 3, "v_head_dim": 4}

Tensor = tuple[str, tuple[int, ...], bytes]


def tensor(shape: tuple[int, ...], dtype: str = "BF16", fill: bytes = b"\x80\x3f") -> Tensor:
    """Ones, unless told otherwise."""
    size = nbytes(dtype, shape)
    assert size is not None
    return dtype, shape, (fill * (size // len(fill) + 1))[:size]


def integers(values: list[int], dtype: str = "I64") -> Tensor:
    code = {"I64": "q", "I32": "i"}[dtype]
    return dtype, (len(values),), struct.pack(f"<{len(values)}{code}", *values)


def booleans(values: list[bool]) -> Tensor:
    return "BOOL", (len(values),), bytes(values)


def weights(prefix: str = "midlayer.") -> dict[str, Tensor]:
    """What a Llama draft has. It drafts the even tokens below 48."""
    wide = 2 * HIDDEN
    ids = [2 * index for index in range(DRAFT_VOCABULARY)]
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    return {
        **{f"{prefix}{name}.weight": tensor((HIDDEN,)) for name in norms},
        f"{prefix}self_attn.q_proj.weight": tensor((HEADS * HEAD, wide)),
        f"{prefix}self_attn.k_proj.weight": tensor((KV_HEADS * HEAD, wide)),
        f"{prefix}self_attn.v_proj.weight": tensor((KV_HEADS * HEAD, wide)),
        f"{prefix}self_attn.o_proj.weight": tensor((HIDDEN, HEADS * HEAD)),
        f"{prefix}mlp.gate_proj.weight": tensor((INNER, HIDDEN)),
        f"{prefix}mlp.up_proj.weight": tensor((INNER, HIDDEN)),
        f"{prefix}mlp.down_proj.weight": tensor((HIDDEN, INNER)),
        "fc.weight": tensor((HIDDEN, 3 * HIDDEN)),
        "norm.weight": tensor((HIDDEN,)),
        "lm_head.weight": tensor((DRAFT_VOCABULARY, HIDDEN)),
        "d2t": integers([target - index for index, target in enumerate(ids)]),
        "t2d": booleans([token in ids for token in range(VOCABULARY)]),
    }


def mla_weights() -> dict[str, Tensor]:
    found = {name: value for name, value in weights().items() if "self_attn" not in name}
    attention = {
        "q_a_proj.weight": (MLA["q_lora_rank"], 2 * HIDDEN),
        "q_a_layernorm.weight": (MLA["q_lora_rank"],),
        "q_b_proj.weight": (HEADS * (3 + 2), MLA["q_lora_rank"]),
        "kv_a_proj_with_mqa.weight": (6 + 2, 2 * HIDDEN),
        "kv_a_layernorm.weight": (6,),
        "kv_b_proj.weight": (HEADS * (3 + 4), 6),
        "o_proj.weight": (HIDDEN, HEADS * 4),
    }
    return found | {f"midlayer.self_attn.{name}": tensor(shape) for name, shape in attention.items()}


@dataclass
class Draft:
    """A draft before it is written; tests change one thing in it."""

    config: dict[str, Any] = field(default_factory=lambda: copy.deepcopy(CONFIG))
    tensors: dict[str, Tensor] = field(default_factory=weights)

    def write(self, directory: Path, shards: int = 1) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        names = list(self.tensors)
        for number in range(shards):
            file = "model.safetensors" if shards == 1 else f"model-{number + 1:05}-of-{shards:05}.safetensors"
            write_tensors(directory / file, {name: self.tensors[name] for name in names[number::shards]})
        return directory


def speculators_draft() -> Draft:
    """As the library saves it: nested config, layers.0, what only the training needs."""
    extra = {"verifier_norm.weight": tensor((HIDDEN,)), "embed_tokens.weight": tensor((VOCABULARY, HIDDEN))}
    return Draft(copy.deepcopy(SPECULATORS), {**weights("layers.0."), **extra})


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    placed: dict[str, TensorInfo] = {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        placed[name] = TensorInfo(dtype, shape, at, at + len(data))
        at += len(data)
    path.write_bytes(encode_header(placed, {"format": "pt"}) + b"".join(data for _, _, data in tensors.values()))


def write_target(directory: Path, config: dict[str, Any] | None = None, *, files: bool = True) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config or TARGET))
    if files:
        prefix = "language_model."
        write_tensors(
            directory / "model-00001-of-00002.safetensors",
            {f"{prefix}model.embed_tokens.weight": tensor((VOCABULARY, HIDDEN))},
        )
        write_tensors(
            directory / "model-00002-of-00002.safetensors", {f"{prefix}lm_head.weight": tensor((VOCABULARY, HIDDEN))}
        )
    return directory

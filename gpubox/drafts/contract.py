"""What each SGLang version asks of an EAGLE-3 draft, as data. Rules that read these tables are in the modules beside.

Read in the released wheels 0.5.7 to 0.5.23: models/llama_eagle3.py, models/kimi_k25_eagle3.py, the hooks
`set_eagle3_layers_to_capture` of models/*.py, and model_executor/cuda_graph_runner.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from packaging.version import InvalidVersion, Version

from gpubox.errors import InputError

OLDEST: Final = Version("0.5.7")
NEWEST: Final = Version("0.5.23")

SEVERAL_LAYERS: Final = Version("0.5.12")  # the module list `layers`; `midlayer.*` still loads as `layers.0.*`
AUX_NORMS: Final = Version("0.5.12")  # fc_norm, use_aux_norm, num_aux_hidden_states, norm_output
NORM_BEFORE_FC: Final = Version("0.5.17")  # sglang#32334; the key is read nowhere in 0.5.12 to 0.5.16
GRAPH_USES_IDS: Final = Version("0.5.11")  # sglang#22836; before it graphs are captured with the default layers
NEW_ROTARY_SPELLING: Final = Version("0.5.10")  # transformers 5: rope_parameters; before it only rope_theta is read
CAPTURE_AFTER_REDUCE: Final = Version("0.5.14")  # before it a fused all-reduce leaves partial sums in the capture


def engine_version(text: str) -> Version:
    """Raises InputError for a version that the tables cannot place: source builds have the rules of a release."""
    try:
        version = Version(text)
    except InvalidVersion:
        raise InputError(f"engine version {text!r} is not a version", hint="for example 0.5.9") from None
    if version.is_prerelease or version < OLDEST:
        raise InputError(
            f"engine version {text}: what it asks of a draft is known for releases from {OLDEST} on",
            hint="for a source build name the release whose models/llama_eagle3.py and hooks it has",
        )
    return version


class Tensor(NamedTuple):
    """A tensor that the loader fills. `shape`: sizes and products of the names in `sizes()`, one word a dimension."""

    name: str
    shape: str


# V: target vocabulary, D: draft vocabulary, H: hidden size, T: target's hidden size, A: captured layers,
# Q: heads * head_dim, K: key-value heads * head_dim, I: intermediate size. MLA: R, L the ranks of q and kv,
# P the rotary part of a head, N the rest of it, W the width of v, M the heads.
_NORMS_AND_MLP: Final = (
    Tensor("midlayer.input_layernorm.weight", "H"),
    Tensor("midlayer.hidden_norm.weight", "H"),
    Tensor("midlayer.post_attention_layernorm.weight", "H"),
    Tensor("midlayer.mlp.gate_proj.weight", "I H"),
    Tensor("midlayer.mlp.up_proj.weight", "I H"),
    Tensor("midlayer.mlp.down_proj.weight", "H I"),
    Tensor("fc.weight", "H A*T"),
    Tensor("norm.weight", "H"),
)
REQUIRED: Final[Mapping[str, tuple[Tensor, ...]]] = MappingProxyType(
    {
        "LlamaForCausalLMEagle3": (
            *_NORMS_AND_MLP,
            Tensor("midlayer.self_attn.q_proj.weight", "Q 2*H"),
            Tensor("midlayer.self_attn.k_proj.weight", "K 2*H"),
            Tensor("midlayer.self_attn.v_proj.weight", "K 2*H"),
            Tensor("midlayer.self_attn.o_proj.weight", "H Q"),
        ),
        "Eagle3DeepseekV2ForCausalLM": (
            *_NORMS_AND_MLP,
            Tensor("midlayer.self_attn.q_a_proj.weight", "R 2*H"),
            Tensor("midlayer.self_attn.q_a_layernorm.weight", "R"),
            Tensor("midlayer.self_attn.q_b_proj.weight", "M*N+M*P R"),
            Tensor("midlayer.self_attn.kv_a_proj_with_mqa.weight", "L+P 2*H"),
            Tensor("midlayer.self_attn.kv_a_layernorm.weight", "L"),
            Tensor("midlayer.self_attn.kv_b_proj.weight", "M*N+M*W L"),
            Tensor("midlayer.self_attn.o_proj.weight", "H M*W"),
        ),
    }
)
SINCE: Final[Mapping[str, Version]] = MappingProxyType(
    {"LlamaForCausalLMEagle3": OLDEST, "Eagle3DeepseekV2ForCausalLM": Version("0.5.12")}
)
LLAMA, MLA = REQUIRED
# Further layers of a Llama draft (from SEVERAL_LAYERS on): not the input layer, so their attention is H wide.
FURTHER_LAYER: Final = tuple(
    Tensor(tensor.name.replace("midlayer.", "layers.{layer}."), tensor.shape.replace("2*H", "H"))
    for tensor in REQUIRED[LLAMA]
    if tensor.name.startswith("midlayer.") and "input_layernorm" not in tensor.name
)
HEAD: Final = Tensor("lm_head.weight", "D H")
EMBEDDING: Final = Tensor("embed_tokens.weight", "V H")
FC_BIAS: Final = Tensor("fc.bias", "H")
OUTPUT_BIAS: Final = Tensor("midlayer.self_attn.o_proj.bias", "H")
FC_NORM: Final = Tensor("fc_norm.{index}.weight", "T")
INPUT_NORM: Final = Tensor("input_norm.weight", "A*T")
D2T: Final = "d2t"
T2D: Final = "t2d"

LEGACY_NORMS: Final = MappingProxyType({"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1",
                                        "aux_norm_high": "fc_norm.2"})  # fmt: skip


def loaded_name(stored: str, architecture: str, version: Version) -> str:
    """The name of REQUIRED that the loader of `version` fills from a stored tensor; the stored one if there is none.

    Unknown names are skipped by the engine without a word, and what nothing fills keeps its random start.
    """
    name = stored
    if architecture == LLAMA:
        name = name.removeprefix("model.") if not name.startswith("model.lm_head.") else name
        if version < SEVERAL_LAYERS:
            return name
        for legacy, new in LEGACY_NORMS.items():
            name = name.replace(legacy, new)
    return re.sub(r"^layers\.0\.", "midlayer.", name)


def size(expression: str, sizes: Mapping[str, int]) -> int:
    """A dimension of a Tensor's shape: sums of products of names and numbers."""
    total = 0
    for term in expression.split("+"):
        product = 1
        for factor in term.split("*"):
            product *= sizes[factor] if factor.isalpha() else int(factor)
        total += product
    return total

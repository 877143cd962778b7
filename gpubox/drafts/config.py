"""config.json of a draft and of its target: the keys that the engine reads, with their types."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpubox.drafts.documents import read_object
from gpubox.errors import InputError

Size = Annotated[int, Field(ge=1, le=2**24)]
Count = Annotated[int, Field(ge=1, le=64)]
LayerId = Annotated[int, Field(ge=0, le=4096)]
SPECULATORS_KEYS: Final = ("speculators_model_type", "speculators_config", "transformer_layer_config")
IDS: Final = "eagle_aux_hidden_state_layer_ids"


class _Read(BaseModel):
    """Strict on the keys that are read, blind to the rest: a config carries many keys for other programs."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class EagleConfig(_Read):
    """Without layer ids the engine takes its default layers, as it does for an eagle_config that it cannot read."""

    use_aux_hidden_state: bool = True
    eagle_aux_hidden_state_layer_ids: Annotated[list[LayerId], Field(min_length=1, max_length=64)] | None = None
    norm_before_fc: bool | None = None


class DraftConfig(_Read):
    """A flat config of an EAGLE-3 draft as SGLang reads it. Sizes in elements, positions in tokens."""

    architectures: Annotated[list[str], Field(min_length=1)]
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Count
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    vocab_size: Size
    draft_vocab_size: Size | None = None
    target_hidden_size: Size | None = None
    max_position_embeddings: Size
    tie_word_embeddings: bool | None = None
    bias: bool | None = None
    attention_bias: bool | None = None
    torch_dtype: str | None = None
    dtype: str | None = None
    rope_theta: float | int | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    eagle_config: EagleConfig | None = None
    num_aux_hidden_states: Count | None = None
    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    norm_output: bool | None = None
    fc_norm: bool | None = None
    use_aux_norm: bool | None = None
    quantization_config: dict[str, Any] | None = None
    q_lora_rank: Size | None = None
    kv_lora_rank: Size | None = None
    qk_rope_head_dim: Size | None = None
    qk_nope_head_dim: Size | None = None
    v_head_dim: Size | None = None

    @property
    def architecture(self) -> str:
        return self.architectures[0]

    @property
    def ids(self) -> list[int] | None:
        return self.eagle_config.eagle_aux_hidden_state_layer_ids if self.eagle_config else None

    @property
    def captured_layers(self) -> int:
        """How many layers of the target fc takes in."""
        return self.num_aux_hidden_states or len(self.ids or (0, 0, 0))

    @property
    def draft_vocabulary(self) -> int:
        return self.draft_vocab_size or self.vocab_size

    @property
    def target_width(self) -> int:
        return self.target_hidden_size or self.hidden_size

    @property
    def wants_norm_before_fc(self) -> bool:
        nested = self.eagle_config.norm_before_fc if self.eagle_config else None
        return bool(self.norm_before_fc if nested is None else nested)

    @property
    def wants_fc_norm(self) -> bool:
        return bool(self.fc_norm or self.use_aux_norm)

    @property
    def weight_type(self) -> str | None:
        """As the engine finds it: `dtype` is the newer name."""
        return self.dtype or self.torch_dtype

    def sizes(self) -> dict[str, int]:
        """The names of contract.Tensor's shapes; those of MLA only where the config has all of them."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads or self.num_attention_heads
        head = self.head_dim or self.hidden_size // heads
        found = {"V": self.vocab_size, "D": self.draft_vocabulary, "H": self.hidden_size, "T": self.target_width}
        found |= {"A": self.captured_layers, "I": self.intermediate_size, "M": heads}
        found |= {"Q": heads * head, "K": kv_heads * head}
        ranks = {"R": self.q_lora_rank, "L": self.kv_lora_rank, "P": self.qk_rope_head_dim}
        ranks |= {"N": self.qk_nope_head_dim, "W": self.v_head_dim}
        return found | {name: value for name, value in ranks.items() if value is not None}


class TargetConfig(_Read):
    """What of the target's config a draft must agree with; of a multimodal one, its text part."""

    architectures: Annotated[list[str], Field(min_length=1)]
    hidden_size: Size
    vocab_size: Size
    num_hidden_layers: Annotated[int, Field(ge=4, le=4096)]
    max_position_embeddings: Size
    rope_theta: float | int | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    torch_dtype: str | None = None
    dtype: str | None = None

    @property
    def architecture(self) -> str:
        return self.architectures[0]

    @property
    def weight_type(self) -> str | None:
        return self.dtype or self.torch_dtype


def context_length(config: DraftConfig | TargetConfig) -> int:
    """Tokens that the engine derives (get_context_length of its hf_transformers_utils)."""
    scaling = config.rope_scaling or {}
    factor = scaling.get("factor", 1)
    stretched = "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3"
    if stretched or not isinstance(factor, int | float) or not 0 < factor < 1e6:
        return config.max_position_embeddings
    return int(config.max_position_embeddings * factor)


def rotary_base(config: DraftConfig | TargetConfig, *, new_spelling: bool) -> float | None:
    """rope_theta as an engine reads it that knows rope_parameters (`new_spelling`), or one that does not."""
    nested = (config.rope_parameters or {}).get("rope_theta") if new_spelling else None
    value = config.rope_theta if nested is None else nested
    return float(value) if isinstance(value, int | float) else None


def read_target(directory: Path) -> TargetConfig:
    """Raises InputError naming the file and the key."""
    path = directory / "config.json"
    data = read_object(path)
    text = data.get("text_config")
    flat = {**data, **text, "architectures": data.get("architectures")} if isinstance(text, dict) else data
    try:
        return TargetConfig.model_validate(flat)
    except ValidationError as error:
        raise InputError(f"{path}: {problems(error)[0]}", hint="give the target's directory with --target") from None


def problems(error: ValidationError) -> list[str]:
    """One line for each key: its name, the value shortened, what is wrong."""
    found = []
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"])
        value = "" if item["type"] == "missing" else f" = {repr(item['input'])[:60]}"
        found.append(f"{key}{value}: {item['msg']}")
    return found

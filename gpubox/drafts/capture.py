"""Which layers of the target really feed the draft: the engine's reading of the configured ids, by version and target.

An index i means: what enters layer i, that is the output of layer i - 1. `ids` are those of the draft's config.json.
Source: `set_eagle3_layers_to_capture` in SGLang's models/*.py (0.5.9 and 0.5.17 read in full, deepseek_v2.py in all).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from packaging.version import Version

from gpubox.drafts.contract import GRAPH_USES_IDS, OLDEST
from gpubox.specs import patch_names

Rule = Callable[[list[int], int], list[int]]


def _plus_one(ids: list[int], layers: int) -> list[int]:
    return [index + 1 for index in ids]


def _plus_one_if_first_is_one(ids: list[int], layers: int) -> list[int]:
    return _plus_one(ids, layers) if ids[:1] == [1] else list(ids)


def _plus_one_unless_boundary(ids: list[int], layers: int) -> list[int]:
    return list(ids) if max(ids, default=0) == layers else _plus_one(ids, layers)


GPT_OSS_BOUNDARIES: Final = Version("0.5.17")  # sglang#32334

# Family of targets -> (since, rule), oldest first.
RULES: Final[Mapping[str, tuple[tuple[Version, Rule], ...]]] = MappingProxyType(
    {
        "llama": ((OLDEST, _plus_one),),
        "deepseek": ((OLDEST, _plus_one), (Version("0.5.13"), _plus_one_if_first_is_one)),  # sglang#25454
        "gpt-oss": ((OLDEST, _plus_one), (GPT_OSS_BOUNDARIES, _plus_one_unless_boundary)),
    }
)


class Hook(NamedTuple):
    """A target's class and its hook: `absent` the last release read without it, `present` the first read with it."""

    family: str
    present: Version
    absent: Version | None = None


# Targets with set_eagle3_layers_to_capture and get_embed_and_head; Qwen2MoeForCausalLM has only the first.
_READ_FIRST: Final = Version("0.5.9")
_IN_0_5_9: Final = (
    *("ApertusForCausalLM", "BailingMoEForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM"),
    *(
        "ExaoneMoEForCausalLM",
        "Glm4MoeForCausalLM",
        "IQuestCoderForCausalLM",
        "InternLM3ForCausalLM",
        "Llama4ForCausalLM",
    ),
    *("Llama4ForConditionalGeneration", "LlamaForCausalLM", "LongcatFlashForCausalLM", "MiniMaxM2ForCausalLM"),
    *("Ministral3ForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM"),
    *("Qwen2_5_VLForConditionalGeneration", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM"),
    "TeleFLMForCausalLM",
)
_NEW_IN_0_5_17: Final = (
    *("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    *("MiniMaxM3SparseForCausalLM", "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
    *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
)
HOOKS: Final[Mapping[str, Hook]] = MappingProxyType(
    {
        **dict.fromkeys(_IN_0_5_9, Hook("llama", OLDEST)),
        **dict.fromkeys(_NEW_IN_0_5_17, Hook("llama", Version("0.5.17"), absent=_READ_FIRST)),
        **dict.fromkeys(
            ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "MistralLarge3ForCausalLM"),
            Hook("deepseek", OLDEST),
        ),
        "GlmMoeDsaForCausalLM": Hook("deepseek", OLDEST),
        "GptOssForCausalLM": Hook("gpt-oss", OLDEST),
        "KimiK25ForConditionalGeneration": Hook("deepseek", Version("0.5.10"), absent=_READ_FIRST),  # sglang#19689
    }
)
PATCHED_HOOKS: Final = MappingProxyType({patch_names.HOOKS: "KimiK25ForConditionalGeneration"})


def default_layers(layers: int) -> list[int]:
    """What the engine captures when the config names none. Every trainer's own default means the same layers."""
    return [2, layers // 2, layers - 3]


def last_index(family: str, version: Version, layers: int) -> int:
    """gpt-oss captures behind each layer from 0.5.17 on, so also behind the last; the others where one is entered."""
    return layers if family == "gpt-oss" and version >= GPT_OSS_BOUNDARIES else layers - 1


def rule(family: str, version: Version) -> Rule:
    return [found for since, found in RULES[family] if since <= version][-1]


def eager_layers(ids: list[int] | None, family: str, version: Version, layers: int) -> list[int]:
    return default_layers(layers) if ids is None else rule(family, version)(ids, layers)


def graph_layers(
    ids: list[int] | None, family: str, version: Version, layers: int, patches: Iterable[str]
) -> list[int]:
    """Under CUDA graphs (decode and verify)."""
    if version < GRAPH_USES_IDS and patch_names.GRAPH_LAYERS not in patches:
        return default_layers(layers)
    return eager_layers(ids, family, version, layers)


def encode(entered: list[int], family: str, version: Version, layers: int) -> list[int] | None:
    """The ids that make the engine capture `entered`; None when no ids do. The same in every version where possible."""
    for ids in ([index - 1 for index in entered], list(entered)):
        if min(ids, default=0) >= 0 and rule(family, version)(ids, layers) == entered:
            return ids
    return None

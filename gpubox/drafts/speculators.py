"""Configs of drafts made flat: those of the library speculators, and small repairs that every version agrees on.

Source: speculators' Eagle3SpeculatorConfig and vLLM's reading of it (captured where a layer is entered, default
layers 2, n // 2, n - 3), the engine's models/llama_eagle3.py.
"""

from __future__ import annotations

from typing import Any, Final

from packaging.version import Version

from gpubox.drafts.capture import HOOKS, default_layers, encode
from gpubox.drafts.config import IDS, SPECULATORS_KEYS, TargetConfig
from gpubox.drafts.contract import LLAMA
from gpubox.errors import InputError

FAMILY: Final = "llama"  # of targets that are in no table: every class but those adds one
FROM_TOP: Final = ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm", "target_hidden_size")
OF_ANOTHER_LIBRARY: Final = ("auto_map", "transformers_version", "_name_or_path", "_attn_implementation", "use_cache")


def foreign_format(config: dict[str, Any]) -> str | None:
    return "speculators" if any(key in config for key in SPECULATORS_KEYS) else None


def trained_layers(config: dict[str, Any], target: TargetConfig) -> list[int] | None:
    """The layers entered that a config of speculators names; None for other configs, which do not say."""
    if not foreign_format(config):
        return None
    ids = config.get(IDS)
    if ids is None:
        return default_layers(target.num_hidden_layers)
    if not isinstance(ids, list) or not ids or not all(type(index) is int and 0 <= index < 4096 for index in ids):
        raise InputError(f"{IDS} = {str(ids)[:80]}: not a list of layers")
    return ids


def flat_config(
    config: dict[str, Any], target: TargetConfig, version: Version, trained: list[int] | None
) -> dict[str, Any]:
    """What `convert` writes as config.json: flat, with ids that make this engine version capture `trained`.

    Raises InputError for a layer type that the engine's class is not, and for layers that no ids give.
    """
    flat = _flattened(config) if foreign_format(config) else dict(config)
    flat = {key: value for key, value in flat.items() if key not in OF_ANOTHER_LIBRARY}
    if flat.get("target_hidden_size", 0) is None:
        del flat["target_hidden_size"]
    flat.setdefault("tie_word_embeddings", False)
    if (flat.get("dtype") or flat.get("torch_dtype")) in (None, "float32"):
        flat = {
            **flat,
            "torch_dtype": target.weight_type or "bfloat16",
        }  # the engine converts weights when it loads them
        flat.pop("dtype", None)
    _spell_rotary(flat)
    if trained is not None:
        hook = HOOKS.get(target.architecture)
        ids = encode(trained, hook.family if hook else FAMILY, version, target.num_hidden_layers)
        if ids is None:
            raise InputError(f"no layer ids make sglang {version} capture {trained} of {target.architecture}")
        eagle = flat.get("eagle_config")
        flat["eagle_config"] = {**(eagle if isinstance(eagle, dict) else {}), "use_aux_hidden_state": True, IDS: ids}
    return flat


def _flattened(config: dict[str, Any]) -> dict[str, Any]:
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise InputError("config.json has no transformer_layer_config", hint="export the draft with speculators again")
    if config.get("speculators_model_type") != "eagle3" or layer.get("model_type") != "llama":
        raise InputError(
            f"a speculators draft of type {config.get('speculators_model_type')!r} with layers of type "
            f"{layer.get('model_type')!r}",
            hint="the engine's class serves eagle3 with layers of type llama (train with draft-arch llama)",
        )
    flat = {**layer, "architectures": [LLAMA]}
    flat |= {key: config[key] for key in FROM_TOP if key in config}
    flat["draft_vocab_size"] = config.get("draft_vocab_size")
    flat["tie_word_embeddings"] = bool(config.get("tie_word_embeddings"))
    weight_type = config.get("dtype") or config.get("torch_dtype")
    return {**flat, "torch_dtype": weight_type} if weight_type else flat


def _spell_rotary(flat: dict[str, Any]) -> None:
    """Both spellings: transformers 5 reads rope_parameters, 4 reads rope_theta and rope_scaling."""
    new, theta, scaling = flat.get("rope_parameters"), flat.get("rope_theta"), flat.get("rope_scaling")
    if isinstance(new, dict):
        if theta is None and "rope_theta" in new:
            flat["rope_theta"] = new["rope_theta"]
        if scaling is None and new.get("rope_type", "default") != "default":
            flat["rope_scaling"] = {key: value for key, value in new.items() if key != "rope_theta"}
    elif theta is not None:
        old = scaling if isinstance(scaling, dict) else {}
        kind = old.get("rope_type", old.get("type", "default"))
        flat["rope_parameters"] = {**old, "rope_theta": theta, "rope_type": kind}

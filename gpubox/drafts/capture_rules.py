"""Checks of what the target gives to the draft: its hook, the layers captured, whether they are whole sums."""

from __future__ import annotations

from collections.abc import Iterator

from gpubox.drafts.capture import HOOKS, PATCHED_HOOKS, default_layers, encode, last_index
from gpubox.drafts.case import Case
from gpubox.drafts.contract import (
    AUX_NORMS,
    CAPTURE_AFTER_REDUCE,
    GRAPH_USES_IDS,
)
from gpubox.drafts.findings import Capture, Finding, failed, passed, warned
from gpubox.specs import patch_names
from gpubox.weights.safetensors import shown

ENGINE_DEFAULT = 3  # how many layers fc takes in before AUX_NORMS, whatever the config says


def target_hook(case: Case) -> Iterator[Finding]:
    name = case.target.architecture
    hook = HOOKS.get(name)
    patched = patch_names.HOOKS in case.patches and PATCHED_HOOKS[patch_names.HOOKS] == name
    if hook is None:
        yield warned(
            "target hooks",
            f"{shown(name)} is not in the table of targets with EAGLE-3 hooks",
            why="without set_eagle3_layers_to_capture the engine fails after it has loaded the target",
            fix="look for that method in the engine's models/ and add its class to gpubox/drafts/capture.py",
        )
    elif patched or case.version >= hook.present:
        yield passed("target hooks", f"{name}{', by patch' if case.version < hook.present else ''}")
    elif hook.absent is not None and case.version <= hook.absent:
        patch = f", or the patch {patch_names.HOOKS}" if PATCHED_HOOKS[patch_names.HOOKS] == name else ""
        yield failed(
            "target hooks",
            f"{name} has no EAGLE-3 hooks in {case.version}",
            why="the engine fails with AttributeError after it has loaded the target",
            fix=f"an engine from {hook.present} on{patch}",
            reference="sglang#19689" if patch else "",
        )
    else:
        yield warned(
            "target hooks",
            f"{name} has hooks in {hook.present}; {case.version} was not read",
            fix="look for set_eagle3_layers_to_capture in that version's models/",
        )


def layer_ids(case: Case) -> Iterator[Finding]:
    """What config.json asks for, before any engine reads it."""
    config, eagle = case.config, case.config.eagle_config
    ids = config.ids
    if eagle is not None and not eagle.use_aux_hidden_state:
        yield failed(
            "layer ids",
            "eagle_config.use_aux_hidden_state is false",
            why="the engine then captures no layer; an EAGLE-3 draft is fed with them",
            fix="set it to true",
        )
    elif ids is None:
        yield warned(
            "layer ids",
            "eagle_config names no layers",
            why="the engine takes its default ones",
            fix="gpubox draft convert --trained-layers writes them down",
        )
    elif len(set(ids)) != len(ids) or list(ids) != sorted(ids):
        yield failed(
            "layer ids", f"{ids} are not in ascending order", why="the engine concatenates layers as it meets them"
        )
    elif config.num_aux_hidden_states not in (None, len(ids)):
        yield failed("layer ids", f"{len(ids)} ids, but num_aux_hidden_states is {config.num_aux_hidden_states}")
    elif len(ids) != ENGINE_DEFAULT and case.version < AUX_NORMS:
        yield failed(
            "layer ids",
            f"{len(ids)} layers; fc takes in {ENGINE_DEFAULT} before {AUX_NORMS}",
            why="the engine starts and fails at the first request",
        )
    else:
        yield passed("layer ids", ", ".join(map(str, ids)))


def captured(case: Case) -> Iterator[Finding]:
    """Which layers will really be captured, and whether those are what the draft was trained on."""
    capture = case.capture()
    if capture is None:
        yield warned(
            "captured layers", f"not known for {shown(case.target.architecture)}", fix="compare by a parity test"
        )
        return
    last = last_index(capture.family, case.version, case.target.num_hidden_layers)
    if beyond := [index for index in {*capture.eager, *capture.graph} if index > last]:
        yield failed(
            "captured layers",
            f"layer {max(beyond)} is captured when it is entered; the last that is, is {last}",
            why="fewer states arrive than fc takes in",
            fix=_fix(case, capture),
        )
    elif 0 in capture.eager and capture.trained != capture.eager:
        yield failed(
            "captured layers",
            "what enters layer 0 is the embedding",
            why="no trainer feeds it; it is the sign of a shifted list: training fed other blocks than serving would",
            fix=_fix(case, capture),
        )
    elif capture.eager != capture.graph:
        yield failed(
            "captured layers",
            f"eager {_text(capture.eager)}, under CUDA graphs {_text(capture.graph)}",
            why=f"before {GRAPH_USES_IDS} graphs are captured before the ids are set: prefill and decode differ",
            fix=_fix(case, capture),
            reference="sglang#22836",
        )
    elif capture.trained is not None and capture.trained != capture.eager:
        yield failed(
            "captured layers",
            f"{_text(capture.eager)}, but the draft was trained on {_text(capture.trained)}",
            why="widths agree, so nothing fails: one layer off costs a tenth of the accept length, others more",
            fix=_fix(case, capture),
            reference="sglang#25454",
        )
    elif capture.trained is not None:
        yield passed("captured layers", f"{_text(capture.eager)}, as trained")
    elif capture.eager == default_layers(case.target.num_hidden_layers):
        yield passed("captured layers", f"{_text(capture.eager)}, every trainer's default")
    else:
        yield warned(
            "captured layers",
            f"{_text(capture.eager)}; not known whether it was trained on these",
            why=f"trainers' default is {_text(default_layers(case.target.num_hidden_layers))}; "
            "most count layers' outputs, speculators their inputs",
            fix="give --trained-layers as numbers of the layers entered, from the training's configuration",
        )


def _text(layers: list[int]) -> str:
    return "/".join(map(str, layers))


def _fix(case: Case, capture: Capture) -> str:
    """Ids for what was trained, and what graphs need where they do not follow the ids."""
    wanted = capture.trained if capture.trained is not None else capture.graph
    if capture.trained is None and capture.eager == capture.graph:
        return "find out which layers it was trained on and give --trained-layers"
    ids = encode(wanted, capture.family, case.version, case.target.num_hidden_layers)
    if ids is None:
        return "no ids give these layers"
    graphs = f"the patch {patch_names.GRAPH_LAYERS}, or an engine from {GRAPH_USES_IDS} on"
    corrected = f"eagle_aux_hidden_state_layer_ids = {ids} (gpubox draft convert)"
    if capture.trained is None:
        return f"if it was trained on {_text(wanted)}: {corrected}; otherwise {graphs}"
    parts = [corrected] if capture.eager != wanted else []
    if case.version < GRAPH_USES_IDS and patch_names.GRAPH_LAYERS not in case.patches and capture.graph != wanted:
        parts.append(f"for CUDA graphs {graphs}")
    return "; ".join(parts)


def whole_sums(case: Case) -> Iterator[Finding]:
    """A fused all-reduce is done inside the next layer's norm: what is captured before it is one rank's part."""
    if case.family != "deepseek" or case.version >= CAPTURE_AFTER_REDUCE:
        yield passed("captured sums", f"a matter of DeepSeek-like targets before {CAPTURE_AFTER_REDUCE}")
    elif case.serving.tensor_parallel == 1:
        yield passed("captured sums", "one GPU: nothing to reduce")
    elif patch_names.CAPTURE_AFTER_REDUCE in case.patches:
        yield passed("captured sums", f"captured after the all-reduce, by the patch {patch_names.CAPTURE_AFTER_REDUCE}")
    elif case.serving.fused_allreduce is False:
        yield passed("captured sums", "all-reduce fusion is off")
    else:
        report = failed if case.serving.fused_allreduce else warned
        yield report(
            "captured sums",
            "all-reduce fusion is on" if case.serving.fused_allreduce else "right only without all-reduce fusion",
            why=f"before {CAPTURE_AFTER_REDUCE} each rank captures its own partial sum, up to 2048 tokens a batch",
            fix=f"leave enable_flashinfer_allreduce_fusion off, or the patch {patch_names.CAPTURE_AFTER_REDUCE}",
            reference="sglang models/deepseek_v2.py",
        )


CHECKS = (target_hook, layer_ids, captured, whole_sums)

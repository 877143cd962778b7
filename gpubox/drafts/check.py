"""Proves a draft against a target and an engine version, from headers and small reads; nothing is loaded or changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.version import Version
from pydantic import ValidationError

from gpubox.drafts import capture_rules, config_rules, target_rules, tensor_rules, value_rules
from gpubox.drafts.case import Case, Serving, TargetWeights
from gpubox.drafts.checkpoint import Checkpoint, open_checkpoint, recorded_layers
from gpubox.drafts.config import DraftConfig, TargetConfig, problems, read_target
from gpubox.drafts.contract import engine_version
from gpubox.drafts.findings import Capture, Finding, Report, failed, passed
from gpubox.drafts.speculators import flat_config, foreign_format, trained_layers
from gpubox.drafts.target_rules import target_weights
from gpubox.errors import BrokenError, InputError
from gpubox.specs.patch_names import patch_names

CHECKS = (
    *(*config_rules.CHECKS, *capture_rules.CHECKS, *tensor_rules.CHECKS),
    *(*value_rules.CHECKS, *target_rules.CHECKS),
)


def check_draft(
    draft: Path, target_directory: Path, version: str, *, patches: Iterable[str] = (), serving: Serving | None = None
) -> Report:
    """Every finding about the draft in `draft`. A damaged file is a finding.

    Raises InputError when draft or target are not there, their config.json is not JSON, the target's lacks a key, or
    the version is not one that the tables know.
    """
    engine, against = engine_version(version), read_target(target_directory)
    known_patches = patch_names(patches)
    capture, findings = _findings(draft, target_directory, engine, against, known_patches, serving or Serving())
    return Report(
        draft=str(draft),
        target=str(target_directory),
        engine_version=str(engine),
        patches=sorted(known_patches),
        capture=capture,
        findings=findings,
    )


def _findings(
    draft: Path, directory: Path, engine: Version, against: TargetConfig, patches: frozenset[str], serving: Serving
) -> tuple[Capture | None, list[Finding]]:
    try:
        checkpoint = open_checkpoint(draft)
        weights = target_weights(directory)
    except BrokenError as error:
        return None, [failed("files", error.message, fix=error.hint)]
    found = [passed("files", f"{len(checkpoint.headers)} safetensors, {len(checkpoint.where)} tensors")]
    try:
        case = _case(checkpoint, weights, engine, against, patches, serving)
    except InputError as error:
        return None, [*found, failed("config", error.message, fix=error.hint)]
    except ValidationError as error:
        return None, [*found, *(failed("config", text, why="the engine reads it") for text in problems(error))]
    try:
        return case.capture(), [*found, *(finding for check in CHECKS for finding in check(case))]
    except BrokenError as error:  # cut off since its header was read
        return None, [*found, failed("files", error.message, fix=error.hint)]


def _case(
    checkpoint: Checkpoint,
    weights: TargetWeights,
    engine: Version,
    against: TargetConfig,
    patches: frozenset[str],
    serving: Serving,
) -> Case:
    """Raises InputError or pydantic.ValidationError for a config that says too little."""
    raw: dict[str, Any] = checkpoint.config
    foreign = foreign_format(raw)
    if serving.trained_layers is None:
        known = trained_layers(raw, against) or recorded_layers(checkpoint.directory)
        serving = dataclasses.replace(serving, trained_layers=None if known is None else tuple(known))
    if foreign:
        raw = flat_config(raw, against, engine, trained_layers(raw, against))
    return Case(
        checkpoint=checkpoint,
        raw=raw,
        foreign_format=foreign,
        config=DraftConfig.model_validate(raw),
        target=against,
        target_weights=weights,
        version=engine,
        patches=patches,
        serving=serving,
    )

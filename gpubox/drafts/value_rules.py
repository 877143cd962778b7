"""Checks that read values, a few megabytes of them: the vocabulary map and the norms."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from typing import Any

from gpubox.drafts.case import Case
from gpubox.drafts.contract import D2T, T2D
from gpubox.drafts.findings import Finding, failed, passed, warned
from gpubox.weights.safetensors import FLOATS, VALUES_LIMIT, read_values, shown

INTEGER_MAPS = ("I64", "I32", "I16", "U16", "U32")


def vocabulary_map(case: Case) -> Iterator[Finding]:
    """d2t: the target's id of draft token i is d2t[i] + i."""
    config = case.config
    stored = case.checkpoint.named(D2T)
    if stored is None:
        if config.draft_vocabulary < config.vocab_size:
            yield failed(
                "d2t",
                f"missing, with {config.draft_vocabulary} of {config.vocab_size} tokens",
                why="draft ids are then taken for target ids: every proposal is another word",
                fix="export the draft again with its vocabulary map",
            )
        else:
            yield passed("d2t", "not needed: the draft has the whole vocabulary")
        return
    info = case.checkpoint.info(stored)
    if info.shape != (config.draft_vocabulary,) or info.dtype not in INTEGER_MAPS or info.nbytes > VALUES_LIMIT:
        yield failed("d2t", f"is {info.dtype} {list(info.shape)}, not integers [{config.draft_vocabulary}]")
        return
    offsets = case.checkpoint.values(stored)
    yield from _mapped(offsets, config.vocab_size)


def _mapped(offsets: array[Any], vocabulary: int) -> Iterator[Finding]:
    ids = target_ids(offsets)
    outside = [draft for draft, target in enumerate(ids) if not 0 <= target < vocabulary]
    unique = set(ids)
    if outside or len(unique) != len(ids):
        said = (
            f"draft token {outside[0]} maps to {ids[outside[0]]}, outside 0 to {vocabulary - 1}"
            if outside
            else f"{len(ids) - len(unique)} draft tokens map to a target token that has one already"
        )
        absolute = len(set(offsets)) == len(offsets) and all(0 <= value < vocabulary for value in offsets)
        yield failed(
            "d2t",
            said,
            why="the values look like target ids; the engine adds the position to them" if absolute
            else "a proposal would be another word",
            fix="subtract the position from each value" if absolute else "export the draft again",
        )  # fmt: skip
    elif not any(offsets) and len(offsets) < vocabulary:
        yield warned(
            "d2t", f"maps to the first {len(offsets)} tokens", why="a map that was never filled looks like this"
        )
    else:
        yield passed("d2t", f"{len(ids)} different tokens of {vocabulary}")


def target_ids(offsets: array[Any]) -> list[int]:
    return [offset + position for position, offset in enumerate(offsets)]


def inverse_map(case: Case) -> Iterator[Finding]:
    """t2d: whether the draft has a target's token. The engine does not read it; it must agree all the same."""
    stored, forward = case.checkpoint.named(T2D), case.checkpoint.named(D2T)
    if stored is None:
        yield passed("t2d", "absent; the engine does not read it")
        return
    info = case.checkpoint.info(stored)
    if info.dtype not in ("BOOL", "U8") or info.shape != (case.config.vocab_size,) or info.nbytes > VALUES_LIMIT:
        yield failed("t2d", f"is {info.dtype} {list(info.shape)}, not booleans [{case.config.vocab_size}]")
        return
    marked = {token for token, on in enumerate(case.checkpoint.values(stored)) if on}
    if forward is None or case.checkpoint.info(forward).dtype not in INTEGER_MAPS:
        yield warned("t2d", f"marks {len(marked)} tokens, and there is no d2t to compare with")
        return
    mapped = set(target_ids(case.checkpoint.values(forward)))
    if marked != mapped:
        yield failed(
            "t2d",
            f"marks {len(marked)} tokens, d2t maps to {len(mapped)}; {len(marked ^ mapped)} are in one of them only",
            why="two maps of different runs: the head's rows cannot be of both",
            fix="export the draft again; a cached vocabulary map may be stale",
            reference="speculators#1081",
        )
    else:
        yield passed("t2d", "agrees with d2t")


def norm_values(case: Case) -> Iterator[Finding]:
    """One-dimensional weights are norms: small to read, and the first to show a training that diverged."""
    count = 0
    for stored, header in case.checkpoint.where.items():
        info = header.tensors[stored]
        if len(info.shape) != 1 or info.dtype not in FLOATS or info.nbytes > VALUES_LIMIT:
            continue
        values = read_values(header, stored)
        count += 1
        if bad := sum(not math.isfinite(value) for value in values):
            yield failed(
                "norm values",
                f"{shown(stored)}: {bad} of {len(values)} are not finite",
                why="every proposal would be noise",
                fix="take an earlier checkpoint of the training",
            )
            return
        if values and not stored.endswith("bias") and not any(values):
            yield failed("norm values", f"{shown(stored)}: all zero", why="the weights were never written or trained")
            return
    yield passed("norm values", f"{count} tensors, finite")


CHECKS = (vocabulary_map, inverse_map, norm_values)

"""Patches of a stack by what they do. Rules that a patch lifts ask for these names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

HOOKS: Final = "kimi-k25-eagle3-hooks"
FUSION_SM120: Final = "allreduce-fusion-sm120"
SYMM_MEM_SM120: Final = "torch-symm-mem-sm120"
GRAPH_LAYERS: Final = "aux-layers-before-graph-capture"
CAPTURE_AFTER_REDUCE: Final = "aux-capture-after-fused-allreduce"
NORM_BEFORE_RESIDUAL: Final = "draft-norm-before-residual"  # none of ours: a stack may bring its own

_FILE = re.compile(r"(?:\d+-)?(?P<name>.+?)(?:\.patch)?")


def patch_name(file: str) -> str:
    """Without the number that orders it and the ending: '05-NAME.patch' -> 'NAME'."""
    match = _FILE.fullmatch(file)
    return match["name"] if match else file


def patch_names(files: Iterable[str]) -> frozenset[str]:
    return frozenset(patch_name(file) for file in files)

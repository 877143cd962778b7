"""A model directory that an operator brought: is it whole? Reads headers, not weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from gpubox.errors import BrokenError, InputError
from gpubox.weights.safetensors import read_header

AGAIN = "fetch the model again"


def check_model_directory(directory: Path) -> None:
    """Whether a checkpoint that an operator brought is whole: the engine loads one with missing shards without a word.

    config.json parses, no download is half-done, every shard and every tensor of the index is there, and no shard is
    shorter or longer than its header says. Raises InputError naming the file. Source: sglang#32279.
    """
    if not directory.is_dir():
        raise InputError(f"{directory}: no such model directory", hint="correct model.path of the server profile")
    _read_json(directory / "config.json")
    if unfinished := _unfinished_downloads(directory):
        raise InputError(f"{unfinished[0]}: an unfinished download", hint="finish the download, or remove that file")
    index = directory / "model.safetensors.index.json"
    shards = _indexed_shards(index) if index.is_file() else _found_shards(directory)
    for name, tensors in sorted(shards.items()):
        missing = tensors - check_shard(directory / name)
        if missing:
            raise InputError(f"{directory / name}: lacks {min(missing)}, which {index.name} puts there", hint=AGAIN)


def _unfinished_downloads(directory: Path) -> list[Path]:
    """In a snapshot of a Hugging Face cache, unfinished files lie beside it, in blobs/."""
    places = [directory]
    if directory.parent.name == "snapshots":
        places.append(directory.parent.parent / "blobs")
    return sorted(path for place in places for path in place.rglob("*.incomplete"))


def _indexed_shards(index: Path) -> dict[str, set[str]]:
    shards: dict[str, set[str]] = {}
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: has no weight_map", hint=AGAIN)
    for tensor, shard in weight_map.items():
        shards.setdefault(str(shard), set()).add(tensor)
    return shards


def _found_shards(directory: Path) -> dict[str, set[str]]:
    """Without an index only the names tell whether all are there: model-00001-of-00004.safetensors."""
    names = {path.name for path in directory.glob("*.safetensors")}
    for name in sorted(names):
        if parts := re.fullmatch(r"(.*-)(\d+)(-of-)(\d+)(\.safetensors)", name):
            names |= {
                f"{parts[1]}{number:0{len(parts[2])}}{parts[3]}{parts[4]}{parts[5]}"
                for number in range(1, int(parts[4]) + 1)
            }
    return {name: set() for name in names}


def check_shard(path: Path) -> set[str]:
    """The tensors of a safetensors file that is whole. Raises InputError: an operator brought it."""
    try:
        return set(read_header(path).tensors)
    except BrokenError as error:
        raise InputError(error.message, hint=AGAIN) from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable JSON: {error}", hint="a model directory needs it") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: not a JSON object", hint=AGAIN)
    return data

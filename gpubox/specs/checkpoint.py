"""A model directory that an operator brought: is it whole? Reads headers, not weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePath
from typing import Any, NamedTuple, TypeVar

from gpubox.errors import BrokenError, InputError
from gpubox.weights.safetensors import read_header

AGAIN = "fetch the model again"

Found = TypeVar("Found")


class Checkpoint(NamedTuple):
    """What a model directory holds. `size`: bytes of its shards; `notes`: what is odd and does no harm."""

    shards: int
    tensors: int
    size: int
    problems: list[InputError]
    notes: list[str]


def check_model_directory(directory: Path) -> None:
    """Whether a checkpoint that an operator brought is whole: the engine loads one with missing shards without a word.

    Raises InputError naming the first file that is wrong; the others follow as detail. Source: sglang#32279.
    """
    problems = inspect_model_directory(directory).problems
    if problems:
        rest = "\n".join(problem.message for problem in problems[1:])
        raise InputError(problems[0].message, hint=problems[0].hint, detail=rest)


def inspect_model_directory(directory: Path) -> Checkpoint:
    """The one judge of a model directory: everything that is wrong with it, told from headers and sizes.

    config.json parses, no download is half-done, every shard and every tensor of the index is there, and no shard is
    shorter or longer than its header says. Raises InputError only when there is no such directory.
    """
    if not directory.is_dir():
        raise InputError(f"{directory}: no such model directory", hint="correct model.path of the server profile")
    problems: list[InputError] = []
    notes: list[str] = []
    if isinstance(config := _tried(lambda: _read_json(directory / "config.json")), InputError):
        problems.append(config)
    for path in _unfinished_downloads(directory):
        problems.append(InputError(f"{path}: an unfinished download", hint="finish the download, or remove that file"))
    index = directory / "model.safetensors.index.json"
    shards = _tried(lambda: _indexed_shards(index) if index.is_file() else _found_shards(directory))
    if isinstance(shards, InputError):
        return Checkpoint(0, 0, 0, [*problems, shards], notes)
    tensors = size = 0
    for name, wanted in sorted(shards.items()):
        path = directory / name
        found = _tried(partial(check_shard, path))
        if isinstance(found, InputError):
            problems.append(found)
            continue
        tensors += len(found)
        size += path.stat().st_size
        if missing := wanted - found:
            problems.append(InputError(f"{path}: lacks {min(missing)}, which {index.name} puts there", hint=AGAIN))
        if wanted and (extra := found - wanted):
            notes.append(f"{name} holds {len(extra)} tensors that {index.name} does not put there")
    if unused := sorted({path.name for path in directory.glob("*.safetensors")} - shards.keys()):
        notes.append(f"{', '.join(unused)}: not of {index.name}; the engine does not load it")
    if not shards:
        notes.append("there is no safetensors file: nothing of its weights was looked at")
    return Checkpoint(len(shards), tensors, size, problems, notes)


def _tried(check: Callable[[], Found]) -> Found | InputError:
    try:
        return check()
    except InputError as error:
        return error


def _unfinished_downloads(directory: Path) -> list[Path]:
    """In a snapshot of a Hugging Face cache, unfinished files lie beside it, in blobs/. `.partial` is our own."""
    places = [directory]
    if directory.parent.name == "snapshots":
        places.append(directory.parent.parent / "blobs")
    return sorted(path for place in places for end in ("incomplete", "partial") for path in place.rglob(f"*.{end}"))


def _indexed_shards(index: Path) -> dict[str, set[str]]:
    shards: dict[str, set[str]] = {}
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: has no weight_map", hint=AGAIN)
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or PurePath(shard).name != shard or shard in ("", "..") or "\0" in shard:
            raise InputError(f"{index}: puts {tensor[:120]!r} into {str(shard)[:120]!r}, no file beside it", hint=AGAIN)
        shards.setdefault(shard, set()).add(tensor)
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

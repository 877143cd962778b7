"""The files of a draft: config.json and the headers of its shards."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpubox.drafts.documents import read_object
from gpubox.errors import BrokenError, InputError
from gpubox.weights.safetensors import Header, TensorInfo, read_header, read_values, shown

CONFIG: Final = "config.json"
INDEX: Final = "model.safetensors.index.json"
PROVENANCE: Final = "draft.json"
MOST_SHARDS: Final = 256


@dataclass(frozen=True)
class Checkpoint:
    """`config` is the object as it stands in config.json; `where` says for each stored tensor which header has it."""

    directory: Path
    config: dict[str, Any]
    headers: tuple[Header, ...]
    where: dict[str, Header]

    def info(self, stored: str) -> TensorInfo:
        return self.where[stored].tensors[stored]

    def named(self, tensor: str) -> str | None:
        """The stored name of d2t or t2d: bare, or below a module."""
        return next((name for name in self.where if name == tensor or name.endswith(f".{tensor}")), None)

    def values(self, stored: str) -> array[Any]:
        return read_values(self.where[stored], stored)

    @property
    def weight_bytes(self) -> int:
        return sum(header.file_size - header.data_start for header in self.headers)


def open_checkpoint(directory: Path) -> Checkpoint:
    """Raises InputError when there is no draft, BrokenError when a shard is damaged or a tensor stands in two."""
    if not directory.is_dir():
        raise InputError(
            f"{directory}: no such draft directory", hint="the directory that holds the draft's config.json"
        )
    config = read_object(directory / CONFIG)
    headers = tuple(read_header(path) for path in _shards(directory))
    where: dict[str, Header] = {}
    for header in headers:
        for name in header.tensors:
            if name in where:
                raise BrokenError(
                    f"{directory}: {shown(name)} stands in {where[name].path.name} and {header.path.name}"
                )
            where[name] = header
    return Checkpoint(directory, config, headers, where)


def recorded_layers(directory: Path) -> list[int] | None:
    """The layers entered that `convert` recorded as those of the training. Raises InputError for a damaged record."""
    path = directory / PROVENANCE
    if not path.is_file():
        return None
    layers = read_object(path).get("trained_layers")
    if layers is not None and not (isinstance(layers, list) and all(type(index) is int for index in layers)):
        raise InputError(f"{path}: trained_layers is no list of layers", hint="convert the draft again")
    return layers


def _shards(directory: Path) -> list[Path]:
    """Every *.safetensors file: so the engine loads, unless the index says less; then the rest is not loaded."""
    paths = sorted(directory.glob("*.safetensors"))
    index = directory / INDEX
    if index.is_file():
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise InputError(f"{index}: has no weight_map of file names", hint="export the draft again")
        named = set(weight_map.values())
        if strange := sorted(name for name in named if Path(name).name != name or not name.endswith(".safetensors")):
            raise InputError(
                f"{index}: {shown(strange[0])} is not the name of a safetensors file", hint="export the draft again"
            )
        paths = [directory / name for name in sorted(named)]
    if not paths:
        raise InputError(f"{directory}: holds no *.safetensors file", hint="export the draft as safetensors")
    if len(paths) > MOST_SHARDS:
        raise InputError(f"{directory}: {len(paths)} shards; a draft has at most {MOST_SHARDS}")
    return paths

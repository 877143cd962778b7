"""Small model directories with real safetensors files."""

from __future__ import annotations

import json
import random
from pathlib import Path


def shard(tensors: dict[str, bytes]) -> bytes:
    header, data = {}, b""
    for name, value in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(value)], "data_offsets": [len(data), len(data) + len(value)]}
        data += value
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def model(shards: int = 3, size: int = 300_000, seed: int = 0) -> dict[str, bytes]:
    """The files of a model of `shards` shards with one tensor of `size` bytes each."""
    noise = random.Random(seed)
    names = [f"model-{number:05}-of-{shards:05}.safetensors" for number in range(1, shards + 1)]
    weight_map = {f"layers.{number}.weight": name for number, name in enumerate(names)}
    return {
        "config.json": b'{"architectures": ["LlamaForCausalLM"]}\n',
        "model.safetensors.index.json": json.dumps({"metadata": {}, "weight_map": weight_map}).encode(),
        "tokenizer/vocab.txt": b"a\nb\n",
        **{name: shard({tensor: noise.randbytes(size)}) for tensor, name in weight_map.items()},
    }


def write(directory: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return directory

"""What `gpubox draft check` costs on a target and a draft of Kimi-K2.5's size: seconds and peak memory, as a command.

    python -m bench.draft [--directory DIR] [--runs N]

The target has the headers of the real one's structure (61 layers, 384 experts, about 200,000 tensors in 64 shards) and
no data: files with a hole of 560 GB where the weights would be. The draft is a 7168-wide EAGLE-3 head with the real
sizes, also a hole, but for what the check reads: norms, d2t, t2d.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from gpubox.weights.safetensors import TensorInfo, encode_header, nbytes

LAYERS, EXPERTS, SHARDS = 61, 384, 64
HIDDEN, INNER, VOCABULARY, DRAFT_VOCABULARY = 7168, 2048, 163_840, 32_000

Shapes = dict[str, tuple[str, tuple[int, ...]]]


def target_tensors() -> Shapes:
    """INT4 experts as compressed-tensors packs them; attention and shared parts in bfloat16."""
    prefix = "language_model."
    found: Shapes = {f"{prefix}model.embed_tokens.weight": ("BF16", (VOCABULARY, HIDDEN))}
    sizes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    attention = {
        **{"q_a_proj": (1536, HIDDEN), "q_b_proj": (12_288, 1536), "kv_a_proj_with_mqa": (576, HIDDEN)},
        **{"kv_b_proj": (16_384, 512), "o_proj": (HIDDEN, 8192), "q_a_layernorm": (1536,), "kv_a_layernorm": (512,)},
    }
    for layer in range(LAYERS):
        at = f"{prefix}model.layers.{layer}."
        found |= {f"{at}self_attn.{name}.weight": ("BF16", shape) for name, shape in attention.items()}
        found |= {f"{at}{name}.weight": ("BF16", (HIDDEN,)) for name in ("input_layernorm", "post_attention_layernorm")}
        for expert in range(EXPERTS if layer else 0):
            for name, (rows, columns) in sizes.items():
                tensor = f"{at}mlp.experts.{expert}.{name}.weight"
                found[f"{tensor}_packed"] = ("I32", (rows, columns // 8))
                found[f"{tensor}_scale"] = ("BF16", (rows, columns // 32))
                found[f"{tensor}_shape"] = ("I64", (2,))
    found[f"{prefix}lm_head.weight"] = ("BF16", (VOCABULARY, HIDDEN))
    return found


def draft_tensors() -> Shapes:
    heads, inner = 64 * 128, 12_288
    layer: dict[str, tuple[int, ...]] = {
        **{f"{name}.weight": (HIDDEN,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        **{f"self_attn.{name}_proj.weight": (heads, 2 * HIDDEN) for name in "qkv"},
        **{"self_attn.o_proj.weight": (HIDDEN, heads), "mlp.down_proj.weight": (HIDDEN, inner)},
        **{f"mlp.{name}_proj.weight": (inner, HIDDEN) for name in ("gate", "up")},
    }
    other = {"fc.weight": (HIDDEN, 3 * HIDDEN), "norm.weight": (HIDDEN,), "lm_head.weight": (DRAFT_VOCABULARY, HIDDEN)}
    found: Shapes = {f"midlayer.{name}": ("BF16", shape) for name, shape in layer.items()}
    found |= {name: ("BF16", shape) for name, shape in other.items()}
    return {**found, "d2t": ("I64", (DRAFT_VOCABULARY,)), "t2d": ("BOOL", (VOCABULARY,))}


def write_sparse(path: Path, tensors: Shapes, values: dict[str, bytes] | None = None) -> int:
    """A file of that header and a hole, but for `values`; returns the header's bytes."""
    placed: dict[str, TensorInfo] = {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        size = nbytes(dtype, shape)
        assert size is not None
        placed[name] = TensorInfo(dtype, shape, at, at + size)
        at += size
    header = encode_header(placed, {"format": "pt"})
    with path.open("wb") as stream:
        stream.write(header)
        stream.truncate(len(header) + at)
        for name, data in (values or {}).items():
            stream.seek(len(header) + placed[name].begin)
            stream.write(data)
    return len(header)


def make(directory: Path) -> dict[str, Any]:
    """Target and draft below `directory`. Numbers of what was made."""
    target, draft = directory / "target", directory / "draft"
    target.mkdir(parents=True)
    draft.mkdir()
    text = {
        **{"hidden_size": HIDDEN, "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS, "dtype": "bfloat16"},
        **{"max_position_embeddings": 262_144, "rope_theta": 50_000.0},
    }
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    (target / "config.json").write_text(json.dumps(config))
    tensors = list(target_tensors().items())
    weight_map: dict[str, str] = {}
    header_bytes = 0
    for number in range(SHARDS):
        name = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        part = dict(tensors[number * len(tensors) // SHARDS : (number + 1) * len(tensors) // SHARDS])
        header_bytes += write_sparse(target / name, part)
        weight_map |= dict.fromkeys(part, name)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    ids = [5 * index for index in range(DRAFT_VOCABULARY)]
    write_sparse(
        draft / "model.safetensors",
        draft_tensors(),
        {
            "d2t": b"".join((token - index).to_bytes(8, "little") for index, token in enumerate(ids)),
            "t2d": bytes(token % 5 == 0 and token < 5 * DRAFT_VOCABULARY for token in range(VOCABULARY)),
            **{name: b"\x80\x3f" * HIDDEN for name, (_, shape) in draft_tensors().items() if shape == (HIDDEN,)},
        },
    )
    written = {
        **{"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "hidden_size": HIDDEN},
        **{"intermediate_size": 12_288, "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 128},
        **{"vocab_size": VOCABULARY, "draft_vocab_size": DRAFT_VOCABULARY, "tie_word_embeddings": False},
        **{"max_position_embeddings": 262_144, "rope_theta": 50_000.0, "torch_dtype": "bfloat16"},
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]},
    }
    (draft / "config.json").write_text(json.dumps(written))
    size = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    return {"tensors": len(tensors), "shards": SHARDS, "header_mb": header_bytes / 1e6, "target_gb": size / 1e9}


class Cost(NamedTuple):
    """`cpu_seconds` are what remains of `seconds` on a machine that does nothing else."""

    seconds: float
    cpu_seconds: float
    peak_mb: float


def run(command: list[str]) -> Cost:
    """Of a command that must end well. The kernel counts this process's own memory in the peak: keep it small."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit("did not pass; run it by hand: " + " ".join(command))
    return Cost(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6)


def median(command: list[str], runs: int) -> dict[str, float]:
    """Of the times, and the highest peak."""
    found = [run(command) for _ in range(runs)]
    return {
        "seconds": round(statistics.median(cost.seconds for cost in found), 2),
        "cpu_seconds": round(statistics.median(cost.cpu_seconds for cost in found), 2),
        "peak_mb": round(max(cost.peak_mb for cost in found)),
    }


PARSE_ALL = """
import pathlib, sys
from gpubox.weights.safetensors import read_header
for path in pathlib.Path(sys.argv[1]).glob("*.safetensors"):
    read_header(path)
"""


def measure(directory: Path, runs: int) -> dict[str, Any]:
    with concurrent.futures.ProcessPoolExecutor(1) as pool:
        made = pool.submit(make, directory).result()
    code = "from gpubox.cli.main import main; main()"
    check = [sys.executable, "-c", code, "draft", "check", str(directory / "draft")]
    check += ["--target", str(directory / "target"), "--engine", "0.5.17", "--tp", "8", "--json"]
    found = median(check, runs)
    return {
        **{name: round(value, 1) for name, value in made.items()},
        "gpubox draft check": found,
        "goal": {"seconds": 1, "peak_mb": 100},
        "met": found["seconds"] < 1 and found["peak_mb"] < 100,
        "of which gpubox --help": median([sys.executable, "-c", code, "--help"], runs),
        "beside it: every header of the target parsed": median([sys.executable, "-c", PARSE_ALL, check[-6]], 1),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--directory", type=Path, default=None, help="where the files are made (default: a temporary one)"
    )
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        print(json.dumps(measure(Path(directory), options.runs), indent=2))


if __name__ == "__main__":
    main()

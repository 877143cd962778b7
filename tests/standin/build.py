"""Build the stand-in's wheel and a small real stack around it.

Everything in the stack is real but the engine: wheels from the index, hashes, an environment.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from gpubox.devtools.engine_table import to_text
from gpubox.specs.engine_table import EngineTable, load_table

PROJECT = Path(__file__).parent
SOURCE_DATE_EPOCH = "1767225600"  # 2026-01-01; hatchling stamps it on every file of the wheel

STACK_TOML = """\
name = "{name}"
description = "A stand-in engine among real wheels, for drills"
pythons = ["3.11", "3.12"]

[engine]
name = "gpubox-standin-engine"
version = "{version}"
module = "gpubox_standin.launch_server"

[environment]
STANDIN_STACK = "{name}"

[proof]
imports = ["gpubox_standin.app", "msgpack._cmsgpack"]
"""

# What the stand-in takes of the real engine's arguments (gpubox_standin.launch_server).
ARGUMENTS = (
    *("attention_backend", "chunked_prefill_size", "context_length", "device", "disable_cuda_graph"),
    *(
        "disable_custom_all_reduce",
        "disable_overlap_schedule",
        "dtype",
        "enable_metrics",
        "grammar_backend",
        "log_level",
    ),
    *("max_running_requests", "max_total_tokens", "mem_fraction_static", "random_seed", "reasoning_parser"),
    *("sampling_backend", "tool_call_parser", "tp_size", "trust_remote_code", "watchdog_timeout"),
)
ENGINE_IT_STANDS_FOR = PROJECT.parents[1] / "engines" / "sglang-0.5.17.json"


def standin_table(version: str) -> EngineTable:
    """The stand-in's argument table: a part of that of the engine it stands for."""
    real = load_table(ENGINE_IT_STANDS_FOR)
    return EngineTable(
        engine="gpubox-standin-engine",
        version=version,
        source="tests/standin",
        arguments={name: real.arguments[name] for name in ARGUMENTS},
    )


def build_wheel(out_dir: Path) -> Path:
    """Build into `out_dir` (created), equal bytes every time, and return the wheel. Raises RuntimeError."""
    out_dir.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out_dir.resolve())]
    environment = os.environ | {"SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH}
    done = subprocess.run(command, cwd=PROJECT, env=environment, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"hatchling could not build the stand-in: {done.stderr}")
    (wheel,) = out_dir.glob("gpubox_standin_engine-*.whl")
    return wheel


def write_stack(out_dir: Path, wheel: Path, name: str = "standin-a") -> Path:
    """Write the stack directory `out_dir`/<name> for `wheel`; returns it. Two names give two stacks of equal wheels.

    The box finds the wheel itself through a wheelhouse: no index has it.
    """
    version = wheel.name.split("-")[1]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    directory = out_dir / name
    directory.mkdir(parents=True, exist_ok=True)
    own = f"gpubox-standin-engine=={version} \\\n    --hash=sha256:{digest}\n"
    (directory / "stack.toml").write_text(STACK_TOML.format(name=name, version=version))
    (directory / "engine.json").write_text(to_text(standin_table(version)))
    for file, extra in (("requirements.in", f"gpubox-standin-engine=={version}\n"), ("requirements.lock", own)):
        (directory / file).write_text((PROJECT / "stack" / file).read_text() + extra)
    return directory

"""Valid profiles that tests break in one place: speculation on SM120, speculation on Hopper, one GPU, several nodes."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpubox.specs.engine_table import EngineTable, load_table
from gpubox.specs.findings import Finding
from gpubox.specs.server import Server
from gpubox.specs.settled import look_at
from gpubox.specs.stack import Cuda, Engine, Stack
from gpubox.toml import read_toml, validate

ROOT = Path(__file__).resolve().parents[2]
EAGLE3 = read_toml(ROOT / "servers" / "kimi-k2.5-eagle3.toml")
SMALL = read_toml(ROOT / "servers" / "smollm2.toml")
HOOKS, CAPTURE = "01-kimi-k25-eagle3-hooks.patch", "05-aux-capture-after-fused-allreduce.patch"
CUDA = {
    12: Cuda(version="12.8", toolkit="12.8.1", min_driver="570", linked_major=12),
    13: Cuda(version="13.0", toolkit="13.0.1", min_driver="580", linked_major=13),
}
HOPPER = {"gpu": "NVIDIA H200", "gpus": 8, "memory_mib": 143_771, "capability": "9.0"}


def table(version: str) -> EngineTable:
    return load_table(ROOT / "engines" / f"sglang-{version}.json")


def stack(
    version: str = "0.5.9",
    *,
    cuda: int = 13,
    version_of_cuda: str | None = None,
    patches: tuple[str, ...] = (HOOKS,),
    environment: dict[str, str] | None = None,
) -> Stack:
    return Stack(
        name="world",
        description="",
        pythons=["3.11"],
        engine=Engine(name="sglang", version=version, module="sglang.launch_server"),
        cuda=CUDA[cuda].model_copy(update={"version": version_of_cuda or CUDA[cuda].version}),
        patches=list(patches),
        environment=environment or {},
    )


def changed(profile: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy of `profile` with dotted keys set, or removed where the value is None."""
    result = copy.deepcopy(profile)
    for key, value in changes.items():
        *path, last = key.split("/")
        place = result
        for part in path:
            place = place.setdefault(part, {})
        if value is None:
            place.pop(last, None)
        else:
            place[last] = value
    return result


@dataclass
class Base:
    """A valid profile and its stack."""

    profile: dict[str, Any]
    stack: Stack = field(default_factory=stack)

    def findings(self, changes: dict[str, Any] | None = None, **options: Any) -> list[Finding]:
        server = validate(Server, changed(self.profile, changes or {}), "servers/x.toml")
        return look_at(server, self.stack, table(self.stack.engine.version), **options)[1]


SPECULATING = Base(EAGLE3)
PATCHED = Base(EAGLE3, stack(patches=(HOOKS, CAPTURE)))
CUDA12 = Base(EAGLE3, stack(cuda=12))
HOPPER_NEW = Base(
    changed(
        EAGLE3,
        {
            "hardware": HOPPER,
            "nccl": {"profile": "nvlink"},
            "engine/attention_backend": "fa3",
            "engine/speculative_draft_attention_backend": "fa3",
        },
    ),
    stack("0.5.17"),
)
HOPPER_OLD = Base(HOPPER_NEW.profile, stack())
HOPPER_PATCHED = Base(HOPPER_NEW.profile, stack(patches=(HOOKS, CAPTURE)))
TREE = Base(
    changed(
        HOPPER_NEW.profile,
        {"engine/speculative_eagle_topk": 2, "engine/speculative_num_draft_tokens": 6},
    ),
    stack(),
)
PLAIN = Base(read_toml(ROOT / "servers" / "kimi-k2.5.toml"))
ONE_GPU = Base(SMALL)
NO_P2P = Base(changed(EAGLE3, {"nccl": {"profile": "no-p2p"}}))
BASES = {
    name: value
    for name, value in globals().items()
    if isinstance(value, Base)  # every one has to be valid as it stands
}

"""A sweep of the release that serves on this box: who is asked, what is recorded of it, with which Python."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final

import psutil

from gpubox.bench import prompts
from gpubox.bench.bench_serving import Target
from gpubox.bench.cells import Arm
from gpubox.bench.sweep import Bench, Plan, work_of
from gpubox.errors import InputError
from gpubox.nvidia.gpu import driver_version, gpu_names
from gpubox.rollout.activation import Box
from gpubox.rollout.service_user import service_user
from gpubox.rollout.status import locked_versions
from gpubox.specs.release import Release

# Those whose versions decide speed; the lock in the stack names all.
RECORDED: Final = ("sglang", "sglang-kernel", "sgl-kernel", "torch", "flashinfer-python", "triton")


def bench_of_box(box: Box, plan: Plan, texts: tuple[str, ...] | None, name: str | None) -> Bench:
    """Raises InputError when no release is active or the server does not run it."""
    current = box.store.current()
    if current is None or box.service.running_release() != current:
        raise InputError("the current release does not serve", hint="gpubox status; a sweep measures what serves")
    release = box.store.read(current)
    asked = texts or prompts.shipped()
    return Bench(
        python=box.layout.stacks / release.stack_id / "venv" / "bin" / "python",
        # The caches belong to the server: a benchmark writes none.
        environment={**release.environment, "PYTHONDONTWRITEBYTECODE": "1"},
        target=Target(release.base_url, release.served_model_name, Path(release.model_path)),
        arm=_arm(box, release, name or current),
        work=work_of(release.served_model_name, asked, plan, release.base_url, gpu_names()),
        texts=asked,
        alive=lambda: f"pid {box.service.state().main_pid}",
        user=service_user(),
    )


def _arm(box: Box, release: Release, name: str) -> Arm:
    versions = locked_versions(box.layout.stacks / release.stack_id)
    return Arm(
        name=name,
        release=release.id,
        stack_id=release.stack_id,
        server_digest=release.server_digest,
        machine=socket.gethostname(),
        driver=driver_version() or None,
        versions={known: versions[known] for known in RECORDED if known in versions},
        arguments=tuple(_command_line(box.service.state().main_pid)),
    )


def _command_line(pid: int) -> list[str]:
    """As the kernel has it, from the first flag on: what comes before is the interpreter's path."""
    try:
        words = psutil.Process(pid).cmdline()
    except psutil.Error:
        return []
    return words[next((index for index, word in enumerate(words) if word.startswith("--")), len(words)) :]

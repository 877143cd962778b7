"""Prove that the ranks of a release can talk to each other, before anything is loaded into their GPUs.

Two neighbours, the two that lie furthest apart, then all: a machine was seen that hangs with two ranks and passes with
four (NVIDIA/nccl#1999), and a table of what should work (nvidia-smi topo) is no proof.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Final

from gpubox.canonical import short_digest
from gpubox.collectives import record
from gpubox.collectives.evidence import ADVICE, check_shared_memory, kernel_arguments, observe
from gpubox.collectives.ranks import Backend, CollectiveError, Group, Launch, Measured, all_reduce
from gpubox.collectives.record import Conditions, GroupResult, Record
from gpubox.errors import InputError, RefusedError
from gpubox.layout import Layout
from gpubox.nvidia.gpu import busy_gpus, driver_version, gpu_uuids
from gpubox.rollout.history import now
from gpubox.rollout.service_user import run_as, service_user
from gpubox.specs.command_line import argument
from gpubox.specs.release import Release

Reporter = Callable[[str], None]

# NCCL then names the transport of every channel and every variable it took from the environment.
BASE_ENVIRONMENT: Final = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
NCCL_SPEAKS: Final = {"NCCL_DEBUG": "INFO"}
GLOO_STAYS_HERE: Final = {"GLOO_SOCKET_IFNAME": "lo"}


def ranks_of(release: Release) -> int:
    """The tensor-parallel size that the release's command line asks for; 1 when it names none."""
    if release.tp_size is not None:
        return release.tp_size
    return int(argument(release.arguments, "--tp-size") or 1)  # of schema 1


def backend_of(release: Release) -> Backend:
    return "gloo" if argument(release.arguments, "--device") == "cpu" else "nccl"


def groups_of(ranks: int, backend: Backend) -> list[Group]:
    """The groups to prove, smallest first, each once. `ranks` >= 2."""
    chosen = dict.fromkeys([(0, 1), (0, ranks - 1), tuple(range(ranks))])
    return [Group(backend, devices) for devices in chosen]


def conditions(release: Release, ranks: int) -> Conditions:
    """What a proof of now would hold for. Raises GpuboxError when the GPUs cannot be listed."""
    backend = backend_of(release)
    on_gpus = backend == "nccl"
    return Conditions(
        stack_id=release.stack_id,
        environment_digest=short_digest(release.environment),
        backend=backend,
        ranks=ranks,
        driver=driver_version() if on_gpus else "",
        gpus=gpu_uuids() if on_gpus else (),
        kernel=platform.release(),
        kernel_arguments=kernel_arguments(),
    )


def check(release: Release, ranks: int, layout: Layout, report: Reporter) -> Record:
    """Run every group and keep the verdict.

    Raises InputError for less than two ranks or more than there are GPUs, RefusedError when GPUs are in use or /dev/shm
    is too small, and CollectiveError, recorded, with what the machine looked like.
    """
    held = conditions(release, ranks)
    _check_possible(held)
    launch = _launch(release, layout, held.backend)
    passed: list[GroupResult] = []
    try:
        for group in groups_of(ranks, held.backend):
            report(f"all-reduce of {group} ...")
            passed.append(_result(group, all_reduce(group, launch, observe=observe)))
            report(f"all-reduce of {group}: {describe(passed[-1])}")
    except CollectiveError as error:
        record.keep(layout, Record(time=now(), conditions=held, groups=tuple(passed), failure=error.message))
        error.hint = error.hint or ADVICE
        raise
    done = Record(time=now(), conditions=held, groups=tuple(passed), failure=None)
    record.keep(layout, done)
    return done


def describe(result: GroupResult) -> str:
    via = ", ".join(f"{name} x{count}" for name, count in sorted(result.transports.items()))
    return f"{result.bus_gb_per_s:.1f} GB/s bus bandwidth{f', {via}' if via else ''}, {result.library}"


def _check_possible(held: Conditions) -> None:
    if held.ranks < 2:
        raise InputError("an all-reduce needs at least 2 ranks", hint="--ranks 2, or a server with tp_size above 1")
    if held.backend == "nccl":
        if held.ranks > len(held.gpus):
            raise InputError(f"{held.ranks} ranks, but this box has {len(held.gpus)} GPUs", hint="lower tp_size")
        if busy := busy_gpus():
            raise RefusedError(
                f"GPUs are in use ({busy}), and an all-reduce beside a server proves neither",
                hint="systemctl stop sglang; an activation does this by itself at the right moment",
            )
    check_shared_memory()


def _result(group: Group, measured: Measured) -> GroupResult:
    return GroupResult(
        devices=group.devices,
        seconds=measured.seconds,
        bus_gb_per_s=round(measured.bus_gb_per_s(len(group.devices)), 2),
        library=measured.library,
        transports=measured.transports,
    )


def _launch(release: Release, layout: Layout, backend: Backend) -> Launch:
    extra = NCCL_SPEAKS if backend == "nccl" else GLOO_STAYS_HERE
    # The ranks get the rights that the server will have: a device node that only root may open fails here.
    python = layout.stacks / release.stack_id / "venv" / "bin" / "python"
    return Launch(python, {**BASE_ENVIRONMENT, **release.environment, **extra}, run_as(service_user()))

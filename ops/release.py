"""Stacks, models and releases on the box: upload the spec, let `gpubox` there build and prove it."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Iterator
from io import BytesIO
from typing import Any

from pyinfra import host, state
from pyinfra.api import FileUploadCommand, QuoteString, StringCommand, operation
from pyinfra.api.state import StateStage

from facts.box import box_state
from gpubox.errors import GpuboxError
from gpubox.health.probes import prove_answers
from gpubox.settings import Settings
from gpubox.specs.artefacts import read_pins
from gpubox.specs.model import ModelSpec
from gpubox.specs.plan import BoxPlan
from gpubox.specs.release import ReleaseSpec
from gpubox.specs.stack import StackBuild, StackSpec
from ops.refusal import stop
from ops.streamed import Streamed

GPUBOX = "/opt/gpubox/tools/bin/gpubox"
INCOMING = "/opt/gpubox/incoming"


def deployer() -> str:
    """Who deploys, for the lock and for history: user@controller and the process to end if it hangs."""
    return f"{getpass.getuser()}@{socket.gethostname()} pid {os.getpid()}"


@operation()
def built(kind: str, spec: StackSpec | ModelSpec, settings: Settings) -> Iterator[Any]:
    """The stack or model (`kind`) is on the box under its final name, which it gets only when built and proved."""
    if box_state().has(f"{kind}s", spec.id):
        host.noop(f"{kind} {spec.id} is built and proved")
        return
    yield from _uploaded(spec.id, spec.files)
    options: list[str | QuoteString] = ["--cache-owner", settings.service_user] if kind == "stack" else []
    if isinstance(spec.build, StackBuild):
        named = sorted({pinned.index for pinned in read_pins(spec.files)} & settings.indexes.keys())
        options += [word for name in named for word in ("--index", QuoteString(f"{name}={settings.indexes[name]}"))]
    if settings.wheelhouse:
        options += ["--wheelhouse", settings.wheelhouse]
    if settings.offline:
        options.append("--offline")
    yield Streamed(GPUBOX, kind, "build", "--job", QuoteString(deployer()), *options, f"{INCOMING}/{spec.id}")


@operation()
def releases_added(specs: list[ReleaseSpec]) -> Iterator[Any]:
    """The rendered releases are in the box's store. Nothing is switched."""
    missing = [spec for spec in specs if not box_state().has("releases", spec.id)]
    if not missing:
        host.noop("all releases are in the store")
        return
    for spec in missing:
        yield from _uploaded(spec.id, spec.files)
    directories = [f"{INCOMING}/{spec.id}" for spec in missing]
    yield Streamed(GPUBOX, "release", "add", "--job", QuoteString(deployer()), *directories)


@operation()
def activated(plan: BoxPlan) -> Iterator[Any]:
    """The wanted release serves. Decided by what the box runs now, not by what changed in this run."""
    wanted, seen = plan.wanted.id, box_state()
    serves = seen.get("current") == seen.get("running") == wanted and seen.get("active") == "active"
    if serves and not seen.get("pending"):
        host.noop(f"{wanted} serves")
        return
    force = ["--force"] if plan.settings.force else []
    yield Streamed(GPUBOX, "activate", "--who", QuoteString(deployer()), *force, wanted)
    protect = [word for spec in plan.releases for word in ("--protect", spec.id)]
    keep = str(plan.settings.keep_releases)
    yield Streamed(GPUBOX, "release", "collect", "--job", QuoteString(deployer()), "--keep", keep, *protect)


@operation(is_idempotent=False)
def rolled_back(stack: str | None) -> Iterator[Any]:
    """A kept release serves again: the newest of `stack`, or the previous one."""
    which = ["--stack", stack] if stack else []
    yield Streamed(GPUBOX, "rollback", "--who", QuoteString(deployer()), *which)


@operation()
def proved_from_outside(url: str, plan: BoxPlan) -> Iterator[Any]:
    """The server at its public address, asked by the controller: the right model, the right answers."""
    if state.current_stage != StateStage.Execute:
        host.noop(f"{url} is asked when everything has run")
        return
    said: list[str] = []
    try:
        prove_answers(url, plan.server.served_model_name, plan.server.probes, report=said.append)
    except GpuboxError as error:
        yield stop(error)
    else:
        host.noop(f"{url}: {said[-1]}")


def _uploaded(name: str, files: dict[str, bytes]) -> Iterator[Any]:
    directories = sorted({f"{INCOMING}/{name}/{file}".rsplit("/", 1)[0] for file in files})
    yield StringCommand("mkdir", "-p", *directories)
    for file, content in sorted(files.items()):
        yield FileUploadCommand(BytesIO(content), f"{INCOMING}/{name}/{file}")

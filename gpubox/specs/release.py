"""Render a release: a pure function of stack, server, overlay and the box's settings."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gpubox.build.libcuda_standin import STANDIN
from gpubox.canonical import DIGEST_LENGTH, canonical_json, sha256_hex, short_digest
from gpubox.errors import BrokenError
from gpubox.health.probes import Probes
from gpubox.layout import DEFAULT_ROOT, Layout
from gpubox.specs.server import Server
from gpubox.specs.settled import Settled
from gpubox.specs.stack import Overlay, Stack

# The release's own name cannot stand in its files, since it is their digest: the script reads it off its real path.
SERVE = """#!/bin/sh
GPUBOX_RELEASE=$(basename "$(dirname "$(readlink -f "$0")")")
export GPUBOX_RELEASE
exec {command}
"""
RELEASE_FILE = "release.json"
ESCAPED = str.maketrans({character: "\\" + character for character in '\\"`$'})
REPAIR = "move that release's directory away and deploy again; changes belong into servers/*.toml"
RELEASE_ID = re.compile(r"^[a-z0-9][a-z0-9.-]*-[0-9a-f]{12}$")


SINCE_2 = frozenset(
    {
        *("draft_id", "draft_path", "draft_sha256", "engine_name", "engine_version", "tp_size", "context_length"),
        *("nccl_profile", "overrides", "gpu_memory_mib"),
    }
)


class Release(BaseModel):
    """release.json: everything the box needs to start, probe and explain a release. No times, no host names.

    Schema 2 adds the fields of SINCE_2. Releases of schema 1 lie on boxes, are rolled back to, and keep their ids: they
    are read with these fields empty, and never rendered any more.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1, 2] = 2
    server: str
    server_digest: str
    stack: str
    stack_id: str
    overlay: str | None
    model_id: str | None
    model_path: str
    served_model_name: str
    listen_address: str
    port: int
    arguments: list[str]
    environment: dict[str, str]
    probes: Probes
    files: Annotated[dict[str, str], Field(description="sha256 of the other files of the release, by name")]
    draft_id: str | None = None
    draft_path: str | None = None
    draft_sha256: str | None = None
    engine_name: str | None = None
    engine_version: str | None = None
    tp_size: int | None = None
    context_length: int | None = None
    nccl_profile: str | None = None
    gpu_memory_mib: Annotated[int | None, Field(description="of one GPU of the machine that the profile is for")] = None
    overrides: Annotated[dict[str, str], Field(description="rules broken knowingly, each with the reason")] = {}

    @model_validator(mode="after")
    def _nothing_newer_in_an_old_one(self) -> Self:
        if self.schema_version == 1 and (newer := SINCE_2 & self.model_fields_set):
            raise ValueError(f"schema_version 1 has no {min(newer)}")
        return self

    @property
    def id(self) -> str:
        return f"{self.server}-{self.stack}-{short_digest(self._document())}"

    @property
    def base_url(self) -> str:
        """Where the box itself reaches the server."""
        address = "127.0.0.1" if self.listen_address == "0.0.0.0" else self.listen_address
        return f"http://{address}:{self.port}"

    def to_bytes(self) -> bytes:
        return canonical_json(self._document())

    def _document(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude=set(SINCE_2) if self.schema_version == 1 else None)


@dataclass(frozen=True)
class ReleaseSpec:
    """A rendered release: its id and the bytes of its files by name."""

    release: Release
    files: dict[str, bytes]

    @cached_property
    def id(self) -> str:
        """That of the release, from the bytes that are here already."""
        return f"{self.release.server}-{self.release.stack}-{sha256_hex(self.files[RELEASE_FILE])[:DIGEST_LENGTH]}"


def render_release(
    server: Server,
    stack: Stack,
    stack_id: str,
    *,
    settled: Settled,
    overlay: Overlay | None,
    model_id: str | None,
    draft_id: str | None = None,
    listen_address: str,
    layout: Layout | None = None,
) -> ReleaseSpec:
    """`settled`: the arguments and environment that the rules let pass (gpubox.specs.settled)."""
    layout = layout or Layout(DEFAULT_ROOT)
    model_path = server.model.path if model_id is None else str(layout.models / model_id)
    assert model_path is not None
    draft_path = str(layout.models / draft_id) if draft_id else server.draft and server.draft.path
    arguments = [
        *("--model-path", model_path, "--served-model-name", server.served_model_name),
        *("--host", listen_address, "--port", str(server.port)),
        *(("--speculative-draft-model-path", draft_path) if draft_path else ()),
        *settled.arguments.command_line(),
    ]
    python = layout.stacks / stack_id / "venv" / "bin" / "python"
    command = [str(python), "-m", stack.engine.module, *arguments]
    environment = _environment(settled, stack, stack_id, overlay, layout)
    serve = SERVE.format(command=shlex.join(command)).encode()
    env = "".join(f"{name}={_quote(value)}\n" for name, value in environment.items()).encode()
    release = Release(
        server=server.name,
        server_digest=server.digest,
        stack=stack.name,
        stack_id=stack_id,
        overlay=overlay.name if overlay else None,
        model_id=model_id,
        model_path=model_path,
        served_model_name=server.served_model_name,
        listen_address=listen_address,
        port=server.port,
        arguments=arguments,
        environment=environment,
        probes=server.probes,
        files={"env": sha256_hex(env), "serve": sha256_hex(serve)},
        draft_id=draft_id,
        draft_path=draft_path,
        draft_sha256=server.draft.sha256 if server.draft else None,
        engine_name=stack.engine.name,
        engine_version=stack.engine.version,
        tp_size=settled.arguments.get("tp_size") or 1,
        context_length=settled.arguments.get("context_length"),
        nccl_profile=settled.nccl.profile if settled.nccl else None,
        gpu_memory_mib=server.hardware.memory_mib if server.hardware else None,
        overrides=settled.overrides,
    )
    return ReleaseSpec(release, {"env": env, RELEASE_FILE: release.to_bytes(), "serve": serve})


def read_release(directory: Path) -> Release:
    """The release in `directory`, checked: its name is its digest and every file has its bytes. Raises BrokenError."""
    path = directory / RELEASE_FILE
    try:
        release = Release.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BrokenError(f"{path}: not a release: {str(error).splitlines()[0]}", hint=REPAIR) from None
    if release.id != directory.name.removeprefix(".building-"):
        raise BrokenError(f"{path}: was edited: its content is release {release.id}", hint=REPAIR)
    for name, digest in release.files.items():
        file = directory / name
        if not file.is_file() or sha256_hex(file.read_bytes()) != digest:
            raise BrokenError(f"{file}: missing or edited", hint=REPAIR)
    return release


def _environment(
    settled: Settled, stack: Stack, stack_id: str, overlay: Overlay | None, layout: Layout
) -> dict[str, str]:
    """What was settled, and ours over it. Cache paths are ours: caches are never shared by stacks."""
    cache = PurePosixPath(layout.jit_cache(stack_id))
    ours = {
        "GPUBOX_STACK": stack_id,
        "HOME": str(cache / "home"),
        "PYTHONPYCACHEPREFIX": str(cache / "pycache"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "FLASHINFER_WORKSPACE_BASE": str(cache / "flashinfer"),
        "XDG_CACHE_HOME": str(cache / "xdg"),
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{layout.stacks / stack_id}/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    }
    if stack.cuda is not None:
        ours["CUDA_HOME"] = stack.cuda.home
    if overlay is not None and overlay.libcuda_standin:
        ours["LD_LIBRARY_PATH"] = str(layout.stacks / stack_id / STANDIN.parent)
    return dict(sorted({**settled.environment, **ours}.items()))


def _quote(value: str) -> str:
    """Double quotes as systemd's EnvironmentFile reads them (systemd.exec(5)): backslash escapes inside."""
    return f'"{value.translate(ESCAPED)}"'

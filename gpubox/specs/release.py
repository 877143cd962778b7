"""Render a release: a pure function of stack, server, overlay and the box's settings."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from gpubox.build.libcuda_standin import STANDIN
from gpubox.canonical import canonical_json, sha256_hex, short_digest
from gpubox.errors import BrokenError
from gpubox.health.probes import Probes
from gpubox.layout import DEFAULT_ROOT, Layout
from gpubox.specs.engine import EngineArguments
from gpubox.specs.server import Server
from gpubox.specs.stack import Overlay, Stack

# The release's own name cannot stand in its files, since it is their digest: the script reads it off its real path.
SERVE = """#!/bin/sh
GPUBOX_RELEASE=$(basename "$(dirname "$(readlink -f "$0")")")
export GPUBOX_RELEASE
exec {command}
"""
REPAIR = "move that release's directory away and deploy again; changes belong into servers/*.toml"
RELEASE_ID = re.compile(r"^[a-z0-9][a-z0-9.-]*-[0-9a-f]{12}$")


class Release(BaseModel):
    """release.json: everything the box needs to start, probe and explain a release. No times, no host names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
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

    @property
    def id(self) -> str:
        return f"{self.server}-{self.stack}-{short_digest(self.model_dump(mode='json'))}"

    @property
    def base_url(self) -> str:
        """Where the box itself reaches the server."""
        address = "127.0.0.1" if self.listen_address == "0.0.0.0" else self.listen_address
        return f"http://{address}:{self.port}"

    def to_bytes(self) -> bytes:
        return canonical_json(self.model_dump(mode="json"))


@dataclass(frozen=True)
class ReleaseSpec:
    """A rendered release: its id and the bytes of its files by name."""

    release: Release
    files: dict[str, bytes]

    @property
    def id(self) -> str:
        return self.release.id


def render_release(
    server: Server,
    stack: Stack,
    stack_id: str,
    *,
    overlay: Overlay | None,
    model_id: str | None,
    listen_address: str,
    layout: Layout | None = None,
) -> ReleaseSpec:
    """Raises pydantic.ValidationError when the overlay's engine arguments are not valid."""
    layout = layout or Layout(DEFAULT_ROOT)
    model_path = server.model.path if model_id is None else str(layout.models / model_id)
    assert model_path is not None
    arguments = [
        *("--model-path", model_path, "--served-model-name", server.served_model_name),
        *("--host", listen_address, "--port", str(server.port)),
        *engine_arguments(server, overlay).command_line(),
    ]
    python = layout.stacks / stack_id / "venv" / "bin" / "python"
    command = [str(python), "-m", stack.engine.module, *arguments]
    environment = _environment(server, stack, stack_id, overlay, layout)
    serve = SERVE.format(command=shlex.join(command)).encode()
    env = "".join(f"{name}={_quote(value)}\n" for name, value in environment.items()).encode()
    release = Release(
        server=server.name,
        server_digest=short_digest(server.model_dump(mode="json")),
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
    )
    return ReleaseSpec(release, {"env": env, "release.json": release.to_bytes(), "serve": serve})


def engine_arguments(server: Server, overlay: Overlay | None) -> EngineArguments:
    return server.engine.merged(dict(overlay.engine)) if overlay else server.engine


def read_release(directory: Path) -> Release:
    """The release in `directory`, checked: its name is its digest and every file has its bytes. Raises BrokenError."""
    path = directory / "release.json"
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
    server: Server, stack: Stack, stack_id: str, overlay: Overlay | None, layout: Layout
) -> dict[str, str]:
    """Stack, then overlay, then server: the later wins. Cache paths are ours: caches are never shared by stacks."""
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
    merged = {**stack.environment, **(overlay.environment if overlay else {}), **server.environment, **ours}
    return dict(sorted(merged.items()))


def _quote(value: str) -> str:
    """Double quotes as systemd's EnvironmentFile reads them (systemd.exec(5)): backslash escapes inside."""
    escaped = "".join("\\" + character if character in '\\"`$' else character for character in value)
    return f'"{escaped}"'

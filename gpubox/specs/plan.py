"""From settings to everything that will be on a box: a pure function of the commit. No network, no host."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path

from gpubox.errors import InputError
from gpubox.settings import Settings
from gpubox.specs.engine_table import OtherTables, load_table, table_path
from gpubox.specs.findings import Finding
from gpubox.specs.model import ModelSpec, load_model, model_spec
from gpubox.specs.release import ReleaseSpec, render_release
from gpubox.specs.server import CheckpointSource, Server, load_server
from gpubox.specs.settled import Settled, settle
from gpubox.specs.stack import Overlay, Stack, StackSpec, load_overlay, load_stack, stack_spec
from gpubox.toml import nearest


@dataclass(frozen=True)
class BoxPlan:
    """What a deploy puts on one box. `releases[0]` is to be served; the others stand by, one per standby stack.

    `warnings`: what may be wrong with the profile on any of the stacks; shown before anything is done.
    """

    settings: Settings
    server: Server
    overlay: Overlay | None
    stacks: list[StackSpec]
    model: ModelSpec | None
    draft: ModelSpec | None
    releases: list[ReleaseSpec]
    warnings: list[Finding]

    @property
    def models(self) -> list[ModelSpec]:
        """What the box converts: the model, the draft, neither or both."""
        return list({spec.id: spec for spec in (self.model, self.draft) if spec}.values())

    @property
    def wanted(self) -> ReleaseSpec:
        return self.releases[0]

    @property
    def notes(self) -> list[str]:
        """What an operator should read before saying yes: warnings, and rules that the profile breaks knowingly."""
        broken = {rule: why for spec in self.releases for rule, why in spec.release.overrides.items()}
        return [
            *(f"{finding}; what to do: {finding.fix}" for finding in self.warnings),
            *(f"servers/{self.server.name}.toml: overrides {rule}: {why}" for rule, why in broken.items()),
        ]

    def public_url(self, ssh_address: str | None) -> str | None:
        """Where the controller probes the server; None when it listens on loopback only.

        `ssh_address` is None for a box that is reached through its node. Raises InputError when nothing tells where
        such a box is.
        """
        if self.settings.public_url:
            return self.settings.public_url
        if ip_address(self.settings.listen_address).is_loopback:
            return None
        address = ssh_address or self._container_address()
        if address is None:
            raise InputError(
                f"listen_address = {self.settings.listen_address!r}: the address of the container is not known",
                hint='set public_url = "http://ADDRESS:PORT", or give the container a fixed address',
            )
        return f"http://{address}:{self.server.port}"

    def _container_address(self) -> str | None:
        container = self.settings.container
        return container.address.partition("/")[0] if container and container.address != "dhcp" else None


def plan_box(root: Path, settings: Settings) -> BoxPlan:
    """`root` holds stacks/, servers/, models/, overlays/. Raises InputError; reads files, changes nothing."""
    server = load_server(root / "servers", settings.server)
    overlay = _overlay(root, settings)
    model = _model(root, server.model, settings)
    draft = _model(root, server.draft, settings) if server.draft else None
    stacks = [_stack(root, name) for name in settings.stacks]
    settled = [_settled(root, server, stack, overlay, settings) for stack in stacks]
    specs = [_spec(root / "stacks" / stack.name, settings.python, overlay) for stack in stacks]
    releases = [
        render_release(
            server,
            stack,
            spec.id,
            settled=what,
            overlay=overlay,
            model_id=model.id if model else None,
            draft_id=draft.id if draft else None,
            listen_address=settings.listen_address,
        )
        for stack, spec, what in zip(stacks, specs, settled, strict=True)
    ]
    warnings = list(dict.fromkeys(finding for what in settled for finding in what.warnings))
    return BoxPlan(settings, server, overlay, specs, model, draft, releases, warnings)


def _settled(root: Path, server: Server, stack: Stack, overlay: Overlay | None, settings: Settings) -> Settled:
    table = load_table(table_path(root, stack.name, stack.engine.name, stack.engine.version))
    return settle(server, stack, table, overlay=overlay, nccl=settings.nccl, others=OtherTables(root, table))


def _spec(directory: Path, python: str, overlay: Overlay | None) -> StackSpec:
    """stack_spec, once for each content of the directory: many boxes share a stack, and a lock takes a second."""
    return _spec_of(directory, python, overlay.model_dump_json() if overlay else "", _content(directory))


@lru_cache(maxsize=64)
def _spec_of(directory: Path, python: str, overlay: str, content: tuple[bytes | str, ...]) -> StackSpec:
    return stack_spec(directory, python, Overlay.model_validate_json(overlay) if overlay else None)


@lru_cache(maxsize=64)
def _model_of(directory: Path, python: str, content: tuple[bytes | str, ...]) -> ModelSpec:
    load_model(directory)
    return model_spec(directory, python)


def _content(directory: Path) -> tuple[bytes | str, ...]:
    """Every file below, by name, with its bytes."""
    found: list[bytes | str] = []
    for parent, _, names in sorted(os.walk(directory)):
        for name in sorted(names):
            found += [name, Path(parent, name).read_bytes()]
    return tuple(found)


def _stack(root: Path, name: str) -> Stack:
    return load_stack(_directory(root / "stacks", name, "stack"))


def _overlay(root: Path, settings: Settings) -> Overlay | None:
    if settings.overlay is None:
        return None
    return load_overlay(_directory(root / "overlays", settings.overlay, "overlay"))


def _model(root: Path, source: CheckpointSource, settings: Settings) -> ModelSpec | None:
    if source.build is None:
        return None
    directory = _directory(root / "models", source.build, "model")
    return _model_of(directory, settings.python, _content(directory))


def _directory(parent: Path, name: str, key: str) -> Path:
    path = parent / name
    if not path.is_dir():
        known = [entry.name for entry in parent.glob("*") if entry.is_dir()]
        raise InputError(f"{key} = {name!r}: there is no {path}", hint=nearest(name, known))
    return path

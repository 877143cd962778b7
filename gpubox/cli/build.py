"""The verbs that build: stack, model, release. Used by the deploy; usable by hand."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from gpubox.build.artefact_proof import prove_artefacts
from gpubox.build.builder import build_stack
from gpubox.build.install import Sources
from gpubox.errors import InputError
from gpubox.layout import SERVICE_USER, Layout
from gpubox.rollout.history import History, Verdict
from gpubox.rollout.locking import BoxLock, session_anchor
from gpubox.rollout.store import Store
from gpubox.specs.artefacts import ARTEFACTS_TOML, check_address
from gpubox.specs.model import build_model

SPEC = click.Path(exists=True, file_okay=False, path_type=Path)
DIRECTORY = click.Path(file_okay=False, path_type=Path)


def build_options(command: Callable[..., Any]) -> Callable[..., Any]:
    options = [
        click.option("--wheelhouse", type=SPEC, default=None, help="A directory of wheels to look in first."),
        click.option("--offline", is_flag=True, help="Use no network: cache and wheelhouse only."),
        click.option("--job", default=None, help="Who deploys: the lock stays taken until the ssh connection ends."),
        click.argument("spec", type=SPEC),
    ]
    for option in reversed(options):
        command = option(command)
    return command


index_option = click.option(
    "--index", multiple=True, metavar="NAME=URL", help="Where the index NAME of artefacts.toml is. May be repeated."
)


def index_addresses(words: tuple[str, ...]) -> dict[str, str]:
    """Raises InputError for what is not NAME=URL."""
    addresses: dict[str, str] = {}
    for word in words:
        name, equals, address = word.partition("=")
        try:
            if not (name and equals):
                raise ValueError(f"{word!r} is not NAME=URL")
            addresses[name] = check_address(address)
        except ValueError as error:
            raise InputError(f"--index: {error}", hint="e.g. --index pytorch-cu130=https://…/whl/cu130") from None
    return addresses


def timed_report(*, err: bool = False) -> Callable[[str], None]:
    started = time.monotonic()
    return lambda text: click.echo(f"[{time.monotonic() - started:6.1f} s] {text}", err=err)


def locked(layout: Layout, what: str, job: str | None) -> ExitStack:
    """The box's lock for one build; for a deploy (`job`) the record stays until the connection ends."""
    stack = ExitStack()
    note = stack.enter_context(
        BoxLock(layout.state / "lock").held(job or "somebody", what, anchor=session_anchor(), keep=job is not None)
    )
    if note:
        click.echo(note, err=True)  # standard output may be JSON
    return stack


@click.group("stack")
def stack_group() -> None:
    """Software worlds: build and prove."""


@stack_group.command("build")
@click.option(
    "--cache-owner", default=SERVICE_USER, show_default=True, help="Who runs the server: owns the compile caches."
)
@index_option
@build_options
def stack_build(
    spec: Path, wheelhouse: Path | None, offline: bool, job: str | None, cache_owner: str, index: tuple[str, ...]
) -> None:
    """Build the stack that SPEC describes, prove it, give it its final name."""
    layout, sources = Layout(), Sources(wheelhouse, offline, index_addresses(index))
    with locked(layout, f"building stack {spec.name}", job):
        done = build_stack(spec, layout, sources=sources, report=timed_report(), cache_owner=cache_owner)
    click.echo(str(done))


@stack_group.command("prove")
@click.option("--dir", "store", type=DIRECTORY, default=Path("wheelhouse"), show_default=True, help="Keeps the files.")
@click.option("--offline", is_flag=True, help="Prove what lies in --dir; fetch nothing.")
@index_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
@click.argument("stack", type=SPEC)
def stack_prove(stack: Path, store: Path, offline: bool, index: tuple[str, ...], as_json: bool) -> None:
    """Fetch what artefacts.toml of the directory STACK marks unproved, check it, and record the proof there.

    For the machine that first has a network which reaches those indexes. Commit what it changes.
    """
    report = timed_report(err=as_json)
    proofs = prove_artefacts(stack, store, indexes=index_addresses(index), offline=offline, report=report)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(proof) for proof in proofs], indent=2))
    elif not proofs:
        click.echo(f"{stack.resolve().name}: nothing is unproved")
    else:
        click.echo(f"commit {stack / ARTEFACTS_TOML}; from now on other bytes are refused: re-published upstream")


@click.group("model")
def model_group() -> None:
    """Models that are converted on the box."""


@model_group.command("build")
@build_options
def model_build(spec: Path, wheelhouse: Path | None, offline: bool, job: str | None) -> None:
    """Fetch, convert and verify the model that SPEC describes."""
    layout = Layout()
    with locked(layout, f"building model {spec.name}", job):
        done = build_model(spec, layout, wheelhouse=wheelhouse, offline=offline, report=timed_report())
    click.echo(str(done))


@click.group("release")
def release_group() -> None:
    """Releases: put in place, remove old ones."""


@release_group.command("add")
@click.option("--job", default=None, help="Who deploys: the lock stays taken until the ssh connection ends.")
@click.argument("spec", type=SPEC, nargs=-1, required=True)
def release_add(spec: tuple[Path, ...], job: str | None) -> None:
    """Copy rendered releases into the store, complete or not at all. Nothing is switched."""
    layout = Layout()
    with locked(layout, "adding releases", job):
        for directory in spec:
            click.echo(Store(layout).add(directory))


@release_group.command("collect")
@click.option("--keep", default=5, show_default=True, help="How many of the newest proved releases stay.")
@click.option("--protect", multiple=True, help="A release that stays in any case.")
@click.option("--job", default=None, help="Who deploys: the lock stays taken until the ssh connection ends.")
def release_collect(keep: int, protect: tuple[str, ...], job: str | None) -> None:
    """Remove old releases and the stacks that only they needed; never current, previous or protected ones."""
    layout = Layout()
    proved = [e.to_release for e in History(layout.state / "history.jsonl") if e.verdict is Verdict.PROVED]
    newest_first = list(dict.fromkeys(name for name in reversed(proved) if name))
    with locked(layout, "removing old releases", job):
        for name in Store(layout).collect(keep, protect, newest_first):
            click.echo(f"removed {name}")

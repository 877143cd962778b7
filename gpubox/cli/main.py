"""The command `gpubox`: operate a box by hand. Human text by default, --json for programs; docs/command.md."""

from __future__ import annotations

import functools
import getpass
import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import click
from pydantic import BaseModel

from gpubox.cli.box import open_box
from gpubox.cli.text import show_history, show_releases, show_status
from gpubox.errors import ExitCode, GpuboxError, ProofError
from gpubox.rollout import detached
from gpubox.rollout import status as box_status
from gpubox.rollout.activation import Box, Request
from gpubox.rollout.locking import session_anchor
from gpubox.rollout.rollback import rollback_target

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
who_option = click.option("--who", default=None, help="Who asks; written to history (default: you).")


def invoker() -> str:
    """Who runs this command: the person behind sudo if there is one, and where from."""
    return f"{os.environ.get('SUDO_USER') or getpass.getuser()}@{socket.gethostname()}"


def errors_to_exit_codes(command: Callable[..., Any]) -> Callable[..., Any]:
    """Errors become text on standard error and the documented exit status."""

    @functools.wraps(command)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        try:
            return command(*arguments, **options)
        except GpuboxError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(int(error.exit_code))

    return wrapped


class Verbs(NamedTuple):
    """A group of verbs: the module that holds it, and its line in `gpubox --help`."""

    module: str
    summary: str


# Imported when asked for: `gpubox status` needs none of them, and what measures needs scipy.
GROUPS = {
    "bench": Verbs("gpubox.cli.bench", "Measure what serves, and compare."),
    "collectives": Verbs("gpubox.cli.collectives", "All-reduce between the GPUs of this box."),
    "draft": Verbs("gpubox.cli.draft", "EAGLE-3 drafts: check and convert."),
    "model": Verbs("gpubox.cli.build", "Models that are converted on the box."),
    "patches": Verbs("gpubox.cli.patches", "A stack's own changes to its engine: check, apply, revert."),
    "release": Verbs("gpubox.cli.build", "Releases: put in place, remove old ones."),
    "stack": Verbs("gpubox.cli.build", "Software worlds: build and prove."),
    "weights": Verbs("gpubox.cli.weights", "Model directories: verify, fetch, write a manifest."),
}


class GpuboxGroup(click.Group):
    """Every verb reports GpuboxError the same way."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *GROUPS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in GROUPS:
            return super().get_command(ctx, cmd_name)
        group: click.Command = getattr(importlib.import_module(GROUPS[cmd_name].module), f"{cmd_name}_group")
        return group

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click does it, without importing the groups for their first lines."""
        rows = []
        for name in self.list_commands(ctx):
            command = self.commands.get(name)
            if name in GROUPS:
                rows.append((name, GROUPS[name].summary))
            elif command is not None and not command.hidden:
                rows.append((name, command.get_short_help_str(limit=60)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        return errors_to_exit_codes(super().invoke)(ctx)


@click.group(cls=GpuboxGroup)
@click.version_option(package_name="gpubox")
def main() -> None:
    """Releases of the inference server on this box: see, prove, switch, roll back."""


def print_json(value: BaseModel | list[BaseModel]) -> None:
    data = (
        [item.model_dump(mode="json") for item in value] if isinstance(value, list) else value.model_dump(mode="json")
    )
    click.echo(json.dumps(data, indent=2, ensure_ascii=False))


@main.command()
@json_option
def status(as_json: bool) -> None:
    """What serves now, since when, and what to do next."""
    seen = box_status.status(open_box())
    print_json(seen) if as_json else show_status(seen)


@main.command()
@json_option
def releases(as_json: bool) -> None:
    """The releases kept on this box."""
    rows = box_status.releases(open_box())
    print_json(list(rows)) if as_json else show_releases(rows)


@main.command()
@json_option
@click.option("-n", "count", default=20, show_default=True, help="How many of the newest entries.")
def history(as_json: bool, count: int) -> None:
    """What was tried on this box and how it ended."""
    entries = list(open_box().history)[-count:]
    print_json(list(entries)) if as_json else show_history(entries)


@main.command()
@json_option
@click.option("--deep", is_flag=True, help="Also hash the model's files (minutes for a big model).")
@click.argument("release", nargs=-1)
def verify(as_json: bool, deep: bool, release: tuple[str, ...]) -> None:
    """Check that releases and all they need are as they were proved. Default: every release."""
    box = open_box()
    ids = [box.store.resolve(word) for word in release] or box.store.ids()
    found = {name: box_status.verify(box, name, deep=deep) for name in ids}
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        for name, problems in found.items():
            click.echo(f"{name}: {'ok' if not problems else 'BROKEN'}")
            for problem in problems:
                click.echo(f"  {problem}")
    if any(found.values()):
        sys.exit(int(ExitCode.BROKEN))


@main.command()
@json_option
def health(as_json: bool) -> None:
    """Prove the running server now: its unit, its model id, a right answer."""
    box = open_box()
    current = box.store.current()
    if current is None:
        raise ProofError("no release is active on this box", hint="deploy one")
    lines: list[str] = []
    problem = box.dead_reason() or _wrong_release(box, current)
    try:
        if problem is None:
            box.prober.prove(box.store.read(current), forced_kill=False, report=lines.append)
    except GpuboxError as error:
        problem = str(error)
    if as_json:
        click.echo(json.dumps({"release": current, "healthy": problem is None, "problem": problem, "probes": lines}))
    else:
        click.echo("\n".join([*lines, f"{current}: {'healthy' if problem is None else f'NOT healthy: {problem}'}"]))
    if problem is not None:
        sys.exit(int(ExitCode.FAILED))


def _wrong_release(box: Box, current: str) -> str | None:
    running = box.service.running_release()
    return None if running == current else f"the server runs {running}, current is {current}"


@main.command()
@json_option
@who_option
@click.option("--force", is_flag=True, help="Also a release that failed when it was last tried.")
@click.argument("release")
def activate(as_json: bool, who: str | None, force: bool, release: str) -> None:
    """Serve RELEASE, proved; on failure what served before serves again."""
    box = open_box()
    _run(box, "activate", box.store.resolve(release), who, force, as_json)


@main.command()
@json_option
@who_option
@click.option("--force", is_flag=True, help="Also a release that failed when it was last tried.")
@click.option("--stack", default=None, help="The newest release of this stack.")
@click.argument("release", required=False)
def rollback(as_json: bool, who: str | None, force: bool, stack: str | None, release: str | None) -> None:
    """Serve a kept release again: RELEASE, or the newest of --stack, or the previous one."""
    box = open_box()
    _run(box, "rollback", rollback_target(box, release=release, stack=stack), who, force, as_json)


def _run(box: Box, action: str, release: str, who: str | None, force: bool, as_json: bool) -> None:
    """Start the activation apart from this session, show its log until it ends, and end as it ended."""
    request = Request(
        run=detached.new_run_name(),
        who=who or invoker(),
        action=action,
        release=release,
        anchor=session_anchor(),
        force=force,
    )
    run = detached.start(box.layout, request)
    outcome = detached.follow(run, lambda line: click.echo(line, err=as_json))
    if as_json:
        data = {"run": run.name, "release": release, "exit_code": outcome.exit_code, "message": outcome.message}
        click.echo(json.dumps(data))
    elif outcome.message:
        click.echo(f"error: {outcome.message}", err=True)
    else:
        click.echo(f"{release} serves")
    sys.exit(outcome.exit_code)


@main.command("run-activation", hidden=True)
@click.argument("run_name")
def run_activation(run_name: str) -> None:
    """The body of the transient unit."""
    box = open_box()
    run = detached.Run(box.layout, run_name)
    started = time.monotonic()
    try:
        box.activate(run.request(), lambda text: click.echo(f"[{time.monotonic() - started:6.1f} s] {text}"))
    except GpuboxError as error:
        run.finish(detached.failure(error))
        sys.exit(int(error.exit_code))
    run.finish(detached.SUCCESS)


@main.command()
@click.option("--run", "run_name", default=None, hidden=True, help="The run whose unit just ended.")
@click.option("--boot", is_flag=True, help="Only move the link: systemd starts the server right after.")
def recover(run_name: str | None, boot: bool) -> None:
    """Put the old release back if an activation was interrupted."""
    found = open_box().recover(click.echo, restart=not boot)
    if not found and run_name is None:  # the end of every run calls this: silence is its usual answer
        click.echo("nothing was interrupted")

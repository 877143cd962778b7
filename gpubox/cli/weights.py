"""`gpubox weights`: prove, describe and fetch model directories. docs/weights.md."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from gpubox.errors import ExitCode, InputError
from gpubox.layout import Layout
from gpubox.weights import fetch as fetching
from gpubox.weights.hashing import default_jobs
from gpubox.weights.http import Client, MirrorSource, checked_url, local_manifest
from gpubox.weights.manifest import MANIFEST
from gpubox.weights.records import Records
from gpubox.weights.safetensors import shown
from gpubox.weights.sources import DirectorySource, Source
from gpubox.weights.verify import State, Verdict, verify
from gpubox.weights.write import write_manifest

FETCH_JOBS = 4  # files at once: a server's line is full long before our cores are
SAY_EVERY_S = 15.0  # into a log or a pipe, where no bar can be drawn

DIRECTORY = click.Path(file_okay=False, path_type=Path)
FILE = click.Path(dir_okay=False, exists=True, path_type=Path)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
jobs_option = click.option("--jobs", type=click.IntRange(1, 64), default=None, help="How many files at once.")
state_option = click.option(
    "--state", type=DIRECTORY, default=None, help="Where it is recorded what was read (default: the box's state)."
)


def records_in(state: Path | None) -> Records:
    return Records(state or Layout().weights)


@click.group("weights")
def weights_group() -> None:
    """Model directories: are they whole, are the bytes the right ones, fetch them."""


@weights_group.command("verify")
@click.option("--deep", is_flag=True, help="Read every byte that was not read since it changed; needs a manifest.")
@click.option("--fresh", is_flag=True, help="With --deep: read everything, whatever was recorded.")
@click.option("--manifest", type=FILE, default=None, help=f"A file as sha256sum writes it (default: DIR/{MANIFEST}).")
@jobs_option
@state_option
@json_option
@click.argument("directory", type=DIRECTORY)
def weights_verify(
    directory: Path,
    deep: bool,
    fresh: bool,
    manifest: Path | None,
    jobs: int | None,
    state: Path | None,
    as_json: bool,
) -> None:
    """Whether the model in DIRECTORY is whole, and with --deep whether its bytes are those of its manifest."""
    with shown_progress() as progress:
        found = verify(
            directory,
            records_in(state),
            manifest=manifest,
            deep=deep,
            fresh=fresh,
            jobs=jobs,
            on_start=lambda size: progress.start("reading", size),
            on_bytes=progress.advance,
        )
    _finish(found, as_json)


@weights_group.command("manifest")
@click.option("--output", type=click.Path(path_type=Path), default=None, help=f"Where to (default: DIR/{MANIFEST}).")
@jobs_option
@state_option
@click.argument("directory", type=DIRECTORY)
def weights_manifest(directory: Path, output: Path | None, jobs: int | None, state: Path | None) -> None:
    """Write the manifest of the bytes in DIRECTORY as they are now."""
    with shown_progress() as progress:
        path, count = write_manifest(
            directory, output, records_in(state), jobs=jobs or default_jobs(), start=progress.start, on=progress.advance
        )
    click.echo(f"{path}: {count} files")
    click.echo(
        "It proves from now on that these bytes did not change. It does not prove that they are the publisher's."
    )


@weights_group.command("fetch")
@click.option("--from", "origin", default=None, metavar="DIR|URL", help="A directory or an address with a manifest.")
@click.option("--revision", default=None, help="The commit of a hub's repository, 40 hexadecimal digits.")
@click.option("--to", "directory", type=DIRECTORY, required=True, help="The model's directory.")
@click.option(
    "--manifest", type=FILE, default=None, help=f"With --from: a manifest of yours (default: its {MANIFEST})."
)
@click.option(
    "--token-file", type=FILE, default=None, help="The hub's token (default: HF_TOKEN, or that of its client)."
)
@click.option("--exclude", multiple=True, metavar="GLOB", help="Files to leave out: 'original/*'.")
@jobs_option
@state_option
@json_option
@click.argument("repository", required=False, metavar="[OWNER/NAME]")
def weights_fetch(
    repository: str | None,
    origin: str | None,
    revision: str | None,
    directory: Path,
    manifest: Path | None,
    token_file: Path | None,
    exclude: tuple[str, ...],
    jobs: int | None,
    state: Path | None,
    as_json: bool,
) -> None:
    """Fetch a model from the hub (OWNER/NAME --revision) or from elsewhere (--from), proved, to --to. Resumes."""
    cancelled = Event()
    source = _source(repository, origin, revision, manifest, token_file, cancelled)
    records = records_in(state)
    with shown_progress() as progress:
        done = fetching.fetch(
            source,
            directory,
            records,
            jobs=jobs or FETCH_JOBS,
            progress=fetching.Progress(progress.start, progress.advance),
            exclude=exclude,
            cancelled=cancelled,
        )
    click.echo(
        f"{done.fetched} files fetched, {done.present} were there, {done.size / 1e9:.1f} GB; {source.proves}",
        err=as_json,
    )
    _finish(verify(directory, records), as_json)


def _source(
    repository: str | None,
    origin: str | None,
    revision: str | None,
    manifest: Path | None,
    token_file: Path | None,
    cancelled: Event,
) -> Source:
    if (repository is None) == (origin is None):
        raise InputError("weights fetch: give either OWNER/NAME or --from", hint="gpubox weights fetch --help")
    if repository is not None:
        if manifest is not None or revision is None:
            raise InputError(f"{repository}: give --revision, and no --manifest: the hub lists its own digests")
        from gpubox.weights.hub import HubSource  # noqa: PLC0415 - half a second that the other verbs need not wait

        return HubSource(repository, revision, token_file=token_file, cancelled=cancelled)
    assert origin is not None
    if revision is not None or token_file is not None:
        raise InputError("--from: --revision and --token-file are for the hub alone")
    if "://" in origin:
        return MirrorSource(checked_url(origin), local_manifest(manifest), Client(cancelled=cancelled))
    return DirectorySource(Path(origin), manifest)


def _finish(found: Verdict, as_json: bool) -> None:
    click.echo(json.dumps(as_data(found), indent=2) if as_json else "\n".join(lines(found)))
    if found.structure or found.wrong or (found.origin and found.of_state(State.UNLISTED)):
        sys.exit(int(ExitCode.BROKEN))


def as_data(found: Verdict) -> dict[str, object]:
    return {**found.model_dump(mode="json"), "whole": found.whole, "proved": found.proved}


def lines(found: Verdict) -> list[str]:
    """The verdict for a person: structure, content, then what is wrong, file by file."""
    whole = f"whole: {found.shards} shards, {found.tensors} tensors, {found.size / 1e9:.1f} GB"
    said = [found.directory, f"structure   {whole if found.whole else 'NOT WHOLE'}"]
    said += [f"            {problem}" for problem in found.structure]
    said += [f"note        {note}" for note in found.notes]
    said.append(f"content     {_content(found)}")
    said += [f"            {shown(file.name)}: {file.problem}" for file in found.wrong]
    if found.origin:
        said += [f"            {shown(file.name)}: not in {found.origin}" for file in found.of_state(State.UNLISTED)]
    return said


def _content(found: Verdict) -> str:
    if found.origin is None:
        return "unproved: no manifest says what the bytes must be"
    speed = found.read / 1e6 / found.seconds if found.seconds else 0.0
    read = (
        f"{found.read / 1e9:.1f} GB read in {found.seconds:.0f} s, {speed:.0f} MB/s" if found.read else "nothing read"
    )
    if found.wrong:
        return f"WRONG: {len(found.wrong)} of {len(found.files)} files differ from {found.origin} ({read})"
    if unread := found.of_state(State.UNREAD):
        size = sum(file.size for file in unread)
        return f"unproved: {len(unread)} of {len(found.files)} files ({size / 1e9:.1f} GB) were not read yet: --deep"
    if unlisted := found.of_state(State.UNLISTED):
        return f"NOT PROVED: {len(unlisted)} of {len(found.files)} files are not in {found.origin}"
    return f"proved: {len(found.files)} files are those of {found.origin} ({read})"


class Shown:
    """Progress in bytes: a bar on a terminal, else a line now and then. Called from several threads."""

    def __init__(self, bar: Progress | None) -> None:
        self._bar = bar
        self._lock = Lock()
        self._task = bar.add_task("", total=None, visible=False) if bar else None
        self.start("", 0)

    def start(self, what: str, size: int) -> None:
        self._what, self._size, self._done = what, size, 0
        self._since = self._said = time.monotonic()
        if self._bar is not None and self._task is not None:
            self._bar.reset(self._task, description=what, total=size, visible=size > 0)

    def advance(self, count: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, count)
            return
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now - self._said < SAY_EVERY_S:
                return
            self._said = now
        speed = self._done / (now - self._since)
        left = f", {(self._size - self._done) / speed / 60:.0f} min left" if speed > 0 and self._size else ""
        gone, whole = self._done / 1e9, self._size / 1e9
        click.echo(f"{self._what}: {gone:.1f} of {whole:.1f} GB, {speed / 1e6:.0f} MB/s{left}", err=True)


@contextmanager
def shown_progress() -> Iterator[Shown]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Shown(None)
        return
    columns = (
        *(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield Shown(bar)

"""Gather all that a stack needs into one directory, from which a box is built without a network: docs/wheelhouse.md.

`python -m gpubox.devtools.wheelhouse gather STACK`, `verify`, `prune`. Wheels come from the index that uv uses on this
machine, artefacts from the indexes named in group_data, the driver's file from where group_data says.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from gpubox.cli.build import index_addresses, index_option
from gpubox.cli.main import errors_to_exit_codes
from gpubox.devtools.gathering import OnBytes, damages, gather, prune, superfluous
from gpubox.devtools.needed import Needed, wanted_files
from gpubox.errors import BrokenError, ExitCode, InputError
from gpubox.nvidia.driver import AnyDriver, RunFileDriver
from gpubox.toml import Strict, nearest, validate

ROOT = Path(__file__).parents[2]
LARGE = 50_000_000  # bytes; smaller files are not worth a line
DIRECTORY = click.Path(file_okay=False, path_type=Path)
dir_option = click.option("--dir", "directory", type=DIRECTORY, default=Path("wheelhouse"), show_default=True)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")


@click.group()
def main() -> None:
    """Everything that a stack needs, in one directory."""


@main.command("gather")
@click.argument("stack")
@dir_option
@click.option("--python", "pythons", multiple=True, help="Of the boxes, e.g. 3.12; default: all that the stack has.")
@click.option("--model", "models", multiple=True, help="A directory of models/ that boxes convert. May be repeated.")
@click.option("--driver", type=click.Path(dir_okay=False, path_type=Path), help="NVIDIA's .run file, on this machine.")
@click.option("--root", type=DIRECTORY, default=ROOT, hidden=True)
@index_option
@json_option
def gather_command(
    stack: str,
    directory: Path,
    pythons: tuple[str, ...],
    models: tuple[str, ...],
    driver: Path | None,
    root: Path,
    index: tuple[str, ...],
    as_json: bool,
) -> None:
    """Bring everything that boxes need for STACK into --dir; what is there and right is kept."""
    if not (root / "stacks" / stack).is_dir():
        known = [entry.parent.name for entry in root.glob("stacks/*/stack.toml")]
        raise InputError(f"stack = {stack!r}: there is no stacks/{stack}", hint=nearest(stack, known))
    settings = _group_data(root / "group_data")
    indexes = {**settings.get("indexes", {}), **index_addresses(index)}
    wanted_driver = _run_file_driver(settings)
    absent = wanted_driver and not driver and wanted_driver.run.startswith("/") and not Path(wanted_driver.run).exists()
    wants = wanted_files(
        root,
        stack,
        pythons=pythons,
        models=models,
        indexes=indexes,
        driver=None if absent else wanted_driver,
        here=driver,
    )
    with _bar(sum(needed.size or 0 for needed in wants.files), show=not as_json) as (on_bytes, console):

        def on_file(needed: Needed, was_there: bool) -> None:
            if not was_there and not as_json and (needed.size is None or needed.size >= LARGE):
                console.print(needed.path, highlight=False, soft_wrap=True)

        done = gather(directory, wants, on_bytes=on_bytes, on_file=on_file)
    left_out = [wanted_driver.run] if absent and wanted_driver else []
    size = sum(file.size for file in done.manifest.files)
    if as_json:
        _print_json(
            dir=str(directory),
            stack=stack,
            pythons=done.manifest.pythons,
            files=len(done.manifest.files),
            bytes=size,
            fetched=done.fetched,
            manifest_sha256=done.manifest.digest,
            left_out=left_out,
        )
        return
    click.echo(f"{stack}: {len(done.manifest.files)} files, {size / 1e9:.2f} GB in {directory} ({done.fetched} new)")
    click.echo(f"manifest sha256 {done.manifest.digest}")
    for path in left_out:
        click.echo(f"left out: {path} is a path of another host; give the file with --driver")


@main.command("verify")
@dir_option
@json_option
def verify_command(directory: Path, as_json: bool) -> None:
    """Compare every file with the manifests, by sha256. Exit status 5 when one differs or is missing."""
    total = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()) if directory.is_dir() else 0
    with _bar(total, show=not as_json) as (on_bytes, _):
        found = damages(directory, on_bytes=on_bytes)
    if as_json:
        _print_json(dir=str(directory), ok=not found, damages=found)
        sys.exit(int(ExitCode.BROKEN) if found else 0)
    if found:
        raise BrokenError(
            f"{directory}: {len(found)} files are not as gathered",
            hint="gather again: only these are fetched",
            detail="\n".join(found),
        )
    click.echo(f"{directory}: every file is as its manifest says")


@main.command("prune")
@dir_option
@click.option("--forget", metavar="STACK", help="Also what only this stack needs, and its manifest.")
@click.option("--yes", is_flag=True, help="Remove; without it only show.")
@json_option
def prune_command(directory: Path, forget: str | None, yes: bool, as_json: bool) -> None:
    """Remove files that were gathered here and that no manifest names any more."""
    found = superfluous(directory, without=forget)
    size = sum(path.stat().st_size for path in found)
    if yes:
        prune(directory, without=forget)
    if as_json:
        _print_json(dir=str(directory), removed=yes, bytes=size, files=[path.name for path in found])
        return
    for path in found:
        click.echo(f"{'removed' if yes else 'would remove'} {path.relative_to(directory)}")
    click.echo(f"{len(found)} files, {size / 1e9:.2f} GB" + ("" if yes or not found else "; --yes removes them"))


class _Wanted(Strict):
    driver: AnyDriver


def _run_file_driver(settings: dict[str, Any]) -> RunFileDriver | None:
    """None for a driver of packages: a mirror of its repository, or a directory of .debs, replaces the network."""
    if "driver" not in settings:
        return None
    wanted = validate(_Wanted, {"driver": settings["driver"]}, "group_data").driver
    return wanted if isinstance(wanted, RunFileDriver) else None


def _group_data(directory: Path) -> dict[str, Any]:
    """`indexes` and `driver` as the operator's values have them, whichever group they stand in."""
    found: dict[str, Any] = {}
    for path in sorted(directory.glob("*.py")):
        values = runpy.run_path(str(path))
        found |= {key: values[key] for key in ("indexes", "driver") if key in values}
    return found


@contextmanager
def _bar(total: int, *, show: bool) -> Iterator[tuple[OnBytes, Console]]:
    """A bar over `total` bytes on standard error, when a person looks at it."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not (show and console.is_terminal)) as progress:
        task = progress.add_task("", total=total)
        done: dict[str, int] = {}

        def on_bytes(path: str, there: int) -> None:
            done[path] = there
            progress.update(task, completed=sum(done.values()), description=path[:40])

        yield on_bytes, console


def _print_json(**values: Any) -> None:
    click.echo(json.dumps(values, indent=2))


if __name__ == "__main__":
    errors_to_exit_codes(main)()

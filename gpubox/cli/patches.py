"""`gpubox patches`: what is patched, in a stack on this box or in a source tree of your own; docs/patches.md."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gpubox.build.patches import (
    PATCHES,
    PatchReport,
    State,
    apply_patches,
    check_patches,
    read_patches,
    revert_patches,
)
from gpubox.errors import BrokenError, ExitCode, InputError, RefusedError
from gpubox.layout import Layout
from gpubox.rollout.store import Store
from gpubox.specs.patch import Patch
from gpubox.specs.spec import SPEC, read_spec
from gpubox.specs.stack import StackBuild
from gpubox.toml import nearest

DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
PATCH_SET = "A directory of *.patch files, used in the order of their names."


def tree_options(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option("--patches", "patch_set", type=DIRECTORY, required=True, help=PATCH_SET)(command)
    return click.option(
        "--tree", type=DIRECTORY, required=True, help="Your site-packages, or the directory that holds sglang/."
    )(command)


@click.group("patches")
def patches_group() -> None:
    """Patches of a stack: what is applied; apply and revert in a tree of your own."""


@patches_group.command("check")
@json_option
@click.option("--tree", type=DIRECTORY, default=None, help="A tree of your own instead of a stack; needs --patches.")
@click.option("--patches", "patch_set", type=DIRECTORY, default=None, help=PATCH_SET)
@click.argument("stack", required=False)
def check(as_json: bool, tree: Path | None, patch_set: Path | None, stack: str | None) -> None:
    """Is each patch applied? STACK is a stack on this box; default: the one that serves."""
    if (tree is None) != (patch_set is None) or (tree is not None and stack is not None):
        raise InputError("name a STACK, or both --tree and --patches", hint="gpubox patches check --help")
    if tree is not None and patch_set is not None:
        reports, wrong = check_patches(_in_directory(patch_set), tree), {State.NEITHER}
    else:
        reports, wrong = check_patches(*_of_stack(Layout(), stack)), {State.NEITHER, State.APPLICABLE}
    _print(reports, as_json)
    if any(report.state in wrong for report in reports):
        sys.exit(int(ExitCode.BROKEN if tree is None else ExitCode.FAILED))


@patches_group.command("apply")
@json_option
@tree_options
def apply(as_json: bool, tree: Path, patch_set: Path) -> None:
    """Apply the patches that are not applied yet, in order. Never in a built stack."""
    _change(apply_patches, "applied", tree, patch_set, as_json)


@patches_group.command("revert")
@json_option
@tree_options
def revert(as_json: bool, tree: Path, patch_set: Path) -> None:
    """Take out the patches that are applied, the last first. Never in a built stack."""
    _change(revert_patches, "reverted", tree, patch_set, as_json)


def _change(
    work: Callable[[list[Patch], Path], list[str]], done: str, tree: Path, patch_set: Path, as_json: bool
) -> None:
    patches = _in_directory(patch_set)
    _refuse_stacks(Layout(), tree, patches)
    changed = work(patches, tree)
    if as_json:
        click.echo(json.dumps({done: changed, "patches": _data(check_patches(patches, tree))}, indent=2))
    else:
        click.echo("\n".join(f"{name}: {done}" for name in changed) or f"nothing to do: all were {done} before")


def _in_directory(directory: Path) -> list[Patch]:
    names = sorted(path.name for path in directory.glob("*.patch"))
    if not names:
        raise InputError(f"{directory}: holds no *.patch", hint="name the directory that holds the patches")
    return read_patches(directory, names)


def _of_stack(layout: Layout, word: str | None) -> tuple[list[Patch], Path]:
    """The patches and the site-packages of a stack on this box: by id, by a unique beginning, or the serving one."""
    ids = sorted(entry.parent.name for entry in layout.stacks.glob("[!.]*/stack.json"))
    if word is None:
        store = Store(layout)
        current = store.current()
        if current is None:
            raise InputError("no release is active on this box", hint="name a stack: " + (", ".join(ids) or "none yet"))
        word = store.read(current).stack_id
    found = [word] if word in ids else [name for name in ids if name.startswith(word)]
    if len(found) > 1:
        raise InputError(f"stack {word!r} is ambiguous: {', '.join(found)}", hint="give more of it")
    if not found:
        raise InputError(f"there is no stack {word!r} on this box", hint=nearest(word, ids) if ids else "deploy first")
    stack = layout.stacks / found[0]
    if not (stack / SPEC).is_file():
        raise BrokenError(f"{stack}: its {SPEC} is gone", hint="remove this directory and deploy again")
    spec = read_spec(StackBuild, stack)
    site_packages = stack / "venv" / "lib" / f"python{spec.build.python}" / "site-packages"
    return read_patches(stack / PATCHES, spec.build.patches), site_packages


def _refuse_stacks(layout: Layout, tree: Path, patches: list[Patch]) -> None:
    """A built stack never changes: it was proved as it is, and its name is the digest of what went into it."""
    stacks = layout.stacks.resolve()
    touched = [tree, *((tree / file.path).parent for patch in patches for file in patch.header.files)]
    if any(path.resolve().is_relative_to(stacks) for path in touched):
        raise RefusedError(
            f"{tree}: is in a built stack, and those never change",
            hint="name the patch in the stack's stack.toml and deploy: that builds a stack of its own",
        )


def _data(reports: list[PatchReport]) -> list[dict[str, Any]]:
    return [
        {
            "patch": report.patch,
            "state": report.state,
            "files": [{"path": file.path, "state": file.state, "found": file.found} for file in report.files],
        }
        for report in reports
    ]


def _print(reports: list[PatchReport], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(_data(reports), indent=2))
        return
    for report in reports:
        click.echo(f"{report.patch}: {report.state}")
        for file in report.files:
            found = f", found sha256 {file.found}" if file.found else ", no such file"
            click.echo(f"  {file.path}: {file.state}{found if file.state is State.NEITHER else ''}")
    if not reports:
        click.echo("this stack has no patches")

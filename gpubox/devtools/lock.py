"""Generate and check the locks of stacks: `python -m gpubox.devtools.lock [--check] [--upgrade] NAME...`.

One lock serves every Python of a stack on x86-64 Linux: uv resolves universally inside that environment and writes
markers where two Pythons differ. An existing lock is the preference, so a lock changes only where its inputs did,
and a lock that fits its inputs is reproduced byte for byte; that is what the check relies on.
"""

from __future__ import annotations

import difflib
import shutil
import subprocess
import tempfile
from pathlib import Path

import click

from gpubox.errors import GpuboxError, InputError
from gpubox.rollout.running import uv_program
from gpubox.specs.lockfile import parse_lock
from gpubox.specs.spec import LOCK
from gpubox.specs.stack import Stack, load_stack

STACKS = Path(__file__).parents[2] / "stacks"
INPUTS = ("requirements.in", "overrides.txt", "excludes.txt")


class StaleLockError(InputError):
    """The committed lock is not what its inputs resolve to."""


def compile_lock(directory: Path, *, upgrade: bool = False, offline: bool = False) -> str:
    """What the lock of the stack in `directory` should be. Raises GpuboxError with uv's words when nothing fits."""
    stack = load_stack(directory)
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        for name in INPUTS:  # all three exist there, so that one command line serves every stack
            source = directory / name
            (work / name).write_bytes(source.read_bytes() if source.is_file() else b"")
        if (directory / LOCK).is_file() and not upgrade:
            shutil.copy(directory / LOCK, work / LOCK)
        (work / "pyproject.toml").write_text(_project(stack))
        command: list[str | Path] = [
            uv_program(),
            "pip",
            "compile",
            "requirements.in",
            "--output-file",
            LOCK,
            "--quiet",
        ]
        command += ["--override", "overrides.txt", "--excludes", "excludes.txt"]
        command += ["--universal", "--python-version", min(stack.pythons, key=_minor)]
        command += ["--only-binary", ":all:", "--generate-hashes", "--no-annotate"]
        command += ["--custom-compile-command", f"make lock STACK={stack.name}"]
        command += ["--offline"] if offline else []
        run = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            raise GpuboxError(
                f"{directory}: its inputs cannot be locked",
                hint=f"read what uv says below; inputs are {', '.join(INPUTS)}",
                detail=run.stderr,
            )
        text = (work / LOCK).read_text()
    parse_lock(text, str(directory / LOCK))
    return text


def check_lock(directory: Path, *, offline: bool = False) -> None:
    """Raises StaleLockError with the difference when the committed lock does not fit its inputs."""
    path = directory / LOCK
    if not path.is_file():
        raise StaleLockError(f"{path}: no such file", hint=f"run `make lock STACK={directory.name}`")
    committed, fresh = path.read_text(), compile_lock(directory, offline=offline)
    if committed != fresh:
        changes = difflib.unified_diff(
            committed.splitlines(), fresh.splitlines(), "committed", "resolved", lineterm="", n=0
        )
        raise StaleLockError(
            f"{path}: does not fit its inputs any more",
            hint=f"run `make lock STACK={directory.name}` and commit what it changes",
            detail="\n".join(list(changes)[:40]),
        )


def _project(stack: Stack) -> str:
    """uv limits a universal resolution to environments only by a project file."""
    minors = sorted(_minor(python) for python in stack.pythons)
    here = (
        "sys_platform == 'linux' and platform_machine == 'x86_64' and implementation_name == 'cpython'"
        f" and python_version < '3.{minors[-1] + 1}'"
    )
    return (
        f'[project]\nname = "lock"\nversion = "0"\nrequires-python = ">=3.{minors[0]}"\n'
        f'[tool.uv]\nenvironments = ["{here}"]\nrequired-environments = ["{here}"]\n'
    )


def _minor(python: str) -> int:
    return int(python.split(".")[1])


@click.command()
@click.argument("names", nargs=-1)
@click.option("--check", is_flag=True, help="Change nothing; fail when a lock does not fit its inputs.")
@click.option("--upgrade", is_flag=True, help="Take the newest versions that the inputs allow.")
@click.option("--offline", is_flag=True, help="Resolve from uv's cache only.")
def main(names: tuple[str, ...], check: bool, upgrade: bool, offline: bool) -> None:
    """Regenerate the locks of stacks NAMES (all of them when none is given with --check)."""
    try:
        if not names and not check:
            raise InputError("no stack named", hint="run `make lock STACK=<name>`")
        for name in names or sorted(path.parent.name for path in STACKS.glob("*/stack.toml")):
            if check:
                check_lock(STACKS / name, offline=offline)
                click.echo(f"{name}: the lock fits its inputs")
            else:
                (STACKS / name / LOCK).write_text(compile_lock(STACKS / name, upgrade=upgrade, offline=offline))
                click.echo(f"{name}: locked")
    except GpuboxError as error:
        click.echo(str(error), err=True)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()

"""Generate and check the locks of stacks: `python -m gpubox.devtools.lock [--check] [--upgrade] NAME...`.

One lock serves every Python of a stack on x86-64 Linux: uv resolves universally inside that environment and writes
markers where two Pythons differ. An existing lock is the preference, so a lock changes only where its inputs did,
and a lock that fits its inputs is reproduced byte for byte; that is what the check relies on.

What artefacts.toml names is in no default index. The resolver sees a wheel of its name that holds nothing but the
requirements stated there, and the lock gets the hashes stated there: a lock can be made where the files cannot be had.
"""

from __future__ import annotations

import difflib
import re
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import click
from packaging.utils import canonicalize_name
from packaging.version import Version

from gpubox.errors import GpuboxError, InputError
from gpubox.rollout.running import uv_program
from gpubox.specs.artefacts import Artefact, load_artefacts
from gpubox.specs.lockfile import parse_lock
from gpubox.specs.spec import LOCK
from gpubox.specs.stack import BUILD_LOCK, Stack, load_stack

STACKS = Path(__file__).parents[2] / "stacks"
INPUTS = ("requirements.in", "overrides.txt", "excludes.txt")
BUILD_INPUT = "build-requirements.in"


class StaleLockError(InputError):
    """The committed lock is not what its inputs resolve to."""


def compile_lock(directory: Path, *, upgrade: bool = False, offline: bool = False) -> str:
    """What the lock of the stack in `directory` should be. Raises GpuboxError with uv's words when nothing fits."""
    stack, artefacts = load_stack(directory), load_artefacts(directory)
    wheels = [artefact for artefact in artefacts.all if artefact.kind == "wheel"]
    built = [text for artefact in artefacts.all if artefact.kind == "source" for text in artefact.requires]
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        for name in INPUTS:  # all three exist there, so that one command line serves every stack
            source = directory / name
            (work / name).write_bytes(source.read_bytes() if source.is_file() else b"")
        with (work / INPUTS[0]).open("a") as requirements:
            requirements.write("".join(f"\n{text}" for text in built))
        options: list[str | Path] = ["--override", "overrides.txt", "--excludes", "excludes.txt"]
        if wheels:
            options += ["--find-links", "known"]
            for wheel in wheels:
                write_known(work / "known", wheel)
        text = _resolve(work, stack, directory / LOCK, options, upgrade=upgrade, offline=offline)
    for wheel in wheels:
        text = with_hashes(text, canonicalize_name(wheel.name), wheel.accepted)
    parse_lock(text, str(directory / LOCK))
    return text


def compile_build_lock(directory: Path, *, upgrade: bool = False, offline: bool = False) -> str:
    """What the lock of the build requirements (build-requirements.in) of an engine that comes as source should be."""
    stack = load_stack(directory)
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        shutil.copy(directory / BUILD_INPUT, work / INPUTS[0])
        text = _resolve(work, stack, directory / BUILD_LOCK, [], upgrade=upgrade, offline=offline)
    parse_lock(text, str(directory / BUILD_LOCK))
    return text


def _resolve(
    work: Path, stack: Stack, committed: Path, options: list[str | Path], *, upgrade: bool, offline: bool
) -> str:
    if committed.is_file() and not upgrade:
        shutil.copy(committed, work / LOCK)
    (work / "pyproject.toml").write_text(_project(stack))
    command: list[str | Path] = [uv_program(), "pip", "compile", INPUTS[0], "--output-file", LOCK, "--quiet", *options]
    command += ["--universal", "--python-version", min(stack.pythons, key=_minor)]
    command += ["--only-binary", ":all:", "--generate-hashes", "--no-annotate"]
    command += ["--custom-compile-command", f"make lock STACK={stack.name}"]
    command += ["--offline"] if offline else []
    run = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise GpuboxError(
            f"{committed.parent}: its inputs cannot be locked",
            hint=f"read what uv says below; inputs are {', '.join(INPUTS)}",
            detail=run.stderr,
        )
    return (work / LOCK).read_text()


def write_known(directory: Path, artefact: Artefact) -> None:
    """A wheel that has only the name and the requirements of `artefact`, for a resolver."""
    directory.mkdir(exist_ok=True)
    version = Version(artefact.version)
    info = f"{canonicalize_name(artefact.name).replace('-', '_')}-{version}.dist-info"
    requires = "".join(f"Requires-Dist: {text}\n" for text in artefact.requires)
    metadata = f"Metadata-Version: 2.1\nName: {artefact.name}\nVersion: {version}\n{requires}"
    with zipfile.ZipFile(directory / artefact.file, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: gpubox\nRoot-Is-Purelib: false\n")
        wheel.writestr(f"{info}/RECORD", "")


def with_hashes(text: str, name: str, digests: list[str]) -> str:
    """The lock with these hashes for `name` in place of the resolver's."""
    hashes = " \\\n".join(f"    --hash=sha256:{digest}" for digest in digests)
    entry = re.compile(rf"^({re.escape(name)}==[^\n]*? \\)\n(?:    --hash=\S+(?: \\)?\n)+", re.MULTILINE)
    return entry.sub(lambda match: f"{match[1]}\n{hashes}\n", text)


def check_lock(directory: Path, *, offline: bool = False) -> None:
    """Raises StaleLockError with the difference when a committed lock of the stack does not fit its inputs."""
    for name, compiled in _locks(directory):
        path = directory / name
        if not path.is_file():
            raise StaleLockError(f"{path}: no such file", hint=f"run `make lock STACK={directory.name}`")
        committed, fresh = path.read_text(), compiled(directory, offline=offline)
        if committed != fresh:
            changes = difflib.unified_diff(
                committed.splitlines(), fresh.splitlines(), "committed", "resolved", lineterm="", n=0
            )
            raise StaleLockError(
                f"{path}: does not fit its inputs any more",
                hint=f"run `make lock STACK={directory.name}` and commit what it changes",
                detail="\n".join(list(changes)[:40]),
            )


def _locks(directory: Path) -> list[tuple[str, Callable[..., str]]]:
    """The locks of a stack, with what makes each."""
    locks: list[tuple[str, Callable[..., str]]] = [(LOCK, compile_lock)]
    return [*locks, (BUILD_LOCK, compile_build_lock)] if (directory / BUILD_INPUT).is_file() else locks


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
                for file, compiled in _locks(STACKS / name):
                    text = compiled(STACKS / name, upgrade=upgrade, offline=offline)
                    (STACKS / name / file).write_text(text)
                click.echo(f"{name}: locked")
    except GpuboxError as error:
        click.echo(str(error), err=True)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()

"""Which files a stack needs to be built without a network, and where each is to be had from here."""

from __future__ import annotations

import subprocess
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.utils import parse_wheel_filename

from gpubox.build.artefacts import address_of
from gpubox.canonical import sha256_hex
from gpubox.errors import GpuboxError, InputError
from gpubox.nvidia.driver import RunFileDriver
from gpubox.rollout.running import uv_program
from gpubox.specs.artefacts import Artefacts, Pinned, RepublishedError, check_digest, load_artefacts, pins
from gpubox.specs.lockfile import parse_lock
from gpubox.specs.spec import LOCK
from gpubox.specs.stack import BUILD_LOCK, load_stack, stack_spec
from gpubox.specs.stack_rules import OLDEST_GLIBC, installable_tags
from gpubox.specs.wheelhouse import Role


@dataclass(frozen=True)
class Needed:
    """One file of a wheelhouse. `address` says where it is when it has to be fetched; `check` refuses other bytes."""

    path: str
    role: Role
    size: int | None
    address: Callable[[], str]
    check: Callable[[str], None]


@dataclass(frozen=True)
class Wants:
    """What a wheelhouse is to hold. `locks`: the sha256 of each lock that it then serves."""

    stack: str
    pythons: list[str]
    locks: list[str]
    files: list[Needed]


def wanted_files(
    root: Path,
    stack: str,
    *,
    pythons: tuple[str, ...],
    models: tuple[str, ...],
    indexes: Mapping[str, str],
    driver: RunFileDriver | None,
    here: Path | None,
) -> Wants:
    """Everything that a box with one of `pythons` (default: all of the stack's) needs for `stack` of `root`.

    `driver`: NVIDIA's .run file too, from its address, or from `here` when the settings name a path of another host.
    Raises InputError for what does not exist, GpuboxError with uv's words when an index does not have a locked wheel.
    """
    directory = root / "stacks" / stack
    description, artefacts = load_stack(directory), load_artefacts(directory)
    chosen = list(pythons or description.pythons)
    for python in chosen:
        stack_spec(directory, python, None)  # refuses what does not fit together
    locks: list[tuple[Path, Role]] = [(directory / LOCK, "stack")]
    if (directory / BUILD_LOCK).is_file():
        locks.append((directory / BUILD_LOCK, "engine build"))
    locks.append((root / "tools" / LOCK, "tools"))
    locks += [(root / "models" / model / LOCK, "model") for model in models]
    found: dict[str, Needed] = {}
    for path, role in locks:
        for python in chosen:
            for needed in locked_wheels(path, python, role, artefacts):
                found.setdefault(needed.path, needed)
    for pinned in pins(artefacts):
        found[pinned.file] = _artefact(pinned, indexes)
    for name in description.patches:
        source = directory / "patches" / name
        found[f"patches/{stack}/{name}"] = _local(f"patches/{stack}/{name}", "patch", source, None)
    if driver is not None:
        name = driver.run.rpartition("/")[2]
        found[name] = _driver(name, driver, here)
    digests = [sha256_hex(path.read_bytes()) for path, _ in locks]
    return Wants(stack, chosen, digests, sorted(found.values(), key=lambda needed: needed.path))


def locked_wheels(lock: Path, python: str, role: Role, artefacts: Artefacts) -> list[Needed]:
    """The best wheel of each locked distribution that the default index has. Raises GpuboxError."""
    try:
        parsed = parse_lock(lock.read_text(encoding="utf-8"), str(lock))
    except OSError as error:
        raise InputError(f"{lock}: {error.strerror}", hint="correct its name, or make the lock") from None
    named = {pinned.name for pinned in pins(artefacts)}
    expected = {name: version for name, version in parsed.expected(python).items() if name not in named}
    accepted = {(entry.name, entry.version): entry.hashes for entry in parsed.entries}
    ranks = {tag: rank for rank, tag in enumerate(installable_tags(python))}
    found = []
    for name, wheels in _offers(lock, expected, python).items():
        fitting = [
            (min(ranks[tag] for tag in tags), wheel)
            for wheel in wheels
            if wheel["hashes"]["sha256"] in accepted[name, expected[name]]
            and (tags := [tag for tag in parse_wheel_filename(_file(wheel))[3] if tag in ranks])
        ]
        if not fitting:
            raise GpuboxError(
                f"{lock}: {name}=={expected[name]}: no index here has a locked wheel of it for Python {python}",
                hint="name it in artefacts.toml with the index that has it",
            )
        found.append(_wheel(min(fitting, key=lambda pair: pair[0])[1], role))
    return found


def _offers(lock: Path, expected: Mapping[str, str], python: str) -> dict[str, list[dict[str, Any]]]:
    """What uv finds on its index, by name: every wheel with url, size and hashes (the standard lock format)."""
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        (work / "in.txt").write_text("".join(f"{name}=={version}\n" for name, version in expected.items()))
        command: list[str | Path] = [uv_program(), "pip", "compile", "in.txt", "--no-deps", "--quiet"]
        command += ["--format", "pylock.toml", "--output-file", "pylock.toml", "--only-binary", ":all:"]
        command += ["--python-version", python, "--python-platform", f"x86_64-manylinux_2_{OLDEST_GLIBC}"]
        run = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            raise GpuboxError(f"{lock}: not all of it is to be had", hint="read what uv says below", detail=run.stderr)
        packages = tomllib.loads((work / "pylock.toml").read_text())["packages"]
    return {package["name"]: package.get("wheels", []) for package in packages}


def _file(wheel: Mapping[str, Any]) -> str:
    return unquote(urlsplit(str(wheel["url"])).path).rpartition("/")[2]


def _wheel(wheel: Mapping[str, Any], role: Role) -> Needed:
    file, address = _file(wheel), str(wheel["url"])
    return Needed(file, role, wheel.get("size"), lambda: address, _exactly(file, str(wheel["hashes"]["sha256"])))


def _artefact(pinned: Pinned, indexes: Mapping[str, str]) -> Needed:
    role: Role = "stack" if pinned.kind == "wheel" else pinned.kind
    return Needed(
        pinned.file,
        role,
        None,
        lambda: address_of(pinned, indexes),
        lambda digest: check_digest(pinned, digest, pinned.file),
    )


def _driver(name: str, driver: RunFileDriver, here: Path | None) -> Needed:
    if here is None and driver.run.startswith("https://"):
        return Needed(name, "driver", None, lambda: driver.run, _exactly(name, driver.sha256))
    return _local(name, "driver", here or Path(driver.run), driver.sha256)


def _local(path: str, role: Role, source: Path, sha256: str | None) -> Needed:
    if not source.is_file():
        raise InputError(f"{source}: no such file here", hint="give its place with --driver, or leave it out")
    digest = sha256 or sha256_hex(source.read_bytes())
    return Needed(path, role, source.stat().st_size, source.resolve().as_uri, _exactly(path, digest))


def _exactly(file: str, sha256: str) -> Callable[[str], None]:
    def check(digest: str) -> None:
        if digest != sha256:
            raise RepublishedError(
                f"{file}: re-published upstream: got sha256 {digest}, locked is {sha256}",
                hint="find out why it changed before you lock it again",
            )

    return check

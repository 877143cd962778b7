"""What must hold between stack.toml, artefacts.toml and the lock, checked before anything is downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from gpubox.errors import InputError
from gpubox.specs.artefacts import ARTEFACTS_TOML, Artefact, Artefacts
from gpubox.specs.lockfile import Lock, foreign_cuda

if TYPE_CHECKING:
    from gpubox.specs.stack import Cuda, Stack

# sglang <= 0.5.9, server_args.check_torch_2_9_1_cudnn_compatibility: with exactly this torch and a multimodal model an
# older cuDNN stops the server at start (its convolutions are slow and hungry). A variable switches the check off; then
# the slow convolutions stay.
CUDNN_OF_TORCH_2_9_1 = Version("9.15")
CUDNN_BYPASS = "SGLANG_DISABLE_CUDNN_CHECK"

OLDEST_GLIBC = 35  # 2.35, of Ubuntu 22.04; Debian 12 has 2.36, Ubuntu 24.04 has 2.39

# Distributions that are one thing in two parts: the Python part refuses another version of the other at import.
_TWINS = (("flashinfer-python", "flashinfer-cubin"),)


def check_lock(stack: Stack, artefacts: Artefacts, lock: Lock, python: str) -> None:
    """Raises InputError naming the first thing that does not fit, and the way out."""
    expected = lock.expected(python)
    relock = f"correct stack.toml or requirements.in, then `make lock STACK={stack.name}`"
    _check_engine(stack, artefacts, expected, lock.origin, relock)
    for name in stack.proof.kernel_distributions:
        if name not in expected:
            raise InputError(
                f"{lock.origin}: does not hold {name!r}, which stack.toml names in proof.kernel_distributions",
                hint=relock,
            )
    for one, other in _TWINS:
        if one in expected and other in expected and expected[one] != expected[other]:
            raise InputError(
                f"{lock.origin}: {one} {expected[one]} and {other} {expected[other]} must be equal", hint=relock
            )
    check_sources(stack, artefacts, lock, python)
    if stack.cuda is not None:
        _check_cuda(stack, stack.cuda, expected, lock.origin)


def check_sources(stack: Stack, artefacts: Artefacts, lock: Lock, python: str) -> None:
    """Every locked build that a default index cannot tell apart has its one source, and the lock has its one file.

    A local version (+cu130) names a build that only a particular index has: a resolver that looks in several takes
    whichever answers first. Raises InputError.
    """
    wheels = {canonicalize_name(a.name): a for a in artefacts.all if a.kind == "wheel"}
    expected = lock.expected(python)
    for name, version in expected.items():
        if Version(version).local and name not in wheels:
            raise InputError(
                f"{lock.origin}: {name}=={version} has no source: a local version is in no default index",
                hint=f"name its file, index and hash in {ARTEFACTS_TOML}",
            )
    for name, wheel in wheels.items():
        _check_wheel(stack, wheel, lock, python, expected.get(name))
    for builds in (a for a in artefacts.all if a.kind == "python"):
        if not any(builds.version.startswith(f"{minor}.") for minor in stack.pythons):
            raise InputError(
                f"{ARTEFACTS_TOML}: Python {builds.version} is none of the stack's ({', '.join(stack.pythons)})",
                hint="correct its version, or pythons in stack.toml",
            )


def installable_tags(python: str) -> list[Tag]:
    """The wheel tags that CPython `python` ("3.12") takes on every supported system, best first."""
    version = (3, int(python.split(".")[1]))
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(OLDEST_GLIBC, 4, -1)]
    platforms[-12:-12] = ["manylinux2014_x86_64"]  # 2.17; the two older names follow their numbers
    platforms += ["manylinux2010_x86_64", "manylinux1_x86_64"]
    interpreter = f"cp{version[0]}{version[1]}"
    return [
        *cpython_tags(version, platforms=platforms),
        *compatible_tags(version, interpreter=interpreter, platforms=platforms),
    ]


def _check_engine(stack: Stack, artefacts: Artefacts, expected: Mapping[str, str], origin: str, relock: str) -> None:
    sources = [artefact for artefact in artefacts.all if artefact.kind == "source"]
    for source in sources:
        if canonicalize_name(source.name) != canonicalize_name(stack.engine.name):
            raise InputError(
                f"{ARTEFACTS_TOML}: source {source.name!r} is not the engine of stack.toml ({stack.engine.name!r})",
                hint="only the engine is built from source; everything else is a wheel",
            )
        if stack.engine.name in expected:
            raise InputError(
                f"{origin}: holds {stack.engine.name}, which {ARTEFACTS_TOML} builds from source", hint=relock
            )
    locked = sources[0].version if sources else expected.get(stack.engine.name)
    if locked != stack.engine.version:
        raise InputError(
            f"{origin}: holds {stack.engine.name} {locked}, stack.toml says engine.version = {stack.engine.version!r}",
            hint=relock,
        )


def _check_wheel(stack: Stack, wheel: Artefact, lock: Lock, python: str, locked: str | None) -> None:
    relock = f"run `make lock STACK={stack.name}`"
    if locked is None or Version(locked) != Version(wheel.version):
        raise InputError(f"{lock.origin}: holds {wheel.name} {locked}, {ARTEFACTS_TOML} {wheel.version}", hint=relock)
    hashes = {h for e in lock.entries if e.name == canonicalize_name(wheel.name) for h in e.hashes}
    if hashes != set(wheel.accepted):
        raise InputError(
            f"{lock.origin}: {wheel.name} is locked with other hashes than {ARTEFACTS_TOML} gives", hint=relock
        )
    if parse_wheel_filename(wheel.file)[3].isdisjoint(installable_tags(python)):
        raise InputError(
            f"{ARTEFACTS_TOML}: {wheel.file} is not for Python {python}",
            hint="take the file for it, or drop the Python",
        )
    local, cuda = Version(wheel.version).local or "", stack.cuda
    if cuda is not None and local.startswith("cu") and local != f"cu{cuda.version.replace('.', '')}":
        raise InputError(
            f"{ARTEFACTS_TOML}: {wheel.name} {wheel.version} is not of CUDA {cuda.version}",
            hint=f"take the build +cu{cuda.version.replace('.', '')}, or correct cuda.version in stack.toml",
        )


def _check_cuda(stack: Stack, cuda: Cuda, expected: Mapping[str, str], origin: str) -> None:
    foreign = foreign_cuda(expected, cuda.linked_major)
    if foreign:
        raise InputError(
            f"{origin}: not of CUDA {cuda.linked_major}: {', '.join(foreign)}",
            hint=f"name them in excludes.txt or pin what asks for them, then `make lock STACK={stack.name}`",
        )
    if CUDNN_BYPASS in stack.environment:
        raise InputError(
            f"stack.toml: environment {CUDNN_BYPASS} hides a cuDNN that is too old",
            hint=f"override it to {CUDNN_OF_TORCH_2_9_1} or newer in overrides.txt instead",
        )
    cudnn = f"nvidia-cudnn-cu{cuda.linked_major}"
    old = cudnn in expected and Version(expected[cudnn]) < CUDNN_OF_TORCH_2_9_1
    if old and Version(expected.get("torch", "0")).public == "2.9.1":
        raise InputError(
            f"{origin}: {cudnn} {expected[cudnn]} with torch 2.9.1: a multimodal model will not start",
            hint=f"override it to >={CUDNN_OF_TORCH_2_9_1} in overrides.txt, then `make lock STACK={stack.name}`",
        )

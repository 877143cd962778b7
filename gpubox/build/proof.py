"""Prove a built stack before it gets its name: versions, imports, and what the kernel libraries really link."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from gpubox.build.elf import cuda_library_major, read_linkage, shared_libraries
from gpubox.build.proof_errors import death, step_failed
from gpubox.errors import ProofError
from gpubox.rollout.running import run_lines
from gpubox.specs.lockfile import Lock, foreign_cuda
from gpubox.specs.stack import StackBuild

PROBE = Path(__file__).with_name("proof_probe.py")
Report = Callable[[str], None]


@dataclass(frozen=True)
class Proved:
    """What was seen; equal on every machine that built the same spec with the same Python.

    `kernels`: for each kernel distribution, the CUDA libraries that each of its files links; paths are relative to
    site-packages.
    """

    python: str
    versions: dict[str, str]
    torch_cuda: str | None
    kernels: dict[str, dict[str, list[str]]]


def prove(
    python: Path,
    build: StackBuild,
    lock: Lock,
    *,
    also: Mapping[str, str],
    imports: list[str],
    environment: Mapping[str, str],
    pycache: Path,
    report: Report,
) -> Proved:
    """Raises ProofError naming the first thing that does not hold.

    `also`: versions by name of what is installed beside the lock. `imports`: what of build.proof.imports can be
    imported by now. `pycache` takes the bytecode of what is imported.
    """
    seen = _run_probe(python, build, imports, environment, pycache, report)
    version = str(seen.results["python"]["version"])
    expected = {**lock.expected(version), **also}
    versions = check_versions(
        seen.results["distributions"]["versions"], expected, unlabelled=build.proof.kernel_distributions
    )
    major = build.cuda.linked_major if build.cuda else None
    if major is not None:
        foreign = foreign_cuda(versions, major)
        if foreign:
            raise ProofError(
                f"{build.name}: not of CUDA {major}: {', '.join(foreign)}", hint="correct the stack's lock"
            )
    site_packages = python.parents[1] / "lib" / f"python{build.python}" / "site-packages"
    if major is not None:
        check_runtimes(build.name, site_packages, major)
    kernels = {
        name: kernel_links(name, site_packages, paths, major)
        for name, paths in sorted(seen.results["kernels"]["libraries"].items())
    }
    _check_torch(build, seen.results.get("torch"), expected.get("torch"))
    for step, result in seen.results.items():
        if "exit_status" in result:
            raise step_failed(build.name, step, death(result["exit_status"]), seen.stderr, major)
        if "error" in result:
            raise step_failed(build.name, step, result["error"], result["traceback"], major)
    if seen.exit_status != 0:
        raise step_failed(build.name, seen.last_step, death(seen.exit_status), seen.stderr, major)
    torch = seen.results.get("torch")
    return Proved(version, versions, torch["cuda"] if torch else None, kernels)


def check_versions(
    found: Mapping[str, list[str]], expected: Mapping[str, str], *, unlabelled: Collection[str] = ()
) -> dict[str, str]:
    """The installed versions by canonical name. Raises ProofError unless they are exactly the locked ones.

    Of the distributions `unlabelled` the build (+cu130) may be missing in what is installed: kernel wheels carry it in
    their file's name only. Which CUDA they are of is proved from what they link.
    """
    names = {canonicalize_name(name) for name in unlabelled}
    by_name: dict[str, list[str]] = {}
    for name, versions in found.items():
        by_name.setdefault(canonicalize_name(name), []).extend(versions)
    problems = [
        f"{name}=={version} is locked and not there" for name, version in expected.items() if name not in by_name
    ]
    for name, versions in sorted(by_name.items()):
        wanted = expected.get(name)
        if wanted is None:
            problems.append(f"{name}=={versions[0]} is there and not locked")
        elif len(versions) > 1:
            problems.append(f"{name} is there {len(versions)} times: {', '.join(versions)}")
        elif not (_same_version(versions[0], wanted) or (name in names and versions[0] == Version(wanted).public)):
            problems.append(f"{name}=={wanted} is locked, {versions[0]} is there")
    if problems:
        raise ProofError(
            f"the venv is not what the lock says ({len(problems)} differences)",
            hint="run the build again: it makes the venv anew from the cache",
            detail="\n".join(problems),
        )
    return {name: by_name[name][0] for name in sorted(by_name)}


def kernel_links(name: str, site_packages: Path, paths: list[str], major: int | None) -> dict[str, list[str]]:
    """The CUDA libraries that the files `paths` of the distribution `name` link.

    Raises ProofError when one links another CUDA major than `major`, or when none links any: then nothing is proved.
    """
    links: dict[str, list[str]] = {}
    majors: set[int] = set()
    for path in paths:
        linkage = read_linkage(site_packages / path)
        if linkage is None:
            continue
        links[path] = list(linkage.cuda)
        majors |= linkage.cuda_majors
        wrong = sorted(linkage.cuda_majors - {major}) if major is not None else []
        if wrong:
            raise ProofError(
                f"{name}: {path} links {', '.join(linkage.cuda)}, but the stack declares CUDA {major}",
                hint=f"this is the build for CUDA {wrong[0]}: lock the wheel built for CUDA {major}",
            )
    if major is not None and not majors:
        raise ProofError(
            f"{name}: none of its {len(paths)} shared libraries links CUDA's, so it cannot tell its CUDA major",
            hint="name only distributions with CUDA kernels in proof.kernel_distributions",
        )
    return links


def check_runtimes(name: str, site_packages: Path, major: int) -> None:
    """Raises ProofError when a wheel, whatever its name, brought CUDA's own libraries of another major than `major`.

    Not CUPTI: triton's wheels bring CUDA 12's, in a directory of its own, for its profiler, also those for CUDA 13.
    """
    for path in shared_libraries(site_packages):
        other = cuda_library_major(path.name)
        if other is not None and other != major and not path.name.startswith("libcupti.so."):
            raise ProofError(
                f"{name}: not of CUDA {major}: {path.relative_to(site_packages)} is CUDA {other}'s",
                hint="find the wheel that brings it (grep its RECORD) and name it in excludes.txt, then lock again",
            )


@dataclass
class _Seen:
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    last_step: str = "start"
    exit_status: int = 0
    stderr: str = ""


def _run_probe(
    python: Path,
    build: StackBuild,
    imports: list[str],
    environment: Mapping[str, str],
    pycache: Path,
    report: Report,
) -> _Seen:
    request = json.dumps({"imports": imports, "kernel_distributions": build.proof.kernel_distributions})
    command: list[str | Path] = [python, "-I", "-X", f"pycache_prefix={pycache}", PROBE, request]
    seen = _Seen()

    def on_line(line: str) -> None:
        result = json.loads(line)
        step = result.pop("step")
        if step != seen.last_step and not result:
            seen.last_step = step
            if step.startswith(("import", "torch", "device")):
                report(f"proof: {step}")
            return
        seen.results[step] = result

    def on_silence(seconds: float) -> None:
        report(f"proof: {seen.last_step} still running after {seconds:.0f} s")

    with tempfile.TemporaryFile() as errors:
        seen.exit_status = run_lines(
            command, environment=environment, on_line=on_line, on_silence=on_silence, errors=errors
        )
        errors.seek(0)
        seen.stderr = errors.read().decode(errors="replace")
    if "distributions" not in seen.results or "kernels" not in seen.results:
        raise ProofError(f"{build.name}: its Python does not run", hint="build again", detail=seen.stderr[-2000:])
    return seen


def _check_torch(build: StackBuild, torch: Mapping[str, Any] | None, locked: str | None) -> None:
    """Only a torch that imports tells its version and CUDA's; one that does not is reported with the imports."""
    if torch is None or "error" in torch:
        return
    if build.cuda is not None and torch["cuda"] != build.cuda.version:
        raise ProofError(
            f"{build.name}: torch {torch['version']} is of CUDA {torch['cuda']}, "
            f"stack.toml says {build.cuda.version!r}",
            hint="lock the torch build of that CUDA version, or correct cuda.version",
        )
    if locked is None:
        return
    wanted, seen = Version(locked), Version(torch["version"])
    if seen != wanted and not (wanted.local is None and seen.public == wanted.public):
        raise ProofError(
            f"{build.name}: torch {locked} is locked, torch {torch['version']} runs (ABI: kernels fit one torch only)",
            hint="a later step replaced its files: build again, and look for what brings a second torch",
        )


def _same_version(one: str, other: str) -> bool:
    try:
        return Version(one) == Version(other)
    except InvalidVersion:
        return one == other

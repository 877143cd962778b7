"""The steps of a stack's build that install something: artefacts, venv, locked wheels, an engine from its source."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpubox.build.artefacts import obtain, unpack_python
from gpubox.build.engine_source import build_wheel, unpack_source
from gpubox.build.uv_errors import explain_uv_failure
from gpubox.layout import Layout
from gpubox.rollout.running import run_lines, uv_environment, uv_program
from gpubox.specs.artefacts import Pinned
from gpubox.specs.stack import BUILD_LOCK, StackSpec, pinned_artefacts
from gpubox.specs.wheelhouse import gathered_for

LARGE_MIB = 50.0  # downloads smaller than this are not worth a line of progress

Report = Callable[[str], None]


@dataclass(frozen=True)
class Sources:
    """Where a build may get files from. `indexes`: addresses by the names that artefacts use.

    A wheelhouse that was gathered for this lock is complete: then no index is asked, not even through the cache.
    """

    wheelhouse: Path | None = None
    offline: bool = False
    indexes: Mapping[str, str] = field(default_factory=dict)

    def options(self, lock: bytes, *more: Path) -> list[str | Path]:
        """uv's options for installing from `lock`; `more` are further directories of wheels."""
        words: list[str | Path] = ["--offline"] if self.offline else []
        if self.wheelhouse is not None and gathered_for(self.wheelhouse, lock):
            words.append("--no-index")
        for directory in (*more, *([self.wheelhouse] if self.wheelhouse else [])):
            words += ["--find-links", directory]
        return words


@dataclass(frozen=True)
class Job:
    """One build in `work`; `files` are the artefacts that were obtained, by file name."""

    spec: StackSpec
    work: Path
    layout: Layout
    sources: Sources
    report: Report
    files: dict[str, Path] = field(default_factory=dict)


def engine_source(spec: StackSpec) -> Pinned | None:
    return next((pinned for pinned in pinned_artefacts(spec) if pinned.kind == "source"), None)


def obtain_artefacts(job: Job) -> None:
    """Fill job.files with the spec's artefacts; a Python build only where the system has no such Python."""
    for pinned in pinned_artefacts(job.spec):
        if pinned.kind != "python" or shutil.which(f"python{job.spec.build.python}") is None:
            job.files[pinned.file] = obtain(
                pinned,
                job.layout.artefacts,
                wheelhouse=job.sources.wheelhouse,
                indexes=job.sources.indexes,
                offline=job.sources.offline,
                report=job.report,
            )


def make_venv(job: Job, venv: Path) -> None:
    """Relocatable, since it is renamed; from the system's Python, since that is what the box's updates maintain."""
    python: str | Path = job.spec.build.python
    build = next((p.file for p in pinned_artefacts(job.spec) if p.kind == "python" and p.file in job.files), None)
    if build is not None:
        python = unpack_python(job.files[build], job.layout.pythons)
    job.report(f"making a venv for Python {job.spec.build.python}" + (f" from {build}" if build else ""))
    command: list[str | Path] = [uv_program(), "venv", "--relocatable", "--python", python]
    command += ["--python-preference", "only-system", venv]
    _uv(job, command)


def install_lock(job: Job, lock: str, venv: Path) -> None:
    """Exactly the wheels of the spec's file `lock` are in `venv`. Raises GpuboxError that explains uv's words."""
    wheels = job.work / "artefacts"
    wheels.mkdir()
    for pinned in pinned_artefacts(job.spec):
        if pinned.kind == "wheel":
            (wheels / pinned.file).symlink_to(job.files[pinned.file])
    command: list[str | Path] = [uv_program(), "pip", "sync", "--python", venv / "bin" / "python"]
    command += ["--require-hashes", "--no-build", "--link-mode", "hardlink", job.work / lock]
    command += job.sources.options(job.spec.files[lock], *([wheels] if any(wheels.iterdir()) else []))
    said: list[str] = []

    def on_line(line: str) -> None:
        said.append(line)
        text = progress_of(line)
        if text:
            job.report(text)

    def on_silence(seconds: float) -> None:
        job.report(f"still installing after {seconds:.0f} s, {free_bytes(job.work) / 1e9:.1f} GB of disk free")

    status = run_lines(command, environment=uv_environment(job.layout), on_line=on_line, on_silence=on_silence)
    shutil.rmtree(wheels)
    if status != 0:
        raise explain_uv_failure(f"stack {job.spec.id}", "\n".join(said), free_bytes=free_bytes(job.work))


def install_engine(job: Job, engine: Pinned) -> None:
    """Build the engine's wheel from its source and install it beside the locked wheels, without its dependencies."""
    tree, builder, out = (job.work / f"engine-{name}" for name in ("source", "builder", "wheel"))
    job.report(f"building {engine.name} {engine.version} from its source")
    project = unpack_source(job.files[engine.file], engine, tree)
    make_venv(job, builder)
    install_lock(job, BUILD_LOCK, builder)
    wheel = build_wheel(project, engine, builder / "bin" / "python", out, uv_environment(job.layout))
    command: list[str | Path] = [uv_program(), "pip", "install", "--python", job.work / "venv" / "bin" / "python"]
    _uv(job, [*command, "--no-deps", "--no-index", "--offline", wheel])
    for directory in (tree, builder, out):
        shutil.rmtree(directory)


def progress_of(line: str) -> str | None:
    """A line of uv as a line of progress; None for what would only be noise (each of 200 packages)."""
    download = re.match(r"\s*Downloading (\S+) \(([\d.]+)(KiB|MiB|GiB)\)", line)
    if download:
        mib = float(download[2]) * {"KiB": 1 / 1024, "MiB": 1, "GiB": 1024}[download[3]]
        return line.strip() if mib >= LARGE_MIB else None
    if "Failed to hardlink" in line:
        return (
            "the wheel cache is on another file system than the stacks: wheels are copied, not linked, "
            "which takes minutes and 10 GB for each stack"
        )
    return line.strip() if re.match(r"(Resolved|Prepared|Installed|Uninstalled) ", line) else None


def free_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


def _uv(job: Job, command: list[str | Path]) -> None:
    run = subprocess.run(command, env=uv_environment(job.layout), capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise explain_uv_failure(f"stack {job.spec.id}", run.stderr, free_bytes=free_bytes(job.work))

"""Build a stack on the box: a venv of the locked wheels, proved, under its final name or not at all.

Everything happens in `stacks/.building-<id>`. An interrupted build leaves that directory and the wheel cache; the next
one makes the venv anew from the cache (links, seconds) rather than guess what a half-written venv still holds.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import pwd
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from gpubox.build.libcuda_standin import STANDIN, build_standin, driver_symbols, refuse_on_nvidia_host
from gpubox.build.patches import apply_patches
from gpubox.build.proof import Proved, prove
from gpubox.build.uv_errors import disk_full, explain_uv_failure
from gpubox.canonical import canonical_json
from gpubox.errors import InputError
from gpubox.files import sync_directory
from gpubox.layout import Layout
from gpubox.rollout.running import run_lines, uv_environment, uv_program
from gpubox.specs.spec import LOCK, read_spec
from gpubox.specs.stack import StackBuild, StackSpec, locked_packages

RECORD = "stack.json"
LARGE_MIB = 50.0  # downloads smaller than this are not worth a line of progress

Report = Callable[[str], None]


def build_stack(
    spec_dir: Path,
    layout: Layout,
    *,
    wheelhouse: Path | None = None,
    offline: bool = False,
    report: Report,
    cache_owner: str | None = None,
) -> Path:
    """The directory of the stack that the spec in `spec_dir` describes, built and proved when it is not there yet.

    `report` gets lines of progress. `cache_owner` is the user who gets the stack's compile caches. Raises BrokenError
    for a damaged spec, RefusedError for a stand-in on a host with a driver, ProofError, or GpuboxError when uv fails or
    the disk is full; then nothing has the final name.
    """
    spec = read_spec(StackBuild, spec_dir)
    if spec.build.libcuda_standin:
        refuse_on_nvidia_host(f"stack {spec.id}")
    final = layout.stacks / spec.id
    if final.is_dir():
        report(f"stack {spec.id} is built already")
        return final
    _check_user(cache_owner)
    work = layout.stacks / f".building-{spec.id}"
    if work.exists():
        report(f"an earlier build of {spec.id} did not end: starting over, downloads are kept")
        shutil.rmtree(work)
    work.mkdir(parents=True)
    try:
        _build(spec, work, layout, wheelhouse=wheelhouse, offline=offline, report=report)
        _hand_over_bytecode(work, final, layout.jit_cache(spec.id), cache_owner)
        _name(work, final)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise disk_full(f"stack {spec.id}", _free_bytes(work)) from None
    report(f"stack {spec.id} is built and proved")
    return final


def _build(
    spec: StackSpec, work: Path, layout: Layout, *, wheelhouse: Path | None, offline: bool, report: Report
) -> None:
    _write_spec(spec, work)
    (work / "pycache").mkdir()
    _make_venv(spec, work, layout, report)
    _install(spec, work, layout, wheelhouse=wheelhouse, offline=offline, report=report)
    apply_patches([work / "patches" / name for name in spec.build.patches], _site_packages(spec, work))
    symbols = _add_standin(spec, work, report)
    proved = _prove(spec, work, report)
    (work / "venv" / ".lock").unlink(missing_ok=True)  # uv's, writable by everybody
    (work / RECORD).write_bytes(stack_record(spec, proved, symbols))


def stack_record(spec: StackSpec, proved: Proved, standin_symbols: list[str]) -> bytes:
    """stack.json: what was proved. Equal on every box that built this spec: no times, names of hosts, or paths."""
    return canonical_json(
        {
            "schema_version": 1,
            "id": spec.id,
            "spec": spec.build.model_dump(mode="json"),
            "proved": dataclasses.asdict(proved),
            "libcuda_standin": standin_symbols,
        }
    )


def _write_spec(spec: StackSpec, work: Path) -> None:
    for name, data in spec.files.items():
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _make_venv(spec: StackSpec, work: Path, layout: Layout, report: Report) -> None:
    """Relocatable, since it is renamed; from the system's Python, since that is what the box's updates maintain."""
    python = spec.build.python
    report(f"making a venv for Python {python}")
    command: list[str | Path] = [uv_program(), "venv", "--relocatable", "--python", python]
    command += ["--python-preference", "only-system", work / "venv"]
    run = subprocess.run(command, env=uv_environment(layout), capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise explain_uv_failure(f"stack {spec.id}", run.stderr, free_bytes=_free_bytes(work))


def _install(
    spec: StackSpec, work: Path, layout: Layout, *, wheelhouse: Path | None, offline: bool, report: Report
) -> None:
    command: list[str | Path] = [uv_program(), "pip", "sync", "--python", work / "venv" / "bin" / "python"]
    command += ["--require-hashes", "--no-build", "--link-mode", "hardlink", work / LOCK]
    command += ["--find-links", wheelhouse] if wheelhouse else []
    command += ["--offline"] if offline else []
    said: list[str] = []

    def on_line(line: str) -> None:
        said.append(line)
        text = progress_of(line)
        if text:
            report(text)

    def on_silence(seconds: float) -> None:
        report(f"still installing after {seconds:.0f} s, {_free_bytes(work) / 1e9:.1f} GB of disk free")

    status = run_lines(command, environment=uv_environment(layout), on_line=on_line, on_silence=on_silence)
    if status != 0:
        raise explain_uv_failure(f"stack {spec.id}", "\n".join(said), free_bytes=_free_bytes(work))


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


def _add_standin(spec: StackSpec, work: Path, report: Report) -> list[str]:
    if not spec.build.libcuda_standin:
        return []
    symbols = driver_symbols(_site_packages(spec, work))
    build_standin(work / STANDIN.parent, symbols)
    report(f"made a stand-in for libcuda.so.1 with {len(symbols)} functions")
    return symbols


def _prove(spec: StackSpec, work: Path, report: Report) -> Proved:
    """In an environment like the service's, but with an empty home, so that nothing of this machine helps."""
    with tempfile.TemporaryDirectory() as home:
        environment = {
            "PATH": f"{work}/venv/bin:/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "HF_HUB_OFFLINE": "1",
            **spec.build.environment,
            "HOME": home,
        }
        if spec.build.cuda is not None:
            environment["CUDA_HOME"] = spec.build.cuda.home
        if spec.build.libcuda_standin:
            environment["LD_LIBRARY_PATH"] = str(work / STANDIN.parent)
        python = work / "venv" / "bin" / "python"
        return prove(
            python, spec.build, locked_packages(spec), environment=environment, pycache=work / "pycache", report=report
        )


def _hand_over_bytecode(work: Path, final: Path, cache: Path, owner: str | None) -> None:
    """Give the bytecode of the proof's imports to the service, which cannot write into the stack.

    Bytecode lies below its prefix by the path of its source, so it moves from the old path of the stack to the new one.
    """
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir(parents=True)
    compiled = cache / "pycache"
    shutil.move(work / "pycache", compiled)
    if (compiled / work.relative_to("/")).is_dir():
        (compiled / work.relative_to("/")).rename(compiled / final.relative_to("/"))
    if owner is not None:
        user = pwd.getpwnam(owner)
        for path in [cache, *cache.rglob("*")]:
            os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)


def _name(work: Path, final: Path) -> None:
    """What has the final name is complete, also after a power cut: first the data, then the name."""
    subprocess.run(["sync", "--file-system", work], check=True)
    work.rename(final)
    sync_directory(final.parent)


def _check_user(name: str | None) -> None:
    try:
        if name is not None:
            pwd.getpwnam(name)
    except KeyError:
        raise InputError(f"cache owner {name!r}: no such user here", hint="create the user first") from None


def _site_packages(spec: StackSpec, work: Path) -> Path:
    return work / "venv" / "lib" / f"python{spec.build.python}" / "site-packages"


def _free_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free

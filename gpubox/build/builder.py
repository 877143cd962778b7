"""Build a stack on the box: a venv of the locked wheels, proved, under its final name or not at all.

Everything happens in `stacks/.building-<id>`. An interrupted build leaves that directory and the wheel cache; the next
one makes the venv anew from the cache (links, seconds) rather than guess what a half-written venv still holds.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path

from packaging.utils import canonicalize_name

from gpubox.build.install import (
    Job,
    Report,
    Sources,
    engine_source,
    free_bytes,
    install_engine,
    install_lock,
    make_venv,
    obtain_artefacts,
)
from gpubox.build.libcuda_standin import STANDIN, build_standin, driver_symbols, refuse_on_nvidia_host
from gpubox.build.patches import PATCHES, apply_patches, patch_record, read_patches
from gpubox.build.proof import Proved, prove
from gpubox.build.uv_errors import disk_full
from gpubox.canonical import canonical_json
from gpubox.errors import InputError
from gpubox.files import sync_directory
from gpubox.layout import Layout
from gpubox.specs.patch import Patch
from gpubox.specs.spec import LOCK, read_spec
from gpubox.specs.stack import StackBuild, StackSpec, locked_packages

RECORD = "stack.json"
NOTHING = Sources()


def build_stack(
    spec_dir: Path,
    layout: Layout,
    *,
    sources: Sources = NOTHING,
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
        _build(Job(spec, work, layout, sources, report))
        _hand_over_bytecode(work, final, layout.jit_cache(spec.id), cache_owner)
        _name(work, final)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise disk_full(f"stack {spec.id}", free_bytes(work)) from None
    report(f"stack {spec.id} is built and proved")
    return final


def _build(job: Job) -> None:
    spec, work, report = job.spec, job.work, job.report
    _write_spec(spec, work)
    (work / "pycache").mkdir()
    obtain_artefacts(job)
    make_venv(job, work / "venv")
    install_lock(job, LOCK, work / "venv")
    symbols = _add_standin(spec, work, report)
    engine = engine_source(spec)
    if engine is not None:
        # Each step is proved before the next may cover up what it did.
        _prove(spec, work, report, after_engine=False)
        install_engine(job, engine)
    patches = read_patches(work / PATCHES, spec.build.patches)
    for name in apply_patches(patches, _site_packages(spec, work)):
        report(f"applied {name}")
    proved = _prove(spec, work, report)
    (work / "venv" / ".lock").unlink(missing_ok=True)  # uv's, writable by everybody
    (work / RECORD).write_bytes(stack_record(spec, proved, symbols, patches))


def stack_record(spec: StackSpec, proved: Proved, standin_symbols: list[str], patches: list[Patch]) -> bytes:
    """stack.json: what was proved. Equal on every box that built this spec: no times, names of hosts, or paths."""
    return canonical_json(
        {
            "schema_version": 1,
            "id": spec.id,
            "spec": spec.build.model_dump(mode="json"),
            "patches": patch_record(patches),
            "proved": dataclasses.asdict(proved),
            "libcuda_standin": standin_symbols,
        }
    )


def _write_spec(spec: StackSpec, work: Path) -> None:
    for name, data in spec.files.items():
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _add_standin(spec: StackSpec, work: Path, report: Report) -> list[str]:
    if not spec.build.libcuda_standin:
        return []
    symbols = driver_symbols(_site_packages(spec, work))
    build_standin(work / STANDIN.parent, symbols)
    report(f"made a stand-in for libcuda.so.1 with {len(symbols)} functions")
    return symbols


def _prove(spec: StackSpec, work: Path, report: Report, *, after_engine: bool = True) -> Proved:
    """In an environment like the service's, but with an empty home, so that nothing of this machine helps.

    `after_engine` is False when an engine that comes as source is not installed yet.
    """
    engine = spec.build.engine
    package = engine.module.partition(".")[0]
    also = {str(canonicalize_name(engine.name)): engine.version} if engine_source(spec) and after_engine else {}
    imports = [module for module in spec.build.proof.imports if after_engine or module.partition(".")[0] != package]
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
            python,
            spec.build,
            locked_packages(spec),
            also=also,
            imports=imports,
            environment=environment,
            pycache=work / "pycache",
            report=report,
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

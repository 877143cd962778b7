"""An engine that comes as its source at one commit: its wheel is built on the box, from locked build requirements."""

from __future__ import annotations

import os
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from gpubox.errors import BrokenError, GpuboxError
from gpubox.rollout.running import uv_program
from gpubox.specs.artefacts import Pinned

SOURCE_DATE_EPOCH = "1767225600"  # 2026-01-01: equal trees give equal wheels, as far as the build backend plays along


def unpack_source(archive: Path, source: Pinned, directory: Path) -> Path:
    """The project's directory, unpacked below `directory`. Raises BrokenError for an archive that has none."""
    directory.mkdir()
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(directory, filter="data")
    except tarfile.TarError as error:
        raise BrokenError(f"{archive}: no source archive: {error}", hint="it should be a .tar.gz") from None
    for path in directory.rglob("*"):  # a build puts these times into the wheel
        os.utime(path, (int(SOURCE_DATE_EPOCH), int(SOURCE_DATE_EPOCH)), follow_symlinks=False)
    tops = list(directory.iterdir())
    project = tops[0] / source.subdirectory if len(tops) == 1 else directory
    if not (project / "pyproject.toml").is_file():
        raise BrokenError(
            f"{archive}: no {source.subdirectory}/pyproject.toml in its one directory",
            hint="correct subdirectory in artefacts.toml",
        )
    return project


def build_wheel(project: Path, source: Pinned, python: Path, out: Path, environment: Mapping[str, str]) -> Path:
    """The engine's wheel, built by `python`, which has the locked build requirements; nothing else is fetched.

    Raises GpuboxError when the build fails or makes another version than `source` says.
    """
    command: list[str | Path] = [uv_program(), "build", "--wheel", "--no-build-isolation", "--offline"]
    command += ["--python", python, "--out-dir", out, project]
    version = Version(source.version)
    variables = {
        **environment,
        "PATH": f"{python.parent}:{environment.get('PATH', '/usr/bin:/bin')}",
        "SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH,
        "SETUPTOOLS_SCM_PRETEND_VERSION": str(version),  # an archive has no history to read a version from
    }
    run = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise GpuboxError(
            f"{source.name} {source.version}: its source does not build",
            hint="what the build needs stands in build-requirements.in; then `make lock` again",
            detail="\n".join((run.stdout + run.stderr).splitlines()[-25:]),
        )
    wheels = list(out.glob("*.whl"))
    built = parse_wheel_filename(wheels[0].name)[:2] if len(wheels) == 1 else None
    if built != (canonicalize_name(source.name), version):
        raise GpuboxError(
            f"{source.name} {source.version}: its source builds {', '.join(wheel.name for wheel in wheels)}",
            hint="correct name and version in artefacts.toml and stack.toml",
        )
    return wheels[0]

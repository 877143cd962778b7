"""Models that a box converts once: described in models/<name>/, verified by hash, kept outside every release."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, field_validator

from gpubox.build.uv_errors import explain_uv_failure
from gpubox.canonical import canonical_json
from gpubox.errors import BrokenError, InputError, ProofError
from gpubox.files import sync_directory
from gpubox.layout import Layout
from gpubox.rollout.running import run_lines, uv_environment, uv_program
from gpubox.specs.lockfile import parse_lock
from gpubox.specs.spec import LOCK, Build, FileName, Spec, hashes, read_spec, render_spec
from gpubox.toml import Name, Strict, load

CONVERT = "convert.py"
PROVED = "model.json"

Report = Callable[[str], None]


class ModelFile(Strict):
    """`size` in bytes."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    size: Annotated[int, Field(ge=0)]


class Model(Strict):
    """`models/<name>/model.toml`. `files` are all that the conversion must give, by name, config.json among them."""

    name: Name
    description: str
    license: str
    source: str
    files: dict[FileName, ModelFile]

    @field_validator("files")
    @classmethod
    def _has_config(cls, value: dict[str, ModelFile]) -> dict[str, ModelFile]:
        if "config.json" not in value:
            raise ValueError("config.json is not listed; no engine loads a model without it")
        return value


class ModelBuild(Build):
    """spec.json of a model: everything that decides what is converted. `files` are what must come out."""

    python: str
    files: dict[FileName, ModelFile]


ModelSpec = Spec[ModelBuild]


def load_model(directory: Path) -> Model:
    """`directory`/model.toml. Raises InputError; its `name` must be the directory's."""
    path = directory / "model.toml"
    model = load(Model, path)
    if model.name != directory.resolve().name:
        raise InputError(f"{path}: name = {model.name!r}, the directory is {directory.name!r}", hint="make both equal")
    return model


def model_spec(directory: Path, python: str) -> ModelSpec:
    """The spec of the model in `directory` for the box's Python `python` ("3.11"). Raises InputError."""
    model = load_model(directory)
    try:
        inputs = {name: (directory / name).read_bytes() for name in (LOCK, CONVERT)}
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}", hint="a model needs both files") from None
    parse_lock(inputs[LOCK].decode(), str(directory / LOCK))
    build = ModelBuild(
        name=model.name,
        python=python,
        files=model.files,
        inputs=hashes(inputs),
    )
    return render_spec(build, inputs)


def build_model(
    spec_dir: Path, layout: Layout, *, wheelhouse: Path | None = None, offline: bool = False, report: Report
) -> Path:
    """Fetch, convert, verify, and give the model its final name; returns its directory. Does nothing when it is there.

    Raises BrokenError for a damaged spec, GpuboxError when the wheels cannot be had, ProofError when the conversion
    fails or gives other bytes than model.toml says; then nothing has the final name.
    """
    spec = read_spec(ModelBuild, spec_dir)
    final = layout.models / spec.id
    work = layout.models / f".building-{spec.id}"
    shutil.rmtree(
        work, ignore_errors=True
    )  # a conversion takes seconds: not worth resuming; downloads are in the cache
    if (final / PROVED).is_file():
        report(f"model {spec.id} is built already")
        return final
    if final.exists():
        raise BrokenError(f"{final}: has no {PROVED}", hint="somebody changed it: remove it and deploy again")
    out = work / "out"
    out.mkdir(parents=True)
    _make_venv(work / "venv", spec_dir, spec, layout, wheelhouse=wheelhouse, offline=offline, report=report)
    _convert(work / "venv", spec_dir, spec, out, report)
    report("verifying the result")
    _check_files(out, spec.build.files)
    (out / PROVED).write_bytes(canonical_json(spec.build.model_dump(mode="json")))
    _make_durable(out)
    out.rename(final)
    sync_directory(layout.models)
    shutil.rmtree(work)
    report(f"model {spec.id} is built and verified")
    return final


def verify_model(directory: Path) -> None:
    """Every file of a converted model has its size and hash. Raises BrokenError naming the first that has not."""
    try:
        build = ModelBuild.model_validate_json((directory / PROVED).read_bytes())
    except (OSError, ValidationError) as error:
        raise BrokenError(f"{directory / PROVED}: {error}", hint="remove the directory and deploy again") from None
    try:
        _check_files(directory, build.files)
    except ProofError as error:
        raise BrokenError(error.message, hint="remove the directory and deploy again") from None


def _make_venv(
    venv: Path,
    spec_dir: Path,
    spec: ModelSpec,
    layout: Layout,
    *,
    wheelhouse: Path | None,
    offline: bool,
    report: Report,
) -> None:
    """A venv of the locked wheels, from the system's Python; it lives only while the model is built."""
    report(f"fetching the wheels of model {spec.build.name}")
    uv = uv_program()
    make: list[str | Path] = [uv, "venv", "--python", spec.build.python, "--python-preference", "only-system", venv]
    sync: list[str | Path] = [uv, "pip", "sync", "--require-hashes", "--no-build", "--python", venv / "bin" / "python"]
    sync += ["--find-links", wheelhouse] if wheelhouse else []
    sync += ["--offline"] if offline else []
    said: list[str] = []
    for command in (make, [*sync, spec_dir / LOCK]):
        status = run_lines(
            command,
            environment=uv_environment(layout),
            on_line=said.append,
            on_silence=lambda seconds: report(f"still fetching after {seconds:.0f} s"),
        )
        if status != 0:
            free = shutil.disk_usage(layout.models).free
            raise explain_uv_failure(f"model {spec.id}", "\n".join(said), free_bytes=free)


def _convert(venv: Path, spec_dir: Path, spec: ModelSpec, out: Path, report: Report) -> None:
    report("converting")
    site_packages = venv / "lib" / f"python{spec.build.python}" / "site-packages"
    command: list[str | Path] = [venv / "bin" / "python", "-I", "-B", spec_dir / CONVERT, site_packages, out]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-25:])
        raise ProofError(f"model {spec.id}: {CONVERT} ended with {done.returncode}", hint="read it below", detail=tail)


def _check_files(directory: Path, expected: dict[str, ModelFile]) -> None:
    for name, file in expected.items():
        path = directory / name
        if not path.is_file():
            raise ProofError(f"{path}: is missing", hint="convert.py and model.toml disagree")
        if path.stat().st_size != file.size:
            raise ProofError(f"{path}: has {path.stat().st_size} bytes, model.toml says {file.size}")
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != file.sha256:
            raise ProofError(f"{path}: sha256 is {digest}, model.toml says {file.sha256}")
    if extra := {path.name for path in directory.iterdir()} - expected.keys() - {PROVED}:
        raise ProofError(f"{directory}: unexpected {', '.join(sorted(extra))}", hint="list it in model.toml")


def _make_durable(directory: Path) -> None:
    """On disk before the final name is; readable for the user that serves (safetensors writes files of mode 0600)."""
    for path in directory.iterdir():
        with path.open("rb") as stream:
            os.fchmod(stream.fileno(), 0o644)
            os.fsync(stream.fileno())
    directory.chmod(0o755)
    sync_directory(directory)

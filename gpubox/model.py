"""Models that a box converts once: described in models/<name>/, verified by hash, kept outside every release."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpubox.canonical import DIGEST_LENGTH, canonical_json, sha256_hex
from gpubox.errors import BrokenError, InputError, ProofError
from gpubox.files import sync_directory, write_atomic
from gpubox.layout import Layout
from gpubox.lockfile import parse_lock
from gpubox.server import Name
from gpubox.toml import load

LOCK = "requirements.lock"
CONVERT = "convert.py"
SPEC = "spec.json"
PROVED = "model.json"
Report = Callable[[str], None]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelFile(_Strict):
    """`size` in bytes."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    size: Annotated[int, Field(ge=0)]


class Model(_Strict):
    """`models/<name>/model.toml`. `files` are what the conversion must give, by name."""

    name: Name
    description: str
    license: str
    source: str
    files: Annotated[dict[str, ModelFile], Field(min_length=1)]


class ModelBuild(_Strict):
    """spec.json: everything that decides a converted model. `inputs` are sha256 by file name."""

    schema_version: Literal[1] = 1
    name: Name
    python: str
    files: dict[str, ModelFile]
    inputs: dict[str, str]


@dataclass(frozen=True)
class ModelSpec:
    """A rendered model spec: the bytes of what the box gets, by file name."""

    build: ModelBuild
    files: dict[str, bytes]

    @property
    def id(self) -> str:
        return f"{self.build.name}-{sha256_hex(self.files[SPEC])[:DIGEST_LENGTH]}"


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
        inputs={name: sha256_hex(data) for name, data in inputs.items()},
    )
    return ModelSpec(build, {SPEC: canonical_json(build.model_dump(mode="json")), **inputs})


def read_model_spec(directory: Path) -> ModelSpec:
    """The spec that was uploaded to `directory`, every file checked by its sha256. Raises BrokenError."""
    try:
        raw = (directory / SPEC).read_bytes()
        build = ModelBuild.model_validate_json(raw)
        files = {SPEC: raw, **{name: (directory / name).read_bytes() for name in build.inputs}}
    except (OSError, ValidationError) as error:
        raise BrokenError(
            f"{directory}: not a model spec: {error}", hint="deploy again; specs are not edited"
        ) from None
    for name, digest in build.inputs.items():
        if sha256_hex(files[name]) != digest:
            raise BrokenError(f"{directory / name}: is not what spec.json says", hint="deploy again")
    return ModelSpec(build, files)


def build_model(
    spec_dir: Path, layout: Layout, *, wheelhouse: Path | None = None, offline: bool = False, report: Report
) -> Path:
    """Fetch, convert, verify, and give the model its final name; returns its directory. Does nothing when it is there.

    Raises ProofError when the wheels cannot be had or the result has other bytes than model.toml says.
    """
    spec = read_model_spec(spec_dir)
    final = layout.models / spec.id
    if (final / PROVED).is_file():
        return final
    building = layout.models / f".building-{spec.id}"
    out = building / "out"
    shutil.rmtree(building, ignore_errors=True)  # a conversion takes seconds: not worth resuming half-way
    out.mkdir(parents=True)
    report(f"fetching the wheels of model {spec.build.name}")
    venv = _make_venv(building / "venv", spec_dir, spec, layout, wheelhouse=wheelhouse, offline=offline)
    report("converting")
    site_packages = next((venv / "lib").glob("python3.*")) / "site-packages"
    _run([venv / "bin" / "python", "-I", "-B", spec_dir / CONVERT, site_packages, out], "the conversion failed")
    report("verifying")
    _check_files(out, spec.build.files)
    write_atomic(out / PROVED, canonical_json(spec.build.model_dump(mode="json")))
    _sync_files(out)
    out.rename(final)
    sync_directory(layout.models)
    shutil.rmtree(building)
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


def check_model_directory(directory: Path) -> None:
    """Whether a checkpoint that an operator brought is whole: the engine loads one with missing shards without a word.

    config.json parses, every shard of the index is there, no file is shorter than its header says, and no download is
    half-done. Raises InputError naming the file. Source: sglang#32279.
    """
    _read_json(directory / "config.json")
    if left := sorted(directory.rglob("*.incomplete")):
        raise InputError(f"{left[0]}: an unfinished download", hint="finish it")
    index = directory / "model.safetensors.index.json"
    shards = {str(name) for name in _read_json(index)["weight_map"].values()} if index.is_file() else set()
    for name in sorted(shards or {path.name for path in directory.glob("*.safetensors")}):
        _check_shard(directory / name)


def _check_shard(path: Path) -> None:
    """A safetensors file is 8 bytes of header length, a JSON header, and data up to the largest offset in it."""
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        end = (
            8
            + length
            + max((entry["data_offsets"][1] for k, entry in header.items() if k != "__metadata__"), default=0)
        )
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path}: not a whole safetensors file: {error}", hint="fetch this shard again") from None
    if path.stat().st_size != end:
        raise InputError(f"{path}: has {path.stat().st_size} bytes, its header says {end}", hint="fetch it again")


def _read_json(path: Path) -> dict[str, dict[str, str]]:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not readable JSON: {error}", hint="a model directory needs it") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: not a JSON object", hint="fetch it again")
    return data


def _make_venv(
    venv: Path, spec_dir: Path, spec: ModelSpec, layout: Layout, *, wheelhouse: Path | None, offline: bool
) -> Path:
    uv = Path(sys.executable).with_name("uv")
    where = [*(["--find-links", str(wheelhouse)] if wheelhouse else []), *(["--offline"] if offline else [])]
    environment = {"UV_CACHE_DIR": str(layout.wheel_cache)}
    _run([uv, "venv", "--quiet", "--python", spec.build.python, venv], "no venv", environment)
    sync: list[str | Path] = [uv, "pip", "sync", "--quiet", "--require-hashes", "--no-build", "--python", venv / "bin" / "python", *where]
    _run([*sync, spec_dir / LOCK], f"model {spec.build.name}: its wheels cannot be installed", environment)
    return venv


def _run(command: list[str | Path], problem: str, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **(environment or {})}
    )
    if done.returncode != 0:
        raise ProofError(problem, hint="see below; a deploy tries again", detail=(done.stdout + done.stderr)[-4000:])


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


def _sync_files(directory: Path) -> None:
    for path in directory.iterdir():
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
    sync_directory(directory)

"""Stacks and overlays as data, and the spec that a box builds a stack from. Pure: reads files, changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from gpubox.errors import InputError
from gpubox.specs.artefacts import ARTEFACTS, Pinned, load_artefacts, pins, read_pins, render_pins
from gpubox.specs.lockfile import Lock, parse_lock
from gpubox.specs.patch import check_chain, check_distributions, read_patch
from gpubox.specs.server import check_environment
from gpubox.specs.spec import LOCK, Build, FileName, Spec, hashes, render_spec
from gpubox.specs.stack_rules import check_lock
from gpubox.toml import Name, Strict, load, nearest

BUILD_LOCK = "build-requirements.lock"  # what builds an engine that comes as source

Minor = Annotated[str, Field(pattern=r"^3\.\d+$")]
DottedName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]
EngineArgument = bool | int | float | str


class Engine(Strict):
    """`name` is the distribution that the lock must hold at `version`; `module` is what `python -m` starts."""

    name: str
    version: str
    module: DottedName


class Cuda(Strict):
    """`version` is torch.version.cuda; `linked_major` the N of the libcudart.so.N that kernels link.

    `toolkit` is the toolkit of the box (nvcc for kernels compiled there); `min_driver` the oldest driver branch.
    """

    version: Annotated[str, Field(pattern=r"^\d+\.\d+$")]
    toolkit: Annotated[str, Field(pattern=r"^\d+\.\d+\.\d+$")]
    min_driver: Annotated[str, Field(pattern=r"^\d+(\.\d+)*$")]
    linked_major: Annotated[int, Field(ge=11)]

    @property
    def home(self) -> str:
        """CUDA_HOME: where the toolkit's packages put it."""
        return f"/usr/local/cuda-{self.toolkit.rpartition('.')[0]}"

    @model_validator(mode="after")
    def _one_major(self) -> Self:
        for key, text in (("version", self.version), ("toolkit", self.toolkit)):
            if int(text.split(".")[0]) != self.linked_major:
                raise ValueError(f"{key} = {text!r} and linked_major = {self.linked_major} are different CUDA majors")
        return self


class Proof(Strict):
    """`imports` must import; the libraries of `kernel_distributions` must load and link the declared CUDA major."""

    imports: list[DottedName] = []
    kernel_distributions: list[str] = []


class Stack(Strict):
    """`stacks/<name>/stack.toml`. `cuda` is absent for an engine that needs none."""

    name: Name
    description: str
    pythons: Annotated[list[Minor], Field(min_length=1)]
    engine: Engine
    cuda: Cuda | None = None
    environment: dict[str, str] = {}
    patches: list[FileName] = []
    proof: Proof = Proof()

    @field_validator("environment")
    @classmethod
    def _environment_names(cls, value: dict[str, str]) -> dict[str, str]:
        return check_environment(value)


class Overlay(Strict):
    """`overlays/<name>/overlay.toml`: what differs on a machine that lacks something."""

    name: Name
    description: str
    refuse_nvidia_driver: bool = False
    libcuda_standin: bool = False
    environment: dict[str, str] = {}
    engine: dict[str, EngineArgument] = {}

    @field_validator("environment")
    @classmethod
    def _environment_names(cls, value: dict[str, str]) -> dict[str, str]:
        return check_environment(value)

    @model_validator(mode="after")
    def _standin_needs_refusal(self) -> Self:
        if self.libcuda_standin and not self.refuse_nvidia_driver:
            raise ValueError("libcuda_standin = true needs refuse_nvidia_driver = true: it would hide a real driver")
        return self


class StackBuild(Build):
    """spec.json of a stack: everything that decides what is built, and nothing else."""

    python: Minor
    engine: Engine
    cuda: Cuda | None
    environment: dict[str, str]
    patches: list[FileName]
    proof: Proof
    libcuda_standin: bool


StackSpec = Spec[StackBuild]


def load_stack(directory: Path) -> Stack:
    """`directory`/stack.toml. Raises InputError; its `name` must be the directory's."""
    path = _description(directory, "stack")
    stack = load(Stack, path)
    _check_name(path, stack.name, directory)
    return stack


def load_overlay(directory: Path) -> Overlay:
    """`directory`/overlay.toml. Raises InputError; its `name` must be the directory's."""
    path = _description(directory, "overlay")
    overlay = load(Overlay, path)
    _check_name(path, overlay.name, directory)
    return overlay


def stack_spec(directory: Path, python: str, overlay: Overlay | None) -> StackSpec:
    """The spec of the stack in `directory` for `python` ("3.11"). Raises InputError when stack and lock disagree.

    Of an overlay only the libcuda stand-in changes what is built; the rest goes into releases.
    """
    stack = load_stack(directory)
    if python not in stack.pythons:
        raise InputError(
            f"{directory}: not locked for Python {python}",
            hint=f"use one of {', '.join(stack.pythons)}, or add it to pythons in stack.toml and regenerate the lock",
        )
    inputs = {LOCK: _read(directory / LOCK)}
    inputs |= {f"patches/{name}": _read(directory / "patches" / name) for name in stack.patches}
    artefacts = load_artefacts(directory)
    if artefacts.all:
        inputs[ARTEFACTS] = render_pins(pins(artefacts))
    if any(artefact.kind == "source" for artefact in artefacts.all):
        inputs[BUILD_LOCK] = _read(directory / BUILD_LOCK)
    lock = parse_lock(inputs[LOCK].decode(), str(directory / LOCK))
    check_lock(stack, artefacts, lock, python)
    patches = [read_patch(name, inputs[f"patches/{name}"]) for name in stack.patches]
    check_chain(patches)
    check_distributions(patches, lock.expected(python), str(directory / LOCK))
    build = StackBuild(
        name=stack.name,
        python=python,
        engine=stack.engine,
        cuda=stack.cuda,
        environment=stack.environment,
        patches=stack.patches,
        proof=stack.proof,
        libcuda_standin=overlay is not None and overlay.libcuda_standin,
        inputs=hashes(inputs),
    )
    return render_spec(build, inputs)


def locked_packages(spec: StackSpec) -> Lock:
    return parse_lock(spec.files[LOCK].decode(), LOCK)


def pinned_artefacts(spec: StackSpec) -> list[Pinned]:
    return read_pins(spec.files)


def brings_python(spec: StackSpec) -> bool:
    """Whether the stack can be built on a box whose system lacks its Python."""
    return any(pinned.kind == "python" for pinned in pinned_artefacts(spec))


def _description(directory: Path, kind: str) -> Path:
    path = directory / f"{kind}.toml"
    if not path.is_file():
        known = [entry.parent.name for entry in directory.parent.glob(f"*/{kind}.toml")]
        raise InputError(f"{kind} = {directory.name!r}: there is no {path}", hint=nearest(directory.name, known))
    return path


def _check_name(path: Path, name: str, directory: Path) -> None:
    if name != directory.resolve().name:
        raise InputError(
            f"{path}: name = {name!r}, but the directory is {directory.resolve().name!r}", hint="make both equal"
        )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror}", hint="stack.toml and `make lock` decide what must exist"
        ) from None

"""The check that a release with a draft must pass before it is activated, from what the release itself says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpubox.drafts.case import Serving
from gpubox.drafts.check import check_draft
from gpubox.drafts.documents import read_object
from gpubox.drafts.findings import Report
from gpubox.errors import BrokenError, InputError, RefusedError
from gpubox.layout import Layout
from gpubox.specs.command_line import argument

ALGORITHM: Final = "EAGLE3"
EMPTIED_AT_BOOT: Final = ("/tmp", "/var/tmp", "/dev/shm", "/run")
FUSION_FLAGS: Final = ("--enable-flashinfer-allreduce-fusion", "--flashinfer-allreduce-fusion-backend")
TENSOR_PARALLEL_FLAGS: Final = ("--tp-size", "--tensor-parallel-size", "--tp")


@dataclass(frozen=True)
class ReleaseDraft:
    """What of a release decides whether its draft fits.

    `patches` as the stack's spec names them; `arguments` the words of the engine's command line; `gpu_bytes` of one.
    """

    draft_path: Path
    model_path: Path
    engine_version: str
    patches: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    gpu_bytes: int | None = None
    quantized_on_purpose: bool = False


def check_release_draft(release: ReleaseDraft, layout: Layout) -> Report:
    """Seconds, no GPU. Call it before anything is stopped; the report's warnings belong into the activation's log.

    Raises RefusedError for a draft that does not fit this target, engine and command line, BrokenError for one that is
    not there or damaged.
    """
    path = release.draft_path
    _refuse_places(path, layout)
    algorithm = argument(release.arguments, "--speculative-algorithm")
    if algorithm is not None and algorithm.upper() != ALGORITHM:
        raise RefusedError(
            f"draft {path}: --speculative-algorithm is {algorithm}",
            hint=f"{ALGORITHM}: with another name the engine feeds no hidden states to the draft, without a word",
        )
    if not (path / "config.json").is_file():
        raise BrokenError(
            f"draft {path}: has no config.json", hint="gpubox draft convert puts one into the model store"
        )
    try:
        report = check_draft(
            path,
            release.model_path,
            release.engine_version,
            patches=release.patches,
            serving=_serving(release),
        )
    except InputError as error:
        raise RefusedError(error.message, hint=error.hint) from None
    if report.failures:
        first = report.failures[0]
        kind = BrokenError if first.name == "files" else RefusedError
        raise kind(
            f"draft {path}: {first.name}: {first.what}",
            hint=first.fix,
            detail="\n".join(str(finding) for finding in report.failures),
        )
    return report


def serving_engine(layout: Layout) -> tuple[str, tuple[str, ...]]:
    """Engine version and patches of the stack of the current release. Raises InputError when there is none."""
    hint = "name it with --engine, for example --engine 0.5.9"
    if not layout.current.is_symlink():
        raise InputError("no release is active on this box, so no engine version is known", hint=hint)
    stack_id = str(read_object(layout.current / "release.json").get("stack_id"))
    return stack_engine(layout, stack_id)


def stack_engine(layout: Layout, stack_id: str) -> tuple[str, tuple[str, ...]]:
    """Engine version and patches of a stack on this box. Raises InputError when its stack.json names none."""
    spec = read_object(layout.stacks / stack_id / "stack.json").get("spec")
    engine: Any = spec.get("engine") if isinstance(spec, dict) else None
    if not isinstance(spec, dict) or not isinstance(engine, dict) or not isinstance(engine.get("version"), str):
        hint = "name it with --engine, for example --engine 0.5.9"
        raise InputError(f"stack {stack_id}: its stack.json names no engine version", hint=hint)
    return engine["version"], tuple(name for name in spec.get("patches", ()) if isinstance(name, str))


def _serving(release: ReleaseDraft) -> Serving:
    words = release.arguments
    fused = any(argument(words, flag) is not None for flag in FUSION_FLAGS) if words else None
    fraction = argument(words, "--mem-fraction-static")
    try:
        return Serving(
            context_length=_whole(argument(words, "--context-length")),
            dtype=argument(words, "--dtype"),
            tensor_parallel=_whole(argument(words, *TENSOR_PARALLEL_FLAGS)) or (1 if words else None),
            fused_allreduce=fused,
            memory_fraction=None if fraction is None else float(fraction),
            gpu_bytes=release.gpu_bytes,
            quantized_on_purpose=release.quantized_on_purpose,
        )
    except ValueError as error:
        raise InputError(f"engine arguments: {error}") from None


def _whole(text: str | None) -> int | None:
    return None if text is None else int(text)


def _refuse_places(path: Path, layout: Layout) -> None:
    """A release outlives a reboot; so must its draft."""
    if not path.is_absolute():
        raise RefusedError(
            f"draft {path}: not an absolute path", hint="the directory that gpubox draft convert printed"
        )
    if path.is_relative_to(layout.root):
        return
    for place in EMPTIED_AT_BOOT:
        if path.is_relative_to(place):
            raise RefusedError(f"draft {path}: {place} is emptied at boot", hint=f"put it below {layout.models}")

"""A draft of any spelling made into one that the engine reads: a new directory in the model store, checked.

Never in place: the source stays as it is. What has the final name is complete; a conversion that was interrupted goes
on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from packaging.version import Version
from pydantic import BaseModel, ConfigDict

from gpubox.canonical import canonical_json, short_digest
from gpubox.drafts.check import check_draft
from gpubox.drafts.checkpoint import CONFIG, INDEX, PROVENANCE, Checkpoint, open_checkpoint, recorded_layers
from gpubox.drafts.config import TargetConfig, read_target
from gpubox.drafts.contract import HEAD, LLAMA, NEWEST, engine_version, loaded_name
from gpubox.drafts.findings import Report
from gpubox.drafts.speculators import flat_config, foreign_format, trained_layers
from gpubox.errors import BrokenError, GpuboxError, InputError, ProofError
from gpubox.files import sync_directory, write_atomic
from gpubox.layout import Layout
from gpubox.specs.model import ModelFile
from gpubox.weights.safetensors import Header, TensorInfo, encode_header, shown

CHUNK: Final = 8 * 2**20  # bytes read at once
NAME: Final = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")
TRAINING_ONLY: Final = re.compile(r"^(model\.)?verifier_|rotary_emb\.inv_freq$")

Say = Callable[[str], None]


class Origin(BaseModel):
    """What a converted draft was made of, and how. `source`: sha256 of each file; `renamed`: old to new names."""

    model_config = ConfigDict(frozen=True)

    schema_version: Literal[1] = 1
    name: str
    source: dict[str, str]
    source_format: str
    engine_version: str
    target_architecture: str
    trained_layers: list[int] | None
    config: dict[str, Any]
    renamed: dict[str, str]
    dropped: list[str]


class Provenance(Origin):
    """draft.json. No times, no hosts, no paths: equal sources give equal bytes."""

    files: dict[str, ModelFile]


class Converted(NamedTuple):
    directory: Path
    report: Report


def convert_draft(
    source: Path,
    name: str,
    target: Path,
    version: str,
    layout: Layout,
    *,
    patches: Iterable[str] = (),
    trained: list[int] | None = None,
    say: Say,
) -> Converted:
    """The converted draft below layout.models, as NAME-DIGEST; the digest is of everything that decides its bytes.

    `trained`: the layers entered that it was trained on; None where the source says it, by its format or by the record
    of an earlier conversion, or nobody knows.

    Raises InputError for what cannot be converted, BrokenError for damaged files, ProofError when the result does not
    pass; then nothing is kept.
    """
    if not NAME.fullmatch(name):
        raise InputError(f"--name {name!r}", hint="lower-case letters, digits, dots and hyphens, at most 64")
    engine, against = engine_version(version), read_target(target)
    checkpoint = open_checkpoint(source)
    before = _stamps(checkpoint)
    say("reading the source")
    origin = _origin(checkpoint, name, engine, against, trained)
    model_id = f"{name}-{short_digest(origin.model_dump(mode='json'))}"
    final = layout.models / model_id
    if final.exists():
        _check_complete(final)
        say(f"draft {model_id} is converted already")
    else:
        work = layout.models / f".building-{model_id}"
        _remove_older(layout.models, name, work)
        _build(checkpoint, origin, work, say)
        if _stamps(checkpoint) != before:
            shutil.rmtree(work)
            raise GpuboxError(f"{source}: somebody wrote to it while it was read", hint="convert again when it is done")
    place = final if final.exists() else work
    report = check_draft(place, target, version, patches=patches)
    if report.failures:
        if place != final:
            shutil.rmtree(place)
        raise ProofError(
            f"{source}: the converted draft does not pass: {report.failures[0].what}",
            hint=report.failures[0].fix or "gpubox draft check shows everything",
            detail="\n".join(str(finding) for finding in report.failures),
        )
    if place != final:
        place.rename(final)
        sync_directory(layout.models)
    return Converted(final, report.model_copy(update={"draft": str(final)}))


def _origin(
    checkpoint: Checkpoint, name: str, engine: Version, target: TargetConfig, trained: list[int] | None
) -> Origin:
    layers = trained or trained_layers(checkpoint.config, target) or recorded_layers(checkpoint.directory)
    renamed, dropped = _names(checkpoint)
    config = flat_config(checkpoint.config, target, engine, layers)
    head = next((stored for stored, new in renamed.items() if new == HEAD.name), None)
    if config.get("draft_vocab_size") is None and head is not None:
        config["draft_vocab_size"] = checkpoint.info(head).shape[0] if checkpoint.info(head).shape else None
    config.setdefault("draft_vocab_size", None)
    files = [checkpoint.directory / CONFIG, *(header.path for header in checkpoint.headers)]
    return Origin(
        name=name,
        source={path.name: _sha256(path) for path in files},
        source_format=foreign_format(checkpoint.config) or "flat",
        engine_version=str(engine),
        target_architecture=target.architecture,
        trained_layers=layers,
        config=config,
        renamed={stored: new for stored, new in renamed.items() if stored != new},
        dropped=dropped,
    )


def _names(checkpoint: Checkpoint) -> tuple[dict[str, str], list[str]]:
    """Stored to new names, and what is left out. The new ones load in every version."""
    renamed: dict[str, str] = {}
    taken: dict[str, str] = {}
    dropped = []
    for stored in checkpoint.where:
        if TRAINING_ONLY.search(stored):
            dropped.append(stored)
            continue
        new = loaded_name(stored.removeprefix("model."), LLAMA, NEWEST)
        if new in taken:
            raise InputError(
                f"{checkpoint.directory}: {shown(stored)} and {shown(taken[new])} would both become {shown(new)}",
                hint="export the draft again with each tensor once",
            )
        renamed[stored], taken[new] = new, stored
    return renamed, sorted(dropped)


def _build(checkpoint: Checkpoint, origin: Origin, work: Path, say: Say) -> None:
    work.mkdir(parents=True, exist_ok=True)
    shards = [header for header in checkpoint.headers if header.tensors.keys() - set(origin.dropped)]
    _check_space(work, sum(header.file_size for header in shards))
    files: dict[str, ModelFile] = {}
    weight_map: dict[str, str] = {}
    for number, header in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        kept = {stored: origin.renamed.get(stored, stored) for stored in header.tensors if stored not in origin.dropped}
        files[name] = _write_shard(header, kept, work / name, say)
        weight_map |= dict.fromkeys(kept.values(), name)
    documents = {CONFIG: canonical_json(origin.config)}
    if len(shards) > 1:
        total = sum(header.tensors[stored].nbytes for header in shards for stored in header.tensors)
        documents[INDEX] = canonical_json({"metadata": {"total_size": total}, "weight_map": weight_map})
    for name, data in documents.items():
        write_atomic(work / name, data)
        files[name] = ModelFile(sha256=hashlib.sha256(data).hexdigest(), size=len(data))
    provenance = Provenance(**dict(origin), files=files)
    write_atomic(work / PROVENANCE, canonical_json(provenance.model_dump(mode="json")))
    for stranger in {path.name for path in work.iterdir()} - files.keys() - {PROVENANCE}:
        (work / stranger).unlink()
    work.chmod(0o755)
    sync_directory(work)


def _write_shard(header: Header, kept: dict[str, str], path: Path, say: Say) -> ModelFile:
    """Copy the tensors of one shard under their new names. A shard that has its name is whole: it got it last."""
    order = sorted(kept, key=lambda stored: header.tensors[stored][2:])
    placed: dict[str, TensorInfo] = {}
    at = 0
    for stored in order:
        info = header.tensors[stored]
        placed[kept[stored]] = TensorInfo(info.dtype, info.shape, at, at + info.nbytes)
        at += info.nbytes
    start = encode_header(placed, header.metadata)
    if path.is_file() and path.stat().st_size == len(start) + at:
        say(f"{path.name} is there already")
        return ModelFile(sha256=_sha256(path), size=path.stat().st_size)
    say(f"writing {path.name}, {at / 1e6:.0f} MB")
    part = path.with_name(f"{path.name}.part")
    digest = hashlib.sha256(start)
    with header.path.open("rb") as source, part.open("wb") as out:
        out.write(start)
        for stored in order:
            info = header.tensors[stored]
            source.seek(header.data_start + info.begin)
            for data in _chunks(source, info.nbytes, header.path):
                digest.update(data)
                out.write(data)
        out.flush()
        os.fchmod(out.fileno(), 0o644)
        os.fsync(out.fileno())
    part.replace(path)
    return ModelFile(sha256=digest.hexdigest(), size=len(start) + at)


def _chunks(source: Any, count: int, path: Path) -> Iterable[bytes]:
    while count:
        data = source.read(min(CHUNK, count))
        if not data:
            raise BrokenError(f"{path}: was cut off while it was read", hint="convert again from a whole copy")
        yield data
        count -= len(data)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _stamps(checkpoint: Checkpoint) -> list[tuple[int, int, int]]:
    """What changes when somebody writes to a shard."""
    found = [header.path.stat() for header in checkpoint.headers]
    return [(status.st_ino, status.st_size, status.st_mtime_ns) for status in found]


def _check_complete(final: Path) -> None:
    try:
        files = Provenance.model_validate(json.loads((final / PROVENANCE).read_bytes())).files
        wrong = [name for name, file in files.items() if (final / name).stat().st_size != file.size]
    except (OSError, ValueError) as error:
        raise BrokenError(f"{final}: is not as it was converted: {error}", hint="remove it and convert again") from None
    if wrong:
        raise BrokenError(
            f"{final}: {wrong[0]} has another size than {PROVENANCE} says", hint="remove it, convert again"
        )


def _check_space(work: Path, needed: int) -> None:
    there = sum(path.stat().st_size for path in work.iterdir())
    free = shutil.disk_usage(work).free
    if free + there < needed:
        raise GpuboxError(f"{work.parent}: {free / 1e9:.1f} GB are free, the draft needs {needed / 1e9:.1f} GB")


def _remove_older(models: Path, name: str, work: Path) -> None:
    """Half-built conversions of other bytes under this name."""
    for path in models.glob(".building-*"):
        if path != work and re.fullmatch(rf"\.building-{re.escape(name)}-[0-9a-f]{{12}}", path.name):
            shutil.rmtree(path)

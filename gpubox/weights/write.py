"""Write a manifest from the bytes that are there. What it proves is written into it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gpubox.errors import BrokenError, InputError, RefusedError
from gpubox.files import write_atomic
from gpubox.rollout.history import now
from gpubox.specs.checkpoint import check_model_directory
from gpubox.weights.hashing import OnBytes, hash_files
from gpubox.weights.manifest import MANIFEST, model_files, render_manifest
from gpubox.weights.records import Records
from gpubox.weights.safetensors import shown

PROVES = (
    "made by `gpubox weights manifest` from the bytes that were here, {when}",
    "proves that they did not change since; not that they are the publisher's",
)


def write_manifest(
    directory: Path,
    output: Path | None,
    records: Records,
    *,
    jobs: int,
    start: Callable[[str, int], None],
    on: OnBytes,
) -> tuple[Path, int]:
    """The manifest's path and its number of files. Files that were read and did not change are not read again.

    Raises InputError for a directory that is not whole, RefusedError when there is a manifest, BrokenError when a file
    cannot be read or changes meanwhile.
    """
    path = output or directory / MANIFEST
    if path.exists():
        raise RefusedError(f"{path}: exists and is not replaced", hint="move it away, or name another with --output")
    check_model_directory(directory)
    files = model_files(directory)
    if odd := sorted(name for name, file in files.items() if not file.is_file()):
        raise InputError(f"{directory / odd[0]}: is no file", hint="replace the link by what it names, or remove it")
    if odd := sorted(name for name in files if not name.isprintable()):
        raise InputError(f"{directory}: {shown(odd[0])}: no name for a manifest", hint="rename it, or remove it")
    records.prepare()
    found = {name: digests.sha256 for name, file in files.items() if (digests := records.find(file))}
    unread = {file: name for name, file in files.items() if name not in found}
    start("reading", sum(file.stat().st_size for file in unread))
    for file, result in hash_files(list(unread), jobs=jobs, on_bytes=on, each=records.write):
        if isinstance(result, Exception):
            raise BrokenError(f"{file}: {result}", hint="make sure that nobody writes there, and try again")
        found[unread[file]] = result.digests.sha256
    try:
        write_atomic(path, render_manifest(found, tuple(line.format(when=now()) for line in PROVES)))
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}", hint="name a file with --output") from None
    return path, len(found)

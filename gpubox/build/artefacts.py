"""Get a stack's artefacts: from the wheelhouse, from what was fetched before, or from the one index that has each."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

from packaging.utils import canonicalize_name

from gpubox.build.fetch import fetch, find_in_index, sha256_of
from gpubox.errors import BrokenError, GpuboxError
from gpubox.specs.artefacts import Pinned, check_digest, index_address

Report = Callable[[str], None]
STEP = 250_000_000  # bytes between two lines of progress


def obtain(
    pinned: Pinned,
    store: Path,
    *,
    wheelhouse: Path | None,
    indexes: Mapping[str, str],
    offline: bool,
    report: Report,
) -> Path:
    """The artefact's file, of an accepted hash: in `wheelhouse`, or in `store`, fetched when it is not there.

    Raises RepublishedError for a file of other bytes, InputError for an index without an address, GpuboxError.
    """
    for directory in (wheelhouse, store):
        if directory is not None and (directory / pinned.file).is_file():
            check_digest(pinned, sha256_of(directory / pinned.file), str(directory / pinned.file))
            return directory / pinned.file
    if offline:
        raise GpuboxError(
            f"{pinned.file} is not on this box, and no network is to be used",
            hint="bring it in a wheelhouse (`make wheelhouse`), or run once without --offline",
        )
    address = address_of(pinned, indexes)
    report(f"Downloading {pinned.file}")
    said = 0

    def progress(done: int) -> None:
        nonlocal said
        if done - said >= STEP:
            said = done
            report(f"{pinned.file}: {done / 1e6:.0f} MB")

    fetch(address, store / pinned.file, lambda digest: check_digest(pinned, digest, address), progress=progress)
    return store / pinned.file


def address_of(pinned: Pinned, indexes: Mapping[str, str]) -> str:
    """A wheel is listed on its project's page of a simple index; other files lie at the index's own address."""
    index = index_address(pinned, indexes)
    if pinned.kind == "wheel":
        return find_in_index(index, canonicalize_name(pinned.name), pinned.file)
    return f"{index}/{pinned.file.replace('+', '%2B')}"


def unpack_python(archive: Path, pythons: Path) -> Path:
    """The interpreter of a relocatable build, unpacked once below `pythons`; complete under its name or not there.

    Raises BrokenError when the archive is none (its hash was accepted before).
    """
    target = pythons / archive.name.removesuffix(".gz").removesuffix(".tar")
    interpreter = target / "python" / "bin" / "python3"
    if interpreter.exists():
        return interpreter
    building = pythons / f".building-{target.name}"
    shutil.rmtree(building, ignore_errors=True)
    shutil.rmtree(target, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(building, filter="data")
    except tarfile.TarError as error:
        shutil.rmtree(building)
        raise BrokenError(f"{archive}: no Python build: {error}", hint="correct its entry in artefacts.toml") from None
    if not (building / "python" / "bin" / "python3").exists():
        shutil.rmtree(building)
        raise BrokenError(f"{archive}: holds no python/bin/python3", hint="take an install_only build")
    building.rename(target)
    return interpreter

"""Manifests: the digest of every file of a directory, in the format of `sha256sum`, which can check them too.

A line is 64 hexadecimal digits, a space, a space or *, and the name; lines that start with # are comments. A name with
a backslash, a newline or a carriage return has those escaped and a backslash before the whole line (GNU coreutils,
"md5sum invocation").
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from gpubox.errors import InputError
from gpubox.weights.hashing import Expected

MANIFEST: Final = "SHA256SUMS"
SIZE_LIMIT: Final = 16 * 2**20  # bytes of a manifest: 100,000 files
_LINE: Final = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *]([^\n\r]+)")
_ESCAPES: Final = {"\\\\": "\\", "\\n": "\n", "\\r": "\r"}


class Expectations(NamedTuple):
    """What every file must be, by name relative to the directory, and where that is written."""

    origin: str
    files: Mapping[str, Expected]


def parse_manifest(data: bytes, origin: str) -> dict[str, str]:
    """sha256 by name. Raises InputError naming `origin` and the line: a line that is not understood proves nothing."""
    if len(data) > SIZE_LIMIT:
        raise InputError(f"{origin}: has {len(data)} bytes; a manifest has at most {SIZE_LIMIT}")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise InputError(f"{origin}: is not UTF-8 text", hint="give a file that sha256sum wrote") from None
    found: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.startswith("#"):
            continue
        where = f"{origin}, line {number}"
        match = _LINE.fullmatch(line)
        if match is None:
            raise InputError(f"{where}: not a digest and a name as sha256sum writes them", hint="write it anew")
        name = _unescaped(match[3], where) if match[1] else match[3]
        name = checked_name(name.removeprefix("./"), where)
        if found.setdefault(name, match[2].lower()) != match[2].lower():
            raise InputError(f"{where}: {name} has another digest above", hint="keep the right one")
    if not found:
        raise InputError(f"{origin}: names no file", hint="gpubox weights manifest DIR writes one")
    return found


def render_manifest(files: Mapping[str, str], comments: tuple[str, ...] = ()) -> bytes:
    """The manifest of sha256 by name, in the order of the names; `sha256sum -c` takes it."""
    lines = [f"# {line}" for line in comments]
    for name in sorted(files):
        escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
        lines.append(f"{'' if escaped == name else chr(92)}{files[name]}  {escaped}")
    return ("\n".join(lines) + "\n").encode()


def checked_name(name: str, where: str) -> str:
    """A name that stays inside its directory, whoever wrote it. Raises InputError."""
    parts = PurePosixPath(name).parts
    plain = "/".join(parts) == name and not name.startswith("/") and ".." not in parts and "\0" not in name
    if not plain or not parts or len(name.encode(errors="replace")) > 1024:
        raise InputError(f"{where}: {name[:200]!r} is not the name of a file below the directory")
    return name


def read_manifest(path: Path) -> Expectations:
    """The manifest in the file `path`. Raises InputError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: no readable manifest: {error.strerror}") from None
    files = parse_manifest(data, str(path))
    return Expectations(str(path), {name: Expected("sha256", digest) for name, digest in files.items()})


def expectations(directory: Path, manifest: Path | None = None) -> Expectations | None:
    """What the files of `directory` must be: the manifest given, the one beside them, or the hub's own names.

    None when nothing says it. Raises InputError for a manifest that cannot be read.
    """
    if manifest is not None:
        return read_manifest(manifest)
    if (directory / MANIFEST).exists():
        return read_manifest(directory / MANIFEST)
    return _names_of_blobs(directory)


def _names_of_blobs(directory: Path) -> Expectations | None:
    """In a snapshot of a hub's cache each file is a link to blobs/DIGEST: sha256 of large files, git ids of small ones.

    Source: huggingface_hub 2.4, "Understand caching": blobs are named by the ETag that the hub gave them.
    """
    if directory.resolve().parent.name != "snapshots":
        return None
    files: dict[str, Expected] = {}
    for name, path in model_files(directory).items():
        target = path.readlink().name if path.is_symlink() else ""
        if re.fullmatch(r"[0-9a-f]{64}", target):
            files[name] = Expected("sha256", target)
        elif re.fullmatch(r"[0-9a-f]{40}", target):
            files[name] = Expected("git", target)
    return Expectations("the names of the hub's blobs", files) if files else None


def model_files(directory: Path) -> dict[str, Path]:
    """Every file that an engine could read, by relative name: all but hidden ones and the manifest itself.

    A link to a directory is given as if it were a file: it is not looked into, and so never proved.
    """
    found: dict[str, Path] = {}
    for path in sorted(directory.iterdir()):
        if path.name.startswith(".") or path.name == MANIFEST:
            continue
        if path.is_dir() and not path.is_symlink():
            found |= {f"{path.name}/{name}": inner for name, inner in model_files(path).items()}
        else:
            found[path.name] = path
    return found


def _unescaped(name: str, where: str) -> str:
    if re.sub(r"\\[\\nr]", "", name).count("\\"):
        raise InputError(f"{where}: a backslash that escapes nothing", hint="write it anew with sha256sum")
    return re.sub(r"\\[\\nr]", lambda match: _ESCAPES[match[0]], name)

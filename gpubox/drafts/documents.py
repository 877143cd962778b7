"""JSON files that others wrote, read without trust: bounded, no key twice, no nesting that breaks the parser."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, Final

from gpubox.errors import InputError

SIZE_LIMIT: Final = 1 << 20  # bytes; a model's config.json has a few thousand


def read_object(path: Path, *, limit: int = SIZE_LIMIT) -> dict[str, Any]:
    """The JSON object in a file. Raises InputError naming the file and what is wrong with it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise InputError(f"{path}: not a file")
            data = stream.read(limit + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > limit:
        raise InputError(f"{path}: has more than {limit} bytes, too much for such a file")
    try:
        value = json.loads(data.decode(), object_pairs_hook=_each_once, parse_constant=_no_constant)
    except RecursionError:
        raise InputError(f"{path}: is nested too deep") from None
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: not a JSON object")
    return value


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"key {name[:80]!r} stands there twice")
        found[name] = value
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")

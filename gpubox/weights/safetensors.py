"""Headers of safetensors files, and small reads of values: no torch, no numpy; memory at most 8 times the header.

The format: 8 bytes of header length (little endian), a JSON object, then the tensors' bytes without holes. The JSON has
a fixed shape, so it is read entry by entry and never as a tree: what is nested, repeated or too large is refused where
it stands. Source: the format's description and the checks of its reference implementation (safetensors 0.6, tensor.rs).
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from gpubox.errors import BrokenError

HEADER_LIMIT: Final = 100_000_000  # bytes; the reference implementation refuses longer headers
ENTRY_LIMIT: Final = 4096  # bytes of one tensor's entry; rank 64 with the largest sizes fits in
RANK_LIMIT: Final = 64  # torch's own
SIZE_LIMIT: Final = 2**63  # of one dimension, and of a file
VALUES_LIMIT: Final = 16 * 2**20  # bytes that read_values reads at once; a d2t of 163,840 has 1.3 MB
METADATA: Final = "__metadata__"

BITS: Final[Mapping[str, int]] = MappingProxyType(
    {
        **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
        **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
        **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
        **dict.fromkeys(("I32", "U32", "F32"), 32),
        **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    }
)
INTEGERS: Final[Mapping[str, str]] = MappingProxyType(
    {"BOOL": "B", "U8": "B", "I8": "b", "U16": "H", "I16": "h", "U32": "I", "I32": "i", "U64": "Q", "I64": "q"}
)
FLOATS: Final = ("BF16", "F16", "F32", "F64")


class TensorInfo(NamedTuple):
    """One tensor: dtype as the format spells it, and where its bytes lie, from the start of the data (not the file)."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class Header(NamedTuple):
    """What a file says of itself, checked against its size. data_start and file_size in bytes."""

    path: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    data_start: int
    file_size: int


def read_header(path: Path) -> Header:
    """The header of a safetensors file.

    Holds: every name once, known dtypes, sizes that agree with dtype and shape, data without holes or overlaps up to
    the end of the file. Raises BrokenError naming the file and what is wrong.
    """
    text, size = _header_text(path)
    tensors, metadata = _Reader(path, text).read()
    header = Header(path, tensors, metadata, 8 + len(text), size)
    _check_layout(header)
    return header


def mentions(path: Path, words: Iterable[bytes]) -> bool:
    """Whether a header spells one of `words` anywhere: a cheap first look, where one of many shards is wanted.

    Raises BrokenError when there is no header; it is not checked any further.
    """
    text, _ = _header_text(path)
    return any(word in text for word in words)


def read_values(header: Header, name: str, *, limit: int = VALUES_LIMIT) -> array[Any]:
    """All values of one small tensor: integers and booleans (0, 1) as they are, floats (BF16 too) as floats.

    Raises BrokenError when the file was cut off since its header was read, ValueError for more than `limit` bytes and
    for types that are not read (FP8 and smaller, complex): ask for the dtype and size first.
    """
    info = header.tensors[name]
    if info.nbytes > limit:
        raise ValueError(f"{name} has {info.nbytes} bytes; at most {limit} are read")
    if info.dtype not in INTEGERS and info.dtype not in FLOATS:
        raise ValueError(f"values of type {info.dtype} are not read")
    with _opened(header.path) as (descriptor, _):
        data = _read_at(descriptor, header.path, header.data_start + info.begin, info.nbytes)
    return _decode(info.dtype, data)


def encode_header(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """Length and header of a file that holds `tensors`, padded so that the data starts at a multiple of 8."""
    entries: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    for name, info in tensors.items():
        entries[name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": (info.begin, info.end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def nbytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Bytes of a tensor; None when it would end inside a byte."""
    bits = BITS[dtype] * math.prod(shape)
    return None if bits % 8 else bits // 8


def shown(name: str) -> str:
    """A name from a file as it may be printed: short, and no control characters."""
    text = name if name.isprintable() else ascii(name)
    return text if len(text) <= 120 else f"{text[:120]}..."


def _broken(path: Path, what: str) -> BrokenError:
    return BrokenError(f"{path}: {what}", hint="fetch or copy that file again")


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, int]]:
    """A regular file's descriptor and size. Not blocking: opening a named pipe would wait for a writer."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise _broken(path, "is missing") from None
    except (OSError, ValueError) as error:
        raise _broken(path, f"cannot be read: {error}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _broken(path, "is not a file")
        yield descriptor, status.st_size
    finally:
        os.close(descriptor)


def _header_text(path: Path) -> tuple[bytes, int]:
    """The JSON text and the size of the file."""
    with _opened(path) as (descriptor, size):
        length = int.from_bytes(_read_at(descriptor, path, 0, 8), "little")
        if length > HEADER_LIMIT:
            raise _broken(path, f"says that its header has {length} bytes; {HEADER_LIMIT} are the most")
        if 8 + length > size:
            raise _broken(path, f"is cut off: its header has {length} bytes, the file has {size}")
        if not length or _read_at(descriptor, path, 8, 1) != b"{":
            raise _broken(path, "is not a safetensors file: its header does not start with {")
        return _read_at(descriptor, path, 8, length), size


def _read_at(descriptor: int, path: Path, start: int, count: int) -> bytes:
    parts: list[bytes] = []
    while count:
        try:
            part = os.pread(descriptor, count, start)
        except OSError as error:
            raise _broken(path, f"cannot be read: {error}") from None
        if not part:
            raise _broken(path, f"is cut off at byte {start}")
        parts.append(part)
        start += len(part)
        count -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _decode(dtype: str, data: bytes) -> array[Any]:
    if dtype == "BF16":  # the upper half of a float32
        wide = bytearray(2 * len(data))
        wide[2::4], wide[3::4] = data[0::2], data[1::2]
        dtype, data = "F32", bytes(wide)
    if dtype == "F16":
        return array("d", struct.unpack(f"<{len(data) // 2}e", data))
    values: array[Any] = array(INTEGERS.get(dtype) or {"F32": "f", "F64": "d"}[dtype])
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


_ENTRY_DECODER: Final = json.JSONDecoder(object_pairs_hook=list)
_SPACE: Final = re.compile(rb"[ \t\n\r]*")


class _Reader:
    """The header's bytes and where the reading stands.

    Bytes, not text: one wide character would make a str of four times the size.
    """

    def __init__(self, path: Path, data: bytes) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def read(self) -> tuple[dict[str, TensorInfo], dict[str, str]]:
        tensors: dict[str, TensorInfo] = {}
        metadata: dict[str, str] | None = None
        for name in self._names():
            if name in tensors or (name == METADATA and metadata is not None):
                raise _broken(self.path, f"its header names {shown(name)} twice")
            if name == METADATA:
                metadata = self._metadata()
            else:
                tensors[name] = self._entry(name)
        self._skip_space()
        if self.at != len(self.data):
            raise self._malformed("something follows the object")
        return tensors, metadata or {}

    def _metadata(self) -> dict[str, str]:
        metadata: dict[str, str] = {}
        for key in self._names():
            if key in metadata:
                raise _broken(self.path, f"its {METADATA} names {shown(key)} twice")
            metadata[key] = self._string()
        return metadata

    def _names(self) -> Iterator[str]:
        """The names of the object that starts here; whoever asks for the next one has read the value of the last."""
        self._expect(b"{")
        self._skip_space()
        if self.data.startswith(b"}", self.at):
            self.at += 1
            return
        while True:
            name = self._string()
            self._expect(b":")
            self._skip_space()
            yield name
            if self._expect(b",", b"}") == b"}":
                return

    def _string(self) -> str:
        self._expect(b'"')
        end = self.at
        while True:
            end = self.data.find(b'"', end)
            if end < 0:
                raise self._malformed("a string has no end")
            before = end
            while before > self.at and self.data[before - 1] == ord("\\"):
                before -= 1
            if (end - before) % 2 == 0:
                break
            end += 1
        raw = self.data[self.at : end]
        try:
            text = raw.decode()
            if "\\" in text or not text.isprintable():
                text = json.loads(f'"{text}"')
                text.encode()  # half of a surrogate pair is no text
        except UnicodeError:
            raise self._malformed("a string is not UTF-8") from None
        except ValueError:
            raise self._malformed("a string is not JSON") from None
        self.at = end + 1
        return text

    def _entry(self, name: str) -> TensorInfo:
        """An entry is flat, so it ends at the next brace; json sees no more than these bytes."""
        end = self.data.find(b"}", self.at, self.at + ENTRY_LIMIT) + 1
        if not end or not self.data.startswith(b"{", self.at):
            raise self._malformed(f"no entry of at most {ENTRY_LIMIT} bytes for {shown(name)}")
        try:
            pairs = _ENTRY_DECODER.decode(self.data[self.at : end].decode())
        except (ValueError, RecursionError):
            raise self._malformed(f"the entry of {shown(name)} is not JSON") from None
        self.at = end
        try:
            return _tensor(pairs)
        except ValueError as error:
            raise _broken(self.path, f"tensor {shown(name)}: {error}") from None

    def _expect(self, *allowed: bytes) -> bytes:
        self._skip_space()
        found = self.data[self.at : self.at + 1]
        if found not in allowed or not found:
            raise self._malformed(f"{' or '.join(map(bytes.decode, allowed))} is missing")
        self.at += 1
        return found

    def _skip_space(self) -> None:
        if self.data[self.at : self.at + 1] in (b" ", b"\t", b"\n", b"\r"):
            match = _SPACE.match(self.data, self.at)
            assert match is not None
            self.at = match.end()

    def _malformed(self, what: str) -> BrokenError:
        return _broken(self.path, f"its header is not valid at byte {8 + self.at}: {what}")


def _tensor(pairs: list[tuple[str, Any]]) -> TensorInfo:
    """Raises ValueError saying what is wrong with the entry."""
    entry = dict(pairs)
    if len(pairs) != 3 or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError("its entry is not dtype, shape and data_offsets, each once")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"unknown dtype {shown(str(dtype))}")
    if not _sizes(shape) or len(shape) > RANK_LIMIT:
        raise ValueError("its shape is not a list of sizes")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError("its data_offsets are not a begin and an end")
    wanted = nbytes(dtype, tuple(shape))
    if wanted is None:
        raise ValueError(f"{dtype} {shown(str(shape))} ends inside a byte")
    if wanted != offsets[1] - offsets[0]:
        needed = wanted if wanted < SIZE_LIMIT else "more than any file's"
        raise ValueError(
            f"{dtype} {shown(str(shape))} needs {needed} bytes, its data_offsets have {offsets[1] - offsets[0]}"
        )
    return TensorInfo(sys.intern(dtype), tuple(shape), *offsets)


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < SIZE_LIMIT for item in value)


def _check_layout(header: Header) -> None:
    """Tensors follow each other without holes or overlaps, to the last byte of the file."""
    at = 0
    for name, info in sorted(header.tensors.items(), key=lambda item: item[1][2:]):
        if info.begin < at:
            raise _broken(header.path, f"tensor {shown(name)} starts at {info.begin}, inside another that ends at {at}")
        if info.begin > at:
            raise _broken(header.path, f"bytes {at} to {info.begin} of its data belong to no tensor")
        at = info.end
    if header.data_start + at != header.file_size:
        raise _broken(header.path, f"has {header.file_size} bytes, its header says {header.data_start + at}")

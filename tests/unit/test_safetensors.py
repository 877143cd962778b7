"""The reader of safetensors headers: what is valid is read exactly, what is not is named, and nothing costs more."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpubox.errors import BrokenError
from gpubox.weights.safetensors import (
    BITS,
    HEADER_LIMIT,
    Header,
    TensorInfo,
    encode_header,
    nbytes,
    read_header,
    read_values,
    shown,
)

MEMORY_FACTOR = 8  # bytes of Python objects for a byte of header, at the very worst (names of one character)
MEMORY_BASE = 200_000


def packed(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, TensorInfo]:
    """Tensors one after the other."""
    found: dict[str, TensorInfo] = {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        size = nbytes(dtype, shape)
        assert size is not None
        found[name] = TensorInfo(dtype, shape, at, at + size)
        at += size
    return found


def write(path: Path, tensors: dict[str, TensorInfo], metadata: dict[str, str] | None = None) -> Path:
    header = encode_header(tensors, metadata or {})
    path.write_bytes(header + bytes(max((info.end for info in tensors.values()), default=0)))
    return path


def raw(path: Path, header: bytes, data: int = 0) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(data))
    return path


def entry(dtype: Any = "U8", shape: Any = (1,), offsets: Any = (0, 1)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


NAMES = st.text(min_size=0, max_size=30).filter(lambda name: name != "__metadata__").filter(_is_utf8)
WHOLE_BYTES = sorted(dtype for dtype, bits in BITS.items() if bits % 8 == 0)
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
TENSORS = st.dictionaries(NAMES, st.tuples(st.sampled_from(WHOLE_BYTES), SHAPES), max_size=8).map(packed)
TEXTS = st.text(max_size=20).filter(_is_utf8)


class TestValid:
    @settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(tensors=TENSORS, metadata=st.dictionaries(TEXTS, TEXTS, max_size=4))
    def test_what_was_written_is_read(
        self, tmp_path: Path, tensors: dict[str, TensorInfo], metadata: dict[str, str]
    ) -> None:
        path = write(tmp_path / "a.safetensors", tensors, metadata)
        header = read_header(path)
        assert header.tensors == tensors
        assert header.metadata == metadata
        assert header.file_size == path.stat().st_size
        assert header.data_start % 8 == 0

    @settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(tensors=TENSORS, indent=st.sampled_from([None, 1, "\t"]), ascii_only=st.booleans(), seed=st.integers(0, 99))
    def test_any_spelling_of_the_same_json(
        self, tmp_path: Path, tensors: dict[str, TensorInfo], indent: Any, ascii_only: bool, seed: int
    ) -> None:
        """White space, escapes, order of entries and of keys within one: a header is JSON."""
        shuffled = list(tensors.items())
        random.Random(seed).shuffle(shuffled)
        value = {}
        for name, info in shuffled:
            keys = [("dtype", info.dtype), ("shape", info.shape), ("data_offsets", (info.begin, info.end))]
            random.Random(seed).shuffle(keys)
            value[name] = dict(keys)
        text = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
        path = raw(tmp_path / "a.safetensors", text, max((info.end for info in tensors.values()), default=0))
        assert read_header(path).tensors == tensors

    def test_packed_types_smaller_than_a_byte(self, tmp_path: Path) -> None:
        tensors = packed({"a": ("F4", (3, 2)), "b": ("F6_E2M3", (4,))})
        assert [info.nbytes for info in tensors.values()] == [3, 3]
        assert read_header(write(tmp_path / "a", tensors)).tensors == tensors
        assert nbytes("F4", (3,)) is None

    def test_no_tensors(self, tmp_path: Path) -> None:
        assert read_header(raw(tmp_path / "a", b"{}")) == Header(tmp_path / "a", {}, {}, 10, 10)


class TestInvalid:
    """Each defect by itself; the message names the file and the place."""

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            pytest.param(b"", "is cut off at byte 0", id="empty"),
            pytest.param(b"\x02\x00\x00", "is cut off at byte 3", id="length cut"),
            pytest.param(b"\xff" * 8, f"{2**64 - 1} bytes; {HEADER_LIMIT} are the most", id="length huge"),
            pytest.param((10**8).to_bytes(8, "little"), "cut off: its header has 100000000 bytes", id="header absent"),
            pytest.param((99).to_bytes(8, "little") + b'{"a":', "has 99 bytes, the file has 13", id="header cut"),
            pytest.param(bytes(8), "does not start with {", id="length zero"),
            pytest.param(b"version https://git-lfs.github.com/spec/v1\n", "bytes; 100000000 are the most", id="LFS"),
            pytest.param((2).to_bytes(8, "little") + b"[]", "does not start with {", id="a list"),
        ],
    )
    def test_no_header(self, tmp_path: Path, content: bytes, says: str) -> None:
        path = tmp_path / "a.safetensors"
        path.write_bytes(content)
        self.refused(path, says)

    @pytest.mark.parametrize(
        ("header", "says"),
        [
            (b'{"a":', "no entry"),
            (b'{"a', "a string has no end"),
            (b'{"a\\', "a string has no end"),
            (b'{"a\\"', "a string has no end"),
            (b'{"a" 1}', ": is missing"),
            (b'{"a":1}', "no entry"),
            (b'{"a":{}}', "each once"),
            (b'{"a":[{}]}', "no entry"),
            (b"{}{}", "something follows"),
            (b"{},", "something follows"),
            (b"{} x", "something follows"),
            (b"{a:1}", '" is missing'),
            (b'{"\xff":{}}', "not UTF-8"),
            (b'{"\\ud800":{}}', "not UTF-8"),
            (b'{"\\x41":{}}', "not JSON"),
            (b'{"a\n":{}}', "not JSON"),
            (b'{"a":{"dtype":"\xff"}}', "not JSON"),
            (b'{"__metadata__":{"a":1}}', '" is missing'),
            (b'{"__metadata__":{"a":"b","a":"c"}}', "__metadata__ names a twice"),
            (b'{"__metadata__":{},"__metadata__":{}}', "names __metadata__ twice"),
            (b'{"__metadata__":[]}', "{ is missing"),
            (b'{"a":{"dtype":[[[[{}', "no"),
            (b'{"a":' + b"[" * 100_000, "no entry"),
            (b'{"a":{"dtype":' + b"[" * 4000 + b"}", "not JSON"),
            (b'{"a":{"dtype":"U8","shape":[' + b"9" * 4100 + b'],"data_offsets":[0,1]}}', "at most 4096 bytes"),
            (b'{"a":{"dtype":"U8","shape":[' + b"9" * 4000 + b'],"data_offsets":[0,1]}}', "not a list of sizes"),
        ],
    )
    def test_malformed(self, tmp_path: Path, header: bytes, says: str) -> None:
        self.refused(raw(tmp_path / "a.safetensors", header, 1), says)

    @pytest.mark.parametrize(
        ("wrong", "says"),
        [
            (entry(dtype="I128"), "unknown dtype I128"),
            (entry(dtype="u8"), "unknown dtype u8"),
            (entry(dtype="x" * 999), "unknown dtype x"),
            (entry(dtype=8), "unknown dtype 8"),
            (entry(dtype=None), "unknown dtype None"),
            (entry(dtype=["U8"]), "unknown dtype"),
            (entry(dtype="U16"), "needs 2 bytes, its data_offsets have 1"),
            (entry(dtype="F4"), "ends inside a byte"),
            (entry(shape=1), "shape is not a list"),
            (entry(shape="1"), "shape is not a list"),
            (entry(shape=[-1]), "shape is not a list"),
            (entry(shape=[1.0]), "shape is not a list"),
            (entry(shape=[True]), "shape is not a list"),
            (entry(shape=[2**63]), "shape is not a list"),
            (entry(shape=[1] * 65), "shape is not a list"),
            (entry(shape=[2**62] * 20), "needs more than any file's bytes"),
            (entry(offsets=[1, 0]), "not a begin and an end"),
            (entry(offsets=[0]), "not a begin and an end"),
            (entry(offsets=[0, 1, 1]), "not a begin and an end"),
            (entry(offsets=[-1, 0]), "not a begin and an end"),
            (entry(offsets=[0, 2**64]), "not a begin and an end"),
            (entry(offsets={}), "no entry|not JSON|missing|each once"),
            ({**entry(), "extra": 1}, "each once"),
            ({"dtype": "U8", "shape": [1]}, "each once"),
        ],
    )
    def test_wrong_entry(self, tmp_path: Path, wrong: Any, says: str) -> None:
        self.refused(raw(tmp_path / "a.safetensors", json.dumps({"t": wrong}).encode(), 1), says)

    def test_key_of_an_entry_twice(self, tmp_path: Path) -> None:
        text = b'{"a":{"dtype":"F8_E4M3","dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
        self.refused(raw(tmp_path / "a", text, 1), "each once")

    def test_name_twice(self, tmp_path: Path) -> None:
        """Also when it is spelt in two ways."""
        one, other = json.dumps(entry()), json.dumps(entry(offsets=(1, 2)))
        for second in ("a", "\\u0061"):
            self.refused(raw(tmp_path / "a", f'{{"a":{one},"{second}":{other}}}'.encode(), 2), "names a twice")

    @pytest.mark.parametrize(
        ("offsets", "size", "says"),
        [
            (((0, 4), (2, 6)), 6, "b starts at 2, inside another that ends at 4"),
            (((0, 4), (0, 4)), 4, "b starts at 0, inside another"),
            (((0, 4), (5, 9)), 9, "bytes 4 to 5 of its data belong to no tensor"),
            (((1, 5), (5, 9)), 9, "bytes 0 to 1"),
            (((0, 4), (4, 8)), 9, "bytes, its header says"),
            (((0, 4), (4, 8)), 7, "bytes, its header says"),
            (((0, 4), (2**40, 2**40 + 4)), 8, "bytes 4 to 1099511627776"),
        ],
    )
    def test_layout(self, tmp_path: Path, offsets: Any, size: int, says: str) -> None:
        text = json.dumps({name: entry(shape=[4], offsets=pair) for name, pair in zip("ab", offsets, strict=True)})
        self.refused(raw(tmp_path / "a", text.encode(), size), says)

    def test_no_file(self, tmp_path: Path) -> None:
        self.refused(tmp_path / "a", "is missing")
        (tmp_path / "d").mkdir()
        self.refused(tmp_path / "d", "is not a file")
        self.refused(tmp_path / "\0", "cannot be read")
        (tmp_path / "loop").symlink_to("loop")
        self.refused(tmp_path / "loop", "cannot be read")

    def test_a_named_pipe_is_not_waited_for(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        self.refused(tmp_path / "pipe", "is not a file")

    def refused(self, path: Path, says: str) -> None:
        with pytest.raises(BrokenError, match=says) as caught:
            read_header(path)
        assert caught.value.message.startswith(str(path))
        assert len(caught.value.message) < len(str(path)) + 600
        assert caught.value.message.removeprefix(str(path)).isprintable()


class TestFuzz:
    """Whatever the bytes: an answer or a BrokenError, soon, in memory that the header bounds."""

    @pytest.fixture
    def valid(self, tmp_path: Path) -> bytes:
        tensors = packed(
            {
                "midlayer.self_attn.q_proj.weight": ("BF16", (8, 16)),
                "d2t": ("I64", (16,)),
                "t2d": ("BOOL", (32,)),
                "naïve \U0001f600": ("F8_E4M3", (3,)),
                "scalar": ("F32", ()),
            }
        )
        return write(tmp_path / "valid", tensors, {"format": "pt", "ü": '"\\'}).read_bytes()

    def test_mutations(self, tmp_path: Path, valid: bytes) -> None:
        """One to four mutations of a valid file, 4,000 times; the seed is fixed, so a failure repeats."""
        rng = random.Random(20260214)
        path = tmp_path / "mutated"
        refused = 0
        started = time.monotonic()
        for _ in range(4000):
            data = bytearray(valid)
            for _ in range(rng.randint(1, 4)):
                rng.choice(MUTATIONS)(data, rng)
            path.write_bytes(data)
            refused += not self.answered(path)
        assert time.monotonic() - started < 60
        assert 2000 < refused < 4000  # mutations of tensor data and of names are valid files

    @settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
    @given(header=st.binary(max_size=200), data=st.integers(0, 20))
    def test_any_bytes(self, tmp_path: Path, header: bytes, data: int) -> None:
        self.answered(raw(tmp_path / "a", b"{" + header, data))

    @settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
    @given(
        value=st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from([*BITS]),
            lambda inner: (
                st.lists(inner, max_size=4)
                | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "x"]), inner)
            ),
        )
    )
    def test_any_json(self, tmp_path: Path, value: Any) -> None:
        self.answered(raw(tmp_path / "a", json.dumps({"a": value}).encode(), 1))

    def answered(self, path: Path) -> bool:
        try:
            header = read_header(path)
        except BrokenError as error:
            assert error.message.startswith(str(path))
            return False
        self.consistent(header)
        return True

    def consistent(self, header: Header) -> None:
        """What the format promises, told apart from how the reader finds it."""
        covered = sorted((info.begin, info.end) for info in header.tensors.values())
        assert sum(end - begin for begin, end in covered) == header.file_size - header.data_start
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(covered))
        for info in header.tensors.values():
            assert math.prod(info.shape) * BITS[info.dtype] == info.nbytes * 8


def _flip(data: bytearray, rng: random.Random) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.randrange(256)


def _cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data) + 1) :]


def _remove(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    del data[at : at + rng.randint(1, 20)]


def _insert(data: bytearray, rng: random.Random) -> None:
    token = rng.choice([b"{", b"}", b"[", b"]", b'"', b"\\", b",", b":", b"\xf0\x9f", b"\\u0000", b"1e9", b"-1", b"0"])
    at = rng.randrange(len(data) + 1)
    data[at:at] = token * rng.choice([1, 1, 1, 50])


def _double(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data) + 1)
    data[start:start] = data[start : start + rng.randint(1, 60)]


def _length(data: bytearray, rng: random.Random) -> None:
    data[:8] = struct.pack("<Q", rng.choice([0, 1, 7, len(data), len(data) * 2, 2**32, 2**63, 2**64 - 1]))


def _number(data: bytearray, rng: random.Random) -> None:
    """A digit of an offset or a shape."""
    digits = [at for at, byte in enumerate(data[8:400], 8) if 48 <= byte <= 57]
    if digits:
        data[rng.choice(digits)] = rng.randrange(48, 58)


def _data(data: bytearray, rng: random.Random) -> None:
    data[-1:] = bytes([rng.randrange(256)])


MUTATIONS: list[Callable[[bytearray, random.Random], None]] = [
    *(_flip, _cut, _remove, _insert, _double, _length, _number, _data),
]


class TestMemory:
    """Peak of what Python allocates, by tracemalloc."""

    def peak(self, path: Path) -> int:
        tracemalloc.start()
        try:
            read_header(path)
        except BrokenError:
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        return peak

    def test_a_length_alone_allocates_nothing(self, tmp_path: Path) -> None:
        path = tmp_path / "a"
        for length in (2**64 - 1, HEADER_LIMIT + 1, HEADER_LIMIT):
            path.write_bytes(length.to_bytes(8, "little") + b"{}")
            assert self.peak(path) < MEMORY_BASE

    def test_data_is_not_read(self, tmp_path: Path) -> None:
        path = tmp_path / "a"
        header = encode_header(packed({"a": ("U8", (2**36,))}), {})
        with path.open("wb") as stream:
            stream.write(header)
            stream.truncate(len(header) + 2**36)  # a hole
        assert self.peak(path) < MEMORY_BASE

    @pytest.mark.parametrize(
        "header",
        [
            pytest.param(
                encode_header(dict.fromkeys(map(str, range(20_000)), TensorInfo("U8", (0,), 0, 0)), {})[8:],
                id="tiny entries",
            ),
            pytest.param(json.dumps({"__metadata__": {"a": "a" * 10**6 + "\U0001f600"}}, ensure_ascii=False).encode(),
                         id="one wide character"),
            pytest.param(b'{"__metadata__":{"a":"' + b"\\u0000" * 200_000 + b'"}}', id="escapes"),
            pytest.param(b'{"__metadata__":{"a":"' + b"\\" * 10**6 + b'"}}', id="backslashes"),
            pytest.param(b'{"a":' + b"[" * 10**6, id="nesting"),
            pytest.param(b'{"a":' + b'{"a":' * 10**6, id="nested objects"),
            pytest.param(b"{" + b" " * 10**6, id="white space"),
            pytest.param(b'{"a":{"dtype":"' + b"x" * 10**6, id="a string without end"),
            pytest.param(b'{"a":{"dtype":"U8","shape":[' + b"0," * 500_000, id="a list without end"),
        ],
    )  # fmt: skip
    def test_the_header_bounds_it(self, tmp_path: Path, header: bytes) -> None:
        path = raw(tmp_path / "a", header)
        started = time.monotonic()
        peak = self.peak(path)
        assert peak < MEMORY_FACTOR * len(header) + MEMORY_BASE
        assert time.monotonic() - started < 20

    def test_mutations(self, tmp_path: Path) -> None:
        rng = random.Random(7)
        valid = write(tmp_path / "v", packed({f"layers.{i}.weight": ("U8", (2,)) for i in range(300)})).read_bytes()
        path = tmp_path / "a"
        for _ in range(150):
            data = bytearray(valid)
            rng.choice(MUTATIONS)(data, rng)
            path.write_bytes(data)
            assert self.peak(path) < MEMORY_FACTOR * len(data) + MEMORY_BASE


class TestValues:
    @pytest.mark.parametrize(
        ("dtype", "data", "values"),
        [
            ("I64", struct.pack("<2q", -1, 2**40), [-1, 2**40]),
            ("U64", struct.pack("<Q", 2**64 - 1), [2**64 - 1]),
            ("I32", struct.pack("<i", -7), [-7]),
            ("U32", struct.pack("<I", 2**32 - 1), [2**32 - 1]),
            ("I16", struct.pack("<h", -7), [-7]),
            ("U16", struct.pack("<H", 65535), [65535]),
            ("I8", b"\xff", [-1]),
            ("U8", b"\xff", [255]),
            ("BOOL", b"\x00\x01", [0, 1]),
            ("F64", struct.pack("<d", 0.1), [0.1]),
            ("F32", struct.pack("<f", 0.5), [0.5]),
            ("F16", struct.pack("<e", -0.25), [-0.25]),
            ("BF16", struct.pack("<f", 1.5)[2:] + struct.pack("<f", -3.0)[2:], [1.5, -3.0]),
        ],
    )
    def test_every_type(self, tmp_path: Path, dtype: str, data: bytes, values: list[float]) -> None:
        size = BITS[dtype] // 8
        tensors = packed({"before": ("U8", (5,)), "a": (dtype, (len(data) // size,))})
        path = tmp_path / "a"
        path.write_bytes(encode_header(tensors, {}) + b"\xaa" * 5 + data)
        assert list(read_values(read_header(path), "a")) == values

    def test_not_a_number_survives(self, tmp_path: Path) -> None:
        path = tmp_path / "a"
        path.write_bytes(encode_header(packed({"a": ("BF16", (3,))}), {}) + b"\xc0\x7f\x80\x7f\x80\xff")
        nan, infinite, negative = read_values(read_header(path), "a")
        assert math.isnan(nan)
        assert (infinite, negative) == (math.inf, -math.inf)

    def test_refusals(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a", packed({"a": ("U8", (10,)), "b": ("F8_E4M3", (1,))}))
        header = read_header(path)
        with pytest.raises(ValueError, match="a has 10 bytes; at most 9 are read"):
            read_values(header, "a", limit=9)
        with pytest.raises(ValueError, match="F8_E4M3 are not read"):
            read_values(header, "b")
        os.truncate(path, header.data_start + 4)
        with pytest.raises(BrokenError, match="cut off"):
            read_values(header, "a")


def test_names_from_a_file_are_printed_harmless() -> None:
    assert shown("a.weight") == "a.weight"
    assert shown("\x1b[31m\n") == r"'\x1b[31m\n'"
    assert len(shown("x" * 10**6)) == 123

"""Fetching over real HTTP from a server that breaks off, lies about ranges, fails and publishes anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpubox.build import fetch as module
from gpubox.build.fetch import PART, fetch, find_in_index, sha256_of
from gpubox.canonical import sha256_hex
from gpubox.errors import GpuboxError, InputError
from tests.unit.index import Index, serving

DATA = bytes(range(256)) * 4096


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    with serving() as found:
        found.files["f"] = DATA
        yield found


def only(data: bytes):  # type: ignore[no-untyped-def]
    def check(digest: str) -> None:
        if digest != sha256_hex(data):
            raise GpuboxError("other bytes")

    return check


def get(index: Index, target: Path, data: bytes = DATA) -> None:
    fetch(f"{index.url}/f", target, only(data))


def test_a_file_comes_whole_and_with_progress(index: Index, tmp_path: Path) -> None:
    seen: list[int] = []
    fetch(f"{index.url}/f", tmp_path / "sub" / "f", only(DATA), progress=seen.append)
    assert (tmp_path / "sub" / "f").read_bytes() == DATA
    assert seen[-1] == len(DATA)
    assert not list(tmp_path.rglob("*.part"))


def test_a_broken_connection_is_continued_where_it_broke(index: Index, tmp_path: Path) -> None:
    index.cut_after = 300_000
    get(index, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA
    assert [wanted for _, wanted in index.asked] == [None, *(f"bytes={n * 300_000}-" for n in (1, 2, 3))]


def test_an_earlier_run_is_continued(index: Index, tmp_path: Path) -> None:
    (tmp_path / f"f{PART}").write_bytes(DATA[:1000])
    get(index, tmp_path / "f")
    assert index.asked == [("f", "bytes=1000-")]
    assert (tmp_path / "f").read_bytes() == DATA


@pytest.mark.parametrize("extra", [b"", b"more"])
def test_a_part_that_is_the_whole_file_or_longer(index: Index, tmp_path: Path, extra: bytes) -> None:
    (tmp_path / f"f{PART}").write_bytes(DATA + extra)
    get(index, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA


def test_a_server_without_ranges_starts_over(index: Index, tmp_path: Path) -> None:
    index.ranges = False
    (tmp_path / f"f{PART}").write_bytes(b"x" * 1000)
    get(index, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA


def test_a_part_of_an_older_publication_is_not_blamed_on_the_newer(index: Index, tmp_path: Path) -> None:
    (tmp_path / f"f{PART}").write_bytes(b"x" * 1000)
    get(index, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA
    assert [wanted for _, wanted in index.asked] == ["bytes=1000-", None]


@pytest.mark.parametrize("begun", [False, True])
def test_other_bytes_get_no_name_and_leave_no_part(index: Index, tmp_path: Path, begun: bool) -> None:
    if begun:
        (tmp_path / f"f{PART}").write_bytes(DATA[:1000])
    with pytest.raises(GpuboxError, match="other bytes"):
        get(index, tmp_path / "f", data=b"expected")
    assert list(tmp_path.iterdir()) == []


def test_a_server_in_trouble_is_asked_again_and_given_up_in_the_end(index: Index, tmp_path: Path) -> None:
    index.errors = [503, 500, 429]
    get(index, tmp_path / "f")
    index.errors = [503] * 20
    with pytest.raises(GpuboxError, match=r"503 .*, 5 times in a row") as caught:
        get(index, tmp_path / "g")
    assert "run again" in caught.value.hint
    assert len(index.errors) == 15


def test_what_is_not_there_is_not_asked_again(index: Index, tmp_path: Path) -> None:
    with pytest.raises(GpuboxError, match="404"):
        fetch(f"{index.url}/nothing", tmp_path / "f", only(DATA))
    assert len(index.asked) == 1
    with pytest.raises(InputError, match="no such file"):
        fetch(f"file://{tmp_path}/nothing", tmp_path / "f", only(DATA))


def test_a_directory_is_an_index_too(tmp_path: Path) -> None:
    (tmp_path / "a+b").write_bytes(DATA)
    fetch(f"file://{tmp_path}/a%2Bb", tmp_path / "f", only(DATA))
    assert sha256_of(tmp_path / "f") == sha256_hex(DATA)


def test_a_page_that_lists_one_address_with_five_hashes(index: Index) -> None:
    index.add("sgl-kernel", "k-1+cu130-py3-none-any.whl", b"", *(f"#sha256={n:064x}" for n in range(5)))
    address = find_in_index(index.url, "sgl-kernel", "k-1+cu130-py3-none-any.whl")
    assert address == f"{index.url}/files/k-1+cu130-py3-none-any.whl"
    with pytest.raises(GpuboxError, match="does not list other"):
        find_in_index(index.url, "sgl-kernel", "other")
    with pytest.raises(GpuboxError, match="404"):
        find_in_index(index.url, "torch", "other")

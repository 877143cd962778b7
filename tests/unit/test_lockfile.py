"""Locks: what is one, what it says for a Python, and that the committed ones fit what was asked for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gpubox.errors import InputError
from gpubox.specs.lockfile import foreign_cuda, parse_lock
from gpubox.specs.stack import load_stack

STACKS = Path(__file__).resolve().parents[2] / "stacks"
REAL = sorted(path.parent for path in STACKS.glob("*/requirements.lock"))
HASH = "--hash=sha256:" + "ab" * 32

words = st.text("abz019", min_size=1, max_size=4)
names = st.lists(words, min_size=1, max_size=3).map("-".join)
numbers = st.lists(st.integers(0, 999).map(str), min_size=1, max_size=4).map(".".join)
versions = st.tuples(numbers, st.sampled_from(["", ".post1", "rc2", "+cu128"])).map("".join)
hashes = st.lists(st.integers(0, 2**256 - 1).map("{:064x}".format), min_size=1, max_size=3, unique=True)
markers = st.sampled_from(
    ["", "python_full_version < '3.12'", "python_full_version >= '3.12'", "sys_platform == 'linux'"]
)


def write_entry(name: str, version: str, marker: str, digests: list[str]) -> str:
    head = f"{name}=={version}" + (f" ; {marker}" if marker else "")
    return " \\\n".join([head, *(f"    --hash=sha256:{digest}" for digest in digests)]) + "\n"


@given(st.dictionaries(names, st.tuples(versions, markers, hashes), max_size=6), st.booleans())
def test_what_is_written_is_read(entries: dict[str, tuple[str, str, list[str]]], comments: bool) -> None:
    between = "# a comment\n\n" if comments else ""
    lock = parse_lock(between.join(write_entry(name, *rest) for name, rest in entries.items()))
    assert [entry.name for entry in lock.entries] == [canonicalize_name(name) for name in entries]
    for entry, (_, marker, digests) in zip(lock.entries, entries.values(), strict=True):
        assert entry.hashes == set(digests)
        assert bool(entry.marker) == bool(marker)
    old, new = set(lock.expected("3.11")), set(lock.expected("3.12"))
    assert old - new == {e.name for e in lock.entries if "< " in e.marker}
    assert new - old == {e.name for e in lock.entries if ">=" in e.marker}


@given(st.text(alphabet="a1=.;'\"\\\n #-@:/<>~!,[]() \t") | st.text())
def test_no_text_is_more_than_refused(text: str) -> None:
    try:
        lock = parse_lock(text)
    except InputError as error:
        assert re.match(r"requirements\.lock:\d+: ", error.message)
    else:
        assert all(entry.hashes and entry.version for entry in lock.entries)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (f"six>=1.0 {HASH}", "not pinned as name==version"),
        (f"six==1.* {HASH}", "not pinned as name==version"),
        (f"six===1.0 {HASH}", "not pinned as name==version"),
        (f"six {HASH}", "not pinned as name==version"),
        (f"six[extra]==1.0 {HASH}", "not pinned as name==version"),
        (f"six @ file:///tmp/six.whl {HASH}", "not pinned as name==version"),
        ("six==1.0", "six has no --hash"),
        ("six==1.0 --hash=md5:00", "not only sha256 hashes"),
        (f"six==1.0 {HASH[:-1]}", "not only sha256 hashes"),
        (f"six==1.0 {HASH} --no-binary", "not only sha256 hashes"),
        ("--index-url=somewhere", "option '--index-url=somewhere' has no place"),
        ("-r other.txt", "option '-r' has no place"),
        (f"six = 1.0 {HASH}", "not a requirement"),
    ],
)
def test_what_is_no_lock_is_refused_with_its_line(line: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_lock(f"# one\nattrs==25.1.0 \\\n    {HASH}\n{line}\n", "x.lock")
    assert caught.value.message.startswith("x.lock:4: ")
    assert says in caught.value.message


def test_a_name_locked_twice_for_one_python_is_refused() -> None:
    lock = parse_lock(f"Six==1.0 {HASH}\nsix==1.1 ; python_version >= '3.12' {HASH}\n")
    assert lock.expected("3.11.9") == {"six": "1.0"}
    with pytest.raises(InputError, match=r":2: six is locked twice for Python 3\.12 \(also on line 1\)"):
        lock.expected("3.12")


def test_other_platforms_do_not_count() -> None:
    text = f"a==1 ; sys_platform == 'win32' {HASH}\nb==1 ; platform_machine == 'aarch64' {HASH}\nc==1 {HASH}\n"
    assert parse_lock(text).expected("3.11") == {"c": "1"}


@pytest.mark.parametrize(
    ("name", "version", "majors"),
    [
        ("nvidia-cublas-cu12", "12.8.4.1", {12}),
        ("nvidia-cudnn-cu13", "9.19.0.56", {13}),
        ("nvidia-cutlass-dsl-libs-cu12", "4.6.0", {12}),
        ("cupy-cuda12x", "14.0", {12, 13}),  # not decided by the rule
        ("torch", "2.9.1+cu130", {13}),
        ("torch", "2.9.1", {12, 13}),
        ("sgl-kernel", "0.3.21+cu129", {12}),
        ("nvidia-cuda-runtime", "13.0.96", {13}),
        ("nvidia-nvjitlink", "12.8.1", {12}),
        ("nvidia-cufft", "12.0.0.61", {12, 13}),  # counts for itself: this one is CUDA 13's
        ("nvidia-ml-py", "13.615.71", {12, 13}),  # follows the driver
        ("cuda-bindings", "12.9.10", {12}),
    ],
)
def test_which_cuda_major_a_distribution_belongs_to(name: str, version: str, majors: set[int]) -> None:
    assert {major for major in (12, 13) if not foreign_cuda({name: version}, major)} == majors


LOCKED = [(path, python) for path in REAL for python in load_stack(path).pythons]


@pytest.mark.parametrize(("directory", "python"), LOCKED, ids=lambda value: getattr(value, "name", value))
def test_the_committed_locks_hold_what_was_asked_for(directory: Path, python: str) -> None:
    text = (directory / "requirements.lock").read_text()
    assert f"make lock STACK={directory.name}" in text
    assert "://" not in text
    expected = parse_lock(text).expected(python)
    for file in ("requirements.in", "overrides.txt"):
        path = directory / file
        for line in path.read_text().splitlines() if path.exists() else []:
            wish = line.partition("#")[0].strip()
            if wish:
                requirement = Requirement(wish)
                assert requirement.specifier.contains(expected[canonicalize_name(requirement.name)]), wish


def test_there_are_committed_locks() -> None:
    assert {path.name for path in REAL} >= {"cuda128", "cuda130", "cuda130-next"}

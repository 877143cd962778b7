"""The format of patches: what is read is exactly what is applied, and everything else is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubox.errors import GpuboxError, InputError
from gpubox.specs.patch import check_chain, check_distributions, file_versions, read_patch
from tests.unit.patching import HEADER, diff, header, patch_text, sha

REPO = Path(__file__).resolve().parents[2]
SET = REPO / "patches" / "sglang-0.5.9"
FILES: dict[str, tuple[str | None, str]] = {"pkg/m.py": ("one\ntwo\n", "one\n2\n"), "pkg/new.py": (None, "new\n")}
GOOD = patch_text(FILES)
APPLIES = f'applies_to = "{sha(str(FILES["pkg/m.py"][0]))}"'

some = st.sampled_from(["a\n", "b\n", "\n", " x\n", "-y\n", "--- z\n", "@@\n", "\r\n", "é\x0b\n"])
lines = st.lists(some, max_size=12)
texts = st.builds(lambda body, end: "".join(body) + end, lines, st.sampled_from(["", "a", "\r", "\\ "]))


@given(old=st.none() | texts, new=texts)
def test_what_a_patch_says_is_what_it_does_both_ways(old: str | None, new: str) -> None:
    if old == new or (old is None and not new):
        return
    patch = read_patch("x.patch", patch_text({"m.py": (old, new)}).encode())
    file = patch.header.files[0]
    before = None if old is None else old.encode()
    assert patch.apply(file, before) == new.encode()
    assert patch.revert(file, new.encode()) == before


@given(data=st.binary(max_size=200) | st.integers(0, len(GOOD)).map(lambda cut: GOOD[:cut].encode()))
def test_no_bytes_but_a_patch_are_one(data: bytes) -> None:
    with pytest.raises(InputError, match=r"x\.patch"):
        read_patch("x.patch", data if data != GOOD.encode() else b"")


@given(at=st.integers(0, len(GOOD) - 1), byte=st.binary(min_size=1, max_size=1))
def test_a_patch_with_one_byte_changed_is_refused_or_does_the_same(at: int, byte: bytes) -> None:
    data = GOOD.encode()
    broken = data[:at] + byte + data[at + 1 :]
    try:
        patch = read_patch("x.patch", broken)
        results = {
            file.path: patch.apply(file, old.encode() if old is not None else None)
            for file in patch.header.files
            for old in [FILES[file.path][0]]
        }
    except (GpuboxError, KeyError):
        return
    for path, result in results.items():
        assert sha(result.decode()) == next(file.gives for file in patch.header.files if file.path == path)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('why = "a test"\n', "", "key 'why' is missing"),
        ('why = "a test"', 'why = ""', "why = ''"),
        ('why = "a test"', 'reason = "a test"', "unknown key 'reason'"),
        ('why = "a test"', 'why = "a', "its header is not TOML"),
        ('["none"]', "[]", "upstream = []"),
        ('["by this test"]', "[]", "verified = []"),
        ('"helper==2.0"', '"helper>=2.0"', "distributions.0 = 'helper>=2.0'"),
        ('path = "pkg/m.py"', 'path = "../m.py"', "files.0.path = '../m.py'"),
        ('path = "pkg/m.py"', 'path = "/pkg/m.py"', "files.0.path = '/pkg/m.py'"),
        ('path = "pkg/m.py"', 'path = "pkg//m.py"', "files.0.path = 'pkg//m.py'"),
        ('path = "pkg/new.py"', 'path = "pkg/m.py"', "a file is named twice"),
        ('path = "pkg/m.py"', 'path = "pkg/n.py"', "header and diff name different files: pkg/m.py, pkg/n.py"),
        (APPLIES, "", "pkg/m.py: a new file has no applies_to"),
        (APPLIES, 'applies_to = "abc"', "files.0.applies_to = 'abc'"),
        ("--- /dev/null", "--- a/pkg/new.py", "pkg/new.py: a new file has no applies_to, every other file has one"),
        ("+++ b/pkg/m.py", "+++ b/pkg/n.py", "x.patch:16: 'a/pkg/m.py' and 'b/pkg/n.py' are not"),
        ("+++ b/pkg/new.py", "+++ /dev/null", "are not a/PATH"),
        ("@@ -1,2 +1,2 @@", "@@ -1,3 +1,2 @@", "x.patch:22: expected a line that starts with '--- '"),
        ("@@ -1,2 +1,2 @@", "@@ -1,1 +1,1 @@", "expected a line that starts with '--- '"),
        ("@@ -1,2 +1,2 @@", "@@ -0,2 +1,2 @@", "lines are counted from 1"),
        ("@@ -1,2 +1,2 @@", "@@ 1 2 @@", "not a hunk's head"),
        ("@@ -1,2 +1,2 @@\n one\n-two\n+2\n", "", "pkg/m.py has no hunk"),
        ("+new\n", "", "the diff ends inside a hunk"),
        ("+new\n", "new\n", "a line of a hunk starts with"),
    ],
)
def test_what_is_wrong_is_named(old: str, new: str, says: str) -> None:
    assert GOOD.count(old) == 1
    with pytest.raises(InputError) as caught:
        read_patch("x.patch", GOOD.replace(old, new).encode())
    assert "x.patch" in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "change", [("-two", "-three"), ("+2", "+3"), (" one", " uno"), ("@@ -1,2 +1,2 @@", "@@ -2,2 +2,2 @@")]
)
def test_a_diff_at_odds_with_its_header_is_not_applied(change: tuple[str, str]) -> None:
    patch = read_patch("x.patch", GOOD.replace(*change).encode())
    with pytest.raises(InputError, match=r"x\.patch: its diff of pkg/m\.py (gives|has a hunk)"):
        patch.apply(patch.header.files[0], b"one\ntwo\n")


def test_one_file_twice_in_a_diff() -> None:
    with pytest.raises(InputError, match="comes twice"):
        read_patch("x.patch", (GOOD + diff("pkg/m.py", "a\n", "b\n")).encode())


def test_a_chain_must_fit() -> None:
    one, two, other = (
        read_patch(name, patch_text({"m.py": (old, new)}).encode())
        for name, old, new in (("1", "a\n", "b\n"), ("2", "b\n", "c\n"), ("3", "x\n", "y\n"))
    )
    back = read_patch("4", patch_text({"m.py": ("c\n", "a\n")}).encode())
    check_chain([one, two])
    assert file_versions([one, two]) == {"m.py": [sha("a\n"), sha("b\n"), sha("c\n")]}
    for wrong, says in (
        ([two, one], "1: applies to another m.py than 2"),
        ([one, other], "3: applies to another m.py"),
        ([one, one], "named twice"),
        ([one, two, back], "undoes an earlier one"),
    ):
        with pytest.raises(InputError, match=says):
            check_chain(wrong)


def test_a_patch_is_for_a_release() -> None:
    top = HEADER.replace('["helper==2.0"]', '["Helper_x==2.0", "helper-x==2.1"]')
    patch = read_patch("1.patch", patch_text({"m.py": ("a\n", "b\n")}, top).encode())
    for locked in ({"helper-x": "2.0"}, {"helper-x": "2.1"}, {}):
        check_distributions([patch], locked, "lock")
    with pytest.raises(InputError, match=r"lock: holds helper-x 2\.2, 1\.patch is for 2\.0 or 2\.1"):
        check_distributions([patch], {"helper-x": "2.2"}, "lock")


def test_a_header_alone_is_no_patch() -> None:
    with pytest.raises(InputError, match="no TOML header before a line"):
        read_patch("x.patch", header(FILES).encode())


def test_the_repositorys_patches_are_read_and_fit() -> None:
    patches = [read_patch(path.name, path.read_bytes()) for path in sorted(SET.glob("*.patch"))]
    check_chain(patches)
    assert len(patches) == 7
    for patch in patches:
        assert patch.header.unverified, "no SM120 card was at hand: every patch has something that nobody has seen"

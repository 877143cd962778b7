"""Patches on files: recognised by hash, all files of a patch or none, continued after a kill, never through a link."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from gpubox.build import patches as on_disk
from gpubox.build.patches import (
    State,
    apply_patches,
    check_patches,
    drifted,
    patch_record,
    read_patches,
    revert_patches,
)
from gpubox.canonical import canonical_json
from gpubox.cli.main import main
from gpubox.errors import GpuboxError, InputError, RefusedError
from gpubox.layout import Layout
from gpubox.specs.patch import Patch
from tests.unit.patching import patch_text, sha

M = "pkg/m.py"
N = "pkg/n.py"
TEXTS = {M: ["m0\n", "m1\n", "m2\n"], N: ["n0\n", "n1\n"]}
SET = {
    "1.patch": patch_text({M: ("m0\n", "m1\n"), N: ("n0\n", "n1\n")}),
    "2.patch": patch_text({M: ("m1\n", "m2\n"), "pkg/sub/new.py": (None, "new\n")}),
}


def line(text: str) -> str:
    """The sha256 of a file of one line."""
    return sha(f"{text}\n")


class Tree:
    """Site-packages whose module is a hard link into a cache, and a directory of patches."""

    def __init__(self, root: Path) -> None:
        self.site, self.cached, self.directory = root / "site", root / "cached.py", root / "set"
        (self.site / "pkg").mkdir(parents=True)
        self.directory.mkdir()
        self.cached.write_text("m0\n")
        (self.site / M).hardlink_to(self.cached)
        (self.site / N).write_text("n0\n")
        for name, text in SET.items():
            (self.directory / name).write_text(text)

    @property
    def patches(self) -> list[Patch]:
        return read_patches(self.directory, sorted(SET))

    def files(self) -> dict[str, str]:
        return {str(path.relative_to(self.site)): path.read_text() for path in self.site.rglob("*") if path.is_file()}

    def states(self) -> list[list[State]]:
        return [[file.state for file in report.files] for report in check_patches(self.patches, self.site)]


BEFORE = {M: "m0\n", N: "n0\n"}
BETWEEN = {M: "m1\n", N: "n1\n"}
AFTER = {M: "m2\n", N: "n1\n", "pkg/sub/new.py": "new\n"}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_apply_and_revert(tree: Tree) -> None:
    (tree.site / M).chmod(0o755)
    assert apply_patches(tree.patches, tree.site) == ["1.patch", "2.patch"]
    assert tree.files() == AFTER
    assert tree.cached.read_text() == "m0\n"
    assert (tree.site / M).stat().st_mode & 0o777 == 0o755
    assert apply_patches(tree.patches, tree.site) == []
    assert revert_patches(tree.patches, tree.site) == ["2.patch", "1.patch"]
    assert tree.files() == BEFORE
    assert revert_patches(tree.patches, tree.site) == []


@pytest.mark.parametrize(("path", "text"), [(M, "edited\n"), (N, "edited\n"), (N, None)])
@pytest.mark.parametrize("work", [apply_patches, revert_patches])
def test_a_file_that_is_neither_stops_all(
    tree: Tree, work: Callable[[list[Patch], Path], list[str]], path: str, text: str | None
) -> None:
    (tree.site / path).unlink()
    if text is not None:
        (tree.site / path).write_text(text)
    before = tree.files()
    found = "is missing" if text is None else f"has sha256 {sha(text)}"
    with pytest.raises(RefusedError, match=f"1.patch: {path} {found}, neither what the patch applies to"):
        work(tree.patches, tree.site)
    assert tree.files() == before


@given(m=st.integers(0, 2), n=st.integers(0, 1), new=st.booleans())
def test_from_any_mixture_of_known_files_both_ways_end_well(
    tmp_path_factory: pytest.TempPathFactory, m: int, n: int, new: bool
) -> None:
    """What a kill at any moment leaves is such a mixture."""
    for work, wanted in ((apply_patches, AFTER), (revert_patches, BEFORE)):
        tree = Tree(tmp_path_factory.mktemp("tree"))
        (tree.site / M).unlink()
        (tree.site / M).write_text(TEXTS[M][m])
        (tree.site / N).write_text(TEXTS[N][n])
        if new:
            (tree.site / "pkg" / "sub").mkdir()
            (tree.site / "pkg" / "sub" / "new.py").write_text("new\n")
        states = tree.states()
        assert states[0] == [State.APPLIED if m >= 1 else State.APPLICABLE, State.APPLIED if n else State.APPLICABLE]
        assert states[1] == [State.APPLIED if m == 2 else State.APPLICABLE, State.APPLIED if new else State.APPLICABLE]
        work(tree.patches, tree.site)
        assert tree.files() == wanted


@pytest.mark.parametrize("good_writes", range(4))
def test_a_patch_that_cannot_be_written_whole_changes_nothing(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, good_writes: int
) -> None:
    real, left = on_disk.write_atomic, [good_writes]

    def fails_later(path: Path, data: bytes, mode: int) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise OSError(28, "No space left on device")
        real(path, data, mode)

    monkeypatch.setattr(on_disk, "write_atomic", fails_later)
    failed = ("1.patch: pkg/m.py", "1.patch: pkg/n.py", "2.patch: pkg/m.py", "2.patch: pkg/sub/new.py")[good_writes]
    with pytest.raises(GpuboxError, match=f"{failed}: No space left on device"):
        apply_patches(tree.patches, tree.site)
    assert tree.files() == (BEFORE if good_writes < 2 else BETWEEN)
    assert apply_patches(tree.patches, tree.site)[-1] == "2.patch"
    assert tree.files() == AFTER


def test_a_diff_at_odds_with_its_header_changes_nothing(tree: Tree) -> None:
    (tree.directory / "1.patch").write_text(SET["1.patch"].replace("-n0", "-n9"))
    with pytest.raises(InputError, match=r"its diff of pkg/n\.py"):
        apply_patches(tree.patches, tree.site)
    assert tree.files() == BEFORE


def test_drift_is_seen(tree: Tree) -> None:
    record = tree.site.parent / "stack.json"
    apply_patches(tree.patches, tree.site)
    record.write_bytes(canonical_json({"patches": patch_record(tree.patches)}))
    assert drifted(record, tree.site) == []
    (tree.site / M).write_text("m1\n")
    (tree.site / "pkg" / "sub" / "new.py").unlink()
    assert drifted(record, tree.site) == [
        f"{M} is {line('m1')}, after 2.patch it was {line('m2')}",
        f"pkg/sub/new.py is missing, after 2.patch it was {line('new')}",
    ]
    record.write_text("{}")
    assert drifted(record, tree.site) == []


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["patches", *map(str, words)])


def test_the_verbs(tree: Tree) -> None:
    where = ("--tree", tree.site, "--patches", tree.directory)
    assert run("check", *where).output.splitlines()[:2] == ["1.patch: applicable", f"  {M}: applicable"]
    done = run("apply", *where)
    assert (done.exit_code, done.output) == (0, "1.patch: applied\n2.patch: applied\n")
    assert run("apply", *where).output == "nothing to do: all were applied before\n"
    seen = json.loads(run("check", *where, "--json").output)
    assert [(entry["patch"], entry["state"]) for entry in seen] == [("1.patch", "applied"), ("2.patch", "applied")]
    assert seen[0]["files"][0] == {"path": M, "state": "applied", "found": sha("m2\n")}
    assert json.loads(run("revert", *where, "--json").output)["reverted"] == ["2.patch", "1.patch"]
    (tree.site / N).write_text("edited\n")
    neither = run("check", *where)
    assert neither.exit_code == 1
    assert f"  {N}: neither, found sha256 {line('edited')}" in neither.output
    assert run("apply", *where).exit_code == 4


def test_a_built_stack_is_never_patched(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpubox.cli.patches.Layout", lambda: Layout(tree.site.parent / "opt"))
    stacks = tree.site.parent / "opt" / "stacks" / "small-0123456789ab"
    stacks.parent.mkdir(parents=True)
    tree.site.rename(stacks)
    through_a_link = tree.site
    through_a_link.symlink_to(stacks)
    for where in (stacks, through_a_link):
        for verb in ("apply", "revert"):
            refused = run(verb, "--tree", where, "--patches", tree.directory)
            assert refused.exit_code == 4
            assert "is in a built stack, and those never change" in refused.output
    assert (stacks / M).read_text() == "m0\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["check", "--tree", "."], "name a STACK, or both --tree and --patches"),
        (["check", "small"], "there is no stack 'small' on this box"),
        (["check"], "no release is active on this box"),
        (["apply", "--tree", ".", "--patches", "."], "holds no *.patch"),
    ],
)
def test_bad_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gpubox.cli.patches.Layout", lambda: Layout(tmp_path))
    done = run(*words)
    assert done.exit_code == 2
    assert says in done.output

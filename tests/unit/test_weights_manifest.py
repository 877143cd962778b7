"""Manifests: what sha256sum writes is read, what we write sha256sum checks, and nothing leads outside the directory."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubox.errors import InputError
from gpubox.weights.hashing import Expected
from gpubox.weights.manifest import checked_name, expectations, model_files, parse_manifest, render_manifest
from tests.checkpoints import write
from tests.mirror import git_id

DIGEST = "0123456789abcdef" * 4
parts = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda part: part not in (".", "..")
)
names = st.lists(parts, min_size=1, max_size=3).map("/".join)
digests = st.text("0123456789abcdef", min_size=64, max_size=64)


@given(st.dictionaries(names, digests, min_size=1, max_size=8))
def test_what_is_written_is_read(files: dict[str, str]) -> None:
    data = render_manifest(files, ("a comment", "another"))
    assert parse_manifest(data, "m") == files
    assert render_manifest(parse_manifest(data, "m"), ("a comment", "another")) == data


@given(st.one_of(st.binary(max_size=300), st.text(f"{DIGEST[:16]} *\\\n\r#./nr", max_size=300).map(str.encode)))
def test_noise_is_refused_or_names_files_below(noise: bytes) -> None:
    try:
        found = parse_manifest(noise, "m")
    except InputError as error:
        assert str(error).startswith("m")
        return
    assert all(checked_name(name, "m") == name and len(digest) == 64 for name, digest in found.items())


@given(st.text(max_size=30))
def test_no_name_leads_outside(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    base = tmp_path_factory.getbasetemp()
    try:
        checked_name(name, "m")
    except InputError:
        return
    assert Path(f"{base}/{name}").is_relative_to(base)
    assert ".." not in Path(name).parts


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "a//b", ".", "a/./b", "a/", ""])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="not the name of a file below"):
        checked_name(name, "m")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"{DIGEST[1:]}  a", "line 2: not a digest"),
        (f"{DIGEST} a", "line 2: not a digest"),
        (f"SHA256 (a) = {DIGEST}", "line 2: not a digest"),
        (f"{DIGEST}  a\r", "line 2: not a digest"),
        (f"\\{DIGEST}  a\\b", "line 2: a backslash"),
        (f"{DIGEST}  ../a", "line 2: '../a' is not"),
        (f"{DIGEST}  config.json\n{'f' * 64}  ./config.json", "line 3: config.json has another digest"),
    ],
)
def test_a_bad_line_is_named(line: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse_manifest(f"{DIGEST}  first\n{line}\n".encode(), "m")


def test_no_file_is_no_manifest() -> None:
    with pytest.raises(InputError, match="names no file"):
        parse_manifest(b"# only words\n\n", "m")


ODD = {"plain": b"1", "with space": b"2", "back\\slash": b"3", "new\nline": b"4", "sub/dir": b"5", "ünï": b"6"}


def test_sha256sum_checks_what_we_write(tmp_path: Path) -> None:
    files = write(tmp_path, ODD)
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in ODD.items()}
    (tmp_path / "SHA256SUMS").write_bytes(render_manifest(sums, ("comment",)))
    check = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    done = subprocess.run(check, cwd=files, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": OK") == len(ODD)


@pytest.mark.parametrize("mode", ["--text", "--binary"])
def test_what_sha256sum_writes_is_read(tmp_path: Path, mode: str) -> None:
    write(tmp_path, ODD)
    done = subprocess.run(["sha256sum", mode, *ODD], cwd=tmp_path, capture_output=True, check=True)
    assert parse_manifest(done.stdout, "m") == {name: hashlib.sha256(data).hexdigest() for name, data in ODD.items()}


def test_a_snapshot_of_a_hub_cache_is_its_own_manifest(tmp_path: Path) -> None:
    large, small = b"x" * 1000, b"{}"
    snapshot = tmp_path / "models--a--b" / "snapshots" / ("0" * 40)
    blobs = write(tmp_path / "models--a--b" / "blobs", {hashlib.sha256(large).hexdigest(): large, git_id(small): small})
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs") / hashlib.sha256(large).hexdigest())
    (snapshot / "config.json").symlink_to(Path("../../blobs") / git_id(small))
    (snapshot / "mine.txt").write_text("not the hub's")
    found = expectations(snapshot)
    assert found is not None
    assert found.files == {
        "model.safetensors": Expected("sha256", hashlib.sha256(large).hexdigest()),
        "config.json": Expected("git", git_id(small)),
    }
    assert (blobs / git_id(small)).is_file()
    assert expectations(blobs) is None


def test_what_an_engine_could_read(tmp_path: Path) -> None:
    write(tmp_path, {"config.json": b"", "a/b/c.py": b"", ".cache/x": b"", "SHA256SUMS": b"", ".gitattributes": b""})
    (tmp_path / "out").symlink_to("/etc")
    (tmp_path / "gone").symlink_to("nowhere")
    assert model_files(tmp_path).keys() == {"config.json", "a/b/c.py", "out", "gone"}

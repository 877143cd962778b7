"""weights verify: structure and content told apart, nothing read twice, every way to be wrong named."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gpubox.cli.main import main
from gpubox.errors import InputError
from gpubox.weights import hashing
from gpubox.weights.hashing import ChangedError, Digests, Hashed, Identity, hash_file, hash_files
from gpubox.weights.manifest import render_manifest
from gpubox.weights.records import Record, Records
from gpubox.weights.verify import State, Verdict, verify
from tests.checkpoints import model, write
from tests.mirror import git_id

SHARD = "model-00002-of-00003.safetensors"


def sums(files: dict[str, bytes]) -> bytes:
    return render_manifest({name: hashlib.sha256(data).hexdigest() for name, data in files.items()})


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    files = model()
    write(tmp_path / "model", files)
    (tmp_path / "model" / "SHA256SUMS").write_bytes(sums(files))
    return tmp_path / "model"


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path / "state")


def states(found: Verdict) -> dict[str, State]:
    return {file.name: file.state for file in found.files}


def read(found: Verdict) -> set[str]:
    return {file.name for file in found.files if file.read}


class TestContent:
    def test_proved_and_never_read_twice(self, directory: Path, records: Records) -> None:
        first = verify(directory, records, deep=True)
        assert first.proved and len(read(first)) == 6
        assert first.read == sum(path.stat().st_size for path in directory.rglob("*.*"))
        second = verify(directory, records, deep=True)
        assert second.proved and not read(second) and second.read == 0
        assert verify(directory, records).proved

    def test_fresh_reads_again(self, directory: Path, records: Records) -> None:
        verify(directory, records, deep=True)
        assert len(read(verify(directory, records, deep=True, fresh=True))) == 6

    def test_unread_is_not_proved(self, directory: Path, records: Records) -> None:
        found = verify(directory, records)
        assert found.whole and not found.proved
        assert set(states(found).values()) == {State.UNREAD}

    def test_without_a_manifest_content_is_unproved(self, directory: Path, records: Records) -> None:
        (directory / "SHA256SUMS").unlink()
        found = verify(directory, records)
        assert found.whole and not found.proved and found.origin is None
        with pytest.raises(InputError, match="no manifest"):
            verify(directory, records, deep=True)

    def test_one_flipped_bit(self, directory: Path, records: Records) -> None:
        data = bytearray((directory / SHARD).read_bytes())
        data[-1] ^= 1
        (directory / SHARD).write_bytes(data)
        found = verify(directory, records, deep=True)
        assert found.whole and not found.proved  # its header and size are right
        assert [file.name for file in found.wrong] == [SHARD]
        assert states(verify(directory, records))[SHARD] is State.WRONG  # remembered
        assert read(verify(directory, records, deep=True)) == {SHARD}  # and read again when asked

    @pytest.mark.parametrize("change", ["size", "mtime", "inode", "content with the same mtime"])
    def test_what_changed_is_read_again(self, directory: Path, records: Records, change: str) -> None:
        verify(directory, records, deep=True)
        path = directory / "config.json"
        status = path.stat()
        data = path.read_bytes()
        if change == "size":
            path.write_bytes(data + b" ")
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        elif change == "mtime":
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        elif change == "inode":
            (directory / "new").write_bytes(data)
            os.utime(directory / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
            (directory / "new").rename(path)
        else:
            path.write_bytes(data[::-1])
        assert read(verify(directory, records, deep=True)) == {"config.json"}

    def test_files_outside_the_manifest_are_named(self, directory: Path, records: Records) -> None:
        (directory / "modeling_evil.py").write_text("import os")
        found = verify(directory, records, deep=True)
        assert states(found)["modeling_evil.py"] is State.UNLISTED and not found.proved and not found.wrong

    def test_a_listed_file_that_is_missing(self, directory: Path, records: Records) -> None:
        (directory / "tokenizer/vocab.txt").unlink()
        found = verify(directory, records, deep=True)
        assert found.whole and states(found)["tokenizer/vocab.txt"] is State.MISSING and not found.proved

    def test_a_record_of_another_file_counts_for_nothing(self, directory: Path, records: Records) -> None:
        verify(directory, records, deep=True)
        for file in records.directory.glob("*.json"):
            data = json.loads(file.read_text())
            file.write_text(json.dumps(data | {"path": "/somewhere/else"}))
        assert len(read(verify(directory, records, deep=True))) == 6

    def test_links_in_a_circle_and_names_that_are_no_text(self, directory: Path, records: Records) -> None:
        (directory / "loop").symlink_to("loop")
        (directory / os.fsdecode(b"\xff")).write_bytes(b"")
        found = verify(directory, records, deep=True)
        assert states(found)["loop"] is State.MISSING
        assert states(found)[os.fsdecode(b"\xff")] is State.UNLISTED
        done = run("verify", directory, "--state", records.directory)
        assert done.exit_code == 5 and "udcff" in done.output

    @given(damage=st.binary(max_size=40))
    def test_a_damaged_record_counts_for_nothing(self, tmp_path_factory: pytest.TempPathFactory, damage: bytes) -> None:
        base = tmp_path_factory.mktemp("damage")
        records, path = Records(base / "state"), base / "file"
        path.write_bytes(b"data")
        records.prepare()
        records.write(hash_file(path))
        assert records.find(path) is not None
        next(records.directory.glob("*.json")).write_bytes(damage)
        assert records.find(path) is None

    def test_records_of_files_that_are_gone_are_forgotten(self, directory: Path, records: Records) -> None:
        verify(directory, records, deep=True)
        (directory / "tokenizer/vocab.txt").unlink()
        verify(directory, records, deep=True, fresh=True)
        assert len(list(records.directory.glob("*.json"))) == 5

    def test_a_hub_snapshot_through_its_links(self, tmp_path: Path, records: Records) -> None:
        files = {name: data for name, data in model().items() if "/" not in name}
        hub = tmp_path / "models--o--n"
        snapshot = hub / "snapshots" / ("1" * 40)
        snapshot.mkdir(parents=True)
        for name, data in files.items():
            blob = hashlib.sha256(data).hexdigest() if len(data) > 1000 else git_id(data)
            write(hub / "blobs", {blob: data})
            (snapshot / name).symlink_to(Path("../../blobs") / blob)
        found = verify(snapshot, records, deep=True)
        assert found.proved and found.origin == "the names of the hub's blobs"
        blob = (snapshot / SHARD).resolve()
        blob.write_bytes(blob.read_bytes()[:-1] + b"\0")
        assert [file.name for file in verify(snapshot, records, deep=True).wrong] == [SHARD]
        blob.unlink()
        gone = verify(snapshot, records, deep=True)
        assert not gone.whole and states(gone)[SHARD] is State.MISSING
        (hub / "blobs" / "abc.incomplete").touch()
        assert any("an unfinished download" in problem for problem in verify(snapshot, records).structure)


class TestStructure:
    def test_everything_wrong_is_said_at_once(self, directory: Path, records: Records) -> None:
        (directory / "model-00001-of-00003.safetensors").unlink()
        (directory / SHARD).write_bytes((directory / SHARD).read_bytes()[:-1])
        write(directory, {".partial/abc": b""})
        found = "\n".join(verify(directory, records).structure)
        assert "model-00001-of-00003.safetensors" in found and SHARD in found and ".partial: an unfinished" in found

    @pytest.mark.parametrize(
        "name", ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "", "..", "x\0", 7, None]
    )
    def test_an_index_that_leads_outside(self, directory: Path, records: Records, name: Any) -> None:
        index = {"weight_map": {"t": name}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        assert "no file beside it" in verify(directory, records).structure[0]

    def test_what_is_odd_is_noted(self, directory: Path, records: Records) -> None:
        index = json.loads((directory / "model.safetensors.index.json").read_text())
        del index["weight_map"]["layers.1.weight"]
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        found = verify(directory, records)
        assert found.whole and found.shards == 2
        assert found.notes == [f"{SHARD}: not of model.safetensors.index.json; the engine does not load it"]


class TestHashing:
    def test_the_digests_of_other_programs(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(os.urandom(3 * hashing.BUFFER + 17))
        found = hash_file(path).digests
        said = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout.split()[0]
        git = subprocess.run(["git", "hash-object", path], capture_output=True, text=True, check=True).stdout.strip()
        assert found == Digests(said, git)

    def test_a_file_that_grows_while_it_is_read(self, tmp_path: Path) -> None:
        """Without end: it is not read to an end that never comes."""
        path = tmp_path / "file"
        path.write_bytes(bytes(2 * hashing.BUFFER))

        def grow(count: int) -> None:
            with path.open("ab") as stream:
                stream.write(b"more")

        with pytest.raises(ChangedError):
            hash_file(path, on_bytes=grow)

    def test_a_file_just_written_has_settled_when_it_is_read(self, tmp_path: Path) -> None:
        """Written again right after: the kernel's clock must have moved, or the change would go unseen."""
        path = tmp_path / "file"
        for _ in range(20):
            path.write_bytes(b"a")
            identity = hash_file(path).identity
            assert time.time_ns() - identity.mtime_ns >= hashing.CLOCK_STEP_NS
            path.write_bytes(b"b")
            assert Identity.of(path.stat()) != identity

    def test_each_is_recorded_as_it_is_done(self, tmp_path: Path) -> None:
        paths = [tmp_path / str(number) for number in range(5)]
        for path in paths:
            path.write_bytes(path.name.encode() * 1000)
        (tmp_path / "3").unlink()
        done: list[Path] = []

        def each(hashed: Hashed) -> None:
            done.append(hashed.path)

        found = dict(hash_files(paths, jobs=2, each=each))
        assert isinstance(found[tmp_path / "3"], FileNotFoundError)
        assert sorted(done) == sorted(set(paths) - {tmp_path / "3"})


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(main, ["weights", *map(str, arguments)])


class TestCommand:
    def test_whole_and_proved(self, directory: Path, tmp_path: Path) -> None:
        done = run("verify", directory, "--deep", "--state", tmp_path / "s")
        assert done.exit_code == 0
        assert "structure   whole: 3 shards, 3 tensors" in done.output
        assert "content     proved: 6 files" in done.output

    def test_without_manifest(self, directory: Path, tmp_path: Path) -> None:
        (directory / "SHA256SUMS").unlink()
        done = run("verify", directory, "--state", tmp_path / "s")
        assert done.exit_code == 0 and "content     unproved: no manifest" in done.output
        done = run("verify", directory, "--deep", "--state", tmp_path / "s")
        assert done.exit_code == 2 and "gpubox weights manifest" in done.output

    @pytest.mark.parametrize("deep", [True, False])
    def test_wrong_bytes_are_status_5(self, directory: Path, tmp_path: Path, deep: bool) -> None:
        (directory / "config.json").write_bytes(b"{}")
        assert run("verify", directory, "--deep", "--state", tmp_path / "s").exit_code == 5
        done = run("verify", directory, *(["--deep"] if deep else []), "--state", tmp_path / "s")
        assert done.exit_code == 5 and "config.json: its sha256" in done.output

    def test_json(self, directory: Path, tmp_path: Path) -> None:
        done = run("verify", directory, "--deep", "--json", "--state", tmp_path / "s")
        data = json.loads(done.stdout)
        assert data["proved"] and data["whole"] and data["files"][0]["state"] == "proved"

    def test_not_whole(self, directory: Path, tmp_path: Path) -> None:
        (directory / SHARD).unlink()
        done = run("verify", directory, "--state", tmp_path / "s")
        assert done.exit_code == 5 and "NOT WHOLE" in done.output and SHARD in done.output

    def test_no_place_for_records(self, directory: Path, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        done = run("verify", directory, "--deep", "--state", tmp_path / "file" / "state")
        assert done.exit_code == 2 and "cannot be recorded" in done.output

    def test_manifest_of_what_is_there(self, directory: Path, tmp_path: Path) -> None:
        refused = run("manifest", directory, "--state", tmp_path / "s")
        assert refused.exit_code == 4 and "not replaced" in refused.output
        (directory / "SHA256SUMS").unlink()
        done = run("manifest", directory, "--state", tmp_path / "s")
        assert done.exit_code == 0 and "does not prove that they are the publisher's" in done.output
        assert "# proves that they did not change since" in (directory / "SHA256SUMS").read_text()
        checked = subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=directory, check=False)
        assert checked.returncode == 0
        proved = run("verify", directory, "--state", tmp_path / "s")  # read once, by the manifest
        assert "content     proved" in proved.output

    def test_no_manifest_with_a_name_that_is_no_text(self, directory: Path, tmp_path: Path) -> None:
        (directory / "SHA256SUMS").unlink()
        (directory / os.fsdecode(b"\xff")).write_bytes(b"")
        done = run("manifest", directory, "--state", tmp_path / "s")
        assert done.exit_code == 2 and "no name for a manifest" in done.output

    def test_no_manifest_of_a_broken_directory(self, directory: Path, tmp_path: Path) -> None:
        (directory / "SHA256SUMS").unlink()
        (directory / SHARD).unlink()
        done = run("manifest", directory, "--state", tmp_path / "s")
        assert done.exit_code == 2 and SHARD in done.output and not (directory / "SHA256SUMS").exists()


def test_killed_in_the_middle_costs_only_the_files_that_were_being_read(tmp_path: Path) -> None:
    """kill -9 after some files are done: the next run reads the rest alone."""
    files = model(shards=12, size=200_000)
    directory = write(tmp_path / "model", files)
    (directory / "SHA256SUMS").write_bytes(sums(files))
    slow = (
        "import sys, time; from gpubox.weights import hashing; real = hashing.hash_file\n"
        "def slow(*a, **k): time.sleep(0.05); return real(*a, **k)\n"
        "hashing.hash_file = slow\nfrom gpubox.cli.main import main; main()"
    )
    command = [sys.executable, "-c", slow, "weights", "verify", str(directory), "--deep", "--jobs", "2"]
    process = subprocess.Popen([*command, "--state", str(tmp_path / "s")], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while len(list((tmp_path / "s").glob("*.json"))) < 5 and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    recorded = len([Record.model_validate_json(file.read_bytes()) for file in (tmp_path / "s").glob("*.json")])
    assert 5 <= recorded < len(files)
    found = verify(directory, Records(tmp_path / "s"), deep=True)
    assert found.proved and len(read(found)) == len(files) - recorded

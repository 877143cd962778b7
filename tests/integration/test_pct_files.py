"""Files to and from a container over @pct (pct_node.py)."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

import pytest
from pyinfra.api.host import Host

from connectors.pct import CHUNK
from tests.integration.pct_node import PctNode


def leftovers(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith(".pyinfra-")]


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, 3 * CHUNK + 17])
def test_upload_and_download(box: Host, tmp_path: Path, size: int) -> None:
    source, target = tmp_path / "source", tmp_path / "a 'new' $target"
    source.write_bytes(os.urandom(size))
    assert box.put_file(str(source), str(target))
    assert target.read_bytes() == source.read_bytes()
    back = io.BytesIO()
    assert box.get_file(str(target), back)
    assert back.getvalue() == source.read_bytes()
    assert leftovers(tmp_path) == []


def test_upload_of_open_files(box: Host, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes("ü\r\n".encode())
    with source.open() as text, source.open("rb") as data:
        for file in (text, data, io.StringIO("ü\r\n", newline=""), io.BytesIO("ü\r\n".encode())):
            target.unlink(missing_ok=True)
            assert box.put_file(file, str(target))
            assert target.read_bytes() == "ü\r\n".encode()


def test_upload_reads_in_chunks(box: Host, tmp_path: Path) -> None:
    class Counted(io.BytesIO):
        largest = 0

        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(size)
            Counted.largest = max(Counted.largest, len(data))
            return data

    assert box.put_file(Counted(bytes(5 * CHUNK)), str(tmp_path / "target"))
    assert 0 < Counted.largest <= CHUNK


def test_upload_keeps_the_mode_of_what_is_there(box: Host, tmp_path: Path) -> None:
    kept, new = tmp_path / "kept", tmp_path / "new"
    kept.write_text("old, and longer")
    kept.chmod(0o4710)
    for target in (kept, new):
        assert box.put_file(io.StringIO("text"), str(target))
        assert target.read_text() == "text"
    umask = os.umask(0)
    os.umask(umask)
    assert kept.stat().st_mode & 0o7777 == 0o4710
    assert new.stat().st_mode & 0o7777 == 0o666 & ~umask


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_upload_keeps_the_owner_of_what_is_there(box: Host, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.touch()
    os.chown(target, 1234, 4321)
    assert box.put_file(io.StringIO("text"), str(target))
    assert (target.stat().st_uid, target.stat().st_gid) == (1234, 4321)


def test_upload_follows_a_link(box: Host, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("elsewhere")
    assert box.put_file(io.StringIO("text"), str(link))
    assert link.is_symlink()
    assert (tmp_path / "elsewhere").read_text() == "text"


def test_upload_into_a_device(box: Host) -> None:
    assert box.put_file(io.StringIO("text"), "/dev/null")
    assert not Path("/dev/null").is_file()


def test_failed_uploads_say_why(box: Host, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"upload of .* is a directory"):
        box.put_file(io.StringIO("text"), str(tmp_path))
    with pytest.raises(OSError, match="No such file or directory"):
        box.put_file(io.BytesIO(bytes(20 * CHUNK)), str(tmp_path / "missing/target"))


def test_an_upload_that_changes_on_the_way_is_refused(box: Host, tmp_path: Path) -> None:
    class Growing(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return b"more" if self.tell() else super().read(size) + b"more"

    class Shrinking(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return b""

    target = tmp_path / "target"
    target.write_text("old")
    with pytest.raises(OSError, match="0 of 4 bytes arrived"):
        box.put_file(Shrinking(b"text"), str(target))
    assert target.read_text() == "old"
    assert leftovers(tmp_path) == []


def test_a_broken_upload_leaves_the_old_file(node: PctNode, box: Host, tmp_path: Path) -> None:
    class Cutting(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if self.tell() == 8 * CHUNK:
                node.cut()
                time.sleep(0.3)
            return super().read(size)

    target = tmp_path / "target"
    target.write_text("old")
    with pytest.raises(OSError, match="was lost"):
        box.put_file(Cutting(bytes(64 * CHUNK)), str(target))
    deadline = time.monotonic() + 10
    while leftovers(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert leftovers(tmp_path) == []
    assert target.read_text() == "old"
    assert box.put_file(io.StringIO("new"), str(target))
    assert target.read_text() == "new"


def test_an_upload_that_a_stop_ends_says_so(node: PctNode, vmid: int, box: Host, tmp_path: Path) -> None:
    class Stopping(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if self.tell() == 8 * CHUNK:
                node.set_state(vmid, "STOPPED")
            return super().read(size)

    with pytest.raises(OSError, match=rf"upload of .*container {vmid} on node pve1 is STOPPED"):
        box.put_file(Stopping(bytes(64 * CHUNK)), str(tmp_path / "target"))
    assert not (tmp_path / "target").exists()


def test_a_local_file_that_cannot_be_read(box: Host, tmp_path: Path) -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise OSError("bad sector")

    target = tmp_path / "target"
    with pytest.raises(OSError, match="bad sector"):
        box.put_file(Failing(b"text"), str(target))
    assert not target.exists()


def test_failed_downloads_say_why(box: Host, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"download of .*No such file or directory"):
        box.get_file(str(tmp_path / "missing"), io.BytesIO())


def test_rsync_is_refused(box: Host) -> None:
    with pytest.raises(NotImplementedError, match="through its node"):
        box.check_can_rsync()
    with pytest.raises(NotImplementedError):
        box.rsync("a", "b", [])

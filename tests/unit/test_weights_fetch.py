"""weights fetch against real servers that stall, cut off, corrupt and lie: right bytes, or none and a reason."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpubox.cli.main import main
from gpubox.errors import GpuboxError, InputError, LockedError, RefusedError
from gpubox.weights import fetch as fetching
from gpubox.weights.fetch import Fetched, Progress, fetch
from gpubox.weights.hashing import Expected
from gpubox.weights.http import Client, MirrorSource, Patience, checked_url, local_manifest
from gpubox.weights.records import Records
from gpubox.weights.sources import DirectorySource, Part, Source, Wanted
from gpubox.weights.verify import verify
from tests import mirror as faults
from tests.checkpoints import model, write
from tests.mirror import Fault, Mirror, mirror

SHARD = "model-00002-of-00003.safetensors"
HURRY = Patience(connect_s=5, stall_s=1, attempts=4, progress=10**9, backoff_s=0.01, backoff_limit_s=0.1)
FILES = model()


class Place(NamedTuple):
    to: Path
    records: Records

    def fetch(self, source: Source, **options: Any) -> Fetched:
        quiet = Progress(lambda what, size: None, lambda count: None)
        return fetch(source, self.to, self.records, **{"jobs": 3, "progress": quiet, **options})

    def from_mirror(self, server: Mirror, **options: Any) -> Fetched:
        return self.fetch(MirrorSource(server.url, None, Client(patience=HURRY)), **options)

    def check(self, files: dict[str, bytes] = FILES) -> None:
        """Whole, proved without another read, and nothing else left."""
        found = verify(self.to, self.records)
        assert found.proved, found
        assert found.read == 0
        assert {name: (self.to / name).read_bytes() for name in files} == files
        assert not (self.to / ".partial").exists()
        assert all((self.to / name).stat().st_mode & 0o777 == 0o644 for name in files)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "models" / "to", Records(tmp_path / "state"))


@pytest.fixture
def server() -> Iterator[Mirror]:
    with mirror({f"/{name}": data for name, data in FILES.items()}) as running:
        yield running


def test_all_of_it(server: Mirror, place: Place) -> None:
    assert place.from_mirror(server) == Fetched(6, 0, sum(map(len, FILES.values())))
    place.check()
    assert "its manifest came from there too" in (place.to / "SHA256SUMS").read_text()
    done = subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=place.to, check=False)
    assert done.returncode == 0


def test_again_is_nothing(server: Mirror, place: Place) -> None:
    place.from_mirror(server)
    before = (place.to / "SHA256SUMS").read_bytes()
    server.seen.clear()
    assert place.from_mirror(server)[:2] == (0, 6)
    assert [seen.path for seen in server.seen if seen.method == "GET"] == ["/SHA256SUMS"]
    assert (place.to / "SHA256SUMS").read_bytes() == before


def test_a_server_that_announces_no_sizes(server: Mirror, place: Place) -> None:
    server.length_of_head = "0"
    server.faults[f"/{SHARD}"] = [faults.cut(100_000), faults.cut_without_length(50_000)]
    place.from_mirror(server)
    place.check()


PASSING: dict[str, list[Fault]] = {
    "stalls at once": [faults.stall()],
    "stalls in the middle": [faults.stall(100_000)],
    "trickles": [faults.trickle(0.02)],
    "cuts off": [faults.cut(100_000)],
    "cuts off again and again": [faults.cut(100_000), faults.cut(100_000), faults.cut(1)],
    "cuts off, then ignores ranges": [faults.cut(100_000), faults.ignore_range],
    "cuts off, then answers another range": [faults.cut(100_000), faults.other_range],
    "cuts off, then 416": [faults.cut(100_000), faults.status(416)],
    "cuts off without a length": [faults.cut_without_length(100_000)],
    "flips a bit": [faults.corrupt],
    "cuts off, then flips a bit": [faults.cut(100_000), faults.corrupt],
    "500, 502, 503": [faults.status(500), faults.status(502), faults.status(503)],
    "429 with Retry-After": [faults.status(429, Retry_After="1")],
    "sends more": [faults.too_long],
    "a page with status 200": [faults.error_page],
    "redirects": [faults.redirect("/elsewhere")],
}


@pytest.mark.parametrize("what", PASSING)
def test_failures_that_pass(server: Mirror, place: Place, what: str) -> None:
    server.files["/elsewhere"] = FILES[SHARD]
    server.faults[f"/{SHARD}"] = list(PASSING[what])
    place.from_mirror(server)
    place.check()
    assert not server.faults[f"/{SHARD}"]


def test_what_was_fetched_is_not_fetched_again(server: Mirror, place: Place) -> None:
    server.faults[f"/{SHARD}"] = [faults.cut(100_000), faults.stall(50_000)]
    place.from_mirror(server)
    place.check()
    assert server.starts(f"/{SHARD}") == [0, 100_000, 150_000]


@pytest.mark.parametrize(
    ("plan", "starts"),
    [
        ([faults.cut(100_000), faults.ignore_range], [0, 100_000]),
        ([faults.cut(100_000), faults.other_range, faults.corrupt], [0, 100_000, 0, 0]),
        ([faults.too_long_without_length], [0, 0]),
        ([faults.cut(100_000), faults.status(416), faults.corrupt], [0, 100_000, 0, 0]),
    ],
)
def test_each_lie_is_seen_when_it_is_told(server: Mirror, place: Place, plan: list[Fault], starts: list[int]) -> None:
    """Not only by the digest in the end: a lie costs no second fetch of all."""
    server.faults[f"/{SHARD}"] = plan
    place.from_mirror(server)
    place.check()
    assert server.starts(f"/{SHARD}") == starts


LASTING: dict[str, tuple[Fault, str, int]] = {
    "404": (faults.status(404), "answered 404", 1),
    "401": (faults.status(401), "answered 401", 1),
    "500 for ever": (faults.status(500), "answered 500, 4 times in a row", 4),
    "silent for ever": (faults.stall(), "sent nothing for too long, 4 times in a row", 4),
    "wrong for ever": (faults.corrupt, "came with other bytes twice", 2),
    "redirects to itself": (faults.redirect(f"/{SHARD}"), "TooManyRedirects", 11),
}


@pytest.mark.parametrize("what", LASTING)
def test_failures_that_last(server: Mirror, place: Place, what: str) -> None:
    """A bounded number of requests, a reason, nothing under the file's name, and all others in place."""
    fault, said, requests = LASTING[what]
    server.faults[f"/{SHARD}"] = [fault] * 100
    with pytest.raises(GpuboxError, match=said) as error:
        place.from_mirror(server)
    assert SHARD in error.value.message
    assert len(server.starts(f"/{SHARD}")) == requests
    assert not (place.to / SHARD).exists()
    assert all((place.to / name).is_file() for name in FILES if name != SHARD)
    assert not verify(place.to, place.records).whole
    assert not any(path.stat().st_size for path in (place.to / ".partial").iterdir())
    server.faults.clear()
    assert place.from_mirror(server)[:2] == (1, 5)
    place.check()


def test_a_server_that_gives_a_little_each_time_has_an_end(tmp_path: Path) -> None:
    """Progress buys new attempts, by the megabyte and not by the byte."""
    with mirror({"/a": bytes(1000)}) as server:
        server.faults["/a"] = [faults.cut(1)] * 1000
        part = Part(tmp_path / "part", 1000, lambda count: None)
        with pytest.raises(GpuboxError, match="4 times in a row"):
            Client(patience=HURRY).fill(f"{server.url}/a", part)
        assert len(server.starts("/a")) == 4
        patient = HURRY._replace(progress=10)
        server.faults["/a"] = [faults.cut(10)] * 50
        Client(patience=patient).fill(f"{server.url}/a", part)
        part.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(plan=st.lists(st.integers(0, 9), max_size=5), cut=st.integers(0, 3000), left=st.binary(max_size=4000))
def test_any_order_of_faults_gives_the_right_bytes(tmp_path: Path, plan: list[int], cut: int, left: bytes) -> None:
    """Whatever lies there from before, and whatever the server does a few times."""
    data = hashlib.sha256(b"seed").digest() * 100
    kinds: list[Callable[[], Fault]] = [
        lambda: faults.cut(cut),
        lambda: faults.cut_without_length(cut),
        lambda: faults.ignore_range,
        lambda: faults.other_range,
        lambda: faults.too_long,
        lambda: faults.error_page,
        *[lambda code=code: faults.status(code) for code in (416, 500, 503, 429)],
    ]
    shutil.rmtree(tmp_path / "to", ignore_errors=True)
    place = Place(tmp_path / "to", Records(tmp_path / "state"))
    expected = Expected("sha256", hashlib.sha256(data).hexdigest())
    write(place.to, {"x": b""})
    with mirror({"/config.json": data}) as server:
        server.faults["/config.json"] = [kinds[number]() for number in plan]
        part = fetching.part_path(place.to, Wanted("config.json", len(data), expected))
        write(part.parent, {part.name: left})
        patience = HURRY._replace(attempts=8, backoff_s=0.0001)
        place.fetch(MirrorSource(server.url, None, Client(patience=patience)))
    assert (place.to / "config.json").read_bytes() == data


def test_what_an_earlier_run_left_is_checked(server: Mirror, place: Place) -> None:
    """Garbage of the right size under the part's name: found by the digest, fetched anew, once."""
    digest = hashlib.sha256(FILES[SHARD]).hexdigest()
    part = fetching.part_path(place.to, Wanted(SHARD, len(FILES[SHARD]), Expected("sha256", digest)))
    write(part.parent, {part.name: bytes(len(FILES[SHARD]))})
    place.from_mirror(server)
    place.check()
    assert server.starts(f"/{SHARD}") == [0]


def test_an_earlier_run_is_continued(server: Mirror, place: Place) -> None:
    digest = hashlib.sha256(FILES[SHARD]).hexdigest()
    part = fetching.part_path(place.to, Wanted(SHARD, len(FILES[SHARD]), Expected("sha256", digest)))
    write(part.parent, {part.name: FILES[SHARD][:1000]})
    place.from_mirror(server)
    place.check()
    assert server.starts(f"/{SHARD}") == [1000]


class TestOfTheOperator:
    @pytest.mark.parametrize("content", [b"mine", FILES["config.json"][::-1]])
    def test_another_file_is_not_replaced(self, server: Mirror, place: Place, content: bytes) -> None:
        write(place.to, {"config.json": content})
        with pytest.raises(RefusedError, match=r"config.json is there with other content"):
            place.from_mirror(server)
        assert (place.to / "config.json").read_bytes() == content
        assert list(place.to.iterdir()) == [place.to / "config.json"]
        assert not server.starts(f"/{SHARD}")

    def test_an_equal_file_stays(self, server: Mirror, place: Place) -> None:
        write(place.to, {SHARD: FILES[SHARD]})
        inode = (place.to / SHARD).stat().st_ino
        assert place.from_mirror(server)[:2] == (5, 1)
        assert (place.to / SHARD).stat().st_ino == inode and not server.starts(f"/{SHARD}")

    @pytest.mark.parametrize("kind", ["directory", "link to nothing"])
    def test_what_is_no_file_is_not_replaced(self, server: Mirror, place: Place, kind: str) -> None:
        place.to.mkdir(parents=True)
        (place.to / SHARD).mkdir() if kind == "directory" else (place.to / SHARD).symlink_to("nowhere")
        with pytest.raises(RefusedError, match=SHARD):
            place.from_mirror(server)

    def test_a_file_that_appears_meanwhile_is_not_replaced(self, server: Mirror, place: Place) -> None:
        def appear(count: int) -> None:
            write(place.to, {SHARD: b"mine"})

        with pytest.raises(RefusedError, match="not replaced"):
            place.from_mirror(server, progress=Progress(lambda what, size: None, appear))
        assert (place.to / SHARD).read_bytes() == b"mine"

    def test_a_manifest_of_another_version(self, server: Mirror, place: Place) -> None:
        write(place.to, {"SHA256SUMS": f"{'0' * 64}  {SHARD}\n".encode()})
        with pytest.raises(RefusedError, match="says 0000"):
            place.from_mirror(server)
        assert not (place.to / SHARD).exists()

    def test_a_manifest_that_lacks_some_is_completed(self, server: Mirror, place: Place) -> None:
        line = f"# mine\n{hashlib.sha256(FILES[SHARD]).hexdigest()}  {SHARD}"
        write(place.to, {"SHA256SUMS": line.encode()})
        place.from_mirror(server)
        assert (place.to / "SHA256SUMS").read_text().startswith(line + "\n")
        place.check()


class TestBefore:
    def test_no_space(self, server: Mirror, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        real = shutil.disk_usage
        monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=fetching.RESERVE + 500_000))
        with pytest.raises(GpuboxError, match="GB are needed there and"):
            place.from_mirror(server)
        assert not place.to.exists() and not server.starts(f"/{SHARD}")

    def test_what_is_there_already_needs_no_space(
        self, server: Mirror, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.faults[f"/{SHARD}"] = [faults.cut(200_000), *[faults.status(500)] * 4]
        with pytest.raises(GpuboxError):
            place.from_mirror(server)
        free = fetching.RESERVE + len(FILES[SHARD]) - 200_000
        real = shutil.disk_usage
        monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=free))
        place.from_mirror(server)
        assert server.starts(f"/{SHARD}")[-1] == 200_000

    def test_another_one_works_there(self, server: Mirror, place: Place) -> None:
        go_on = threading.Event()
        server.faults[f"/{SHARD}"] = [faults.hold(go_on)]
        slow = MirrorSource(server.url, None, Client())
        first = threading.Thread(target=lambda: place.fetch(slow))
        first.start()
        while not server.starts(f"/{SHARD}"):
            time.sleep(0.01)
        with pytest.raises(LockedError, match="another gpubox weights fetch"):
            place.from_mirror(server)
        go_on.set()
        first.join()
        place.check()

    @pytest.mark.parametrize("name", ["../outside", "/etc/x", ".partial/lock"])
    def test_names_of_a_hostile_list(self, place: Place, name: str) -> None:
        class Hostile:
            where, proves = "there", ""

            def wanted(self) -> list[Wanted]:
                return [Wanted(name, 1, Expected("sha256", "0" * 64))]

            def fill(self, file: Wanted, part: Part) -> None:
                raise AssertionError

        with pytest.raises(InputError):
            place.fetch(Hostile())

    @pytest.mark.parametrize(
        "url", ["https://me:secret@host/x", "ftp://host/", "https:///x", "https://h/x?token=secret"]
    )
    def test_addresses(self, url: str) -> None:
        with pytest.raises(InputError) as error:
            checked_url(url)
        assert "secret" not in str(error.value)

    def test_a_manifest_cut_off_on_its_way(self, server: Mirror, place: Place) -> None:
        server.faults["/SHA256SUMS"] = [faults.cut(100), faults.stall(), faults.status(502)]
        place.from_mirror(server)
        place.check()

    def test_no_manifest_on_the_mirror(self, server: Mirror, place: Place) -> None:
        del server.files["/SHA256SUMS"]
        with pytest.raises(GpuboxError, match="SHA256SUMS: answered 404"):
            place.from_mirror(server)

    def test_a_manifest_of_ones_own_decides(self, server: Mirror, place: Place, tmp_path: Path) -> None:
        """The mirror changed file and manifest alike: only the manifest at hand tells."""
        ours = tmp_path / "ours"
        ours.write_bytes(server.files["/SHA256SUMS"])
        server.files[f"/{SHARD}"] = FILES[SHARD][:-1] + b"\0"
        with pytest.raises(GpuboxError, match="other bytes twice"):
            place.fetch(MirrorSource(server.url, local_manifest(ours), Client(patience=HURRY)))


class TestFromADirectory:
    @pytest.fixture
    def origin(self, server: Mirror, tmp_path: Path) -> Path:
        return write(tmp_path / "origin", {**FILES, "SHA256SUMS": server.files["/SHA256SUMS"]})

    def test_all_of_it(self, origin: Path, place: Place) -> None:
        place.fetch(DirectorySource(origin, None))
        place.check()

    def test_goes_on_where_it_stopped(self, origin: Path, place: Place) -> None:
        digest = hashlib.sha256(FILES[SHARD]).hexdigest()
        part = fetching.part_path(place.to, Wanted(SHARD, len(FILES[SHARD]), Expected("sha256", digest)))
        write(part.parent, {part.name: FILES[SHARD][:1000]})
        inode = part.stat().st_ino
        place.fetch(DirectorySource(origin, None))
        place.check()
        assert (place.to / SHARD).stat().st_ino == inode

    def test_a_damaged_source(self, origin: Path, place: Place) -> None:
        (origin / SHARD).write_bytes(bytes(len(FILES[SHARD])))
        with pytest.raises(GpuboxError, match=rf"{SHARD} from .*other bytes twice"):
            place.fetch(DirectorySource(origin, None))

    def test_an_incomplete_source(self, origin: Path, place: Place) -> None:
        (origin / SHARD).unlink()
        with pytest.raises(InputError, match=f"{SHARD}: is missing"):
            place.fetch(DirectorySource(origin, None))

    def test_exclude(self, origin: Path, place: Place) -> None:
        place.fetch(DirectorySource(origin, None), exclude=["tokenizer/*"])
        assert not (place.to / "tokenizer").exists()
        place.check({name: data for name, data in FILES.items() if "/" not in name})

    def test_a_full_disk_is_said(self, origin: Path, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(self: Part, data: bytes) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(Part, "append", full)
            with pytest.raises(GpuboxError, match="No space left on device") as error:
                place.fetch(DirectorySource(origin, None))
        assert "make room" in error.value.hint
        place.fetch(DirectorySource(origin, None))
        place.check()


def command(*arguments: str | Path) -> list[str]:
    program = "from gpubox.cli.main import main; main()"
    return [sys.executable, "-c", program, "weights", "fetch", *map(str, arguments)]


@pytest.mark.parametrize("kills", [1, 3])
def test_killed_in_the_middle(tmp_path: Path, kills: int) -> None:
    """kill -9 while bytes come: the next run goes on from them, and what was complete is not fetched again."""
    files = model(shards=4, size=4_000_000)
    to, state = tmp_path / "to", tmp_path / "state"
    arguments = ("--to", to, "--state", state, "--jobs", "2")
    with mirror({f"/{name}": data for name, data in files.items()}) as server:
        server.chunk_pause_s = 0.01
        for number in range(kills):
            process = subprocess.Popen(command("--from", server.url, *arguments), stderr=subprocess.PIPE)
            goal = (number + 1) * 16_000_000 // (kills + 1) + 2_000_000  # in the middle of two files
            deadline = time.monotonic() + 60
            while sum(server.sent.values()) < goal and time.monotonic() < deadline and process.poll() is None:
                time.sleep(0.005)
            process.send_signal(signal.SIGKILL)
            process.wait()
        server.chunk_pause_s = 0
        whole = sum(len(data) for data in files.values())
        done = subprocess.run(command("--from", server.url, *arguments), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "content     proved: 7 files" in done.stdout
        # What was on its way when the process died is sent again: some buffers of each connection.
        assert sum(server.sent.values()) - whole < kills * 2 * 3_000_000 + 10_000
        assert any(start for seen in [server.starts(f"/{name}") for name in files] for start in seen)
    Place(to, Records(state)).check(files)


def test_the_command_says_what_it_proved(server: Mirror, tmp_path: Path) -> None:
    arguments = ["weights", "fetch", "--from", server.url, "--to", str(tmp_path / "to"), "--state", str(tmp_path / "s")]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert "6 files fetched, 0 were there" in done.output and "its manifest came from there too" in done.output
    for wrong in (["--revision", "a" * 40], ["x/y"], ["--token-file", str(tmp_path / "s" / ".writable")]):
        assert CliRunner().invoke(main, [*arguments, *wrong]).exit_code == 2


def test_a_password_is_taken_from_netrc(server: Mirror, place: Place, tmp_path: Path, monkeypatch: Any) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password secret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    place.from_mirror(server)
    assert all((seen.authorization or "").startswith("Basic ") for seen in server.seen)


def test_interrupted_by_ctrl_c(tmp_path: Path, server: Mirror) -> None:
    """It ends at once, also while it waits for a server."""
    server.faults[f"/{SHARD}"] = [faults.status(503, Retry_After="50")] * 9
    arguments = ("--from", server.url, "--to", tmp_path / "to", "--state", tmp_path / "s")
    process = subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not server.starts(f"/{SHARD}"):
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=10)
    assert process.returncode != 0 and "Traceback" not in said

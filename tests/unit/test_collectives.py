"""All-reduce as a gate: the watcher of the ranks against processes that behave badly, the records, the refusals.

The ranks here are small scripts that speak as worker.py does; the lab runs worker.py itself with the stack's torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from gpubox.collectives import check, ranks, record
from gpubox.collectives.evidence import check_shared_memory
from gpubox.collectives.ranks import CollectiveError, Group, Launch, Measured, all_reduce
from gpubox.collectives.record import Conditions, Record
from gpubox.errors import InputError, RefusedError
from gpubox.layout import Layout
from gpubox.rollout.gates import ReleaseGates
from tests.unit.simulated import SimulatedBox

PAIR = Group("gloo", (0, 1))
PROLOGUE = """
import json, os, sys, time
rank = int(os.environ["RANK"])
def say(**event): print(json.dumps(event), flush=True)
def talk(text): print(text, file=sys.stderr, flush=True)
say(phase="import"); say(phase="init"); say(phase="all-reduce 1024")
"""
GOOD = 'say(size=1024, seconds=0.5 + rank); say(phase="end", library="gloo of torch 2")'


@pytest.fixture
def launch(tmp_path: Path) -> Callable[[str], Launch]:
    def make(body: str) -> Launch:
        worker = tmp_path / "worker.py"
        worker.write_text(PROLOGUE + body)
        return Launch(Path(sys.executable), {"PATH": os.environ["PATH"], "TOKEN": str(tmp_path)}, worker=worker)

    return make


def still_running(launch: Launch) -> list[psutil.Process]:
    return [p for p in psutil.process_iter() if str(launch.worker) in " ".join(_command_line(p))]


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_the_slowest_rank_decides(launch: Callable[[str], Launch]) -> None:
    assert all_reduce(PAIR, launch(GOOD)) == Measured({1024: 1.5}, "gloo of torch 2")


def test_bus_bandwidth_worked_out_by_hand() -> None:
    # 8 ranks, 64 MB in 10 ms: 6.4 GB/s of data, times 2 * 7 / 8.
    assert Measured({1000: 9.0, 64_000_000: 0.01}, "").bus_gb_per_s(8) == pytest.approx(11.2)


def test_transports_are_counted_in_nccls_own_words(launch: Callable[[str], Launch]) -> None:
    said = """
talk("box:12:34 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM")
talk("box:12:34 [0] NCCL INFO Channel 01 : 1[1] -> 0[0] via SHM/direct/direct")
"""
    assert all_reduce(PAIR, launch(said + GOOD)).transports == {"P2P/CUMEM": 2, "SHM/direct/direct": 2}


def test_a_hang_ends_at_its_deadline_and_is_seen_before_the_kill(
    launch: Callable[[str], Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA/nccl#1999: initialised, then for ever at full utilisation. One rank has passed, the other waits."""
    monkeypatch.setitem(ranks.DEADLINES_S, "all-reduce", 1.0)
    body = launch(f"""
{GOOD} if rank == 0 else talk("NCCL INFO waiting")
while rank == 1: time.sleep(0.1)
""")
    seen: list[int] = []

    def observe() -> str:
        seen.append(len(still_running(body)))
        return "GPU 1: 100 %, 130 W"

    with pytest.raises(CollectiveError) as caught:
        all_reduce(PAIR, body, observe=observe)
    assert caught.value.message == "all-reduce of 2 ranks (gloo): rank 1 hung in phase 'all-reduce 1024' (limit 1 s)"
    assert "GPU 1: 100 %, 130 W" in caught.value.detail
    assert "rank 1: NCCL INFO waiting" in caught.value.detail
    assert seen == [1]
    assert still_running(body) == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("say(wrong='1024 bytes: 1 instead of 3'); sys.exit(3)", "rank 0 got a wrong sum: 1024 bytes: 1 instead of 3"),
        ("sys.exit(7)", "rank 0 ended with status 7 in phase 'all-reduce 1024'"),
        ("os.kill(os.getpid(), 11)", "rank 0 ended with signal SIGSEGV in phase 'all-reduce 1024'"),
    ],
)
def test_a_bad_end_names_the_rank_and_ends_the_others(launch: Callable[[str], Launch], body: str, message: str) -> None:
    bad = launch(f"""
if rank == 1: time.sleep(60)
talk("last words")
{body}
""")
    started = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        all_reduce(PAIR, bad)
    assert caught.value.message.endswith(message)
    assert "rank 0: last words" in caught.value.detail
    assert time.monotonic() - started < 20
    assert still_running(bad) == []


@pytest.mark.parametrize("body", ["sys.exit(0)", GOOD + '; say(phase="all-reduce 2048")', "print('{not json')"])
def test_a_rank_that_measured_less_than_it_began_has_not_passed(launch: Callable[[str], Launch], body: str) -> None:
    with pytest.raises(CollectiveError, match=r"ranks \[0, 1\] ended well, but did not measure all that they began"):
        all_reduce(PAIR, launch(body))


def test_what_libraries_print_reaches_no_event(tmp_path: Path) -> None:
    """On an H200 NCCL wrote into the middle of an event's line: descriptor 1 belongs to the libraries."""
    fake = tmp_path / "torch"
    (fake / "distributed").mkdir(parents=True)
    (fake / "__init__.py").write_text("import os\nos.write(1, b'half a line')\n__version__ = 'x'\n")
    (fake / "distributed" / "__init__.py").write_text("def init_process_group(backend): raise SystemExit(5)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-P", ranks.WORKER, "gloo", "0"], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (5, "half a line")
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{"phase": "import"}, {"phase": "init"}]


def test_ranks_die_with_a_caller_that_is_killed(launch: Callable[[str], Launch], tmp_path: Path) -> None:
    sleeping = launch("time.sleep(60)")
    script = tmp_path / "caller.py"
    script.write_text(
        "from pathlib import Path\nfrom gpubox.collectives.ranks import *\n"
        f"all_reduce(Group('gloo', (0, 1)), Launch(Path({sys.executable!r}), {{'PATH': {os.environ['PATH']!r}}}, "
        f"worker=Path({str(sleeping.worker)!r})))\n"
    )
    caller = subprocess.Popen([sys.executable, script], cwd=Path(__file__).parents[2])
    wait_for(lambda: len(still_running(sleeping)) == 2)
    caller.kill()
    caller.wait()
    wait_for(lambda: not still_running(sleeping))


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("count", "wanted"), [(2, [(0, 1)]), (3, [(0, 1), (0, 2), (0, 1, 2)]), (8, [(0, 1), (0, 7), tuple(range(8))])]
)
def test_groups_small_first_each_once(count: int, wanted: list[tuple[int, ...]]) -> None:
    assert [group.devices for group in check.groups_of(count, "nccl")] == wanted


def test_shared_memory_must_have_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = os.statvfs_result((4096, 4096, 16384, 16384, 16384, 0, 0, 0, 0, 255))  # Docker's default of 64 MiB
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    with pytest.raises(RefusedError, match=r"/dev/shm has 64 MiB free, the ranks need 1024 MiB"):
        check_shared_memory()
    monkeypatch.undo()
    with pytest.raises(RefusedError, match="No such file"):
        check_shared_memory(tmp_path / "absent")


def conditions(**changed: object) -> Conditions:
    base = {
        "stack_id": "cuda130-000000000000",
        "environment_digest": "0",
        "backend": "nccl",
        "ranks": 8,
        "driver": "590.48.01",
        "gpus": ("GPU-0", "GPU-1"),
        "kernel": "6.17.2-1-pve",
        "kernel_arguments": "quiet iommu=pt",
    }
    return Conditions.model_validate(base | changed)


def a_record(held: Conditions, failure: str | None = None) -> Record:
    return Record(time="2026-01-01T00:00:00Z", conditions=held, groups=(), failure=failure)


@pytest.mark.parametrize(
    "change",
    [
        {"stack_id": "cuda128-000000000000"},
        {"environment_digest": "1"},
        {"ranks": 4},
        {"driver": "590.48.02"},
        {"gpus": ("GPU-1", "GPU-0")},
        {"kernel": "6.17.2-2-pve"},
        {"kernel_arguments": "quiet"},
    ],
)
def test_a_proof_holds_until_something_that_decides_it_changes(tmp_path: Path, change: dict[str, object]) -> None:
    layout = Layout(tmp_path)
    layout.state.mkdir()
    record.keep(layout, a_record(conditions()))
    assert record.read(layout).under(conditions()) is not None
    assert record.read(layout).under(conditions(**change)) is None


def test_a_new_verdict_replaces_the_old_and_a_torn_file_proves_nothing(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.state.mkdir()
    record.keep(layout, a_record(conditions(), "hung"))
    record.keep(layout, a_record(conditions()))
    assert [kept.failure for kept in record.read(layout).records] == [None]
    record.path(layout).write_bytes(record.path(layout).read_bytes()[:-20])
    assert record.read(layout).records == ()


class TestGates:
    """With a stack whose python is a script that behaves as a worker of two gloo ranks."""

    @pytest.fixture
    def box(self, tmp_path: Path) -> SimulatedBox:
        return SimulatedBox(tmp_path)

    def add(self, box: SimulatedBox, body: str, ranks: int = 2) -> str:
        python = box.layout.stacks / "world-0" / "venv" / "bin" / "python"
        python.parent.mkdir(parents=True, exist_ok=True)
        worker = box.layout.root / "worker.py"
        worker.write_text(PROLOGUE + body)
        python.write_text(f"#!/bin/sh\nexec {sys.executable} {worker}\n")
        python.chmod(0o755)
        return box.add(1, "good", arguments=["--tp-size", str(ranks), "--device", "cpu"])

    def test_one_rank_asks_for_nothing(self, box: SimulatedBox) -> None:
        gates = ReleaseGates(box.layout)
        gates.before_start(box.box.store.read(self.add(box, "sys.exit(1)", ranks=1)), box.lines.append)
        assert record.read(box.layout).records == ()

    def test_passed_once_is_remembered(self, box: SimulatedBox) -> None:
        gates = ReleaseGates(box.layout)
        release = box.box.store.read(self.add(box, GOOD))
        gates.before_start(release, box.lines.append)
        assert box.lines == ["all-reduce of 2 ranks ...", box.lines[1]]
        assert "GB/s bus bandwidth, gloo of torch 2" in box.lines[1]
        (box.layout.root / "worker.py").write_text("raise SystemExit('must not run again')")
        gates.before_start(release, box.lines.append)
        assert "nothing that decides it has changed" in box.lines[-1]

    def test_a_failure_is_known_before_the_next_server_is_stopped(self, box: SimulatedBox) -> None:
        box.box.gates = ReleaseGates(box.layout)
        good = box.add(2, "good")
        bad = self.add(box, "sys.exit(7)")
        box.activate(good)
        with pytest.raises(CollectiveError, match="status 7"):
            box.activate(bad)
        assert box.service.running_release() == good
        assert box.box.store.failed_reason(bad) is None, "the machine failed, not the release"
        stops = box.service.stops
        with pytest.raises(RefusedError, match="ended with status 7"):
            box.activate(bad)
        assert box.service.stops == stops
        (box.layout.root / "worker.py").write_text(PROLOGUE + GOOD)
        box.activate(bad, force=True)
        assert box.service.running_release() == bad

    @pytest.mark.parametrize("ranks", [0, 1])
    def test_less_than_two_ranks_is_no_question(self, box: SimulatedBox, ranks: int) -> None:
        release = box.box.store.read(self.add(box, GOOD))
        with pytest.raises(InputError, match="at least 2 ranks"):
            check.check(release, ranks, box.layout, box.lines.append)

    def test_more_ranks_than_gpus(self, box: SimulatedBox, monkeypatch: pytest.MonkeyPatch) -> None:
        release = box.box.store.read(box.add(1, "good", arguments=["--tp-size", "8"]))
        monkeypatch.setattr(check, "gpu_uuids", lambda: ("GPU-0",) * 7)
        with pytest.raises(InputError, match="8 ranks, but this box has 7 GPUs"):
            check.check(release, 8, box.layout, box.lines.append)

    def test_a_busy_gpu_proves_neither(self, box: SimulatedBox, monkeypatch: pytest.MonkeyPatch) -> None:
        release = box.box.store.read(box.add(1, "good", arguments=["--tp-size", "2"]))
        monkeypatch.setattr(check, "gpu_uuids", lambda: ("GPU-0", "GPU-1"))
        monkeypatch.setattr(check, "busy_gpus", lambda: "0: 4715 MiB")
        with pytest.raises(RefusedError, match="GPUs are in use"):
            check.check(release, 2, box.layout, box.lines.append)

    def test_the_record_holds_no_value_of_the_environment(self, box: SimulatedBox) -> None:
        release = box.box.store.read(self.add(box, GOOD))
        check.check(release, 2, box.layout, box.lines.append)
        assert json.loads(record.path(box.layout).read_text())["records"][0]["failure"] is None
        assert "BEHAVES" not in record.path(box.layout).read_text()

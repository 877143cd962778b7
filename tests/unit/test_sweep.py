"""A sweep against a stand-in of the load generator: resumed, killed, and with servers that misbehave.

The stand-in takes the real one's arguments and writes its result in the recorded shape, at the speed it is told. The
lab runs the real one against the real engine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from gpubox.bench import cells
from gpubox.bench.bench_serving import Target
from gpubox.bench.cells import Arm
from gpubox.bench.endpoint_facts import Counters, accept_length, counters, server_info
from gpubox.bench.sweep import Bench, Plan, sweep, work_of
from gpubox.errors import InputError
from tests.unit.test_bench_serving import RECORDED
from tests.unit.web import canned

NOWHERE = "http://127.0.0.1:9"
PLAN = Plan(concurrencies=(1, 4), repeats=2, output_tokens=8, requests_per_stream=3)
TEXTS = tuple(f"prompt {number}" for number in range(12))

GENERATOR = """\
#!{python}
import json, os, pathlib, sys, time
words = sys.argv[3:]
flag = dict(zip(words[::1], words[1::1]))
n, c = int(flag["--num-prompts"]), int(flag["--max-concurrency"])
log = pathlib.Path(os.environ["LOG"])
with log.open("a") as stream: print(c, file=stream)
asked = [json.loads(l)["conversations"][0]["content"] for l in open(flag["--dataset-path"])]
assert len(set(asked)) == n
{body}
result = json.loads(pathlib.Path({recorded!r}).read_text())
result |= dict(completed=n, output_throughput=100.0 * c, output_lens=[8] * n, ttfts=[0.1] * n, itls=[[0.01] * 7] * n)
result |= dict(generated_texts=["x"] * n, errors=[""] * n)
{edit}
open(flag["--output-file"], "a").write(json.dumps(result) + chr(10))
"""


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., Bench]:
    def make(body: str = "", edit: str = "", alive: Callable[[], str] = lambda: "pid 1") -> Bench:
        python = tmp_path / "python"
        text = GENERATOR.format(python=sys.executable, recorded=str(RECORDED), body=body, edit=edit)
        python.write_text(text)
        python.chmod(0o755)
        arm = Arm(
            name="a",
            release=None,
            stack_id=None,
            server_digest=None,
            machine="m",
            driver=None,
            versions={},
            arguments=(),
        )
        environment = {"PATH": os.environ["PATH"], "LOG": str(tmp_path / "log")}
        work = work_of("m", TEXTS, PLAN, NOWHERE, ())
        return Bench(python, environment, Target(NOWHERE, "m", tmp_path), arm, work, TEXTS, alive)

    return make


def runs(tmp_path: Path) -> list[int]:
    log = tmp_path / "log"
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def test_round_by_round_and_never_twice(tmp_path: Path, bench: Callable[..., Bench]) -> None:
    results = tmp_path / "cells.jsonl"
    found = list(sweep(bench(), PLAN, results, print))
    assert [(cell.repeat, cell.concurrency) for cell in found] == [(1, 1), (1, 4), (2, 1), (2, 4)]
    assert all(cell.valid for cell in found)
    assert [cell.measured.tokens_per_s for cell in found if cell.measured] == [100.0, 400.0] * 2
    assert cells.read(results) == found
    assert list(sweep(bench(), PLAN, results, print)) == []
    assert runs(tmp_path) == [1, 4, 1, 4]


def test_more_repeats_measure_only_what_is_new(tmp_path: Path, bench: Callable[..., Bench]) -> None:
    results = tmp_path / "cells.jsonl"
    list(sweep(bench(), PLAN, results, print))
    wider = Plan(concurrencies=(1, 2, 4), repeats=2, output_tokens=8, requests_per_stream=3)
    assert [(c.repeat, c.concurrency) for c in sweep(bench(), wider, results, print)] == [(1, 2), (2, 2)]


@pytest.mark.parametrize(
    ("body", "edit", "said"),
    [
        ("print('Initialization failed', flush=True); sys.exit(1)", "", "ended with status 1: Initialization failed"),
        ("os.kill(os.getpid(), 9)", "", "ended with status -9: no word"),
        ("sys.exit(0)", "", "left no result"),
        ("", "result['errors'][0] = 'ConnectionRefused'; result['completed'] -= 1", "1 of 3 requests failed"),
        ("", "result['generated_texts'][1] = ''", "1 of 3 streams brought no text"),
    ],
)
def test_what_goes_wrong_makes_the_cell_invalid_and_is_measured_again(
    tmp_path: Path, bench: Callable[..., Bench], body: str, edit: str, said: str
) -> None:
    results, once = tmp_path / "cells.jsonl", Plan((1,), repeats=1, output_tokens=8, requests_per_stream=3)
    (cell,) = sweep(bench(body, edit), once, results, print)
    assert not cell.valid
    assert said in cell.invalid[0]
    (again,) = sweep(bench(), once, results, print)
    assert again.valid
    assert len(cells.read(results)) == 2


def test_a_restart_in_the_middle_spoils_the_cell(tmp_path: Path, bench: Callable[..., Bench]) -> None:
    lives = iter(["pid 1", "pid 2"])
    once = Plan((1,), repeats=1, output_tokens=8, requests_per_stream=3)
    (cell,) = sweep(bench(alive=lambda: next(lives)), once, tmp_path / "cells.jsonl", print)
    assert cell.invalid == ("the server restarted meanwhile (pid 1, then pid 2)",)


def test_too_few_prompts_are_refused_before_anything_is_asked(tmp_path: Path, bench: Callable[..., Bench]) -> None:
    plan = Plan(concurrencies=(1, 5), output_tokens=8, requests_per_stream=3)
    with pytest.raises(InputError, match="concurrency 5 needs 15 prompts, there are 12 different ones"):
        list(sweep(bench(), plan, tmp_path / "cells.jsonl", print))
    assert runs(tmp_path) == []


def test_a_killed_sweep_leaves_readable_results_and_goes_on(tmp_path: Path, bench: Callable[..., Bench]) -> None:
    """kill -9 of the whole sweep in its third cell; its load generator dies with it."""
    body = "if len(log.read_text().split()) == 3: print(os.getpid(), flush=True); time.sleep(60)"
    slow = bench(body)
    script = tmp_path / "sweeping.py"
    script.write_text(
        textwrap.dedent(f"""
        import pathlib
        from gpubox.bench.bench_serving import Target
        from gpubox.bench.cells import Arm, Work
        from gpubox.bench.sweep import Bench, sweep
        from tests.unit.test_sweep import PLAN, TEXTS
        bench = Bench(pathlib.Path({str(slow.python)!r}), {dict(slow.environment)!r}, Target({NOWHERE!r}, "m",
            pathlib.Path({str(tmp_path)!r})), Arm.model_validate_json({slow.arm.model_dump_json()!r}),
            Work.model_validate_json({slow.work.model_dump_json()!r}), TEXTS, lambda: "pid 1")
        for cell in sweep(bench, PLAN, pathlib.Path({str(tmp_path / "cells.jsonl")!r}), print): pass
        """)
    )
    sweeping = subprocess.Popen([sys.executable, script], env={**os.environ, "PYTHONPATH": str(Path.cwd())})
    deadline = time.monotonic() + 60
    while len(runs(tmp_path)) < 3:
        assert time.monotonic() < deadline
        assert sweeping.poll() is None
        time.sleep(0.05)
    sweeping.send_signal(signal.SIGKILL)
    sweeping.wait()
    while any(
        str(slow.python) in " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    ):
        assert time.monotonic() < deadline, "the load generator outlives the sweep"
        time.sleep(0.05)
    assert len(cells.read(tmp_path / "cells.jsonl")) == 2
    rest = list(sweep(bench(), PLAN, tmp_path / "cells.jsonl", print))
    assert [(cell.repeat, cell.concurrency) for cell in rest] == [(2, 1), (2, 4)]


def runs_program(process: psutil.Process, program: Path) -> bool:
    return str(program) in " ".join(process.info["cmdline"] or ())


METRICS = """\
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{is_streaming="false"} 28.0
sglang:generation_tokens_total{is_streaming="true"} 124680.0
# TYPE sglang:spec_verify_calls_total counter
sglang:spec_verify_calls_total 62519.0
"""


class TestEndpointFacts:
    def test_counters_of_a_recorded_engine(self) -> None:
        with canned({"/metrics": METRICS.encode()}) as url:
            assert counters(url) == Counters(124708.0, 62519.0)

    def test_accept_length_of_one_cell(self) -> None:
        assert accept_length(Counters(100, 50), Counters(320, 150)) == 2.2
        assert accept_length(Counters(100, 0), Counters(320, 0)) is None, "no speculation"
        assert accept_length(Counters(100, 50), Counters(20, 10)) is None, "restarted"
        assert accept_length(None, Counters(1, 1)) is None

    def test_an_endpoint_without_either_is_unknown(self) -> None:
        with canned({}) as url:
            assert server_info(url).max_running_requests is None
            assert counters(url) is None
        assert counters(NOWHERE) is None

    def test_limits_of_the_recording(self) -> None:
        recorded = (RECORDED.parent / "server_info.json").read_bytes()
        with canned({"/get_server_info": recorded}) as url:
            assert server_info(url).max_running_requests == json.loads(recorded)["max_running_requests"]

    @pytest.mark.parametrize("body", [b"", b"\xff\xfe", b"sglang:spec_verify_calls_total {", b"{}", b"[]"])
    def test_junk_is_unknown(self, body: bytes) -> None:
        with canned({"/metrics": body, "/server_info": body}) as url:
            assert counters(url) is None
            assert server_info(url).version is None

"""The probes against recordings, against servers that break in every way we know, and against the stand-in engine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gpubox.errors import InputError, ProofError
from gpubox.health import endpoint, probes
from gpubox.health.probes import HealthState, Probes, Question
from tests.standin.server import Standin, free_port, run_standin

RECORDINGS = Path(__file__).parents[1] / "fixtures" / "sglang-0.5.17"
FRANCE = Question(ask="What is the capital of France?", expect=("Paris",))
Handler = Callable[[BaseHTTPRequestHandler], None]


def recording(name: str) -> bytes:
    return (RECORDINGS / name).read_bytes()


@contextmanager
def canned(**answers: tuple[int, bytes] | Handler) -> Iterator[str]:
    """A server of canned answers: `health`, `models` and `chat` are each (status, body) or a function that answers."""
    paths = {"/health": "health", "/v1/models": "models", "/v1/chat/completions": "chat"}

    class Canned(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers[paths[self.path]]
            if callable(answer):
                answer(self)
                return
            self.send_response(answer[0])
            self.send_header("Content-Length", str(len(answer[1])))
            self.end_headers()
            self.wfile.write(answer[1])

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Canned)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def hang(seconds: float) -> Handler:
    return lambda handler: time.sleep(seconds)


def close(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True


def echo_key(handler: BaseHTTPRequestHandler) -> None:
    """So long an answer that the excerpt in the error ends within the key."""
    handler.send_response(500)
    handler.end_headers()
    handler.wfile.write(b"x" * 270 + handler.headers["Authorization"].encode())


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standin]:
    with run_standin(tmp_path_factory.mktemp("standin")) as server:
        server.wait_listening()
        yield server


class TestProbesTable:
    def test_defaults_and_one_answer_without_brackets(self) -> None:
        table = {"ready_deadline_s": 60, "questions": [{"ask": "2+2?", "expect": "4"}]}
        parsed = Probes.model_validate(table)
        assert parsed.questions[0].expect == ("4",)
        assert parsed.questions[0].tries == 3
        assert parsed.burst_requests > 150

    def test_survives_json(self) -> None:
        parsed = Probes(ready_deadline_s=60.0, questions=(FRANCE,))
        assert Probes.model_validate_json(parsed.model_dump_json()) == parsed
        assert Probes.model_validate(parsed.model_dump(mode="json")) == parsed

    @pytest.mark.parametrize(
        "bad",
        [
            {"questions": []},
            {"questions": [{"ask": "", "expect": "4"}]},
            {"questions": [{"ask": "2+2?", "expect": ""}]},  # the empty string is in every answer
            {"questions": [{"ask": "2+2?", "expect": []}]},
            {"questions": [{"ask": "2+2?", "expect": "4", "max_tokens": "32"}]},
            {"burst_requests": 150},  # the fault shows after 100 to 120
            {"ready_deadline_s": 0},
            {"ready_deadline_s": float("nan")},
            {"ready_deadline_s": "60"},
            {"burst_concurency": 3},
        ],
    )
    def test_refuses(self, bad: dict[str, object]) -> None:
        table = {"ready_deadline_s": 60, "questions": [{"ask": "2+2?", "expect": "4"}]}
        with pytest.raises(ValidationError):
            Probes.model_validate(table | bad)


class TestHealth:
    @pytest.mark.parametrize(
        ("status", "state"),
        [
            (200, HealthState.UP),
            (503, HealthState.NOT_YET),
            (404, HealthState.WRONG),
            (401, HealthState.WRONG),
            (500, HealthState.WRONG),
            (302, HealthState.WRONG),
        ],
    )
    def test_status(self, status: int, state: HealthState) -> None:
        with canned(health=(status, b"")) as url:
            assert probes.health_once(url) is state

    def test_refused_closed_or_silent_is_not_yet(self) -> None:
        assert probes.health_once(f"http://127.0.0.1:{free_port()}") is HealthState.NOT_YET
        with canned(health=close) as url:
            assert probes.health_once(url) is HealthState.NOT_YET
        with canned(health=hang(0.5)) as url:
            assert probes.health_once(url, timeout_s=0.1) is HealthState.NOT_YET

    def test_waits_longer_than_the_engine_does(self) -> None:
        assert probes.HEALTH_TIMEOUT_S > 20

    @pytest.mark.parametrize("url", ["127.0.0.1:30000", "http://", "http://x/", "ftp://x", "http://x:99999", ""])
    def test_bad_address_is_an_input_error(self, url: str) -> None:
        with pytest.raises(InputError, match="address"):
            probes.health_once(url)


class TestWaitReady:
    def test_follows_the_engine_up(self, tmp_path: Path) -> None:
        lines: list[str] = []
        with run_standin(tmp_path, STANDIN_LOAD_S="0.3", STANDIN_WARMUP_S="0.3") as server:
            probes.wait_ready(server.url, 20, lambda: None, lines.append, poll_interval_s=0.05)
        assert lines[-1].startswith("ready after")

    def test_dead_ends_it_at_once_with_the_reason(self) -> None:
        start = time.monotonic()
        with pytest.raises(ProofError, match="died while loading: exit status 1"):
            probes.wait_ready(f"http://127.0.0.1:{free_port()}", 600, lambda: "exit status 1", print)
        assert time.monotonic() - start < 1

    def test_deadline_names_what_was_seen_last(self) -> None:
        with (
            canned(health=(503, b"")) as url,
            pytest.raises(ProofError, match=r"within 0 s, last seen: /health answered 503"),
        ):
            probes.wait_ready(url, 0.2, lambda: None, print, poll_interval_s=0.05)

    def test_another_program_on_the_port_is_an_error_at_once(self) -> None:
        with canned(health=(404, b"")) as url, pytest.raises(ProofError, match="/health answered 404") as caught:
            probes.wait_ready(url, 600, lambda: None, print)
        assert "ss -ltnp" in str(caught.value)

    def test_shows_progress(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(probes, "PROGRESS_INTERVAL_S", 0.05)
        lines: list[str] = []
        with canned(health=(503, b"")) as url, pytest.raises(ProofError):
            probes.wait_ready(url, 0.3, lambda: None, lines.append, poll_interval_s=0.05)
        assert lines[0].startswith("waiting for the server, 0 of at most 0 s: /health answered 503")


class TestModelId:
    def test_recording(self) -> None:
        with canned(models=(200, recording("v1_models.json"))) as url:
            assert probes.served_models(url) == ["smollm2"]
            probes.check_model_id(url, "smollm2")
            with pytest.raises(ProofError, match="serves smollm2, expected kimi"):
                probes.check_model_id(url, "kimi")

    @pytest.mark.parametrize(
        ("answer", "words"),
        [
            ((401, recording("unauthorized.json")), "401 Unauthorized"),
            ((404, recording("not_found.json")), "status 404"),
            ((200, b"<html>"), "has not the shape"),
            ((200, b"{}"), "has not the shape"),
            ((200, b"[]"), "has not the shape"),
            (close, "closed connection"),
        ],
    )
    def test_error_names_probe_and_cause(self, answer: tuple[int, bytes] | Handler, words: str) -> None:
        with canned(models=answer) as url, pytest.raises(ProofError, match="'model id' failed") as caught:
            probes.served_models(url)
        assert words in caught.value.message


class TestAsk:
    def test_right_answer(self) -> None:
        with canned(chat=(200, recording("chat.json"))) as url:
            answer = probes.ask(url, "smollm2", FRANCE)
        assert (answer.text, answer.tries) == ("The capital of France is Paris.", 1)

    def test_second_try_may_be_right(self) -> None:
        bodies = iter([recording("chat_wrong_answer.json"), recording("chat.json")])

        def chat(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.end_headers()
            handler.wfile.write(next(bodies))

        with canned(chat=chat) as url:
            assert probes.ask(url, "smollm2", FRANCE).tries == 2

    def test_wrong_answers_are_shown(self) -> None:
        right = pytest.raises(ProofError, match="expected 'Paris'")
        with canned(chat=(200, recording("chat_wrong_answer.json"))) as url, right as caught:
            probes.ask(url, "smollm2", FRANCE)
        assert caught.value.detail.count("answered \"L'Étoile") == 3

    def test_bad_request_is_shown(self) -> None:
        with canned(chat=(400, recording("chat_bad_request.json"))) as url, pytest.raises(ProofError) as caught:
            probes.ask(url, "smollm2", FRANCE)
        assert "max_new_tokens must be at least 0" in caught.value.detail

    def test_deadline_is_for_all_tries(self) -> None:
        start = time.monotonic()
        with canned(chat=hang(0.8)) as url, pytest.raises(ProofError) as caught:
            probes.ask(url, "smollm2", FRANCE, deadline_s=0.3)
        assert caught.value.detail.count("no answer in time") == 1
        assert time.monotonic() - start < 1.5

    def test_greedy_request(self) -> None:
        seen: list[dict[str, object]] = []

        def chat(handler: BaseHTTPRequestHandler) -> None:
            seen.append(json.loads(handler.rfile.read(int(handler.headers["Content-Length"]))))
            handler.send_response(200)
            handler.end_headers()
            handler.wfile.write(recording("chat.json"))

        with canned(chat=chat) as url:
            probes.ask(url, "smollm2", FRANCE)
        assert seen[0]["temperature"] == 0
        assert seen[0]["max_tokens"] == 32


class TestStream:
    def test_recording(self) -> None:
        with canned(chat=(200, recording("chat_stream.sse"))) as url:
            assert endpoint.Endpoint(url).stream("smollm2", "x", 8, time.monotonic() + 5) == 7

    @given(st.data())
    def test_any_shorter_recording_is_refused(self, data: st.DataObject) -> None:
        whole = recording("chat_stream.sse")
        cut = data.draw(st.integers(0, whole.index(b"[DONE]") + len(b"[DONE]") - 1))
        with pytest.raises((ProofError, json.JSONDecodeError)):
            endpoint._count_content(iter(whole[:cut].splitlines()), time.monotonic() + 5)

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            (b"data: [DONE]\n\n", "without any content"),
            (b"", "broke off"),
            (b'data: {"error": {"message": "abort"}}\n\n', "abort"),
            (b"data: {\n\n", "has not the shape"),
            (b"data: {}\n\ndata: [DONE]\n\n", "has not the shape"),
        ],
    )
    def test_broken_stream(self, body: bytes, words: str) -> None:
        with canned(chat=(200, body)) as url, pytest.raises(ProofError, match=words):
            endpoint.Endpoint(url).stream("smollm2", "x", 8, time.monotonic() + 5)


class TestBurst:
    def test_all_finish(self, standin: Standin) -> None:
        assert probes.burst(standin.url, "smollm2", 160, 16).requests == 160

    def test_server_that_hangs_after_n(self, tmp_path: Path) -> None:
        with run_standin(tmp_path, STANDIN_FAULT="hang-after-n", STANDIN_HANG_AFTER="20") as server:
            server.wait_listening()
            with pytest.raises(ProofError, match=r"2\d of 40 .* first: .*(no answer in time|timed out)") as caught:
                probes.burst(server.url, "smollm2", 40, 8, deadline_s=2)
            assert "sglang#22779" in caught.value.hint

    def test_threads_are_bounded(self) -> None:
        most = 0

        def chat(handler: BaseHTTPRequestHandler) -> None:
            nonlocal most
            most = max(most, sum(thread.name.startswith("burst") for thread in threading.enumerate()))
            handler.send_response(200)
            handler.end_headers()
            handler.wfile.write(recording("chat_stream.sse"))

        with canned(chat=chat) as url:
            probes.burst(url, "smollm2", 30, 3)
        assert 1 <= most <= 3


class TestProve:
    PROBES = Probes(questions=(FRANCE,), ready_deadline_s=20.0, completion_deadline_s=0.4)

    def test_all_is_well(self, standin: Standin) -> None:
        lines: list[str] = []
        report = probes.prove(standin.url, "smollm2", self.PROBES, forced_kill=False, report=lines.append)
        assert report.burst is None
        assert report.answers[0].text == "The capital of France is Paris."
        assert probes.ProbeReport.model_validate_json(report.model_dump_json()) == report
        assert any("Paris" in line for line in lines)

    def test_forced_kill_adds_the_burst(self, standin: Standin) -> None:
        report = probes.prove(standin.url, "smollm2", self.PROBES, forced_kill=True, report=print)
        assert report.burst is not None
        assert report.burst.requests == 160

    @pytest.mark.parametrize(
        ("fault", "probe"),
        [("never-ready", "'health'"), ("wrong-model", "'model id'"), ("no-completion", "'completion'")],
    )
    def test_names_the_failing_probe(self, tmp_path: Path, fault: str, probe: str) -> None:
        with run_standin(tmp_path, STANDIN_FAULT=fault) as server:
            server.wait_listening()
            time.sleep(0.1)
            with pytest.raises(ProofError, match=f"probe {probe} failed"):
                probes.prove(server.url, "smollm2", self.PROBES, forced_kill=False, report=print)


class TestKey:
    def test_opens_a_guarded_server(self, tmp_path: Path) -> None:
        with run_standin(tmp_path, "--api-key", "fixture-key") as server:
            server.wait_listening()
            arguments = {"forced_kill": False, "report": print}
            table = TestProve.PROBES
            assert probes.prove(server.url, "smollm2", table, api_key="fixture-key", **arguments).model_id == "smollm2"
            with pytest.raises(ProofError, match="401 Unauthorized"):
                probes.prove(server.url, "smollm2", table, **arguments)

    def test_is_never_shown_even_when_the_server_echoes_it(self) -> None:
        key = "very-secret-key"
        with canned(chat=echo_key, models=echo_key) as url:
            for call in (
                lambda: probes.served_models(url, api_key=key),
                lambda: probes.ask(url, "smollm2", FRANCE, api_key=key),
                lambda: probes.burst(url, "smollm2", 2, 1, api_key=key),
            ):
                with pytest.raises(ProofError) as caught:
                    call()
                assert "very" not in str(caught.value)

    @pytest.mark.parametrize("key", ["", "a b", "a\n", "ä"])
    def test_unusable_key_is_refused_without_showing_it(self, key: str) -> None:
        with pytest.raises(InputError) as caught:
            probes.served_models("http://127.0.0.1:1", api_key=key)
        assert repr(key) not in str(caught.value)

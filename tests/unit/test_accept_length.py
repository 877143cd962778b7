"""The accept length of a draft as a probe: read from the engine's own account, judged against floor and record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from pydantic import ValidationError

from gpubox.errors import ProofError
from gpubox.health import accept_length, probes
from gpubox.health.accept_length import AcceptLength
from gpubox.health.endpoint import Endpoint
from gpubox.health.probes import Probes, Question
from tests.standin.server import run_standin

RECORDINGS = Path(__file__).parents[1] / "fixtures" / "sglang-0.5.17"
PROMPTS = ("one", "two", "three")


def wanted(**changed: Any) -> AcceptLength:
    return AcceptLength.model_validate({"prompts": list(PROMPTS)} | changed)


@contextmanager
def engine(*bodies: dict[str, Any]) -> Iterator[tuple[Endpoint, list[dict[str, Any]]]]:
    """Answers /generate with the given bodies in turn, and keeps what was asked."""
    asked: list[dict[str, Any]] = []

    class Canned(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            body = json.dumps(bodies[(len(asked) - 1) % len(bodies)]).encode()
            self.send_response(200 if self.path == "/generate" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Canned)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield Endpoint(f"http://127.0.0.1:{server.server_address[1]}"), asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def recorded(name: str) -> dict[str, Any]:
    return json.loads((RECORDINGS / name).read_text())


def meta(tokens: int, passes: int) -> dict[str, Any]:
    return {"meta_info": {"completion_tokens": tokens, "spec_verify_ct": passes}}


def test_the_real_engines_own_number_is_found_again() -> None:
    body = recorded("generate_eagle3.json")
    with engine(body) as (endpoint, _):
        seen = accept_length.measure(endpoint, wanted())
    assert seen.length == body["meta_info"]["spec_accept_length"] == 1.6


def test_long_answers_weigh_more() -> None:
    with engine(meta(200, 100), meta(10, 10), meta(30, 10)) as (endpoint, asked):
        assert accept_length.measure(endpoint, wanted()).length == 2.0  # 240 / 120
    assert [request["text"] for request in asked] == list(PROMPTS)
    assert asked[0]["sampling_params"] == {"temperature": 0, "max_new_tokens": 200}


def test_the_template_surrounds_the_prompt() -> None:
    with engine(meta(20, 10)) as (endpoint, asked):
        accept_length.measure(endpoint, wanted(template="<|user|>{prompt}<|end|>"))
    assert asked[0]["text"] == "<|user|>one<|end|>"


def test_a_server_that_does_not_speculate_is_said_to_be_one() -> None:
    with (
        engine(recorded("generate.json")) as (endpoint, _),
        pytest.raises(ProofError, match="does not speculate"),
    ):
        accept_length.prove(endpoint, wanted())


@pytest.mark.parametrize(
    ("table", "length", "passes"),
    [
        ({"floor": 1.3}, 1.02, False),  # random weights, as measured on an H200
        ({"floor": 1.3}, 1.96, True),  # layers off by one: the floor cannot see it
        ({"recorded": 2.17}, 1.96, False),
        ({"recorded": 2.17}, 2.17, True),
        ({"recorded": 2.17}, 2.07, True),
        ({"recorded": 2.17}, 2.06, False),  # 2.17 * 0.95 is 2.0615
        ({"recorded": 2.17, "tolerance": 0.1}, 1.96, True),
        ({"recorded": 1.2, "floor": 1.5}, 1.3, False),  # the floor holds whatever was recorded
    ],
)
def test_floor_and_record(table: dict[str, Any], length: float, passes: bool) -> None:
    with engine(meta(round(length * 1000), 1000)) as (endpoint, _):
        if passes:
            assert accept_length.prove(endpoint, wanted(**table)).length == pytest.approx(length)
            return
        with pytest.raises(ProofError, match=f"'accept length' failed: {length:.2f} tokens a pass"):
            accept_length.prove(endpoint, wanted(**table))


@pytest.mark.parametrize(
    "bad",
    [
        {"prompts": ["one", "two"]},
        {"prompts": ["one", "two", ""]},
        {"template": "no place"},
        {"template": "{prompt} {prompt}"},
        {"floor": 1.0},  # every server reaches 1.0
        {"tolerance": 0.0},
        {"max_tokens": 8},  # the first token comes without a pass: short answers flatter
    ],
)
def test_refuses(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        wanted(**bad)


def test_it_is_a_part_of_the_proof(tmp_path: Path) -> None:
    question = Question(ask="What is the capital of France?", expect=("Paris",))
    table = Probes(ready_deadline_s=60.0, questions=(question,), accept_length=wanted(prompts=["a b c d"] * 3))
    lines: list[str] = []
    with run_standin(tmp_path, STANDIN_ACCEPT_LENGTH="2") as server:
        server.wait_listening()
        probes.wait_ready(server.url, 20, lambda: None, lines.append)
        seen = probes.prove(server.url, "smollm2", table, forced_kill=False, report=lines.append)
    assert seen.accept is not None
    assert seen.accept.length > 1.5
    assert any("accept length" in line for line in lines)


def test_releases_that_lie_on_boxes_keep_their_ids() -> None:
    table = Probes(ready_deadline_s=60.0, questions=(Question(ask="?", expect=("!",)),))
    assert "accept_length" not in table.model_dump(mode="json")
    assert Probes.model_validate(table.model_dump(mode="json")) == table

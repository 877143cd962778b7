"""The stand-in engine against recordings of the real one: equal shapes, equal life, faults on demand."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from gpubox.specs.engine import RESERVED, Source, resolve
from gpubox.specs.stack import load_stack, stack_spec
from tests.standin.build import PROJECT, build_wheel, standin_table, write_stack
from tests.standin.server import Standin, run_standin

RECORDINGS = Path(__file__).parents[1] / "fixtures" / "sglang-0.5.17"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standin]:
    with run_standin(tmp_path_factory.mktemp("standin"), "--enable-metrics") as server:
        server.wait_listening()
        yield server


def recorded(name: str) -> Any:
    return json.loads((RECORDINGS / name).read_text())


def shape(value: Any) -> Any:
    """Keys in their order-free structure, types at the leaves; of a list the shapes of its elements, once each."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return {json.dumps(shape(item), sort_keys=True) for item in value}
    return type(value).__name__


@pytest.mark.parametrize("path", ["/v1/models", "/model_info", "/get_model_info"])
def test_body_has_the_shape_of_the_recording(standin: Standin, path: str) -> None:
    answer = requests.get(standin.url + path)
    assert answer.status_code == 200
    name = path.removeprefix("/get_").strip("/").replace("/", "_") + ".json"
    assert shape(answer.json()) == shape(recorded(name))


def test_server_info_is_a_part_of_the_recording(standin: Standin) -> None:
    real, ours = recorded("server_info.json"), requests.get(f"{standin.url}/server_info").json()
    assert ours.keys() <= real.keys()
    assert ours["internal_states"][0].keys() <= real["internal_states"][0].keys()
    assert shape(ours["internal_states"][0]["memory_usage"]) == shape(real["internal_states"][0]["memory_usage"])


def test_metrics_are_a_part_of_the_recording(standin: Standin) -> None:
    ours = re.findall("^# TYPE .*$", requests.get(f"{standin.url}/metrics").text, flags=re.MULTILINE)
    assert ours
    assert set(ours) <= set((RECORDINGS / "metrics_types.txt").read_text().splitlines())


@pytest.mark.parametrize(("length", "name"), [("0", "generate.json"), ("1.6", "generate_eagle3.json")])
def test_generate_is_a_part_of_the_recording(tmp_path: Path, length: str, name: str) -> None:
    body = {"text": "Once upon a time there was", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    with run_standin(tmp_path, STANDIN_ACCEPT_LENGTH=length) as server:
        server.wait_listening()
        ours, real = requests.post(f"{server.url}/generate", json=body).json(), recorded(name)
    assert ours["meta_info"].keys() <= real["meta_info"].keys()
    assert ("spec_verify_ct" in ours["meta_info"]) == ("spec_verify_ct" in real["meta_info"])
    assert ours["meta_info"]["finish_reason"] == real["meta_info"]["finish_reason"]


def test_chat_equals_the_recording_but_for_id_and_time(standin: Standin) -> None:
    body = {"model": "smollm2", "messages": QUESTION, "temperature": 0, "max_tokens": 32}
    ours, real = requests.post(f"{standin.url}/v1/chat/completions", json=body).json(), recorded("chat.json")
    assert without_id(ours) == without_id(real)


def test_stream_equals_the_recording_but_for_ids_and_stop_reason(standin: Standin) -> None:
    body = {"model": "smollm2", "messages": QUESTION, "max_tokens": 8, "stream": True}
    body["stream_options"] = {"include_usage": True}
    answer = requests.post(f"{standin.url}/v1/chat/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    ours, real = events(answer.text), events((RECORDINGS / "chat_stream.sse").read_text())
    ours[-2 - 1]["choices"][0] |= {"finish_reason": "length", "matched_stop": None}  # recorded: 8 tokens without a stop
    assert ours == real


def test_wrong_model_name_is_echoed_as_recorded(standin: Standin) -> None:
    answer = requests.post(
        f"{standin.url}/v1/chat/completions", json={"model": "nope", "messages": QUESTION, "max_tokens": 4}
    )
    assert answer.status_code == 200
    assert answer.json()["model"] == recorded("chat_wrong_model.json")["model"] == "nope"
    assert shape(answer.json()) == shape(recorded("chat_wrong_model.json"))


def test_errors_equal_the_recordings(standin: Standin) -> None:
    body = {"model": "smollm2", "messages": QUESTION, "max_tokens": -5}
    answer = requests.post(f"{standin.url}/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()) == (400, recorded("chat_bad_request.json"))
    answer = requests.get(f"{standin.url}/no_such")
    assert (answer.status_code, answer.json()) == (404, recorded("not_found.json"))


def test_key_guards_all_but_health_and_metrics(tmp_path: Path) -> None:
    with run_standin(tmp_path, "--api-key", "fixture-key") as server:
        server.wait_listening()
        answer = requests.get(f"{server.url}/v1/models")
        assert (answer.status_code, answer.json()) == (401, recorded("unauthorized.json"))
        assert requests.get(f"{server.url}/health").status_code == 200
        assert requests.get(f"{server.url}/metrics").status_code == 404  # open, but not enabled
        key = {"Authorization": "Bearer fixture-key"}
        assert requests.get(f"{server.url}/v1/models", headers=key).status_code == 200


def test_life_is_refused_then_503_then_200_with_an_empty_body(tmp_path: Path) -> None:
    with run_standin(tmp_path, STANDIN_LOAD_S="0.5", STANDIN_WARMUP_S="0.5") as server:
        seen: list[int | str] = []
        end = time.monotonic() + 20
        while 200 not in seen and time.monotonic() < end:
            try:
                answer = requests.get(f"{server.url}/health")
                status: int | str = answer.status_code
                assert answer.content == b""
            except requests.ConnectionError:
                status = "refused"
            if status not in seen:
                seen.append(status)
            time.sleep(0.02)
        assert seen == ["refused", 503, 200]


def test_sigterm_gives_503_at_once_and_drains(tmp_path: Path) -> None:
    with run_standin(tmp_path, STANDIN_TOKEN_S="0.15") as server:
        server.wait_listening()
        bodies: list[str] = []
        client = threading.Thread(target=lambda: bodies.append(chat_stream(server.url)))
        client.start()
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        assert requests.get(f"{server.url}/health").status_code == 503
        client.join()
        assert bodies[0].endswith("data: [DONE]\n\n")
        assert server.process.wait(5) == -signal.SIGKILL  # it ends by killing itself, as recorded
        assert "Gracefully exiting" in server.log


def test_sigterm_while_loading_ends_at_once(tmp_path: Path) -> None:
    with run_standin(tmp_path, STANDIN_LOAD_S="30") as server:
        server.wait_for_log("loading weights")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(5) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--no-such-flag", "1"], 2, "unrecognized arguments: --no-such-flag 1"),
        (["--served-model-name", "a:b"], 1, "AssertionError: served_model_name cannot contain a colon"),
        (["--model-path", "/nope"], 1, "OSError: Repo id must use alphanumeric chars"),
    ],
)
def test_start_mistakes_end_as_the_real_engine_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    words: str,
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.syspath_prepend(str(PROJECT / "src"))
    monkeypatch.setattr(sys, "argv", ["launch_server", "--model-path", str(tmp_path), *arguments])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module("gpubox_standin.launch_server").main()
    assert ended.value.code == status
    assert words in capsys.readouterr().err


def test_takes_every_argument_of_a_server_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own table (tests/standin/build.py) is a part of the real engine's."""
    table = standin_table("0.1.0")
    values: dict[str, object] = {}
    for key, argument in table.arguments.items():
        number = {"int": 1, "float": 0.5, "bool": True}.get(argument.type, "text")
        values[key] = argument.choices[0] if argument.choices else number
    values = {key: value for key, value in values.items() if key not in RESERVED}
    arguments, findings = resolve([Source("a.toml", "engine", values)], table)
    assert not findings
    words = arguments.command_line()
    monkeypatch.syspath_prepend(str(PROJECT / "src"))
    monkeypatch.setattr(sys, "argv", ["launch_server", "--model-path", "m", *words])
    assert importlib.import_module("gpubox_standin.launch_server").parse_arguments().context_length == 1


def test_fault_never_ready(tmp_path: Path) -> None:
    with run_standin(tmp_path, STANDIN_FAULT="never-ready") as server:
        server.wait_listening()
        time.sleep(0.3)
        assert requests.get(f"{server.url}/health").status_code == 503


def test_fault_exit_at_once_leaves_a_recognizable_last_line(tmp_path: Path) -> None:
    with run_standin(tmp_path, STANDIN_FAULT="exit-at-once") as server:
        assert server.process.wait(10) == 1
        assert "stand-in fault exit-at-once" in server.log.splitlines()[-1]


def test_fault_dies_later(tmp_path: Path) -> None:
    with run_standin(tmp_path, STANDIN_FAULT="dies-later", STANDIN_DIE_AFTER_S="0.3") as server:
        assert server.process.wait(20) == -signal.SIGKILL
        assert "ready to roll" in server.log


def test_fault_no_completion_does_not_hold_up_a_drain(tmp_path: Path) -> None:
    with run_standin(tmp_path, STANDIN_FAULT="no-completion") as server:
        server.wait_listening()
        with pytest.raises(requests.ReadTimeout):
            requests.post(f"{server.url}/v1/chat/completions", json={"messages": QUESTION}, timeout=0.3)
        assert requests.get(f"{server.url}/health").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(5) == -signal.SIGKILL


def test_fault_stubborn_worker_survives_sigterm_and_keeps_the_port(tmp_path: Path) -> None:
    with run_standin(tmp_path, STANDIN_FAULT="stubborn-worker") as server:
        server.wait_listening()
        worker = int(server.wait_for_log(r"stubborn worker pid=(\d+)")[1])
        port = int(server.url.rpartition(":")[2])
        assert os.getsid(worker) != os.getsid(server.process.pid)
        assert parent_of(worker) != server.process.pid
        os.kill(worker, signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(5)
        os.kill(worker, 0)  # still there
        with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
            other.bind(("127.0.0.1", port))


def test_wheel_is_reproducible_and_the_stack_fits_it(tmp_path: Path) -> None:
    wheel, again = build_wheel(tmp_path / "1"), build_wheel(tmp_path / "2")
    assert wheel.read_bytes() == again.read_bytes()
    a, b = (write_stack(tmp_path, wheel, name) for name in ("standin-a", "standin-b"))
    assert load_stack(a).engine.module == "gpubox_standin.launch_server"
    assert (a / "requirements.lock").read_bytes() == (b / "requirements.lock").read_bytes()
    assert stack_spec(a, "3.11", None).id.startswith("standin-a-")
    assert stack_spec(b, "3.12", None).id.startswith("standin-b-")


def chat_stream(url: str) -> str:
    body = {"model": "smollm2", "messages": QUESTION, "stream": True}
    return requests.post(f"{url}/v1/chat/completions", json=body).text


def events(text: str) -> list[Any]:
    """The data of server-sent events, [DONE] as it is."""
    data = [block.removeprefix("data: ") for block in text.split("\n\n") if block.strip()]
    return [item if item == "[DONE]" else without_id(json.loads(item)) for item in data]


def without_id(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"id": "", "created": 0}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

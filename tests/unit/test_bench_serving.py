"""The load generator's result read with distrust, and the prompts of a sweep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubox.bench import prompts
from gpubox.bench.bench_serving import Load, Target, command, read_result, write_prompts
from gpubox.errors import GpuboxError, InputError, ProofError

LOAD = Load(concurrency=2, requests=12, output_tokens=8, warmup_requests=1)
RECORDED = Path(__file__).parents[1] / "fixtures" / "sglang-0.5.17" / "bench_serving.json"


def result(**changed: Any) -> dict[str, Any]:
    """A recorded result of sglang 0.5.17, with the details of 12 good requests that the recording lacks."""
    details = {
        "output_lens": [8] * 12,
        "ttfts": [0.1] * 12,
        "itls": [[0.01] * 7] * 12,
        "generated_texts": ["eight tokens"] * 12,
        "errors": [""] * 12,
    }
    return json.loads(RECORDED.read_text()) | {"completed": 12} | details | changed


def one_of(good: Any, bad: Any, at: int = 3) -> list[Any]:
    return [bad if index == at else good for index in range(12)]


def judged(tmp_path: Path, **changed: Any) -> list[str]:
    output = tmp_path / "result.jsonl"
    output.write_text(json.dumps(result(**changed)) + "\n")
    return read_result(output, LOAD)[1]


def test_the_numbers_of_the_recording(tmp_path: Path) -> None:
    output = tmp_path / "result.jsonl"
    output.write_text("{}\n" + json.dumps(result()) + "\n")
    measured, problems = read_result(output, LOAD)
    assert problems == []
    assert measured.tokens_per_s == 14298.52
    assert (measured.ttft_ms.mean, measured.ttft_ms.median, measured.ttft_ms.p99) == (
        842.7400736360015,
        832.4840290000282,
        1478.4346200199798,
    )
    assert measured.per_stream(250) == 14298.52 / 250


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"errors": one_of("", "Traceback\nConnectionResetError: peer"), "completed": 11},
            "1 of 12 requests failed, first: Traceback ConnectionResetError: peer",
        ),
        ({"completed": 9}, "3 of 12 requests are missing"),
        # It counts these as successes of full length.
        ({"generated_texts": one_of("text", "")}, "1 of 12 streams brought no text"),
        ({"ttfts": one_of(0.1, 0.0)}, "1 of 12 streams brought no text"),
        ({"output_lens": one_of(8, 3)}, "1 of 12 answers are short: 3 of 8 tokens"),
        (
            {"itls": [[0.01] * 7] * 8 + [[0.1] * 7] * 4},
            "the server slowed down: its last requests took 4.7 times as long as its first",
        ),
    ],
)
def test_a_spoilt_request_spoils_the_cell(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    assert judged(tmp_path, **changed) == [said]


def test_a_rising_time_to_first_token_alone_is_no_slowing_down(tmp_path: Path) -> None:
    assert judged(tmp_path, ttfts=[0.1 + 0.002 * index for index in range(12)]) == []


@given(st.text() | st.dictionaries(st.text(), st.integers() | st.lists(st.none())).map(json.dumps))
def test_junk_is_no_result(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    output = tmp_path_factory.mktemp("junk") / "result.jsonl"
    output.write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(GpuboxError):
        read_result(output, LOAD)


def test_no_file_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(ProofError, match="left no result"):
        read_result(tmp_path / "absent", LOAD)


def test_both_arms_get_the_same_prompts_length_and_seed() -> None:
    words = command(Path("/v/python"), Target("http://h:1", "m", Path("/t")), LOAD, Path("/p"), Path("/o"))
    flags = dict(zip(words[3::2], words[4::2], strict=False))
    assert flags["--num-prompts"] == "12"
    assert flags["--max-concurrency"] == "2"
    assert flags["--sharegpt-output-len"] == "8"
    assert flags["--seed"] == "1"
    assert "--disable-ignore-eos" not in words


class TestPrompts:
    def test_shipped_ones_are_many_different_and_always_the_same(self) -> None:
        assert len(set(prompts.shipped())) == len(prompts.shipped()) >= 500
        assert prompts.shipped() == prompts.shipped()
        assert not any("{" in text.replace("{topic}", "{") for text in prompts.shipped())

    def test_custom_format(self, tmp_path: Path) -> None:
        """As the load generator reads it: two turns at least, the first one's content is asked."""
        write_prompts(tmp_path / "p.jsonl", ("why?", "zwölf \u2028 Zeilen"))
        rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text(encoding="utf-8").split("\n") if line]
        assert [row["conversations"][0]["content"] for row in rows] == ["why?", "zwölf \u2028 Zeilen"]
        assert all(len(row["conversations"]) == 2 for row in rows)

    def test_from_file(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.jsonl"
        path.write_text('"one"\n\n{"prompt": "two", "id": 3}\n')
        assert prompts.from_file(path) == ("one", "two")

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ('"one"\nplain text\n', "line 2: no prompt"),
            ('{"text": "one"}\n', "line 1: no prompt"),
            ('"one"\n"one"\n', "holds a prompt twice"),
            ("\n", "holds no prompt"),
        ],
    )
    def test_a_bad_file_is_refused(self, tmp_path: Path, text: str, said: str) -> None:
        (tmp_path / "p").write_text(text)
        with pytest.raises(InputError, match=said):
            prompts.from_file(tmp_path / "p")

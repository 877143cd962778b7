"""SGLang's own load generator, from a stack's venv: its command line, and what its result says when read with distrust.

It counts a stream that ended early or without content as a success of full length, so each request is looked at.
Source: sglang/bench_serving.py of 0.5.9, sglang/benchmark/serving.py of 0.5.17.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpubox.bench.cells import Measured, Percentiles
from gpubox.errors import ProofError

Backend = Literal["sglang", "sglang-oai-chat", "vllm-chat"]

SLOWED_FACTOR: Final = 1.5  # median time of the last third of the requests over that of the first
SEED: Final = 1  # it shuffles the prompts; the same in every run


@dataclass(frozen=True)
class Target:
    """Who is asked, and how. `tokenizer`: a directory, for counting; `backend` sglang is the engine's own /generate."""

    base_url: str
    served_model_name: str
    tokenizer: Path
    backend: Backend = "sglang"


@dataclass(frozen=True)
class Load:
    """`requests` different prompts, `concurrency` at a time, each answered with exactly `output_tokens`."""

    concurrency: int
    requests: int
    output_tokens: int
    warmup_requests: int


def write_prompts(path: Path, prompts: Sequence[str]) -> None:
    """In the 'custom' format. The second turn only has to exist: the output length is fixed."""
    rows = [{"conversations": [{"content": text}, {"content": "an answer of a few words"}]} for text in prompts]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def command(python: Path, target: Target, load: Load, prompts: Path, output: Path) -> list[str]:
    words = [str(python), "-m", "sglang.bench_serving", "--backend", target.backend, "--base-url", target.base_url]
    words += ["--model", str(target.tokenizer), "--served-model-name", target.served_model_name]
    words += ["--tokenizer", str(target.tokenizer), "--dataset-name", "custom", "--dataset-path", str(prompts)]
    words += ["--sharegpt-output-len", str(load.output_tokens), "--num-prompts", str(load.requests)]
    words += ["--max-concurrency", str(load.concurrency), "--warmup-requests", str(load.warmup_requests)]
    words += ["--seed", str(SEED), "--disable-tqdm", "--output-details", "--output-file", str(output)]
    if target.backend == "sglang":
        words += ["--apply-chat-template", "--flush-cache"]
    return words


Numbers = Annotated[list[float], Field(min_length=1)]


class _Result(BaseModel):
    """The fields that are read; it writes many more."""

    model_config = ConfigDict(extra="ignore")

    duration: Annotated[float, Field(gt=0)]
    completed: int
    total_output_tokens: int
    output_throughput: float
    mean_ttft_ms: float
    median_ttft_ms: float
    p99_ttft_ms: float
    mean_tpot_ms: float
    median_tpot_ms: float
    p99_tpot_ms: float
    mean_itl_ms: float
    median_itl_ms: float
    p99_itl_ms: float
    output_lens: list[int]
    ttfts: list[float]
    itls: list[list[float]]
    generated_texts: list[str]
    errors: list[str]

    def percentiles(self, what: Literal["ttft", "tpot", "itl"]) -> Percentiles:
        values: dict[str, Any] = {name: getattr(self, f"{name}_{what}_ms") for name in ("mean", "median", "p99")}
        return Percentiles.model_validate(values)


def read_result(output: Path, load: Load) -> tuple[Measured, list[str]]:
    """The numbers, and why they must not be used. Raises ProofError when there is no readable result."""
    try:
        result = _Result.model_validate_json(output.read_text(encoding="utf-8").splitlines()[-1])
    except (OSError, IndexError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise ProofError(f"the load generator left no result: {reason}", hint="its last lines are above") from None
    measured = Measured(
        duration_s=round(result.duration, 3),
        requests=result.completed,
        output_tokens=result.total_output_tokens,
        tokens_per_s=round(result.output_throughput, 2),
        ttft_ms=result.percentiles("ttft"),
        tpot_ms=result.percentiles("tpot"),
        itl_ms=result.percentiles("itl"),
        accept_length=None,
        kv_tokens=None,
    )
    return measured, problems(result, load)


def problems(result: _Result, load: Load) -> list[str]:
    """One line for each kind of request that spoils the cell."""
    found = []
    if failed := [error for error in result.errors if error]:
        found.append(f"{len(failed)} of {load.requests} requests failed, first: {' '.join(failed[0].split())[-200:]}")
    if result.completed + len(failed) < load.requests:
        found.append(f"{load.requests - result.completed - len(failed)} of {load.requests} requests are missing")
    good = [index for index, error in enumerate(result.errors) if not error]
    if empty := [index for index in good if not result.generated_texts[index] or result.ttfts[index] <= 0]:
        found.append(f"{len(empty)} of {load.requests} streams brought no text")
    short = [index for index in good if index not in empty and result.output_lens[index] < load.output_tokens]
    if short:
        least = min(result.output_lens[index] for index in short)
        found.append(f"{len(short)} of {load.requests} answers are short: {least} of {load.output_tokens} tokens")
    if not found and (factor := slowed(result, load)):
        found.append(f"the server slowed down: its last requests took {factor:.1f} times as long as its first")
    return found


def slowed(result: _Result, load: Load) -> float | None:
    """Requests of equal length at constant concurrency take equal times. None while they do, or with too few."""
    seconds = [ttft + sum(itls) for ttft, itls in zip(result.ttfts, result.itls, strict=True)]
    third = len(seconds) // 3
    if third < max(3, load.concurrency):  # the first and the last round start and end together: they differ anyway
        return None
    factor = statistics.median(seconds[-third:]) / statistics.median(seconds[:third])
    return factor if factor > SLOWED_FACTOR else None

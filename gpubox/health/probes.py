"""Health as proof: what a server has to show before a release counts as serving. Used on the box and by the controller.

The engine's /health alone is not proof: it was seen to stay 200 while completions hang (sglang#6624, sglang#22779),
and chat completions echo any model name with 200. So: health, then the model id of /v1/models, then a right answer,
and after a forced kill a burst of streamed requests. docs/health.md lists what each probe catches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Annotated

from pydantic import BeforeValidator, Field

from gpubox.errors import ProofError
from gpubox.health import accept_length
from gpubox.health.accept_length import AcceptLength, AcceptReport
from gpubox.health.endpoint import Endpoint, HealthState, shorten
from gpubox.toml import Strict, as_tuple

__all__ = [
    "Answer",
    "BurstReport",
    "HealthState",
    "ProbeReport",
    "Probes",
    "Question",
    "ask",
    "burst",
    "check_model_id",
    "health_once",
    "prove",
    "prove_answers",
    "served_models",
    "wait_ready",
]

HEALTH_TIMEOUT_S = 25.0  # above the engine's own 20 s (SGLANG_HEALTH_CHECK_TIMEOUT), so that the engine answers first
POLL_INTERVAL_S = 0.5
PROGRESS_INTERVAL_S = 10.0

Report = Callable[[str], None]
Seconds = Annotated[float, Field(gt=0, le=24 * 3600)]
Text = Annotated[str, Field(min_length=1)]


class Question(Strict):
    """A question whose right answer has a margin: on a GPU the first greedy answer to a close call was seen to differ.

    expect: any one of these in the answer counts; upper and lower case are the same.
    """

    ask: Text
    expect: Annotated[tuple[Text, ...], BeforeValidator(as_tuple), Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 32
    tries: Annotated[int, Field(ge=1, le=10)] = 3


class Probes(Strict):
    """The table [probes] of servers/*.toml; deadlines in seconds. docs/health.md explains every key."""

    questions: Annotated[tuple[Question, ...], BeforeValidator(as_tuple), Field(min_length=1)]
    ready_deadline_s: Seconds  # from start to /health 200; a big model needs an hour
    completion_deadline_s: Seconds = 120.0  # for one question, all its tries together
    burst_requests: Annotated[int, Field(gt=150, le=10_000)] = 160  # sglang#22779 hangs after 100 to 120
    burst_concurrency: Annotated[int, Field(ge=1, le=128)] = 16
    burst_max_tokens: Annotated[int, Field(ge=1, le=4096)] = 2
    burst_deadline_s: Seconds = 300.0  # for the whole burst
    # Of a server that speculates. Absent from release.json while unset: releases that lie on boxes keep their ids.
    accept_length: AcceptLength | None = Field(default=None, exclude_if=lambda value: value is None)


class Answer(Strict):
    """What the server said to one question, after how many tries and seconds."""

    ask: str
    text: str
    tries: int
    seconds: float


class BurstReport(Strict):
    """A burst in which no request failed."""

    requests: int
    seconds: float


class ProbeReport(Strict):
    """What was proved. `burst` is None when no process had been killed by force."""

    model_id: str
    answers: tuple[Answer, ...]
    burst: BurstReport | None
    accept: AcceptReport | None
    seconds: float


def health_once(base_url: str, *, timeout_s: float = HEALTH_TIMEOUT_S) -> HealthState:
    """One look at /health. Never raises for what a server does; raises InputError for a bad address."""
    return Endpoint(base_url).health(timeout_s)[0]


def wait_ready(
    base_url: str,
    deadline_s: float,
    is_dead: Callable[[], str | None],
    report: Report,
    *,
    poll_interval_s: float = POLL_INTERVAL_S,
) -> float:
    """Poll /health until it is 200; returns the seconds waited. `report` hears about it every ~10 s.

    Raises ProofError: at once when is_dead() gives a reason (a dead unit never gets ready) or the status is neither 200
    nor 503; otherwise after deadline_s.
    """
    endpoint = Endpoint(base_url)
    start = shown = time.monotonic()
    while True:
        if reason := is_dead():
            raise ProofError(f"{base_url}: probe 'ready' failed: the server died while loading: {reason}")
        left = start + deadline_s - time.monotonic()
        state, detail = endpoint.health(min(HEALTH_TIMEOUT_S, max(left, 1.0)))
        now = time.monotonic()
        if state is HealthState.UP:
            report(f"ready after {now - start:.1f} s")
            return now - start
        if state is HealthState.WRONG:
            raise ProofError(
                f"{base_url}: probe 'ready' failed: {detail}; a loading engine answers 503, a ready one 200",
                hint="see what listens on that port: ss -ltnp",
            )
        if now - start >= deadline_s:
            raise ProofError(
                f"{base_url}: probe 'ready' failed: not ready within {deadline_s:.0f} s, last seen: {detail}",
                hint="read the server's log; if it only needs longer, raise probes.ready_deadline_s",
            )
        if now - shown >= PROGRESS_INTERVAL_S:
            report(f"waiting for the server, {now - start:.0f} of at most {deadline_s:.0f} s: {detail}")
            shown = now
        time.sleep(poll_interval_s)


def served_models(base_url: str, *, api_key: str | None = None) -> list[str]:
    """The ids in /v1/models. Raises ProofError."""
    return Endpoint(base_url, api_key).models(HEALTH_TIMEOUT_S)


def check_model_id(base_url: str, expected: str, *, api_key: str | None = None) -> None:
    """Raises ProofError unless exactly `expected` is served. A chat proves nothing here: it echoes any name."""
    models = served_models(base_url, api_key=api_key)
    if models != [expected]:
        raise ProofError(
            f"{base_url}: probe 'model id' failed: serves {', '.join(models) or 'nothing'}, expected {expected}",
            hint="is another server on this port? compare served_model_name of the server profile",
        )


def ask(
    base_url: str, model: str, question: Question, *, deadline_s: float = 120.0, api_key: str | None = None
) -> Answer:
    """A greedy chat completion that must hold one of the expected answers, in question.tries tries within deadline_s.

    Raises ProofError that shows what was answered or what went wrong in every try.
    """
    endpoint = Endpoint(base_url, api_key)
    start = time.monotonic()
    failures: list[str] = []
    for number in range(1, question.tries + 1):
        left = start + deadline_s - time.monotonic()
        if left <= 0:
            break
        try:
            text = endpoint.complete(model, question.ask, question.max_tokens, left)
        except ProofError as error:
            failures.append(f"try {number}: {error}")
            continue
        if any(accepted.casefold() in text.casefold() for accepted in question.expect):
            return Answer(ask=question.ask, text=text, tries=number, seconds=round(time.monotonic() - start, 3))
        failures.append(f"try {number}: answered {shorten(text)!r}")
    raise ProofError(
        f"{base_url}: probe 'completion' failed: no right answer to {question.ask!r} within {deadline_s:.0f} s"
        f" and {question.tries} tries, expected {' or '.join(map(repr, question.expect))}",
        hint="a wrong answer means wrong weights, tokenizer or kernels; no answer means the engine hangs: see its log",
        detail="\n".join(failures),
    )


def burst(
    base_url: str,
    model: str,
    n: int,
    concurrency: int,
    *,
    max_tokens: int = 2,
    deadline_s: float = 300.0,
    api_key: str | None = None,
    report: Report = lambda _: None,
) -> BurstReport:
    """n streamed chats, `concurrency` at a time; each must stream something and end with [DONE] before deadline_s.

    Raises ProofError with how many failed and the first error, after 2 * deadline_s at most (a server gone silent).
    """
    endpoint = Endpoint(base_url, api_key)
    start = shown = time.monotonic()
    errors: list[ProofError] = []
    with ThreadPoolExecutor(min(concurrency, n), thread_name_prefix="burst") as pool:
        # Different prompts, so that no cache answers for all of them.
        futures = [
            pool.submit(endpoint.stream, model, f"Count upwards from {i}.", max_tokens, start + deadline_s)
            for i in range(n)
        ]
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                error = future.exception()
                if isinstance(error, ProofError):
                    errors.append(error)
                elif error:
                    raise error
                if (now := time.monotonic()) - shown >= PROGRESS_INTERVAL_S:
                    report(f"burst: {done} of {n} requests ended, {len(errors)} failed, after {now - start:.0f} s")
                    shown = now
        finally:
            for future in futures:
                future.cancel()
    if errors:
        first = errors[0]
        raise ProofError(
            f"{base_url}: probe 'burst' failed: {len(errors)} of {n} streamed requests failed, first: {first.message}",
            hint=first.hint
            or "healthy but hanging after a forced kill is sglang#22779: stop it until its cgroup is empty "
            "and its port is free, then start it again",
        )
    return BurstReport(requests=n, seconds=round(time.monotonic() - start, 3))


def prove_answers(
    base_url: str, model_id: str, probes: Probes, *, report: Report, api_key: str | None = None
) -> tuple[Answer, ...]:
    """What anybody may ask of a ready server: healthy, the right model, right answers. Raises ProofError."""
    state, detail = Endpoint(base_url).health(HEALTH_TIMEOUT_S)
    if state is not HealthState.UP:
        raise ProofError(f"{base_url}: probe 'health' failed: {detail}", hint="read the server's log")
    check_model_id(base_url, model_id, api_key=api_key)
    report(f"serves {model_id}")
    answers = []
    for question in probes.questions:
        answer = ask(base_url, model_id, question, deadline_s=probes.completion_deadline_s, api_key=api_key)
        report(f"{question.ask} -> {shorten(answer.text)} ({answer.seconds:.1f} s, try {answer.tries})")
        answers.append(answer)
    return tuple(answers)


def prove(
    base_url: str,
    model_id: str,
    probes: Probes,
    *,
    forced_kill: bool,
    report: Report,
    api_key: str | None = None,
) -> ProbeReport:
    """Every probe in order on a ready server (see wait_ready), from the box itself. Raises ProofError naming the probe.

    forced_kill: a process of the server that was here before had to be killed; then the burst runs too.
    """
    start = time.monotonic()
    answers = prove_answers(base_url, model_id, probes, report=report, api_key=api_key)
    accept = None
    if probes.accept_length:
        accept = accept_length.prove(Endpoint(base_url, api_key), probes.accept_length)
        least = probes.accept_length.least
        report(f"accept length {accept.length:.2f} over {accept.prompts} prompts, at least {least:.2f}")
    streamed = None
    if forced_kill:
        report(f"a process was killed by force before: {probes.burst_requests} streamed requests")
        streamed = burst(
            base_url,
            model_id,
            probes.burst_requests,
            probes.burst_concurrency,
            max_tokens=probes.burst_max_tokens,
            deadline_s=probes.burst_deadline_s,
            api_key=api_key,
            report=report,
        )
        report(f"burst: {streamed.requests} requests in {streamed.seconds:.1f} s, none failed")
    seconds = round(time.monotonic() - start, 3)
    return ProbeReport(model_id=model_id, answers=answers, burst=streamed, accept=accept, seconds=seconds)

"""What an endpoint says of itself: its limits, and counters that tell the accept length of just one cell.

SGLang answers /server_info and, with --enable-metrics, /metrics. Other OpenAI-compatible servers answer neither: then
what is unknown stays unknown.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import requests
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, ConfigDict, ValidationError

from gpubox.health.endpoint import direct_session

TIMEOUT_S: Final = 30.0
TOKENS: Final = "sglang:generation_tokens_total"
PASSES: Final = "sglang:spec_verify_calls_total"  # since 0.5.17; without speculation it stays 0


class ServerInfo(BaseModel):
    """The fields that are read of /server_info; all None where it does not exist."""

    model_config = ConfigDict(extra="ignore")

    version: str | None = None
    model_path: str | None = None
    max_running_requests: int | None = None
    context_length: int | None = None
    max_total_num_tokens: int | None = None
    speculative_algorithm: str | None = None


class Counters(NamedTuple):
    """Since the server's start: tokens generated, and passes of the target that verified a draft."""

    tokens: float
    passes: float


def server_info(base_url: str) -> ServerInfo:
    """Raises nothing: an endpoint without it is allowed."""
    for path in ("/server_info", "/get_server_info"):
        body = _get(f"{base_url}{path}")
        if body is not None:
            try:
                return ServerInfo.model_validate_json(body)
            except ValidationError:
                continue
    return ServerInfo()


def counters(base_url: str) -> Counters | None:
    """None without metrics, or with an engine that does not count its passes."""
    body = _get(f"{base_url}/metrics")
    if body is None:
        return None
    sums: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(body.decode(errors="replace")):
            for sample in family.samples:
                if sample.name in (TOKENS, PASSES):
                    sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    except ValueError:
        return None
    return Counters(sums[TOKENS], sums[PASSES]) if sums.keys() == {TOKENS, PASSES} else None


def accept_length(before: Counters | None, after: Counters | None) -> float | None:
    """Tokens a pass between two readings; None without speculation, or when the server restarted in between."""
    if before is None or after is None:
        return None
    tokens, passes = after.tokens - before.tokens, after.passes - before.passes
    return round(tokens / passes, 3) if passes > 0 and tokens > 0 else None


def _get(url: str) -> bytes | None:
    with direct_session() as session:
        try:
            response = session.get(url, timeout=TIMEOUT_S, allow_redirects=False)
        except requests.RequestException:
            return None
        return response.content if response.status_code == 200 else None

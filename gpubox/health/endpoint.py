"""Talk to one OpenAI-compatible endpoint: the few requests the probes need, each failure one readable line.

An API key goes into the Authorization header only; errors never show it, not even when a server echoes it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import requests

from gpubox.errors import InputError, ProofError

EXCERPT_LENGTH = 300  # characters of an answer shown in an error


class HealthState(StrEnum):
    UP = "up"
    NOT_YET = "not yet"  # refused, 503 or no answer in time: all are normal while loading
    WRONG = "wrong"  # any other status: this is not the engine, or it is broken


@dataclass(frozen=True)
class Endpoint:
    """`base_url` is http(s)://host[:port] without a final '/'. Raises InputError when it or the key is unusable."""

    base_url: str
    api_key: str | None = None

    def __post_init__(self) -> None:
        if not _is_base_url(self.base_url):
            raise InputError(
                f"address {self.base_url!r}: unusable", hint="allowed: http(s)://host[:port], no '/' at the end"
            )
        key = self.api_key
        if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
            raise InputError("the API key is empty or holds a space or an unprintable character", hint="check its file")

    def health(self, timeout_s: float) -> tuple[HealthState, str]:
        """State and a few words about it. Never raises for what a server does."""
        with direct_session() as session:
            try:
                status = session.get(f"{self.base_url}/health", timeout=timeout_s, allow_redirects=False).status_code
            except requests.Timeout:
                return HealthState.NOT_YET, f"/health gave no answer in {timeout_s:.0f} s"
            except requests.RequestException as error:
                return HealthState.NOT_YET, f"/health: {_reason(error)}"
        state = {200: HealthState.UP, 503: HealthState.NOT_YET}.get(status, HealthState.WRONG)
        return state, f"/health answered {status}"

    def models(self, timeout_s: float) -> list[str]:
        """The ids in /v1/models. Raises ProofError."""
        with self._connection("model id") as session:
            response = session.get(f"{self.base_url}/v1/models", timeout=timeout_s, allow_redirects=False)
            _expect_ok(response)
            return [str(model["id"]) for model in response.json()["data"]]

    def complete(self, model: str, text: str, max_tokens: int, timeout_s: float) -> str:
        """The content of a greedy chat completion. Raises ProofError."""
        with self._connection("completion") as session:
            response = session.post(
                f"{self.base_url}/v1/chat/completions",
                json=_chat(model, text, max_tokens),
                timeout=timeout_s,
                allow_redirects=False,
            )
            _expect_ok(response)
            return str(response.json()["choices"][0]["message"]["content"] or "")

    def generate(self, text: str, max_tokens: int, timeout_s: float) -> dict[str, Any]:
        """The engine's own account (meta_info) of a greedy completion of `text`. Raises ProofError."""
        sampling = {"temperature": 0, "max_new_tokens": max_tokens}
        with self._connection("generate") as session:
            response = session.post(
                f"{self.base_url}/generate",
                json={"text": text, "sampling_params": sampling},
                timeout=timeout_s,
                allow_redirects=False,
            )
            _expect_ok(response)
            return dict(response.json()["meta_info"])

    def stream(self, model: str, text: str, max_tokens: int, end: float) -> int:
        """Stream a chat until [DONE]; returns the number of chunks with content, at least 1.

        end: time.monotonic() by which all must be over; a server gone silent is noticed after as long again at most.
        Raises ProofError.
        """
        body = _chat(model, text, max_tokens) | {"stream": True}
        url, left = f"{self.base_url}/v1/chat/completions", end - time.monotonic()
        with self._connection("stream") as session:
            if left <= 0:
                raise ProofError("not sent before the deadline")
            with session.post(url, json=body, timeout=left, stream=True, allow_redirects=False) as response:
                _expect_ok(response)
                return _count_content(response.iter_lines(), end)

    @contextmanager
    def _connection(self, probe: str) -> Iterator[requests.Session]:
        """A session whose failures become a ProofError that names the probe and hides the key."""
        hint = ""
        try:
            with direct_session() as session:
                if self.api_key:
                    session.headers["Authorization"] = f"Bearer {self.api_key}"
                yield session
                return
        except requests.Timeout:
            problem = "no answer in time"
        except (ValueError, LookupError, TypeError, AttributeError) as error:  # ValueError: what JSON decoders raise
            problem = f"the answer has not the shape of an OpenAI answer ({type(error).__name__}: {error})"
        except requests.RequestException as error:
            problem = _reason(error)
        except ProofError as error:
            problem, hint = error.message, error.hint
        if self.api_key:
            problem = problem.replace(self.api_key, "***")
        raise ProofError(f"{self.base_url}: probe '{probe}' failed: {shorten(problem)}", hint=hint) from None


def shorten(text: str) -> str:
    """One line of at most EXCERPT_LENGTH characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= EXCERPT_LENGTH else flat[: EXCERPT_LENGTH - 1] + "…"


def _is_base_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError when it is not a port number
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or url.endswith("/"))


def direct_session() -> requests.Session:
    """No proxy and no .netrc between a question and the server it is about."""
    session = requests.Session()
    session.trust_env = False
    return session


def _chat(model: str, text: str, max_tokens: int) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    return {"model": model, "messages": [message], "temperature": 0, "max_tokens": max_tokens}


def _expect_ok(response: requests.Response) -> None:
    if response.status_code == 401:
        raise ProofError("401 Unauthorized", hint="the server wants an API key; give the one it was started with")
    if response.status_code != 200:
        raise ProofError(f"status {response.status_code}: {response.text}")


def _count_content(lines: Iterable[bytes], end: float) -> int:
    """Read server-sent events up to [DONE]. Raises ProofError for a stream without content or without an end."""
    content = 0
    for line in lines:
        if time.monotonic() > end:
            raise ProofError(f"the stream was not finished by the deadline ({content} content chunks)")
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            if not content:
                raise ProofError("the stream ended with [DONE] but without any content")
            return content
        chunk = json.loads(data)
        if "error" in chunk:
            raise ProofError(f"the stream holds an error: {json.dumps(chunk['error'])}")
        for choice in chunk["choices"]:
            delta = choice["delta"]
            content += bool(delta.get("content") or delta.get("reasoning_content"))
    raise ProofError(f"the stream broke off without [DONE] ({content} content chunks)")


def _reason(error: requests.RequestException) -> str:
    """The short cause of a connection error: requests wraps it in several layers of object addresses."""
    text = str(error)
    known = ("Connection refused", "Connection reset", "Name or service not known", "closed connection", "timed out")
    return next((cause.lower() for cause in known if cause in text), shorten(text))

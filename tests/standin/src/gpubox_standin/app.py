"""The HTTP face of the stand-in. Shapes follow recordings of SGLang 0.5.17; answers are canned."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gpubox_standin import __version__
from gpubox_standin.bodies import MODEL_INFO, SERVER_INFO
from gpubox_standin.settings import Fault, Settings

EOS_ID = 2
DEFAULT_MAX_TOKENS = 128


@dataclass
class Engine:
    """State of one server."""

    settings: Settings
    model_path: str
    served_model_name: str
    host: str
    port: int
    context_length: int
    api_key: str | None = None
    metrics: bool = False
    ready_since: float | None = None
    draining: bool = False
    in_flight: int = 0
    chats: int = 0

    def set_ready(self) -> None:
        self.ready_since = time.monotonic()

    def ready_for(self) -> float:
        return time.monotonic() - self.ready_since if self.ready_since else 0.0

    def start_drain(self) -> None:
        print("SIGTERM received. Draining requests and shutting down...", file=sys.stderr, flush=True)
        self.draining = True

    def hangs(self) -> bool:
        over = self.chats > self.settings.hang_after
        return self.settings.fault is Fault.NO_COMPLETION or (self.settings.fault is Fault.HANG_AFTER_N and over)


def build_app(engine: Engine) -> ASGIApp:
    """The routes, behind the key check and the count of requests in flight."""

    async def health(_: Request) -> Response:
        if engine.draining or engine.ready_since is None:
            return Response(status_code=503)
        await asyncio.sleep(engine.settings.health_s)
        return Response()

    async def models(_: Request) -> Response:
        name = "another-model" if engine.settings.fault is Fault.WRONG_MODEL else engine.served_model_name
        model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "sglang", "root": name}
        return _json({"object": "list", "data": [model | {"parent": None, "max_model_len": engine.context_length}]})

    async def model_info(_: Request) -> Response:
        return _json(MODEL_INFO | {"model_path": engine.model_path, "tokenizer_path": engine.model_path})

    async def server_info(_: Request) -> Response:
        return _json(SERVER_INFO | _server_info(engine))

    async def metrics(_: Request) -> Response:
        if not engine.metrics:
            raise HTTPException(404)
        labels = f'{{model_name="{engine.served_model_name}"}}'
        gauges = {"num_running_reqs": engine.in_flight, "num_queue_reqs": 0, "context_len": engine.context_length}
        lines = [
            f"# TYPE sglang:{name} gauge\nsglang:{name}{labels} {float(value)}\n" for name, value in gauges.items()
        ]
        return Response("".join(lines), media_type="text/plain; version=1.0.0")

    async def chat(request: Request) -> Response:
        body = await request.json()
        while engine.hangs():
            await asyncio.sleep(0.1)
            if await request.is_disconnected():  # the real engine aborts such a request, so it does not hold up a drain
                return Response(status_code=499)
        return await _chat(engine, body)

    async def generate(request: Request) -> Response:
        body = await request.json()
        return _json(_generate(engine, body["text"], body["sampling_params"].get("max_new_tokens", DEFAULT_MAX_TOKENS)))

    routes = [
        Route("/health", health),
        Route("/health_generate", health),
        Route("/metrics", metrics),
        Route("/v1/models", models),
        Route("/generate", generate, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        *[Route(path, model_info) for path in ("/model_info", "/get_model_info")],
        *[Route(path, server_info) for path in ("/server_info", "/get_server_info")],
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error})
    return _Gate(app, engine)


class _Gate:
    """Answers 401 without the key (health and metrics stay open) and counts chats until their last byte."""

    def __init__(self, app: ASGIApp, engine: Engine) -> None:
        self.app = app
        self.engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        key = self.engine.api_key
        given = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        if key and given != f"Bearer {key}" and not path.startswith(("/health", "/metrics")):
            await _json({"error": "Unauthorized"}, 401)(scope, receive, send)
            return
        chat = path == "/v1/chat/completions"
        self.engine.in_flight += chat
        self.engine.chats += chat
        try:
            await self.app(scope, receive, send)
        finally:
            self.engine.in_flight -= chat


async def _chat(engine: Engine, body: dict[str, Any]) -> Response:
    limit = body.get("max_tokens", DEFAULT_MAX_TOKENS)
    if limit < 0:
        message = f"max_new_tokens must be at least 0, got {limit}."
        error = {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400}
        return _json(error, 400)
    question = body["messages"][-1]["content"]
    answer = tokens(reply(question))
    produced = answer[:limit]
    stopped = len(answer) < limit  # the end-of-text token counts, so an answer of 7 tokens stops within 8
    finish = {"finish_reason": "stop" if stopped else "length", "matched_stop": EOS_ID if stopped else None}
    usage = _usage(prompt=30 + len(tokens(question)), completion=len(produced) + stopped)
    head = {"id": uuid.uuid4().hex, "created": int(time.time()), "model": body.get("model", "default")}
    if body.get("stream"):
        include_usage = (body.get("stream_options") or {}).get("include_usage", False)
        events = _events(engine, head, produced, finish, usage if include_usage else None)
        return StreamingResponse(events, media_type="text/event-stream")
    await asyncio.sleep(engine.settings.token_s * len(produced))
    message = {"role": "assistant", "content": "".join(produced), "reasoning_content": None, "tool_calls": None}
    choice = {"index": 0, "message": message, "logprobs": None, **finish}
    completion = {"object": "chat.completion", "choices": [choice], "usage": usage}
    return _json(head | completion | {"metadata": {"weight_version": "default"}})


def _generate(engine: Engine, text: str, limit: int) -> dict[str, Any]:
    produced = tokens(reply(text))[:limit]
    count = len(produced)
    finish = {"type": "length", "length": limit} if count == limit else {"type": "stop", "matched": EOS_ID}
    meta = {"id": uuid.uuid4().hex, "finish_reason": finish, "prompt_tokens": len(tokens(text))}
    if engine.settings.accept_length:
        passes = max(1, round(count / engine.settings.accept_length))
        meta |= {"spec_verify_ct": passes, "spec_accept_length": count / passes}
    return {"text": "".join(produced), "meta_info": meta | {"completion_tokens": count}}


async def _events(
    engine: Engine,
    head: dict[str, Any],
    produced: list[str],
    finish: dict[str, Any],
    usage: dict[str, Any] | None,
) -> AsyncIterator[str]:
    head = head | {"object": "chat.completion.chunk"}

    def event(delta: dict[str, Any], end: dict[str, Any]) -> str:
        choice = {"index": 0, "delta": {"reasoning_content": None, **delta}, "logprobs": None, **end}
        return _event(head | {"choices": [choice]})

    going_on = {"finish_reason": None, "matched_stop": None}
    yield event({"role": "assistant", "content": ""}, going_on)
    for token in produced:
        await asyncio.sleep(engine.settings.token_s)
        yield event({"content": token}, going_on)
    yield event({}, finish)
    if usage:
        yield _event(head | {"choices": [], "usage": usage})
    yield "data: [DONE]\n\n"


def reply(question: str) -> str:
    """The one answer drills ask for, and for all else something that depends on nothing but the question."""
    if "capital of France" in question:
        return "The capital of France is Paris."
    return f"The stand-in was asked: {question}"


def tokens(text: str) -> list[str]:
    """Words and punctuation, with the space before them; joined they give `text` again."""
    return re.findall(r"\s*\w+|\s*[^\w\s]|\s+", text)


def _usage(prompt: int, completion: int) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    return counts | {"prompt_tokens_details": None, "reasoning_tokens": 0}


def _server_info(engine: Engine) -> dict[str, Any]:
    return {
        "model_path": engine.model_path,
        "tokenizer_path": engine.model_path,
        "served_model_name": engine.served_model_name,
        "host": engine.host,
        "port": engine.port,
        "context_length": engine.context_length,
        "api_key": engine.api_key,  # the real engine shows it in clear, too
        "version": __version__,
    }


def _json(body: Any, status: int = 200) -> Response:
    return JSONResponse(body, status_code=status)


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _json({"detail": error.detail}, error.status_code)

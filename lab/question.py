"""The question that the lab asks of every server: the demo, the benchmark and the tests ask the same one."""

from __future__ import annotations

import requests

from gpubox.errors import GpuboxError

PORT = 30000
QUESTION = "What is the capital of France?"
ANSWER_SECONDS = 120  # a 135M model on two CPU cores


def ask(endpoint: str, question: str = QUESTION, *, timeout: float = ANSWER_SECONDS) -> str:
    """The first model's answer at temperature 0. Raises GpuboxError when the server gives none."""
    try:
        models = requests.get(f"{endpoint}/v1/models", timeout=30)
        models.raise_for_status()
        request = {
            "model": models.json()["data"][0]["id"],
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": 32,
        }
        reply = requests.post(f"{endpoint}/v1/chat/completions", json=request, timeout=timeout)
        reply.raise_for_status()
    except requests.RequestException as error:
        raise GpuboxError(
            f"{endpoint}: no answer",
            hint="see what the box says: python -m lab ssh box1 gpubox status",
            detail=str(error),
        ) from error
    return str(reply.json()["choices"][0]["message"]["content"]).strip()


def endpoint(address: str) -> str:
    return f"http://{address}:{PORT}"

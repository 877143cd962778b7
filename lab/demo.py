"""The end of `make demo`: the deployed server answers a question."""

from __future__ import annotations

import click
import requests

from gpubox.errors import GpuboxError
from lab.boxes import Box

PORT = 30000
QUESTION = "What is the capital of France?"
ANSWER_SECONDS = 120  # a 135M model on two CPU cores

NEXT = """
what to try next
  deploy again, nothing changes   .venv/bin/pyinfra inventories/lab.py deploy.py -y
  move to the CUDA 12.8 stack     .venv/bin/pyinfra inventories/lab.py deploy.py -y --data stack=cuda128
  roll back to what ran before    .venv/bin/pyinfra inventories/lab.py rollback.py -y
  look at the box                 .venv/bin/python -m lab ssh {name} gpubox status
  clean up                        make demo-clean
"""


def ask(endpoint: str, question: str) -> str:
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
        reply = requests.post(f"{endpoint}/v1/chat/completions", json=request, timeout=ANSWER_SECONDS)
        reply.raise_for_status()
    except requests.RequestException as error:
        raise GpuboxError(
            f"{endpoint}: no answer",
            hint="see what the box says: python -m lab ssh box1 gpubox status",
            detail=str(error),
        ) from error
    return str(reply.json()["choices"][0]["message"]["content"]).strip()


def summary(box: Box) -> None:
    """Print endpoint, question and answer, the active release, and what to try next."""
    endpoint = f"http://{box.address}:{PORT}"
    answer = ask(endpoint, QUESTION)
    click.echo(f"\nendpoint  {endpoint}/v1/chat/completions\nasked     {QUESTION}\nanswered  {answer}\n")
    click.echo(box.ssh("gpubox status").stdout.rstrip())
    click.echo(NEXT.format(name=box.name).rstrip())

"""The end of `make demo`: the deployed server answers a question."""

from __future__ import annotations

import click

from lab.boxes import Box
from lab.question import QUESTION, ask, endpoint

NEXT = """
what to try next
  deploy again, nothing changes   .venv/bin/pyinfra inventories/lab.py deploy.py -y
  move to the CUDA 12.8 stack     .venv/bin/pyinfra inventories/lab.py deploy.py -y --data stack=cuda128
  roll back to what ran before    .venv/bin/pyinfra inventories/lab.py rollback.py -y
  look at the box                 .venv/bin/python -m lab ssh {name} gpubox status
  clean up                        make demo-clean
"""


def summary(box: Box) -> None:
    """Print endpoint, question and answer, the active release, and what to try next."""
    where = endpoint(box.address)
    answer = ask(where)
    click.echo(f"\nendpoint  {where}/v1/chat/completions\nasked     {QUESTION}\nanswered  {answer}\n")
    click.echo(box.ssh("gpubox status").stdout.rstrip())
    click.echo(NEXT.format(name=box.name).rstrip())

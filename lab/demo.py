"""The end of `make demo`: the deployed server answers a question."""

from __future__ import annotations

import click

from lab.node import Guest
from lab.question import QUESTION, ask, endpoint

NEXT = """
what to try next
  deploy again, nothing changes   .venv/bin/pyinfra inventories/lab.py deploy.py -y
  move to the CUDA 12.8 stack     .venv/bin/pyinfra inventories/lab.py deploy.py -y --data stack=cuda128
  roll back to what ran before    .venv/bin/pyinfra inventories/lab.py rollback.py -y
  look at the box                 .venv/bin/python -m lab ssh {node} pct exec {vmid} -- /usr/local/bin/gpubox status
  look at the node                .venv/bin/python node_report.py inventories/lab.py
  clean up                        make demo-clean
"""


def summary(box: Guest) -> None:
    """Print endpoint, question and answer, the active release, and what to try next."""
    where = endpoint(str(box.address))
    answer = ask(where)
    click.echo(f"\nendpoint  {where}/v1/chat/completions\nasked     {QUESTION}\nanswered  {answer}\n")
    click.echo(box.node.ssh(f"pct exec {box.vmid} -- /usr/local/bin/gpubox status").stdout.rstrip())
    click.echo(NEXT.format(node=box.node.name, vmid=box.vmid).rstrip())

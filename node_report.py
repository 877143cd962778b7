"""python node_report.py INVENTORY [--limit NODE] [--json]: the preflight report of your Proxmox nodes. Changes nothing.

Exit status: 0 no check failed (warnings are allowed), 1 a check failed or a node did not answer, 2 usage.
A program of its own rather than a pyinfra deploy, whose exit status is 1 for any reason and which asks before it runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click

from gpubox.errors import ExitCode
from gpubox.proxmox.node_readings import read_node
from gpubox.proxmox.node_report import as_json, as_text, report, verdict

PYINFRA = Path(sys.executable).parent / "pyinfra"
GROUP = "proxmox_nodes"
FACT = "facts.node.Node"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("inventory", type=click.Path(exists=True, dir_okay=False))
@click.option("--limit", metavar="NODE", multiple=True, help="only these nodes; may be repeated")
@click.option("--json", "json_lines", is_flag=True, help="one JSON object a line for each node")
def main(inventory: str, limit: tuple[str, ...], json_lines: bool) -> None:
    """Report what would make the boxes of each Proxmox node in INVENTORY slow, hang or fail."""
    wanted = nodes(inventory)
    if unknown := [name for name in limit if name not in wanted]:
        raise click.UsageError(f"--limit {unknown[0]}: no such node; {GROUP} has: {', '.join(wanted) or 'none'}")
    wanted = list(limit) or wanted
    if not wanted:
        raise click.UsageError(f"{inventory} names no node: {GROUP} is missing or empty")
    answers = readings(inventory, wanted)
    checks = {name: report(read_node(answers.get(name) or [])) for name in wanted}
    show = as_json if json_lines else as_text
    for name in wanted:
        click.echo(show(name, checks[name]))
    sys.exit(ExitCode.FAILED if any(verdict(found) == "fail" for found in checks.values()) else ExitCode.OK)


def nodes(inventory: str) -> list[str]:
    """Names in the inventory's group of nodes. Raises UsageError with pyinfra's words for one that it cannot read."""
    done = _pyinfra(inventory, "--json", "debug-inventory")
    try:
        hosts = json.loads(done.stdout)
    except ValueError:
        raise click.UsageError(f"{inventory} cannot be read:\n{done.stderr.strip() or done.stdout.strip()}") from None
    return sorted(host["name"] for host in hosts if GROUP in host["groups"])


def readings(inventory: str, wanted: list[str]) -> dict[str, list[str]]:
    """Each node's lines; a node that cannot be reached is missing, and pyinfra's words on it are shown."""
    done = _pyinfra(inventory, "--json", *(word for name in wanted for word in ("--limit", name)), "fact", FACT)
    if done.returncode != 0:
        click.echo(done.stderr.strip(), err=True)
    try:
        answers: dict[str, list[str]] = json.loads(done.stdout)[FACT]
    except (ValueError, KeyError):
        return {}
    return answers


def _pyinfra(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PYINFRA, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)


if __name__ == "__main__":
    main()

"""The command line of the lab: python -m lab."""

from __future__ import annotations

import os
import sys

import click

from gpubox.errors import GpuboxError
from lab import demo, keys, network
from lab.boxes import Box, Lab
from lab.node import Node
from lab.progress import console
from lab.settings import HOST_NUMBERS, NODES

box_name = click.argument("name", type=click.Choice(list(HOST_NUMBERS)))


@click.group(help="Throw-away boxes and Proxmox nodes on this machine. Names: " + ", ".join(HOST_NUMBERS))
def main() -> None:
    pass


@main.command()
@click.argument("names", nargs=-1, type=click.Choice(list(HOST_NUMBERS)))
def up(names: tuple[str, ...]) -> None:
    """Bring up boxes and nodes (box1 unless named). What is there is kept."""
    for box in Lab.up(names or ("box1",)):
        console.print(f"{box.name} is up at {box.address}")


@main.command()
@click.argument("names", nargs=-1, type=click.Choice(list(HOST_NUMBERS)))
@click.option("--purge", is_flag=True, help="Remove the cached image and wheels too.")
def down(names: tuple[str, ...], purge: bool) -> None:
    """Destroy boxes (all unless named); the last one takes network and key with it."""
    Lab.down(names or None, purge=purge)


@main.command()
def status() -> None:
    """Show the boxes and the network."""
    for box in Lab.boxes():
        state = "running" if box.is_running() else "stopped" if box.exists() else "half-made; run up again"
        click.echo(f"{box.name:10} {box.address:14} {state}")
    click.echo(f"network    {'up' if network.is_up() else 'down'}")


@main.command()
@box_name
def shell(name: str) -> None:
    """Open a shell in a box; works with its network cut."""
    os.execvp("lxc-attach", ["lxc-attach", "-n", Box(name).container, "--clear-env", "--", "login", "-f", "root"])


@main.command(context_settings={"ignore_unknown_options": True})
@box_name
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def ssh(name: str, command: tuple[str, ...]) -> None:
    """Run a command in a box over ssh, or log in when none is given."""
    os.execvp("ssh", ["ssh", *keys.ssh_options(), f"root@{Box(name).address}", *command])


@main.command("save-cache")
@box_name
def save_cache(name: str) -> None:
    """Keep the wheels that a box, or the containers of a node, have fetched for later ones."""
    Lab.save_cache(name)


@main.command("demo-summary")
@click.argument("name", default="node1", type=click.Choice(list(NODES)))
def demo_summary(name: str) -> None:
    """Ask the server in a node's container 101 a question and say what to try next."""
    demo.summary(Node(name).guest(101))


if __name__ == "__main__":
    try:
        main()
    except GpuboxError as error:
        console.print(f"[red]error:[/] {error}", markup=True)
        sys.exit(error.exit_code)

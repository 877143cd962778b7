"""The verb that proves the collectives of a release by hand; an activation does the same by itself."""

from __future__ import annotations

import click

from gpubox.cli.build import locked, timed_report
from gpubox.collectives import check
from gpubox.errors import InputError
from gpubox.layout import Layout
from gpubox.rollout.store import Store


@click.group("collectives")
def collectives_group() -> None:
    """All-reduce between the GPUs of this box: prove it before something waits for it."""


@collectives_group.command("check")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
@click.option("--ranks", type=click.IntRange(min=2), default=None, help="How many (default: the release's tp_size).")
@click.argument("release", required=False)
def check_collectives(as_json: bool, ranks: int | None, release: str | None) -> None:
    """Run all-reduce at 2 ranks and at all, with the release's stack and environment. Needs idle GPUs.

    RELEASE defaults to the current one. A passed check is remembered until stack, environment, driver, kernel, its
    command line or the GPUs change.
    """
    layout = Layout()
    store = Store(layout)
    name = _named(store, release)
    shown = store.check(name)
    with locked(layout, f"collectives check {name}", None):
        say = timed_report()
        done = check.check(shown, ranks or check.ranks_of(shown), layout, (lambda text: None) if as_json else say)
    click.echo(done.model_dump_json(indent=2) if as_json else f"all-reduce of {done.conditions.ranks} ranks passed")


def _named(store: Store, release: str | None) -> str:
    if release:
        return store.resolve(release)
    current = store.current()
    if current is None:
        raise InputError("no release is active on this box", hint="name one: gpubox releases shows them")
    return current

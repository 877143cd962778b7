"""The switch: releases into the store, the wanted one activated, the public address proved."""

from __future__ import annotations

from pyinfra import host
from pyinfra.api import deploy

from gpubox.specs.plan import BoxPlan
from ops import release as op


@deploy("Releases")
def releases(plan: BoxPlan) -> None:
    op.releases_added(name="Rendered releases", specs=plan.releases)


@deploy("Serve")
def serve(plan: BoxPlan) -> None:
    op.activated(name="Activate", plan=plan)
    prove_from_outside(plan)


def ssh_address() -> str | None:
    """The current host's own address; None for a container that is reached through its node."""
    return None if host.name.startswith("@pct/") else host.data.get("ssh_hostname") or host.name


def prove_from_outside(plan: BoxPlan) -> None:
    url = plan.public_url(ssh_address())
    if url:
        op.proved_from_outside(name="Prove from outside", url=url, plan=plan)

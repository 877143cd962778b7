"""CUDA toolkits by exact version from one repository, with nothing of a driver; then held where they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from pyinfra import host, state
from pyinfra.api import StringCommand, operation
from pyinfra.api.state import StateStage

from facts.box import box_state
from gpubox.nvidia import repository, toolkit
from gpubox.nvidia.driver import DriverSettings
from gpubox.nvidia.repository import Key
from gpubox.nvidia.toolkit import PLACE, ToolkitSettings
from ops.apt_repository import read_anew, simulated_then_installed
from ops.refusal import refusal


@operation()
def allowed(settings: ToolkitSettings, key: Key | None) -> Iterator[Any]:
    """Before anything changes: a supported system, and the key that belongs to it; None for a directory."""
    seen = box_state().readings
    if not seen.answered and state.current_stage != StateStage.Execute:
        host.noop("the system is looked at when the box runs")
        return
    checks = [partial(repository.check_system, PLACE, seen.system)]
    if key is not None:
        checks.append(partial(repository.check_key, PLACE, settings, key.fingerprints, seen.system))
    if stop := refusal(*checks):
        yield stop
        return
    host.noop(f"{seen.system}, {'no key' if key is None else 'the key has the expected fingerprint'}")


@operation()
def installed(settings: ToolkitSettings, wanted: Mapping[str, str], offline: bool) -> Iterator[Any]:
    """The toolkits side by side. What apt would do is looked at first; a driver or a removal is refused."""
    exact = toolkit.exact_versions(settings, wanted)
    absent = toolkit.missing(exact, box_state().readings)
    if not absent:
        host.noop("all toolkits are installed: " + ", ".join(f"{name}={version}" for name, version in exact.items()))
        return

    def judge(succeeded: bool, output: str) -> None:
        if not succeeded:
            raise toolkit.explain(output, absent)
        toolkit.check_simulation(output)

    words = [f"{name}={version}" for name, version in absent.items()]
    yield from read_anew(PLACE, settings, judge, offline=offline)
    yield from simulated_then_installed(lambda: words, judge)


@operation()
def frozen(wanted: Mapping[str, str]) -> Iterator[Any]:
    """On hold, with every part of them: an upgrade of the system moves nothing of a toolkit."""
    moving = toolkit.unfrozen(wanted, box_state().readings)
    if not moving:
        host.noop("all packages of the toolkits are on hold")
        return
    yield StringCommand("apt-mark", "hold", *moving)


@operation()
def proved(settings: ToolkitSettings, wanted: Mapping[str, str], driver: DriverSettings | None) -> Iterator[Any]:
    """Every toolkit is complete, and no driver, kernel package or second libcuda came with one."""
    if state.current_stage != StateStage.Execute:
        host.noop("the toolkits are looked at when everything has run")
        return
    seen, exact = box_state().readings, toolkit.exact_versions(settings, wanted)
    if stop := refusal(lambda: toolkit.check_proof(wanted, exact, seen, driver)):
        yield stop
        return
    host.noop(", ".join(toolkit.home(name) for name in wanted))

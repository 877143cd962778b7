"""The driver from apt, on a node, a bare-metal machine or in a container: all of it at one version, then held there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyinfra import host
from pyinfra.api import QuoteString, StringCommand

from gpubox.nvidia import driver_packages
from gpubox.nvidia.driver import PackagedDriver
from gpubox.nvidia.driver_packages import PLACE, Found
from ops.apt_repository import read_anew, simulated_then_installed
from ops.judged import Judged


def installed(driver: PackagedDriver, found: Found, *, offline: bool = False) -> Iterator[Any]:
    """Commands; the first of them that changes a package runs when apt's whole plan was looked at."""
    names = driver_packages.wanted(driver, found.system, modules=found.modules)
    asked = list(dict.fromkeys([*names, *(package.name for package in driver_packages.parts(found.packages))]))
    words = [f"{name}={driver.version}-*" for name in asked]  # as far as a plan knows; decided by what apt-cache says

    def judge_update(succeeded: bool, output: str) -> None:
        if not succeeded:
            raise driver_packages.explain(driver, output, words)

    def judge_policy(succeeded: bool, output: str) -> None:
        words[:] = driver_packages.choose(driver, names, found.packages, driver_packages.read_policy(output))

    def judge_plan(succeeded: bool, output: str) -> None:
        if not succeeded:
            raise driver_packages.explain(driver, output, words)
        driver_packages.check_simulation(driver, output, words, modules=found.modules)

    yield from read_anew(PLACE, driver, judge_update, offline=offline)
    yield Judged("LC_ALL=C", "apt-cache", "policy", *map(QuoteString, asked), judge=judge_policy)
    yield from simulated_then_installed(lambda: words, judge_plan)


def held(found: Found) -> Iterator[Any]:
    """On hold, with every part: an upgrade of the system moves nothing of the driver."""
    moving = driver_packages.unheld(found.packages)
    if not moving:
        host.noop("all packages of the driver are on hold")
        return
    yield StringCommand("apt-mark", "hold", *moving)

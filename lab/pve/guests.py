"""A stand-in for what pve-guests.service does: start the guests with `onboot` at boot, stop all at shutdown.

Kept: startup order (guests without one come last), `up` and `down` delays, that a guest which fails does not keep
the others back. Not kept: the parallel stop of guests of one order.
"""

from __future__ import annotations

import sys
import time

from . import config as conf
from . import lxc, pct
from .errors import PveError
from .schema import startup_order

LAST = 2**31


def in_order(*, only_onboot: bool) -> list[tuple[int, str, dict[str, int]]]:
    """(order, vmid, startup) of this node's containers, first to start first."""
    found = []
    for vmid in conf.vmids():
        settings = conf.load(vmid).settings
        if only_onboot and settings.get("onboot") != "1":
            continue
        startup = startup_order(settings["startup"]) if "startup" in settings else {}
        found.append((startup.get("order", LAST), vmid, startup))
    return sorted(found, key=lambda guest: (guest[0], int(guest[1])))


def start_all() -> None:
    for _order, vmid, startup in in_order(only_onboot=True):
        if lxc.is_running(vmid):
            continue
        print(f"Starting CT {vmid}", file=sys.stderr)
        try:
            pct.start(vmid)
        except PveError as error:
            print(f"Starting CT {vmid} failed: {error.message}", file=sys.stderr)
        if startup.get("up"):
            print(f"Waiting for {startup['up']} seconds (startup delay)", file=sys.stderr)
            time.sleep(startup["up"])


def stop_all() -> None:
    for _order, vmid, startup in reversed(in_order(only_onboot=False)):
        if not lxc.is_running(vmid):
            continue
        timeout = startup.get("down", 180)
        print(f"Stopping CT {vmid} (timeout = {timeout} seconds)", file=sys.stderr)
        try:
            pct.stop(vmid, kill=False, timeout=timeout, kill_after=True)
        except PveError as error:
            print(f"Stopping CT {vmid} failed: {error.message}", file=sys.stderr)

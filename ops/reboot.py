"""A reboot that is known to have happened, since the host's boot id is another one.

pyinfra's own operation compares uptimes: a container's is that of the machine it runs on, and a server that takes
minutes to stop its guests still answers with the old one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from pyinfra.api import FunctionCommand, StringCommand
from pyinfra.api.host import Host
from pyinfra.api.state import State
from pyinfra.facts.server import Command

from ops.refusal import failed

BOOT_ID = "cat /proc/sys/kernel/random/boot_id"
INTERVAL_S = 3


def rebooted(timeout_s: int) -> Iterator[Any]:
    """Commands that reboot the current host and wait until it answers again; they fail after `timeout_s`."""
    before: list[str] = []

    def remember(state: State, host: Host) -> None:
        before.append(host.get_fact(Command, command=BOOT_ID))

    def wait(state: State, host: Host) -> bool:
        host.disconnect()
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            time.sleep(INTERVAL_S)
            if _boot_id(host) not in ("", before[0]):
                return True
            host.disconnect()
        return failed(state, host, f"did not come back within {timeout_s} s of its reboot: look at its console")

    yield FunctionCommand(remember, (), {})
    # Detached, so that the command ends before the connection does.
    yield StringCommand("( sleep 1 && reboot ) </dev/null >/dev/null 2>&1 &")
    yield FunctionCommand(wait, (), {})


def _boot_id(host: Host) -> str:
    """Empty while the host does not answer, as it may at any moment of a reboot."""
    host.connect(show_errors=False)
    if not host.connected:
        return ""
    try:
        status, output = host.run_shell_command(StringCommand(BOOT_ID), _timeout=10)
    except Exception:  # the connection broke while it was asked
        return ""
    return output.stdout.strip() if status else ""

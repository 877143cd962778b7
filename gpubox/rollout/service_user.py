"""The user the server runs as, asked of its unit, and how to run something else with exactly its rights."""

from __future__ import annotations

import os
import subprocess

from gpubox.rollout.service import UNIT


def service_user(unit: str = UNIT) -> str | None:
    """None when it is root, when there is no such unit, or when we are not root and could not change to it anyway."""
    if os.geteuid() != 0:
        return None
    command = ["systemctl", "show", unit, "--property=User", "--value"]
    try:
        user = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return None
    return user if user not in ("", "root") else None


def run_as(user: str | None) -> tuple[str, ...]:
    """What goes before a command, which then dies with its caller. Nothing for None.

    A change of user clears an earlier request for that signal (prctl(2), PR_SET_PDEATHSIG), so it is made again here.
    """
    if user is None:
        return ()
    return ("setpriv", "--pdeathsig", "KILL", f"--reuid={user}", f"--regid={user}", "--init-groups", "--no-new-privs")

"""Fault drills: stop an activation at a named step, so that a test can kill it exactly there.

Only root can ask for it (a file below /run), and a reboot forgets it.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

DRILL_FILE = Path("/run/gpubox/drill")


def pause_if_asked(point: str) -> None:
    """Stop this process (SIGSTOP) when the drill file names `point`; go on when somebody sends SIGCONT."""
    if DRILL_FILE.exists() and DRILL_FILE.read_text().strip() == point:
        os.kill(os.getpid(), signal.SIGSTOP)

"""Run a program on this machine, or say clearly why that failed."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from gpubox.errors import GpuboxError

Completed = subprocess.CompletedProcess[str]


ENDS_WITH_US = ("setpriv", "--pdeathsig", "TERM")  # before a long command: it ends too when this process is killed


def run(
    *command: object,
    check: bool = True,
    timeout: float | None = None,
    text: str = "",
    environment: Mapping[str, str] | None = None,
) -> Completed:
    """Run `command` with `text` on its standard input and capture its output. `timeout` in seconds.

    Raises GpuboxError when it takes too long, cannot be started, or (with `check`) exits with another status than 0.
    """
    words = [str(word) for word in command]
    shown = " ".join(words)
    try:
        done = subprocess.run(
            words, input=text, capture_output=True, text=True, timeout=timeout, check=False, env=environment
        )
    except FileNotFoundError as error:
        raise GpuboxError(f"lab: {words[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise GpuboxError(f"lab: no end after {timeout:.0f} s: {shown}", detail=str(error.output or "")) from error
    if check and done.returncode != 0:
        raise GpuboxError(
            f"lab: exit status {done.returncode}: {shown}",
            detail="\n".join((done.stdout + done.stderr).splitlines()[-30:]),
        )
    return done

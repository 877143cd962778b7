"""Run a long command: its lines as they come, and a sign of life when it is silent. And where uv is."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from gpubox.errors import GpuboxError
from gpubox.layout import Layout

SILENCE_S = 15.0


def uv_program() -> Path:
    """The uv of the environment that runs this: its version is locked with it. Raises GpuboxError."""
    beside = Path(sys.executable).with_name("uv")
    if not beside.is_file():
        raise GpuboxError(f"{beside} is missing", hint="install this environment again from its lock: uv is in it")
    return beside


def uv_environment(layout: Layout) -> dict[str, str]:
    """The caller's variables (proxy, index), without its virtual environment, and with the box's cache.

    UV_SYSTEM_CERTS: what the machine trusts, uv trusts; by itself it would not know the authority of a company's proxy.
    """
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    return environment | {
        "UV_CACHE_DIR": str(layout.wheel_cache),
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_NO_PROGRESS": "1",
        "UV_SYSTEM_CERTS": "1",
    }


def run_lines(
    command: Sequence[str | Path],
    *,
    environment: Mapping[str, str],
    on_line: Callable[[str], None],
    on_silence: Callable[[float], None],
    errors: IO[bytes] | None = None,
) -> int:
    """The exit status, negative for a signal. Standard error goes to `errors`, or among the lines when that is None.

    on_silence is called with the seconds since the start whenever no line came for SILENCE_S. The command dies with its
    caller, also with one that is killed: the next try must not meet it at work. Raises OSError when it cannot start.
    """
    started = time.monotonic()
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if errors is None else errors,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
    try:
        while True:
            try:
                line = lines.get(timeout=SILENCE_S)
            except queue.Empty:
                on_silence(time.monotonic() - started)
                continue
            if line is None:
                return process.wait()
            on_line(line.rstrip("\n"))
    except BaseException:
        process.kill()
        process.wait()
        raise


def _pump(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)

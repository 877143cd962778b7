"""Run pyinfra against boxes of the lab, as a person would: its command line, in the repository's root."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from lab.settings import REPOSITORY
from lab.shell import Completed

INVENTORY = "inventories/lab.py"


def command(*arguments: str) -> list[str]:
    """`pyinfra inventories/lab.py ARGUMENTS...`, with the pyinfra of the Python that runs this."""
    return [str(Path(sys.executable).with_name("pyinfra")), INVENTORY, *arguments]


def environment(names: Iterable[str]) -> dict[str, str]:
    """Variables that point inventories/lab.py at the boxes `names`."""
    return os.environ | {"GPUBOX_LAB_HOSTS": " ".join(names)}


def pyinfra(names: Iterable[str], *arguments: str, timeout: float = 1800) -> Completed:
    """Run pyinfra on the boxes `names` and return what it printed; the caller judges the exit status.

    `timeout` in seconds; raises subprocess.TimeoutExpired after it.
    """
    return subprocess.run(
        command(*arguments),
        cwd=REPOSITORY,
        env=environment(names),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )

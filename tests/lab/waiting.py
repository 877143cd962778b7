"""Wait for what a machine does in its own time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def wait_for(look: Callable[[], Found | None], timeout: float, what: str) -> Found:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if seen := look():
            return seen
        time.sleep(0.1)
    raise AssertionError(f"waited {timeout:.0f} s in vain for {what}")

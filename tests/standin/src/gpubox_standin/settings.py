"""What the environment asks of the stand-in: how long things take (seconds) and which fault to show."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum


class Fault(StrEnum):
    NONE = ""
    NEVER_READY = "never-ready"  # warm-up never ends: 503 for ever
    EXIT_AT_ONCE = "exit-at-once"  # one recognizable log line, exit status 1
    WRONG_MODEL = "wrong-model"  # /v1/models names another model
    NO_COMPLETION = "no-completion"  # healthy, but chats hang
    STUBBORN_WORKER = "stubborn-worker"  # a detached process ignores SIGTERM and keeps the listening socket
    DIES_LATER = "dies-later"  # kills itself STANDIN_DIE_AFTER_S after it got ready
    HANG_AFTER_N = "hang-after-n"  # healthy, but every chat after the first STANDIN_HANG_AFTER hangs (sglang#22779)


@dataclass(frozen=True)
class Settings:
    fault: Fault = Fault.NONE
    load_s: float = 0.5
    warmup_s: float = 0.3
    health_s: float = 0.05  # about 1 s in the real engine: it generates a token
    token_s: float = 0.0  # pause before each token
    drain_s: float = 0.1  # how often a drain looks at the requests in flight; 5 s in the real engine
    die_after_s: float = 5.0
    hang_after: int = 100
    accept_length: float = 0.0  # tokens a pass that a speculating server reports; 0: it does not speculate
    worker_life_s: float = 3600.0  # bounds the stubborn worker, should a test lose it


def from_environment() -> Settings:
    """Reads STANDIN_<FIELD>, e.g. STANDIN_LOAD_S. Raises ValueError for a fault that does not exist."""

    def number(name: str) -> float:
        return float(os.environ.get(f"STANDIN_{name.upper()}", getattr(Settings, name)))

    names = ("load_s", "warmup_s", "health_s", "token_s", "drain_s", "die_after_s", "worker_life_s", "accept_length")
    fault = Fault(os.environ.get("STANDIN_FAULT", ""))
    return Settings(fault=fault, hang_after=int(number("hang_after")), **{name: number(name) for name in names})

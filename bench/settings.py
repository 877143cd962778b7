"""make bench-settings: what it costs to validate the settings of 1,000 boxes and to render all that they get.

Every box has its own settings; profiles, stacks and overlays are those of the repository. The same work as a deploy
does before its first operation, without any host: settings, plan, specs, releases, and their ids. Judged by the time
of the core: nothing here waits.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpubox.settings import load_settings
from gpubox.specs.plan import plan_box

ROOT = Path(__file__).resolve().parents[1]
GOAL_S = 5.0


def boxes(count: int) -> Iterator[dict[str, Any]]:
    """Settings that differ in profile, stack, address and verdict on P2P."""
    for number in range(count):
        kimi = number % 2 == 0
        stack, standby = ("cuda130-next", "cuda128") if number % 3 else ("cuda128", "cuda130-next")
        data: dict[str, Any] = {"stack": stack, "standby_stacks": [standby], "python": ("3.11", "3.12")[number % 2]}
        data |= {"server": "kimi-k2.5"} if kimi else {"server": "smollm2", "overlay": "cpu"}
        data |= {"listen_address": f"10.0.{number // 250}.{number % 250 + 1}", "ssh_user": "root"}
        if number % 4 == 0:
            data["nccl"] = {"profile": "no-p2p"}
        yield data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--boxes", type=int, default=1000)
    count = parser.parse_args().boxes
    started, used = time.perf_counter(), time.process_time()
    ids = set()
    for number, data in enumerate(boxes(count)):
        plan = plan_box(ROOT, load_settings(data, f"box{number}"))
        ids |= {spec.id for spec in plan.releases}
    seconds, used = time.perf_counter() - started, time.process_time() - used
    cost = f"{used:.2f} s of one core (goal for 1,000: {GOAL_S:.0f} s), {seconds:.2f} s on the clock"
    sys.stdout.write(f"{count} boxes, {len(ids)} releases: {cost}\n")
    if len(ids) != 2 * count:
        raise SystemExit("two boxes of different addresses got one release")
    if used > GOAL_S * max(count, 1000) / 1000:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

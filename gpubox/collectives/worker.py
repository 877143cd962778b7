"""One rank of an all-reduce. Runs under a stack's own Python: imports nothing but the standard library and torch.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=4000 python -P worker.py BACKEND DEVICE

DEVICE is the index of the rank's GPU, ignored by gloo. Prints one JSON object a line on standard output: each phase as
it begins, and what was measured; what libraries print goes to standard error (NCCL writes to file descriptor 1, in the
middle of others' lines). The parent ends it when a phase takes too long.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

# Bytes. A token's hidden state; above the 512 KiB from which NCCL 2.26.2 faults on Blackwell (NVIDIA/nccl#2418);
# prefill's size; and one that bandwidth can be told from.
SIZES = (16 * 1024, 1024 * 1024, 16 * 1024 * 1024, 64 * 1024 * 1024)
ROUNDS = 5


events = os.fdopen(os.dup(1), "w")


def say(**event: Any) -> None:
    print(json.dumps(event), file=events, flush=True)


def main() -> None:
    os.dup2(2, 1)
    backend, device = sys.argv[1], int(sys.argv[2])
    say(phase="import")
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    say(phase="init")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    for size in SIZES:
        say(phase=f"all-reduce {size}")
        say(size=size, seconds=median_seconds(torch, dist, size, f"cuda:{device}" if backend == "nccl" else "cpu"))
    version = ".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else torch.__version__
    say(phase="end", library=f"{'NCCL' if backend == 'nccl' else 'gloo of torch'} {version}")
    dist.destroy_process_group()


def median_seconds(torch: Any, dist: Any, size: int, place: str) -> float:
    """Of ROUNDS all-reduces of `size` bytes, each checked. Ends the process with status 3 when a sum is wrong."""
    seconds = []
    rank, world = dist.get_rank(), dist.get_world_size()
    for number in range(ROUNDS):
        # Small whole numbers: their sum is exact, so equality is the test.
        values = torch.full((size // 4,), float(rank + 1 + number), dtype=torch.float32, device=place)
        finish(torch, place)
        started = time.perf_counter()
        dist.all_reduce(values)
        finish(torch, place)
        seconds.append(time.perf_counter() - started)
        wanted = float(world * (world + 1) // 2 + world * number)
        if not bool((values == wanted).all()):
            say(wrong=f"{size} bytes: {values.min().item()} to {values.max().item()} instead of {wanted}")
            sys.exit(3)
    return sorted(seconds)[ROUNDS // 2]


def finish(torch: Any, place: str) -> None:
    if place != "cpu":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()

"""Start the ranks of one all-reduce, watch their phases, end them all when one is late. Nothing outlives the call."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gpubox.errors import GpuboxError

WORKER = Path(__file__).with_name("worker.py")
Backend = Literal["nccl", "gloo"]
Events = queue.Queue[tuple[int, dict[str, Any] | None]]  # the rank's number; None when it says no more

# Seconds that a phase may take. Importing torch reads gigabytes on a cold box; the communicator of eight ranks takes
# seconds; an all-reduce takes milliseconds, or never ends: NVIDIA/nccl#1999 hangs with every GPU at 100 %.
DEADLINES_S = {"start": 60.0, "import": 300.0, "init": 120.0, "all-reduce": 30.0, "end": 30.0}
KILL_GRACE_S = 10.0  # a process that waits for a hung GPU may ignore even SIGKILL
TAIL_LINES = 12
# After a change of user, never before: that clears the signal (prctl(2), PR_SET_PDEATHSIG).
DIES_WITH_ITS_CALLER = ("setpriv", "--pdeathsig", "KILL")

# NCCL's own words with NCCL_DEBUG=INFO: "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM".
_TRANSPORT = re.compile(r"NCCL INFO Channel \S+ : \S+ -> \S+(?: \[\w+\])? via (\S+)")


@dataclass(frozen=True)
class Group:
    """`devices`: the GPU index of each rank; for gloo only their number counts."""

    backend: Backend
    devices: tuple[int, ...]

    def __str__(self) -> str:
        where = f" (GPUs {', '.join(map(str, self.devices))})" if self.backend == "nccl" else ""
        return f"{len(self.devices)} ranks{where}"


@dataclass(frozen=True)
class Measured:
    """seconds: median of an all-reduce by size in bytes, of the slowest rank. transports: NCCL's "via X", counted."""

    seconds: dict[int, float]
    library: str
    transports: dict[str, int] = field(default_factory=dict)

    def bus_gb_per_s(self, ranks: int) -> float:
        """Bus bandwidth at the largest size: bytes * 2 (n-1)/n / time, as NVIDIA's nccl-tests define it."""
        size = max(self.seconds)
        return size * 2 * (ranks - 1) / ranks / self.seconds[size] / 1e9


class CollectiveError(GpuboxError):
    """An all-reduce that hung, gave a wrong sum or died. `message` says which rank was where."""


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[str]
    phase: str = "start"
    since: float = field(default_factory=time.monotonic)
    begun: set[int] = field(default_factory=set)
    seconds: dict[int, float] = field(default_factory=dict)
    library: str = ""
    wrong: str = ""
    said: list[str] = field(default_factory=list)
    readers: list[threading.Thread] = field(default_factory=list)

    @property
    def late(self) -> bool:
        return time.monotonic() - self.since > DEADLINES_S[self.phase.split(" ")[0]]

    @property
    def measured_all(self) -> bool:
        return bool(self.begun) and self.begun == self.seconds.keys()

    def listen(self, events: Events) -> None:
        for work, arguments in ((_read_events, (self, events)), (_read_words, (self,))):
            self.readers.append(threading.Thread(target=work, args=arguments, daemon=True))
            self.readers[-1].start()

    def last_words(self) -> list[str]:
        """Of the libraries; complete once the process has ended."""
        for reader in self.readers:
            reader.join(timeout=KILL_GRACE_S)
        return [f"rank {self.number}: {line}" for line in self.said[-TAIL_LINES:]]

    def take(self, event: dict[str, Any]) -> None:
        if "phase" in event:
            self.phase, self.since = str(event["phase"]), time.monotonic()
            self.library = str(event.get("library", ""))
            if size := re.fullmatch(r"all-reduce (\d+)", self.phase):
                self.begun.add(int(size[1]))
        elif "wrong" in event:
            self.wrong = str(event["wrong"])
        elif "size" in event:
            self.seconds[int(event["size"])] = float(event["seconds"])


@dataclass(frozen=True)
class Launch:
    """How a rank is started: the stack's Python, the release's environment, and what goes before (another user)."""

    python: Path
    environment: Mapping[str, str]
    prefix: Sequence[str] = ()
    worker: Path = WORKER


def all_reduce(group: Group, launch: Launch, *, observe: Callable[[], str] = str) -> Measured:
    """Run it once. Raises CollectiveError.

    `observe` is asked what the machine looks like after a failure, before the ranks are ended: a hang is visible only
    then. Its text becomes part of the error's detail.
    """
    port = _free_port()
    events: Events = queue.Queue()
    ranks: list[_Rank] = []
    failure: CollectiveError | None = None
    try:
        for number, device in enumerate(group.devices):
            own = _rendezvous(number, len(group.devices), port)
            command = [*launch.prefix, *DIES_WITH_ITS_CALLER, str(launch.python), "-P", str(launch.worker)]
            ranks.append(_Rank(number, _start([*command, group.backend, str(device)], {**launch.environment, **own})))
            ranks[-1].listen(events)
        _watch(group, ranks, events)
    except CollectiveError as error:
        failure = error
        failure.detail = observe()
    finally:
        stuck = _end(ranks)
    if stuck:
        failure = failure or CollectiveError(f"all-reduce of {group} ({group.backend}): it passed, but did not end")
        failure.hint = f"ranks {stuck} hang in the driver and ignore SIGKILL: stop the node's other boxes and reboot it"
    if failure:
        failure.detail = "\n".join([failure.detail, *(line for rank in ranks for line in rank.last_words())]).strip()
        raise failure
    return _summary(group, ranks)


def _rendezvous(number: int, ranks: int, port: int) -> dict[str, str]:
    """How torch.distributed finds the others: https://docs.pytorch.org/docs/stable/distributed.html (env://)."""
    return {
        "RANK": str(number),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(number),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _watch(group: Group, ranks: list[_Rank], events: Events) -> None:
    """Until every rank has ended well. Raises CollectiveError for the first that did not."""
    open_ranks = {rank.number for rank in ranks}
    while open_ranks:
        try:
            number, event = events.get(timeout=0.5)
        except queue.Empty:
            pass
        else:
            if event is not None:
                ranks[number].take(event)
            else:
                open_ranks.discard(number)
                status = ranks[number].process.wait()
                if status != 0:
                    raise _failed(group, _death(ranks[number], status))
        if late := [rank for rank in ranks if rank.number in open_ranks and rank.late]:
            raise _failed(group, _hang(late))


def _death(rank: _Rank, status: int) -> str:
    if rank.wrong:
        return f"rank {rank.number} got a wrong sum: {rank.wrong}"
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    return f"rank {rank.number} ended with {how} in phase '{rank.phase}'"


def _hang(late: list[_Rank]) -> str:
    first = min(late, key=lambda rank: rank.since)
    numbers = ", ".join(str(rank.number) for rank in late)
    limit = DEADLINES_S[first.phase.split(" ")[0]]
    return f"rank{'s' if len(late) > 1 else ''} {numbers} hung in phase '{first.phase}' (limit {limit:.0f} s)"


def _failed(group: Group, what: str) -> CollectiveError:
    return CollectiveError(f"all-reduce of {group} ({group.backend}): {what}")


def _summary(group: Group, ranks: list[_Rank]) -> Measured:
    sizes = ranks[0].seconds
    silent = [rank.number for rank in ranks if not rank.measured_all or rank.seconds.keys() != sizes.keys()]
    if silent:
        raise _failed(group, f"ranks {silent} ended well, but did not measure all that they began")
    for rank in ranks:
        rank.last_words()
    via = Counter(found[1] for rank in ranks for line in rank.said if (found := _TRANSPORT.search(line)))
    return Measured({size: max(rank.seconds[size] for rank in ranks) for size in sizes}, ranks[0].library, dict(via))


def _end(ranks: list[_Rank]) -> list[int]:
    """Kill what still runs; the numbers of the ranks that do not die."""
    for rank in ranks:
        if rank.process.poll() is None:
            os.killpg(rank.process.pid, signal.SIGKILL)
    deadline = time.monotonic() + KILL_GRACE_S
    stuck = []
    for rank in ranks:
        try:
            rank.process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            stuck.append(rank.number)
    return stuck


def _read_events(rank: _Rank, events: Events) -> None:
    """Raises nothing: a line that is no event is a defect of the worker, and shown with the rest of what it said."""
    assert rank.process.stdout is not None
    for line in rank.process.stdout:
        try:
            events.put((rank.number, dict(json.loads(line))))
        except ValueError:
            rank.said.append(line.rstrip("\n"))
    events.put((rank.number, None))


def _read_words(rank: _Rank) -> None:
    assert rank.process.stderr is not None
    for line in rank.process.stderr:
        rank.said.append(line.rstrip("\n"))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port

"""What @pct costs beside plain ssh into the same container: commands per second, MB/s of an upload, memory.

    python -m bench.pct --inventory inventories/lab.py --pct @pct/node1/101 --ssh box1

Both hosts are in the inventory and are the same container, which runs and has an sshd. Writes below /var/tmp there.
"""

from gevent import monkey

monkey.patch_all()  # as pyinfra's command line does, and before anything else is imported

# ruff: noqa: E402
import argparse
import hashlib
import json
import os
import resource
import runpy
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from pyinfra.api import Config, Inventory, QuoteString, State, StringCommand
from pyinfra.api.connect import connect_all
from pyinfra.api.host import Host

MB = 1_000_000
REMOTE = "/var/tmp/gpubox-bench-pct"


def connected(inventory: Path, *names: str) -> list[Host]:
    """The hosts `names` of an inventory file; nothing else in it is connected to, but for the node."""
    groups = [group for group in runpy.run_path(str(inventory)).values() if isinstance(group, list)]
    state = State(Inventory((list(chain.from_iterable(groups)), {})), Config())
    state.cwd = str(Path.cwd())
    hosts = [state.inventory.get_host(name) for name in names]
    state.limit_hosts = hosts
    connect_all(state)
    for host in hosts:
        if not host.connected:
            raise SystemExit(f"{host.name}: no connection")
        run(host, "true")
    return hosts


def run(host: Host, *command: str) -> str:
    done, output = host.run_shell_command(StringCommand(*map(QuoteString, command)))
    if not done:
        raise SystemExit(f"{host.name}: {' '.join(command)}: {output.output}")
    return str(output.stdout)


def alternating(arms: dict[str, Callable[[], float]], rounds: int) -> dict[str, Any]:
    """Each arm's numbers (higher is better), taken in turn so that a busy moment of the machine hits all of them."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            found[name].append(round(arm(), 1))
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {"median": medians, "ratio": round(medians["pct"] / medians["ssh"], 2), "runs": found}


def commands_per_second(pct: Host, ssh: Host, *, rounds: int = 7, commands: int = 25) -> dict[str, Any]:
    def rate(host: Host) -> float:
        started = time.perf_counter()
        for _ in range(commands):
            run(host, "true")
        return commands / (time.perf_counter() - started)

    return {**alternating({"pct": lambda: rate(pct), "ssh": lambda: rate(ssh)}, rounds), "goal": 0.8}


def upload_mb_per_second(pct: Host, ssh: Host, *, rounds: int = 5, megabytes: int = 100) -> dict[str, Any]:
    """Over a file that is there already, as in a deploy; what arrived is compared with what was sent."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "source"
        content = os.urandom(megabytes * MB)
        source.write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()

        def rate(host: Host) -> float:
            started = time.perf_counter()
            if not host.put_file(str(source), REMOTE):
                raise SystemExit(f"{host.name}: the upload failed")
            seconds = time.perf_counter() - started
            if not run(host, "sha256sum", REMOTE).startswith(digest):
                raise SystemExit(f"{host.name}: what arrived differs from what was sent")
            return megabytes / seconds

        try:
            measured = alternating({"pct": lambda: rate(pct), "ssh": lambda: rate(ssh)}, rounds)
        finally:
            run(pct, "rm", "-f", REMOTE)
    return {**measured, "goal": 0.9}


def peak_memory_of_upload(pct: Host, *, megabytes: int = 1000) -> dict[str, Any]:
    """MiB this process ever had, after a small upload and after a large one. Must be measured before anything big."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "source"
        peaks = []
        try:
            for size in (10, megabytes):
                source.touch()
                os.truncate(source, size * MB)  # a hole: nothing to store, all of it to send
                if not pct.put_file(str(source), REMOTE):
                    raise SystemExit(f"{pct.name}: the upload failed")
                peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        finally:
            run(pct, "rm", "-f", REMOTE)
    return {"megabytes": megabytes, "peak_mib": round(peaks[1]), "growth_mib": round(peaks[1] - peaks[0], 1)}


def measure(inventory: Path, pct_name: str, ssh_name: str) -> dict[str, Any]:
    pct, ssh = connected(inventory, pct_name, ssh_name)
    return {
        "memory of a 1 GB upload": peak_memory_of_upload(pct),
        "commands per second": commands_per_second(pct, ssh),
        "MB/s of a 100 MB upload": upload_mb_per_second(pct, ssh),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inventory", type=Path, default=Path("inventories/lab.py"))
    parser.add_argument("--pct", required=True, metavar="HOST")
    parser.add_argument("--ssh", required=True, metavar="HOST")
    options = parser.parse_args()
    print(json.dumps(measure(options.inventory, options.pct, options.ssh), indent=2))


if __name__ == "__main__":
    main()

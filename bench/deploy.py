"""make bench-deploy: what a rollback, a converged deploy and a second stack cost, as ratios from one run in the lab.

Runs the real engine in a container of the lab's node node1; brings it up and deploys to it first if need be. Ends with
what reaching a container through its node costs beside plain ssh into it (bench/pct.py).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

from gpubox.errors import GpuboxError
from lab.boxes import Lab
from lab.controller import environment, pyinfra
from lab.node import Guest, Node
from lab.question import ask, endpoint

NODE = "node1"
LIMIT_S = 1200.0
OTHER = {"cuda130-next": "cuda128", "cuda128": "cuda130-next"}


def deploy(*arguments: str) -> str:
    """What pyinfra printed on stderr. Ends the benchmark when it failed."""
    done = pyinfra([NODE], *arguments)
    if done.returncode != 0:
        raise SystemExit(f"pyinfra {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    return str(done.stderr)


def answers(box: Guest) -> bool:
    try:
        return "Paris" in ask(endpoint(str(box.address)), timeout=60)
    except GpuboxError:
        return False


def seconds_to_answer(box: Guest, act: Callable[[], None]) -> float:
    """From the start of `act` to the first right answer of a server that is another process than before."""
    before = main_pid(box)
    started = time.monotonic()
    act()
    while time.monotonic() - started < LIMIT_S:
        if main_pid(box) not in (before, 0) and answers(box):
            return time.monotonic() - started
        time.sleep(0.2)
    raise SystemExit(f"no right answer within {LIMIT_S:.0f} s")


def main_pid(box: Guest) -> int:
    return int(box.run("systemctl show -p MainPID --value sglang.service").stdout or 0)


def current_stack(box: Guest) -> str:
    return str(json.loads(box.run("gpubox status --json").stdout)["current"]).split("-", 1)[1].rsplit("-", 1)[0]


def rollback_over_restart(box: Guest, repeats: int) -> dict[str, object]:
    """Rollback and bare restart to the same stack, alternating; both arms start from the other stack's warm caches."""
    restarts, rollbacks = [], []
    for _ in range(repeats):
        home = current_stack(box)
        restarts.append(seconds_to_answer(box, lambda: in_background(box, "systemctl restart sglang.service")))
        box.run(f"gpubox rollback --stack {OTHER[home]}")
        rollbacks.append(seconds_to_answer(box, partial(in_background, box, f"gpubox rollback --stack {home}")))
        wait_until_recorded(box)
    return {
        "restart_s": restarts,
        "rollback_s": rollbacks,
        "ratio": round(statistics.median(rollbacks) / statistics.median(restarts), 3),
        "goal": 1.05,
    }


def in_background(box: Guest, command: str) -> None:
    subprocess.Popen(
        ["lxc-attach", "-n", box.node.container, "--", "lxc-attach", "-n", str(box.vmid), "--", "sh", "-c", command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def wait_until_recorded(box: Guest) -> None:
    while json.loads(box.run("gpubox status --json").stdout)["activation"]:
        time.sleep(0.5)


def converged_deploy(repeats: int) -> dict[str, object]:
    """Seconds of a deploy that changes nothing over those of pyinfra running `true`; number of remote commands."""
    idle, full = [], []
    for _ in range(repeats):
        idle.append(timed(lambda: deploy("exec", "-y", "--", "true")))
        full.append(timed(lambda: deploy("deploy.py", "-y")))
    commands = deploy("deploy.py", "-y", "-vvv", "--debug").count("Running command on ")
    return {
        "connect_only_s": round(statistics.median(idle), 2),
        "deploy_s": round(statistics.median(full), 2),
        "beyond_connection_s": round(statistics.median(full) - statistics.median(idle), 2),
        "goal_s": 5,
        "remote_commands": commands,
        "controller_peak_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024,
    }


def timed(act: Callable[[], object]) -> float:
    started = time.monotonic()
    act()
    return time.monotonic() - started


def second_stack(box: Guest) -> dict[str, object]:
    """Build the standby stack again from a warm cache, under the same root: seconds, and bytes that are not links."""
    stack = box.run("ls -d /opt/gpubox/stacks/cuda128-*").stdout.strip()
    spec = stack.replace("/stacks/", "/incoming/")
    used = "df -B1 --output=used /opt/gpubox | tail -n 1"
    box.run(f"mv {stack} /opt/gpubox/.bench-first")
    try:
        before = int(box.run(used).stdout)
        seconds = timed(lambda: box.run(f"gpubox stack build --offline --cache-owner gpubox {spec}", timeout=1200))
        after = int(box.run(used).stdout)
    finally:
        box.run(f"rm -rf {stack} && mv /opt/gpubox/.bench-first {stack}")
    apparent = int(box.run(f"du -sb --count-links {stack}").stdout.split()[0])
    return {"seconds": round(seconds, 1), "bytes_added": after - before, "bytes_apparent": apparent}


def pct_beside_ssh(box: Guest) -> dict[str, object]:
    """A program of its own, since it patches the standard library as pyinfra's command line does."""
    box.authorize()
    hosts = ["--inventory", "bench/pct_hosts.py", "--pct", f"@pct/{NODE}/{box.vmid}", "--ssh", "the-container"]
    done = subprocess.run(
        [sys.executable, "-m", "bench.pct", *hosts],
        env=environment([NODE]),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"bench.pct failed:\n{done.stdout}{done.stderr}")
    return dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    Lab.up([NODE])
    box = Node(NODE).guest(101)
    deploy("deploy.py", "-y")
    measurements: dict[str, Callable[[], dict[str, object]]] = {
        "converged deploy": lambda: converged_deploy(5),
        "second stack from a warm cache": lambda: second_stack(box),
        "rollback over restart": lambda: rollback_over_restart(box, options.repeats),
        "@pct beside plain ssh": lambda: pct_beside_ssh(box),
    }
    found = {}
    for title, measure in measurements.items():
        found[title] = measure()
        if not options.json:
            print(title, *(f"  {name:24} {value}" for name, value in found[title].items()), sep="\n", flush=True)
    if options.json:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()

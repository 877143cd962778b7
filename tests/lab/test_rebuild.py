"""The main job on real input: from a bare node to the real engine's answer in one run, and everything that follows.

The real engine from the real locks on CPU, in a container that the deploy makes. What Proxmox and NVIDIA would bring is
the lab's stand-ins (docs/lab-node.md); systemd, LXC, ssh, wheels and model are real.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpubox.errors import GpuboxError
from lab.boxes import Lab, host
from lab.controller import pyinfra
from lab.node import Guest, Node
from lab.question import ask, endpoint
from lab.settings import GATEWAY
from lab.shell import Completed
from tests.lab.apt_repository import BOTH_TOOLKITS, NVCC, toolkit_settings
from tests.lab.conftest import TestBoxes
from tests.lab.waiting import wait_for

REPO = Path(__file__).resolve().parents[2]
NODE, OTHER = "testnode2", "test3"
BOX = f"@pct/{NODE}/101"
NEW, OLD = "cuda130-next", "cuda128"
DATA: list[str] = []  # of every deploy here; the fixture `toolkits` fills it
CUDA_HOME = {NEW: "/usr/local/cuda-13.0", OLD: "/usr/local/cuda-12.8"}


@pytest.fixture(scope="module", autouse=True)
def toolkits(bare: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Both toolkits, from a small signed repository, in every deploy of this module: empty but for an nvcc each.

    After the node: the address that it is served on is the bridge's, which comes with the first host.
    """
    with toolkit_settings(tmp_path_factory.mktemp("toolkits"), BOTH_TOOLKITS, str(GATEWAY)) as settings:
        DATA[:] = ["--data", f"toolkits={json.dumps(settings)}"]
        yield


def run(names: list[str], *arguments: str) -> Completed:
    return pyinfra(names, *arguments, *DATA)


@pytest.fixture(scope="module")
def bare(lab: TestBoxes) -> Iterator[Node]:
    lab.up(NODE, wheels=True)
    node = host(NODE)
    assert isinstance(node, Node)
    yield node
    lab.down(NODE)


@pytest.fixture(scope="module")
def served(bare: Node) -> Guest:
    """The container of a node that was bare before; its wheels are kept for the next box."""
    done = run([NODE], "deploy.py", "-y")
    assert done.returncode == 0, done.stdout + done.stderr
    Lab.save_cache(NODE)
    return bare.guest(101)


def status(box: Guest) -> dict[str, object]:
    return json.loads(box.run("gpubox status --json").stdout)


def answer(box: Guest) -> str:
    return ask(endpoint(str(box.address)))


def stack_served(box: Guest) -> str:
    """The stack that the running process really is of, from the kernel and not from our records."""
    pid = status(box)["main_pid"]
    command = box.run(f"tr '\\0' ' ' < /proc/{pid}/cmdline").stdout
    return command.split("/opt/gpubox/stacks/")[1].split("/")[0].rsplit("-", 1)[0]


def check_served(box: Guest, stack: str) -> None:
    """The box answers from that stack, whose process has the CUDA_HOME of that stack, with its toolkit there."""
    assert "Paris" in answer(box)
    assert stack_served(box) == stack
    pid = status(box)["main_pid"]
    environment = box.run(f"tr '\\0' '\\n' < /proc/{pid}/environ").stdout.splitlines()
    home = CUDA_HOME[stack]
    assert [line for line in environment if line.startswith("CUDA_HOME=")] == [f"CUDA_HOME={home}"]
    assert box.run(f"{home}/bin/nvcc").stdout.strip() == NVCC[home]


def changes(text: str) -> list[str]:
    """The operations that changed something or failed, from `--json`."""
    results = json.loads(text)["results"]
    assert results["failed_hosts"] == []
    assert results["totals"]["hosts"] > 0
    return [operation["name"] for operation in results["operations"] if operation["success"] or operation["error"]]


def again() -> list[str]:
    done = run([NODE], "deploy.py", "-y", "--json")
    assert done.returncode == 0, done.stderr
    return changes(done.stdout)


def refused(*arguments: str) -> str:
    """What a deploy says that must not succeed."""
    done = run([NODE], "deploy.py", "-y", *arguments)
    assert done.returncode != 0, done.stderr
    return done.stderr


def test_a_dry_run_on_a_bare_node_shows_it_all_and_changes_nothing(bare: Node) -> None:
    planned = run([NODE], "deploy.py", "--dry")
    assert planned.returncode == 0, planned.stderr
    steps = ["Node | Driver", "CT 101: present", "CT 101: running", "Nodes are done", "Stack cuda130-next", "Activate"]
    places = [planned.stderr.rindex(step) for step in steps]
    assert places == sorted(places), "nodes come first"
    assert bare.run("pct list; dkms status 2>/dev/null", check=False).stdout == ""


def test_the_argument_tables_are_those_of_the_engines_on_the_box(served: Guest) -> None:
    """engines/*.json against the wheels that the locks really brought."""
    for stack, version in ((NEW, "0.5.17"), (OLD, "0.5.9")):
        site = f"/opt/gpubox/stacks/{stack}-*/venv/lib/python3.*/site-packages"
        served.run(f"/opt/gpubox/tools/bin/python -m gpubox.devtools.engine_table --out /tmp/table.json {site}")
        table = served.run("cat /tmp/table.json; rm /tmp/table.json").stdout
        assert table == (REPO / "engines" / f"sglang-{version}.json").read_text()


def test_the_real_engine_answers_from_the_new_stack(served: Guest) -> None:
    check_served(served, NEW)
    assert status(served)["overlay"] == "cpu"


def test_the_second_deploy_changes_and_restarts_nothing_on_node_and_box(served: Guest) -> None:
    before, booted = status(served), served.node.run("cat /proc/sys/kernel/random/boot_id").stdout
    assert again() == []
    after = status(served)
    assert after["main_pid"] == before["main_pid"]
    assert after["restarts"] == 0
    assert served.node.run("cat /proc/sys/kernel/random/boot_id").stdout == booted


def test_two_ranks_of_the_stacks_own_torch_sum_up(served: Guest) -> None:
    """gloo, beside the running server: on GPUs an activation does it, with NCCL, before anything is loaded."""
    done = json.loads(served.run("gpubox collectives check --ranks 2 --json").stdout)
    assert done["failure"] is None
    (group,) = done["groups"]
    assert group["devices"] == [0, 1]
    assert group["library"].startswith("gloo of torch 2.11")


def test_a_sweep_of_the_real_engine_by_its_own_load_generator(served: Guest) -> None:
    sweep = "gpubox bench sweep --json --concurrency 2 --repeats 1 --output-tokens 8 --requests-per-stream 2"
    cell = json.loads(served.run(sweep).stdout)
    assert cell["invalid"] == []
    assert cell["measured"]["requests"] == 4
    assert cell["measured"]["output_tokens"] == 32
    assert cell["work"]["max_running_requests"] == 16, "the limit that the profile sets, as the server says it"
    assert "--max-running-requests" in cell["arm"]["arguments"]
    assert served.run(sweep).stdout == "", "measured once"


def test_rollback_without_a_network_and_forward_again(served: Guest) -> None:
    served.cut_internet()
    try:
        back = run([NODE], "rollback.py", "-y", "--data", f"stack={OLD}", "--limit", BOX)
        assert back.returncode == 0, back.stdout + back.stderr
        check_served(served, OLD)
        forward = run([NODE], "rollback.py", "-y", "--limit", BOX)
        assert forward.returncode == 0, forward.stdout + forward.stderr
        check_served(served, NEW)
    finally:
        served.restore_internet()
    assert served.run("gpubox verify --deep", check=False).returncode == 0
    verdicts = [entry["verdict"] for entry in json.loads(served.run("gpubox history --json").stdout)]
    assert verdicts == ["proved", "proved", "proved"]


def test_two_boxes_from_one_commit_are_equal(lab: TestBoxes, served: Guest) -> None:
    """Byte-equal stack.json and release.json of both stacks: in a container on a node, and on a box of its own."""
    (other,) = lab.up(OTHER, wheels=True)
    done = run([OTHER], "prepare.py", "-y")
    assert done.returncode == 0, done.stdout + done.stderr
    records = "cd /opt/gpubox && sha256sum stacks/*/stack.json releases/*/*"
    first, second = served.run(records).stdout, other.run(records).stdout
    assert first == second
    assert first.count("stack.json") == 2
    assert first.count("release.json") == 2
    lab.down(OTHER)


def test_a_module_of_another_version_stops_the_box(served: Guest) -> None:
    """H1: the pair of driver and libraries must be equal to the last number. Nothing is substituted."""
    banner = served.node.run("cat /proc/driver/nvidia/version").stdout
    served.node.write("/proc/driver/nvidia/version", banner.replace("590.48.01", "590.44.01"))
    try:
        said = refused("--limit", BOX)
        assert "590.48.01" in said
        assert "590.44.01 loaded" in said
        assert "Paris" in answer(served), "the running server was touched"
    finally:
        served.node.write("/proc/driver/nvidia/version", banner)


def test_a_box_without_the_uvm_node_is_told_from_a_healthy_one(served: Guest) -> None:
    """H2: nvidia-smi is content without it, CUDA is not."""
    device = served.run("stat -c '%t %T' /dev/nvidia-uvm").stdout.split()
    major, minor = (int(number, 16) for number in device)
    served.run("umount /dev/nvidia-uvm && rm /dev/nvidia-uvm")
    try:
        assert served.run("nvidia-smi -L").stdout.count("GPU ") == 1
        said = refused("--limit", BOX)
        assert "999" in said
        assert "uvm" in said
    finally:
        served.run(f"mknod -m 666 /dev/nvidia-uvm c {major} {minor}")


def test_a_node_that_lost_power_serves_again_with_nobodys_help(served: Guest) -> None:
    """Last, since it takes the server down: device nodes first, then the container, then the server."""
    node = served.node
    node.hard_stop()
    node.start()
    wait_for(lambda: answers(served), 300, "the server to answer after the node's boot")
    check_served(served, NEW)
    shown = "systemctl show -p ActiveEnterTimestampMonotonic --value"
    devices, guests = (
        int(node.run(f"{shown} {unit}").stdout) for unit in ("gpubox-nvidia-devices.service", "pve-guests.service")
    )
    assert 0 < devices < guests
    assert again() == []


def answers(box: Guest) -> bool:
    try:
        return "Paris" in answer(box)
    except GpuboxError:
        return False

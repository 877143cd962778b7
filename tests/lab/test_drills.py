"""Fault drills on one real box: whatever goes wrong, a proved release serves, and the next deploy converges."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest

from gpubox.errors import ExitCode
from gpubox.rollout.activation import STEPS
from tests.lab.conftest import TestBoxes
from tests.lab.drills import FAULTS, Drill, DrillRepository, wait_for


@pytest.fixture(scope="module")
def drill(lab: TestBoxes, tmp_path_factory: pytest.TempPathFactory) -> Drill:
    """test1 with good-a served from standin-a, and good-b in the store."""
    repository = DrillRepository(tmp_path_factory.mktemp("drills"))
    made = Drill(lab.up("test1")[0], repository)
    made.prepare()
    for server in ("good-b", "good-a"):
        done = made.deploy(server=server)
        assert done.returncode == 0, done.stderr
    return made


@pytest.fixture(autouse=True)
def _no_pause(drill: Drill) -> Iterator[None]:
    yield
    drill.pause_at(None)


def other_release(drill: Drill) -> tuple[str, str]:
    """What serves now, and a good release that does not."""
    now = drill.serving()
    good = [drill.release(server=name) for name in ("good-a", "good-b")]
    return now, next(name for name in good if name != now)


def test_first_deploy_serves(drill: Drill) -> None:
    assert drill.serving() == drill.release()
    assert drill.status()["restarts"] == 0


def test_second_deploy_changes_and_restarts_nothing(drill: Drill) -> None:
    assert drill.deploy().returncode == 0
    before = drill.untouched()
    again = drill.deploy()
    assert again.returncode == 0, again.stderr
    assert changed_operations(again.stderr) == []
    assert drill.untouched() == before
    assert drill.status()["restarts"] == 0


def changed_operations(text: str) -> list[str]:
    """Names of the operations that changed something, from pyinfra's table of results."""
    changed: list[str] = []
    for line in text.splitlines():
        columns = line.rsplit(maxsplit=4)
        if " | " in line and len(columns) == 5 and columns[2].isdigit():
            changed.append(line.strip())
    return changed


def test_dry_run_changes_nothing_and_tells_the_truth(drill: Drill) -> None:
    drill.deploy()
    before = drill.untouched()
    dry = drill.deploy("--dry", "--diff", server="good-b")
    assert dry.returncode == 0, dry.stderr
    assert "Activate" in dry.stderr
    assert drill.untouched() == before


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_release_is_taken_back_and_not_tried_twice(drill: Drill, fault: str) -> None:
    good = drill.serving()
    failed = drill.deploy(server=fault)
    bad = drill.release(server=fault)
    text = failed.stdout + failed.stderr
    assert failed.returncode == 1, text
    assert drill.serving() == good
    verdicts = [(entry["to_release"], entry["verdict"]) for entry in drill.history()[-2:]]
    assert verdicts == [(bad, "failed"), (good, "restored")]
    log = drill.history()[-2]["log"]
    assert log, "history keeps the failed server's last lines"
    assert str(log[-1])[-60:] in text, "and the message shows them"
    before = drill.untouched()
    refused = drill.deploy(server=fault)
    assert refused.returncode == 1
    assert f"release {bad} failed when it was last activated" in refused.stderr
    assert drill.untouched() == before


def test_a_failed_release_is_tried_again_when_forced(drill: Drill) -> None:
    good = drill.serving()
    drill.deploy(server="exit-at-once")
    count = len(drill.history())
    forced = drill.deploy(server="exit-at-once", force="true")
    assert forced.returncode == 1
    assert len(drill.history()) == count + 2
    assert drill.serving() == good


@pytest.mark.parametrize("step", STEPS)
def test_activation_killed_at_a_step(drill: Drill, step: str) -> None:
    """kill -9 of the process that activates: its unit puts the old release back without help."""
    old, new = other_release(drill)
    drill.pause_at(f"{step}:before")
    activating = subprocess.Popen(["lxc-attach", "-n", drill.box.container, "--", "gpubox", "activate", new])
    pid = drill.paused_pid()
    drill.pause_at(None)
    drill.box.run(f"kill -9 {pid}")
    assert activating.wait(60) != 0
    assert drill.serving() == old
    drill.box.run(f"gpubox activate {new}")
    assert drill.serving() == new


@pytest.mark.parametrize("step", STEPS)
def test_deploy_killed_and_connection_lost_at_a_step(drill: Drill, step: str) -> None:
    """kill -9 of pyinfra, which takes its ssh connection along: the activation goes on and ends by itself."""
    old, new = other_release(drill)
    drill.pause_at(f"{step}:before")
    server = next(name for name in ("good-a", "good-b") if drill.release(server=name) == new)
    deploying = drill.start_deploy(server=server)
    pid = drill.paused_pid()
    drill.pause_at(None)
    deploying.kill()
    deploying.wait()
    drill.box.run(f"kill -CONT {pid}")
    assert drill.serving() == new
    again = drill.deploy(server=server)
    assert again.returncode == 0, again.stderr
    assert old != new


@pytest.mark.parametrize("step", STEPS)
def test_power_cut_at_a_step(drill: Drill, step: str) -> None:
    """Hard stop of the container in the middle: after boot the old release serves, and the next activation works."""
    old, new = other_release(drill)
    drill.pause_at(f"{step}:before")
    activating = subprocess.Popen(["lxc-attach", "-n", drill.box.container, "--", "gpubox", "activate", new])
    drill.paused_pid()
    drill.box.hard_stop()
    activating.wait(60)
    drill.box.start()
    drill.wait_serving()
    assert drill.serving() == old
    assert not [name for name in drill.final_names() if "building" in name]
    drill.box.run(f"gpubox activate {new}")
    assert drill.serving() == new


def test_two_deploys_at_once(drill: Drill) -> None:
    _, new = other_release(drill)
    server = next(name for name in ("good-a", "good-b") if drill.release(server=name) == new)
    drill.pause_at("start:before")
    first = drill.start_deploy(server=server)
    pid = drill.paused_pid()
    drill.pause_at(None)
    second = drill.deploy(server="good-c")
    text = second.stdout + second.stderr
    assert second.returncode == 1, text
    assert "this box is being changed by " in text
    assert f"pid {first.pid} (activate {new}) since 20" in text
    drill.box.run(f"kill -CONT {pid}")
    first.communicate(timeout=120)
    assert first.returncode == 0
    assert drill.serving() == new


def test_the_lock_of_a_dead_deploy_is_taken_over_and_said_so(drill: Drill) -> None:
    _, new = other_release(drill)
    server = next(name for name in ("good-a", "good-b") if drill.release(server=name) == new)
    drill.pause_at("preflight:before")
    first = drill.start_deploy(server=server)
    pid = drill.paused_pid()
    drill.pause_at(None)
    drill.box.run(f"kill -9 {pid}")
    first.kill()
    first.wait()
    drill.settled()
    second = drill.deploy(server=server)
    text = second.stdout + second.stderr
    assert second.returncode == 0, text
    assert "took over the lock of" in text
    assert f"pid {first.pid} " in text
    assert drill.serving() == new


def test_a_worker_that_will_not_die_is_gone_after_the_stop(drill: Drill) -> None:
    """It ignores SIGTERM, has left the session and belongs to pid 1: only its cgroup still knows it."""
    assert drill.deploy(server="stubborn-worker").returncode == 0
    cgroup = drill.box.run("systemctl show -p ControlGroup --value sglang.service").stdout.strip()
    listed = drill.box.run(
        f"cat /sys/fs/cgroup/systemd{cgroup}/cgroup.procs /sys/fs/cgroup{cgroup}/cgroup.procs || true"
    )
    main = drill.status()["main_pid"]
    workers = [int(pid) for pid in set(listed.stdout.split()) if int(pid) != main]
    reparented = [pid for pid in workers if drill.box.run(f"ps -o ppid= -p {pid}").stdout.strip() == "1"]
    assert reparented, "the stand-in made no such worker: the drill proves nothing"
    assert drill.deploy(server="good-a").returncode == 0
    for pid in workers:
        assert drill.box.run(f"test -d /proc/{pid}", check=False).returncode != 0
    assert drill.serving() == drill.release(server="good-a")


def test_rollback_and_back_again(drill: Drill) -> None:
    a, b = drill.release(), drill.release(stack="standin-b", standby_stacks=["standin-a"])
    drill.deploy()
    forward = drill.deploy(stack="standin-b")
    assert forward.returncode == 0, forward.stderr
    assert drill.serving() == b
    back = drill.repository.pyinfra([drill.box], "rollback.py", "-y")
    assert back.returncode == 0, back.stderr
    assert drill.serving() == a
    named = drill.repository.pyinfra([drill.box], "rollback.py", "-y", stack="standin-b")
    assert named.returncode == 0, named.stderr
    assert drill.serving() == b
    missing = drill.box.run("gpubox rollback --stack standin-z", check=False)
    assert missing.returncode == ExitCode.USAGE
    assert "did you mean" in missing.stderr
    drill.deploy()


# -- building --------------------------------------------------------------------------------------------------------


def spoiled_stack(drill: Drill, name: str, old: str, new: str) -> None:
    """A copy of standin-a under another name whose lock was spoiled."""
    target = drill.repository.root / "stacks" / name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(drill.repository.root / "stacks" / "standin-a", target)
    for file in ("stack.toml", "requirements.lock", "requirements.in"):
        text = (target / file).read_text().replace('"standin-a"', f'"{name}"')
        (target / file).write_text(text)
    toml = target / "stack.toml"
    fresh = f'[environment]\nSTANDIN_DRILL = "{time.time_ns()}"\n'  # a stack that no earlier run has built
    toml.write_text(toml.read_text().replace("[environment]\n", fresh))
    lock = target / "requirements.lock"
    assert old in lock.read_text()
    lock.write_text(lock.read_text().replace(old, new, 1))


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("other-bytes", None, "0" * 64, "gpubox-standin-engine"),
        ("no-such-wheel", "msgpack==", "gpubox-has-no-such-package==", "gpubox-has-no-such-package"),
    ],
)
def test_a_stack_that_cannot_be_built(drill: Drill, name: str, old: str | None, new: str, said: str) -> None:
    serving = drill.serving()
    lock = (drill.repository.root / "stacks" / "standin-a" / "requirements.lock").read_text()
    digest = lock.rsplit("sha256:", 1)[1].split()[0]
    spoiled_stack(drill, name, old or digest, new)
    before = drill.status()["main_pid"]
    failed = drill.deploy(stack=name)
    text = failed.stdout + failed.stderr
    assert failed.returncode == 1, text
    assert said in text
    assert "what to do" in text
    assert not [final for final in drill.final_names() if name in final]
    assert drill.serving() == serving
    assert drill.status()["main_pid"] == before


def test_disk_full_while_building(drill: Drill) -> None:
    serving, main = drill.serving(), drill.status()["main_pid"]
    spoiled_stack(drill, "disk-full", "", "")
    spec = drill.repository.plan(stack="disk-full").stacks[0]
    cache = "/opt/gpubox/cache/uv"
    drill.box.limit_disk(cache, 1)
    try:
        failed = drill.deploy(stack="disk-full")
    finally:
        drill.box.unlimit_disk(cache)
    text = failed.stdout + failed.stderr
    assert failed.returncode == 1, text
    assert "disk" in text.lower()
    assert f"stacks/{spec.id}" not in drill.final_names()
    assert drill.serving() == serving
    assert drill.status()["main_pid"] == main
    again = drill.deploy(stack="disk-full")
    assert again.returncode == 0, again.stderr
    assert f"stacks/{spec.id}" in drill.final_names()
    drill.deploy()


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"keep_release": 3}, "unknown key 'keep_release'"),
        ({"keep_releases": "many"}, "keep_releases = 'many'"),
        ({"stack": "cuda999"}, "stack = 'cuda999': there is no"),
        ({"server": "nothing"}, "server = 'nothing': there is no"),
        ({"server": "no-context"}, "engine.context_length: is 0"),
        ({"server": "no-model"}, "no config.json there"),
        ({"server": "busy-port"}, "port = 31000 is in use"),
        ({"python": '"3.19"'}, "not locked for Python 3.19"),
    ],
)
def test_bad_input_is_refused_before_the_first_operation(drill: Drill, data: dict[str, object], said: str) -> None:
    repository = drill.repository
    repository.server("no-context", old="context_length = 2048", new="context_length = 0")
    repository.server("no-model", old="/srv/model", new="/srv")
    repository.server("busy-port", old='served_model_name = "drill"', new='served_model_name = "drill"\nport = 31000')
    listener = subprocess.Popen(
        ["lxc-attach", "-n", drill.box.container, "--", "timeout", "60", "python3", "-m", "http.server", "31000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: drill.box.run("ss -Hltn 'sport = :31000'").stdout, 20, "the listener")
        before = drill.untouched()
        refused = drill.deploy(**data)
        assert refused.returncode == 1
        assert said in refused.stderr
        assert "what to do: " in refused.stderr
        assert "Traceback" not in refused.stderr
        assert drill.untouched() == before
    finally:
        drill.box.run("pkill -f '[h]ttp.server 31000'")
        listener.wait()


def test_verify_finds_an_edit(drill: Drill) -> None:
    release = drill.serving()
    path = f"/opt/gpubox/releases/{release}/env"
    drill.box.run(f"cp -p {path} /tmp/env && echo EDITED=1 >> {path}")
    try:
        done = drill.box.run("gpubox verify", check=False)
        assert done.returncode == ExitCode.BROKEN
        assert "edited" in done.stdout
    finally:
        drill.box.run(f"cp -p /tmp/env {path}")
    assert drill.box.run("gpubox verify").returncode == 0


def test_health_sees_a_server_that_went_away(drill: Drill) -> None:
    drill.serving()
    assert drill.box.run("gpubox health").returncode == 0
    drill.box.run("systemctl stop sglang.service")
    assert drill.box.run("gpubox health", check=False).returncode == ExitCode.FAILED
    converged = drill.deploy()
    assert converged.returncode == 0, converged.stderr
    assert drill.serving() == drill.release()


def test_the_service_is_not_root_and_cannot_write_its_stack(drill: Drill) -> None:
    pid = drill.status()["main_pid"]
    assert drill.box.run(f"stat -c %U /proc/{pid}").stdout.strip() == "gpubox"
    writable = drill.box.run("su -s /bin/sh gpubox -c 'find /opt/gpubox/stacks /opt/gpubox/releases -writable -type f'")
    assert writable.stdout.strip() == ""

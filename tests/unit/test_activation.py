"""Activation as a state machine: what serves after success, failure, and death at every step."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from gpubox.build import libcuda_standin
from gpubox.build.libcuda_standin import STANDIN
from gpubox.errors import GpuboxError, LockedError, ProofError, RefusedError
from gpubox.rollout.history import Verdict
from gpubox.rollout.locking import Anchor
from tests.unit.simulated import KILLED, STEP_POINTS, SimulatedBox, kill_at

BAD = ["exits", "never-ready", "wrong-model", "no-completion"]


@pytest.fixture
def box(tmp_path: Path) -> SimulatedBox:
    return SimulatedBox(tmp_path)


def verdicts(box: SimulatedBox) -> list[tuple[str | None, Verdict]]:
    return [(entry.to_release, entry.verdict) for entry in box.box.history]


def test_activation_serves_and_remembers_the_previous_release(box: SimulatedBox) -> None:
    first, second = box.add(1, "good"), box.add(2, "good")
    box.activate(first)
    box.activate(second)
    assert box.box.store.current() == box.service.running_release() == second
    assert box.box.store.previous() == first
    assert verdicts(box) == [(first, Verdict.PROVED), (second, Verdict.PROVED)]
    assert box.box.pending() is None


@pytest.mark.parametrize("behaves", BAD)
def test_a_bad_release_is_taken_back(box: SimulatedBox, behaves: str) -> None:
    good, bad = box.add(1, "good"), box.add(2, behaves)
    box.activate(good)
    with pytest.raises(ProofError) as caught:
        box.activate(bad)
    assert "the server's last words" in str(caught.value)
    assert box.box.store.current() == box.service.running_release() == good
    assert verdicts(box)[1:] == [(bad, Verdict.FAILED), (good, Verdict.RESTORED)]
    assert box.box.pending() is None


def test_ranks_that_cannot_talk_bring_the_old_server_back_and_blame_no_release(box: SimulatedBox) -> None:
    good, bad = box.add(1, "good"), box.add(2, "no-all-reduce")
    box.activate(good)
    with pytest.raises(ProofError, match="all-reduce hung"):
        box.activate(bad)
    assert box.box.store.current() == box.service.running_release() == good
    assert verdicts(box)[1:] == [(bad, Verdict.FAILED), (good, Verdict.RESTORED)]
    assert [entry.step for entry in box.box.history][1] == "collectives"
    assert box.box.store.failed_reason(bad) is None


def test_what_can_be_judged_beside_the_running_server_does_not_stop_it(box: SimulatedBox) -> None:
    good, bad = box.add(1, "good"), box.add(2, "bad-draft")
    box.activate(good)
    stops = box.service.stops
    with pytest.raises(ProofError, match="draft"):
        box.activate(bad)
    assert box.service.stops == stops
    assert verdicts(box) == [(good, Verdict.PROVED)]


def test_a_release_that_failed_is_refused_until_forced(box: SimulatedBox) -> None:
    good, bad = box.add(1, "good"), box.add(2, "wrong-model")
    box.activate(good)
    with pytest.raises(ProofError):
        box.activate(bad)
    before = verdicts(box)
    with pytest.raises(RefusedError, match="prove: wrong-model"):
        box.activate(bad)
    assert verdicts(box) == before, "a refusal changes nothing"
    with pytest.raises(ProofError):
        box.activate(bad, force=True)


def test_the_first_release_of_a_box_may_fail(box: SimulatedBox) -> None:
    bad = box.add(1, "exits")
    with pytest.raises(ProofError):
        box.activate(bad)
    assert box.box.store.current() is None
    assert box.service.running_release() is None


def test_an_incomplete_release_is_refused_before_the_stop(box: SimulatedBox) -> None:
    good, broken = box.add(1, "good"), box.add(2, "good")
    box.activate(good)
    (box.layout.releases / broken / "env").write_text("EDITED=1\n")
    with pytest.raises(GpuboxError, match="edited"):
        box.activate(broken)
    assert box.service.running_release() == good
    assert box.box.store.failed_reason(broken) is None


@pytest.mark.parametrize("after", ["recover", "reboot", "next activation"])
@pytest.mark.parametrize("point", STEP_POINTS)
def test_killed_at_any_step_a_proved_release_serves(box: SimulatedBox, point: str, after: str) -> None:
    old, new = box.add(1, "good"), box.add(2, "good")
    box.activate(old)
    kill_at(box, point)
    request = box.request(new)
    assert box.killed_after(10**6, lambda: box.box.activate(request, box.lines.append)) == KILLED
    box.box._pause = lambda here: None
    assert box.box.store.check(str(box.box.store.current()))
    if after == "recover":
        box.box.recover(box.lines.append)
    elif after == "reboot":
        box.reboot()
    else:
        box.activate(new)
    expected = new if after == "next activation" or point == "record:after" else old
    assert box.box.store.current() == box.service.running_release() == expected
    assert box.box.pending() is None


def test_a_second_change_is_told_who_holds_the_lock(box: SimulatedBox) -> None:
    release = box.add(1, "good")
    mine = Anchor.of(psutil.Process())
    with (
        box.box.lock.held("somebody", "building stack x", anchor=mine),
        pytest.raises(LockedError, match=r"somebody \(building stack x\) since 20"),
    ):
        box.activate(release)


def test_a_kept_lock_outlives_the_command_and_ends_with_its_anchor(box: SimulatedBox) -> None:
    release = box.add(1, "good")
    process = subprocess.Popen(["sleep", "60"])
    anchor = Anchor.of(psutil.Process(process.pid))
    with box.box.lock.held("deployer", "building", anchor=anchor, keep=True):
        pass
    with pytest.raises(LockedError, match="deployer"):
        box.activate(release)
    process.kill()
    process.wait()
    box.activate(release)
    assert any("took over the lock of deployer" in line for line in box.lines)


class Interleavings(RuleBasedStateMachine):
    """Any order of deploys, activations, rollbacks, kills and reboots keeps `current` complete."""

    releases = Bundle("releases")

    def __init__(self) -> None:
        super().__init__()
        # In memory: the machine makes thousands of durable writes.
        self._directory = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        self.box = SimulatedBox(Path(self._directory.name))
        self.number = 0

    def teardown(self) -> None:
        self._directory.cleanup()

    @rule(target=releases, behaves=st.sampled_from(["good", "good", "bad-draft", "no-all-reduce", *BAD]))
    def deploy(self, behaves: str) -> str:
        self.number += 1
        return self.box.add(self.number, behaves)

    @rule(release=releases, force=st.booleans())
    def activate(self, release: str, force: bool) -> None:
        behaves = self.box.service.behaviour(release)
        try:
            self.box.activate(release, force=force)
        except RefusedError:
            assert not force and behaves != "good"
        except ProofError:
            assert behaves != "good"
        else:
            assert behaves == "good"
            assert self.box.service.running_release() == release

    @rule()
    def rollback(self) -> None:
        previous = self.box.box.store.previous()
        if previous:
            self.box.activate(previous)
            assert self.box.service.running_release() == previous

    @rule(release=releases, ticks=st.integers(1, 40), recover=st.booleans())
    def killed_activation(self, release: str, ticks: int, recover: bool) -> None:
        request = self.box.request(release, force=True)
        self.box.killed_after(ticks, lambda: self.box.box.activate(request, lambda line: None))
        if recover:
            self.box.box.recover(self.box.lines.append)

    @rule(ticks=st.integers(1, 20))
    def killed_recovery(self, ticks: int) -> None:
        self.box.killed_after(ticks, lambda: self.box.box.recover(lambda line: None))

    @rule()
    def reboot(self) -> None:
        self.box.reboot()
        self.settled()

    @rule()
    def recover(self) -> None:
        self.box.box.recover(self.box.lines.append)
        self.settled()

    def settled(self) -> None:
        """Nothing is open: what serves is what current names, and it proved once."""
        current = self.box.box.store.current()
        assert self.box.box.pending() is None
        if current is not None:
            good = (Verdict.PROVED, Verdict.RESTORED)
            assert any(e.to_release == current and e.verdict in good for e in self.box.box.history)
            assert self.box.service.behaviour(current) == "good"

    @invariant()
    def current_is_complete(self) -> None:
        current = self.box.box.store.current()
        if current is not None:
            self.box.box.store.check(current)

    @invariant()
    def history_is_readable(self) -> None:
        list(self.box.box.history)


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_a_stack_with_the_libcuda_standin_is_refused_where_there_is_a_driver(
    box: SimulatedBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, release = box.add(1, "good"), box.add(2, "good")
    box.activate(good)
    standin = box.layout.stacks / "world-0" / STANDIN
    standin.parent.mkdir(parents=True)
    standin.touch()
    monkeypatch.setattr(libcuda_standin, "_MODULE", "sys/module/kernel")  # every Linux has it
    with pytest.raises(RefusedError, match="has an NVIDIA driver"):
        box.activate(release)
    assert box.service.running_release() == good
    assert box.box.store.failed_reason(release) is None


def test_an_edited_current_release_does_not_keep_a_good_one_out(box: SimulatedBox) -> None:
    old, new = box.add(1, "good"), box.add(2, "good")
    box.activate(old)
    (box.layout.releases / old / "env").write_text("EDITED=1\n")
    box.activate(new)
    assert box.service.running_release() == new


def test_a_stop_that_fails_is_not_the_new_release_s_fault(box: SimulatedBox, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = box.add(1, "good"), box.add(2, "good")
    box.activate(old)

    def stop(port: int, report: object) -> bool:
        raise GpuboxError("port 30000 is still in use")

    with monkeypatch.context() as patched:
        patched.setattr(box.service, "stop", stop)
        with pytest.raises(GpuboxError, match="still in use"):
            box.activate(new)
    assert box.box.store.failed_reason(new) is None
    assert box.box.store.current() == old
    box.activate(new)

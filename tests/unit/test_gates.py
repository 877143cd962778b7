"""What is judged beside the running server before a release may replace it: its weights and its draft."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpubox.canonical import sha256_hex
from gpubox.errors import BrokenError, RefusedError
from gpubox.rollout.gates import ReleaseGates
from gpubox.weights.records import Records
from gpubox.weights.verify import verify
from tests.unit.simulated import SimulatedBox


@pytest.fixture
def box(tmp_path: Path) -> SimulatedBox:
    return SimulatedBox(tmp_path)


def lines_of_gate(box: SimulatedBox, **fields: object) -> list[str]:
    release = box.box.store.read(box.add(1, "good")).model_copy(update=fields)
    lines: list[str] = []
    ReleaseGates(box.layout).before_stop(release, force=False, report=lines.append)
    return lines


def listed(box: SimulatedBox, digest: str) -> Path:
    model = box.layout.root / "model"
    (model / "SHA256SUMS").write_text(f"{digest}  config.json\n")
    return model


def test_bytes_that_nobody_read_are_said_to_be_unproved(box: SimulatedBox) -> None:
    (line,) = lines_of_gate(box)
    assert "are not proved: gpubox weights verify" in line


def test_a_file_known_to_be_wrong_stops_the_activation_without_a_read(box: SimulatedBox) -> None:
    model = listed(box, "0" * 64)
    assert "are not proved" in lines_of_gate(box)[0], "nobody has read it yet"
    verify(model, Records(box.layout.weights), deep=True)
    with pytest.raises(BrokenError, match=r"config\.json") as caught:
        lines_of_gate(box)
    assert "weights verify" in caught.value.hint


def test_a_missing_file_of_the_manifest_stops_it_too(box: SimulatedBox) -> None:
    model = listed(box, sha256_hex((box.layout.root / "model" / "config.json").read_bytes()))
    with (model / "SHA256SUMS").open("a") as stream:
        stream.write("0" * 64 + "  model-00002-of-00002.safetensors\n")
    with pytest.raises(BrokenError, match=r"model-00002-of-00002\.safetensors"):
        lines_of_gate(box)


def test_a_draft_that_is_not_there_is_found_before_the_old_server_stops(box: SimulatedBox) -> None:
    spec = '{"spec": {"engine": {"version": "0.5.9"}, "patches": []}}'
    (box.layout.stacks / "world-0" / "stack.json").write_text(spec)
    with pytest.raises(BrokenError, match=r"has no config\.json"):
        lines_of_gate(box, draft_path=str(box.layout.root / "draft"))


def test_a_draft_in_a_place_that_a_reboot_empties_is_refused(box: SimulatedBox) -> None:
    spec = '{"spec": {"engine": {"version": "0.5.9"}, "patches": []}}'
    (box.layout.stacks / "world-0" / "stack.json").write_text(spec)
    with pytest.raises(RefusedError, match="/var/tmp/draft"):
        lines_of_gate(box, draft_path="/var/tmp/draft")

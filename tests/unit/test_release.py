"""Rendering a release and keeping it: pure, equal for equal inputs, and nothing edited goes unseen."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubox.canonical import canonical_json
from gpubox.errors import BrokenError, InputError
from gpubox.settings import Settings
from gpubox.specs.plan import BoxPlan, plan_box
from gpubox.specs.release import _quote, read_release
from tests.containers import CONTAINER
from tests.unit.simulated import SimulatedBox

ROOT = Path(__file__).resolve().parents[2]
DATA = {"stack": "cuda130-next", "standby_stacks": ["cuda128"], "server": "smollm2", "overlay": "cpu", "python": "3.11"}


def plan(**data: object) -> BoxPlan:
    return plan_box(ROOT, Settings.model_validate({**DATA, **data}))


def test_equal_settings_give_equal_bytes() -> None:
    one, other = plan(), plan()
    assert [spec.files for spec in one.releases] == [spec.files for spec in other.releases]
    assert [spec.files for spec in one.stacks] == [spec.files for spec in other.stacks]


@pytest.mark.parametrize("change", [{"overlay": None}, {"listen_address": "0.0.0.0"}, {"python": "3.12"}])
def test_what_decides_a_release_is_in_its_name(change: dict[str, object]) -> None:
    assert plan(**change).wanted.id != plan().wanted.id


@pytest.mark.parametrize("change", [{"keep_releases": 9}, {"stop_timeout_s": 7}, {"standby_stacks": []}])
def test_what_does_not_decide_it_is_not(change: dict[str, object]) -> None:
    assert plan(**change).wanted.id == plan().wanted.id


@pytest.mark.parametrize("loopback", ["127.0.0.1", "127.3.4.5", "::1"])
def test_a_server_on_loopback_is_not_asked_from_outside(loopback: str) -> None:
    assert plan(listen_address=loopback).public_url("box.example") is None


@pytest.mark.parametrize(
    ("change", "ssh_address", "expected"),
    [
        ({}, "box.example", "http://box.example:30000"),
        ({"public_url": "https://llm.example"}, None, "https://llm.example"),
        ({"container": {**CONTAINER, "address": "10.0.0.7/24"}}, None, "http://10.0.0.7:30000"),
    ],
)
def test_the_address_asked_from_outside(change: dict[str, object], ssh_address: str | None, expected: str) -> None:
    assert plan(listen_address="0.0.0.0", **change).public_url(ssh_address) == expected


def test_a_container_whose_address_nobody_knows_is_refused() -> None:
    with pytest.raises(InputError, match="address of the container is not known"):
        plan(listen_address="0.0.0.0", container=CONTAINER).public_url(None)


def test_the_command_line() -> None:
    serve = plan().wanted.files["serve"].decode()
    words = shlex.split(serve.splitlines()[-1])
    assert words[0] == "exec"
    assert words[1].endswith("/venv/bin/python")
    assert words[2:4] == ["-m", "sglang.launch_server"]
    options = dict(zip(words[4::2], words[5::2], strict=False))
    assert options["--served-model-name"] == "smollm2"
    assert options["--host"] == "127.0.0.1", "closed unless the operator opens it"
    assert options["--context-length"] == "2048"
    assert "--disable-cuda-graph" in words, "the overlay's"


def test_without_the_overlay_nothing_of_it_is_left() -> None:
    wanted = plan(overlay=None).wanted
    text = b"".join(wanted.files.values()).decode()
    assert "cpu" not in text.lower().replace("numa_cpu", "")
    assert "LD_LIBRARY_PATH" not in text


def test_caches_of_two_stacks_are_apart() -> None:
    first, second = (spec.release.environment for spec in plan().releases)
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "PYTHONPYCACHEPREFIX", "HOME"):
        assert first[name] != second[name]
    assert (first["CUDA_HOME"], second["CUDA_HOME"]) == ("/usr/local/cuda-13.0", "/usr/local/cuda-12.8")


@given(st.text(st.characters(min_codepoint=32, exclude_characters="\x7f", exclude_categories=["Cs", "Cc"])))
def test_environment_values_come_back_whole(value: str) -> None:
    """Read as systemd reads an EnvironmentFile: in double quotes a backslash escapes four characters only."""
    quoted = _quote(value)
    assert quoted[0] == quoted[-1] == '"'
    assert re.sub(r'\\(["\\`$])', r"\1", quoted[1:-1]) == value


@pytest.mark.parametrize("name", ["serve", "env", "release.json"])
def test_an_edit_is_seen(tmp_path: Path, name: str) -> None:
    box = SimulatedBox(tmp_path)
    release = box.add(1, "good")
    path = tmp_path / "releases" / release / name
    path.write_bytes(path.read_bytes().replace(b"0", b"1") + b"\n")
    with pytest.raises(BrokenError, match=r"edited|not a release"):
        read_release(path.parent)


def test_a_release_is_found_by_its_beginning_and_by_its_digest(tmp_path: Path) -> None:
    box = SimulatedBox(tmp_path)
    one, other = box.add(1, "good"), box.add(2, "good")
    store = box.box.store
    assert store.resolve(one[-12:-3]) == one
    with pytest.raises(InputError, match="ambiguous"):
        store.resolve("server-")
    with pytest.raises(InputError, match="there is no release"):
        store.resolve("nothing")
    assert store.resolve(other) == other


def test_adding_again_changes_nothing_and_a_half_built_one_is_invisible(tmp_path: Path) -> None:
    box = SimulatedBox(tmp_path)
    release = box.add(1, "good")
    before = (tmp_path / "releases" / release).stat().st_mtime_ns
    assert box.add(1, "good") == release
    assert (tmp_path / "releases" / release).stat().st_mtime_ns == before
    (tmp_path / "releases" / ".building-server-world-0123456789ab").mkdir()
    assert box.box.store.ids() == [release]


def test_collect_keeps_current_previous_protected_and_the_newest(tmp_path: Path) -> None:
    box = SimulatedBox(tmp_path)
    ids = [box.add(number, "good") for number in range(7)]
    for release in ids[:6]:
        box.activate(release)
    removed = box.box.store.collect(1, [ids[6]], list(reversed(ids[:6])))
    assert set(removed) == set(ids[:4])
    assert set(box.box.store.ids()) == {ids[4], ids[5], ids[6]}
    assert (tmp_path / "stacks" / "world-0").is_dir(), "the releases that stay need it"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_canonical_json_does_not_depend_on_order(value: object) -> None:
    def turned(item: object) -> object:
        if isinstance(item, dict):
            return {key: turned(item[key]) for key in reversed(list(item))}
        return [turned(part) for part in item] if isinstance(item, list) else item

    assert canonical_json(value) == canonical_json(turned(value))

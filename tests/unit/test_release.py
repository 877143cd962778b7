"""Rendering a release and keeping it: pure, equal for equal inputs, and nothing edited goes unseen."""

from __future__ import annotations

import hashlib
import json
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
from gpubox.specs.release import SINCE_2, _quote, read_release
from gpubox.specs.server import load_server
from tests.containers import CONTAINER
from tests.unit.simulated import SimulatedBox

ROOT = Path(__file__).resolve().parents[2]
SERVERS = sorted((ROOT / "servers").glob("*.toml"))
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


OLD_RELEASE = {
    "server": "smollm2",
    "server_digest": "0123456789ab",
    "stack": "cuda128",
    "stack_id": "cuda128-0123456789ab",
    "overlay": None,
    "model_id": "smollm2-0123456789ab",
    "model_path": "/opt/gpubox/models/smollm2-0123456789ab",
    "served_model_name": "smollm2",
    "listen_address": "127.0.0.1",
    "port": 30000,
    "arguments": ["--model-path", "x"],
    "environment": {},
    "probes": {"questions": [{"ask": "?", "expect": ["!"], "max_tokens": 32, "tries": 3}], "ready_deadline_s": 900.0}
    | {"completion_deadline_s": 120.0, "burst_requests": 160, "burst_concurrency": 16, "burst_max_tokens": 2}
    | {"burst_deadline_s": 300.0},
    "files": {name: hashlib.sha256(b"x").hexdigest() for name in ("env", "serve")},
    "schema_version": 1,
}
FILES = {"files": OLD_RELEASE["files"]}
# What gpubox wrote for these values before there was a schema 2: it is the name of a directory on somebody's box.
OLD_ID = "smollm2-cuda128-a3831e370315"


def write_release(directory: Path, document: dict[str, object]) -> Path:
    data = canonical_json(document)
    path = directory / f"{document['server']}-{document['stack']}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.mkdir()
    (path / "release.json").write_bytes(data)
    for name in ("env", "serve"):
        (path / name).write_bytes(b"x")
    return path


def test_a_release_of_schema_1_is_read_and_keeps_its_id(tmp_path: Path) -> None:
    path = write_release(tmp_path, OLD_RELEASE)
    assert path.name == OLD_ID
    release = read_release(path)
    assert release.id == OLD_ID
    assert release.to_bytes() == (path / "release.json").read_bytes()
    assert (release.draft_path, release.engine_version, release.overrides) == (None, None, {})


def test_a_box_rolls_back_to_a_release_of_schema_1(tmp_path: Path) -> None:
    box = SimulatedBox(tmp_path)
    new = box.add(1, "good")
    written = json.loads((tmp_path / "releases" / new / "release.json").read_bytes())
    old = {key: value for key, value in written.items() if key not in SINCE_2} | {"schema_version": 1}
    path = write_release(tmp_path / "incoming", {**old, "files": OLD_RELEASE["files"]})
    released = box.box.store.add(path)
    assert released == path.name
    box.activate(released)
    box.activate(new)
    assert box.box.store.previous() == released
    box.activate(released)
    assert box.box.store.current() == released
    assert released in box.box.store.ids()


def test_schema_1_holds_nothing_newer_and_schema_2_holds_it_all(tmp_path: Path) -> None:
    path = write_release(tmp_path, OLD_RELEASE | {"draft_path": "/srv/draft"})
    with pytest.raises(BrokenError, match="not a release"):
        read_release(path)
    assert set(json.loads(plan().wanted.files["release.json"])) >= SINCE_2
    assert plan().wanted.release.schema_version == 2


def test_a_release_says_what_later_checks_need() -> None:
    release = plan(server="kimi-k2.5-eagle3", overlay=None, standby_stacks=[]).wanted.release
    assert release.draft_path == "/srv/models/kimi-k2.5-eagle3"
    assert (release.engine_name, release.engine_version) == ("sglang", "0.5.17")
    assert (release.tp_size, release.context_length, release.nccl_profile) == (8, 131_072, "pcie-only")
    words = release.arguments
    assert words[words.index("--speculative-draft-model-path") + 1] == release.draft_path


def test_an_id_is_the_same_from_the_release_and_from_its_bytes() -> None:
    for spec in plan().releases:
        assert spec.id == spec.release.id


@pytest.mark.parametrize("unit", ["sglang.service.j2"])
def test_a_crash_loop_trips_the_limit_and_a_long_load_does_not(unit: str) -> None:
    """The window spans the whole burst of slow starts, or systemd restarts for ever; an hour's load is no failure."""
    text = (ROOT / "templates" / "etc" / "systemd" / "system" / unit).read_text()
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    unit_of = {"h": 3600.0, "min": 60.0, "s": 1.0, "": 1.0}

    def seconds(name: str) -> float:
        number, suffix = re.fullmatch(r"(\d+)(h|min|s|)", values[name]).groups()  # type: ignore[union-attr]
        return float(number) * unit_of[suffix]

    slowest = max(load_server(ROOT / "servers", path.stem).probes.ready_deadline_s for path in SERVERS)
    assert slowest >= 3600
    assert seconds("StartLimitIntervalSec") >= int(values["StartLimitBurst"]) * (slowest + seconds("RestartSec"))
    assert seconds("TimeoutStartSec") >= slowest, "systemd must not be the one that gives up"
    assert values["Restart"] == "always"
    assert values["KillMode"] == "mixed"


def test_what_may_be_wrong_is_shown_with_the_plan(tmp_path: Path) -> None:
    for name in ("stacks", "models", "overlays", "engines"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "servers").mkdir()
    text = (ROOT / "servers" / "kimi-k2.5.toml").read_text()
    (tmp_path / "servers" / "kimi-k2.5.toml").write_text(text.replace('mm_attention_backend = "sdpa"', ""))
    settings = Settings.model_validate({**DATA, "server": "kimi-k2.5", "overlay": None})
    found = [finding.rule for finding in plan_box(tmp_path, settings).warnings]
    assert found == ["sm120-vision-attention"], "once, though it is so on both stacks"


def test_a_draft_that_the_box_builds_is_needed_like_the_model(tmp_path: Path) -> None:
    for name in ("stacks", "models", "overlays", "engines"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "servers").mkdir()
    text = (ROOT / "servers" / "kimi-k2.5-eagle3.toml").read_text()
    text = text.replace('path = "/srv/models/kimi-k2.5-eagle3"', 'build = "smollm2"')
    (tmp_path / "servers" / "kimi-k2.5-eagle3.toml").write_text(text)
    settings = Settings.model_validate({**DATA, "server": "kimi-k2.5-eagle3", "overlay": None, "standby_stacks": []})
    planned = plan_box(tmp_path, settings)
    (draft,) = planned.models
    assert planned.wanted.release.draft_id == draft.id
    assert planned.wanted.release.draft_path == f"/opt/gpubox/models/{draft.id}"
    box = SimulatedBox(tmp_path / "box")
    release = json.loads((tmp_path / "box" / "releases" / box.add(1, "good") / "release.json").read_bytes())
    (tmp_path / "box" / "spec").mkdir()
    added = box.box.store.add(write_release(tmp_path / "box" / "spec", release | {"draft_id": draft.id, **FILES}))
    with pytest.raises(BrokenError, match="its draft is not complete"):
        box.box.store.check(added)

"""Whatever an operator may write wrong: refused with a message that names file, key, value and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubox.errors import InputError
from gpubox.settings import Settings, load_node_settings, load_settings
from gpubox.specs.server import check_environment, load_server

REPO = Path(__file__).resolve().parents[2]
GOOD = {"stack": "cuda128", "server": "smollm2"}
PROFILE = (REPO / "servers" / "smollm2.toml").read_text()


def problem_of(data: dict[str, object]) -> str:
    with pytest.raises(InputError) as caught:
        load_settings({**GOOD, **data}, "box1")
    return str(caught.value)


def profile_problem(tmp_path: Path, old: str, new: str) -> str:
    assert old in PROFILE
    (tmp_path / "smollm2.toml").write_text(PROFILE.replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        load_server(tmp_path, "smollm2")
    return str(caught.value)


def test_pyinfra_keys_are_not_ours() -> None:
    settings = load_settings({**GOOD, "ssh_user": "root", "_sudo": True}, "box1")
    assert settings == Settings(stack="cuda128", server="smollm2")


def test_a_key_of_the_other_kind_of_host_is_left_to_it() -> None:
    """`--data key=value` reaches nodes and boxes alike; a key of neither is refused on both."""
    assert load_settings({**GOOD, "allow_reboot": True}, "box1") == Settings(stack="cuda128", server="smollm2")
    driver = {"version": "590.48.01", "run": "/root/driver.run", "sha256": "0" * 64}
    assert load_node_settings({**GOOD, "driver": driver}, "pve1").driver.version == "590.48.01"
    for load in (load_settings, load_node_settings):
        with pytest.raises(InputError, match="unknown key 'stak'"):
            load({**GOOD, "driver": driver, "stak": "cuda128"}, "host1")


def test_unknown_setting_suggests_the_nearest() -> None:
    text = problem_of({"standby_stack": ["cuda128"]})
    assert text.splitlines()[0] == "host box1: unknown key 'standby_stack'"
    assert "did you mean 'standby_stacks'?" in text


def test_wrong_type_names_host_key_value_and_what_is_allowed() -> None:
    text = problem_of({"keep_releases": "many"})
    assert text.startswith("host box1: keep_releases = 'many': ")
    assert "valid integer" in text


def test_missing_setting() -> None:
    with pytest.raises(InputError, match="host box1: key 'server' is missing"):
        load_settings({"stack": "cuda128"}, "box1")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("python", 3.12),
        ("listen_address", "everywhere"),
        ("wheelhouse", "relative/path"),
        ("stop_timeout_s", 0),
        ("public_url", "ftp://box"),
        ("standby_stacks", ["a", "a"]),
        ("stack", "../../etc"),
        ("service_user", "root; rm"),
        ("indexes", {"pytorch-cu130": "https://me:secret@mirror/whl"}),
    ],
)
def test_bad_values_are_refused_with_their_name(key: str, value: object) -> None:
    text = problem_of({key: value})
    assert text.startswith("host box1: ")
    assert key in text.splitlines()[0]


def test_every_problem_is_told_at_once() -> None:
    text = problem_of({"keep_releases": 0, "stop_timeout_s": "x"})
    assert "keep_releases" in text
    assert "stop_timeout_s" in text


def test_the_shipped_profile_is_valid() -> None:
    assert load_server(REPO / "servers", "smollm2").engine["context_length"] == 2048


def test_a_server_that_does_not_exist() -> None:
    with pytest.raises(InputError, match=r"server = 'smolm2': there is no") as caught:
        load_server(REPO / "servers", "smolm2")
    assert "did you mean 'smollm2'?" in str(caught.value)


def test_colon_in_the_served_name(tmp_path: Path) -> None:
    assert "must not contain ':'" in profile_problem(
        tmp_path, 'served_model_name = "smollm2"', 'served_model_name = "a:b"'
    )


def test_model_by_build_and_path(tmp_path: Path) -> None:
    assert "exactly one" in profile_problem(tmp_path, 'build = "smollm2"', 'build = "smollm2"\npath = "/models/x"')


def test_not_toml(tmp_path: Path) -> None:
    assert "not valid TOML" in profile_problem(tmp_path, "[model]", "[model")


def test_name_and_file_differ(tmp_path: Path) -> None:
    assert "but the file says" in profile_problem(tmp_path, 'name = "smollm2"', 'name = "other"')


@given(st.dictionaries(st.text(max_size=20), st.text(max_size=20), max_size=3))
def test_environment_is_one_printable_line_or_refused(environment: dict[str, str]) -> None:
    try:
        check_environment(environment)
    except ValueError:
        return
    for name, value in environment.items():
        assert name.isascii()
        assert not name.startswith("GPUBOX_")
        assert "\n" not in value
        assert "\0" not in value
        assert "=" not in name


@given(st.dictionaries(st.text(max_size=12), st.one_of(st.none(), st.integers(), st.text(), st.lists(st.text()))))
def test_any_data_is_settings_or_an_input_error(data: dict[str, object]) -> None:
    try:
        load_settings(data, "box1")
    except InputError as error:
        assert str(error).startswith("host box1: ")


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 100_000, "a = " + "1" * 10_000, "a = 1\nb = nan = 2", "\x00", 'a = "\\uD800"']
)
def test_hostile_toml_is_an_input_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(InputError, match=r"x\.toml"):
        load_server(tmp_path, "x")


def test_infinite_deadlines_are_refused(tmp_path: Path) -> None:
    text = profile_problem(tmp_path, "ready_deadline_s = 900", "ready_deadline_s = inf")
    assert "probes.ready_deadline_s" in text


def test_a_password_in_a_refused_address_is_not_shown() -> None:
    indexes = {"pytorch": "https://user:s3cr3t@example.org/whl"}
    with pytest.raises(InputError) as caught:
        load_settings({**GOOD, "indexes": indexes}, "box1")
    assert "s3cr3t" not in str(caught.value)
    assert "https://user:***@example.org/whl" in str(caught.value)

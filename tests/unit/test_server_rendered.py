"""What every profile comes to on every stack, byte for byte, and that a box can read it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from gpubox.canonical import sha256_hex
from gpubox.specs.engine_table import load_table, spelling, table_path
from gpubox.specs.release import Release
from gpubox.specs.server import Server
from gpubox.specs.stack import load_stack
from tests.rendered import EXPECTED, ROOT, difference, expected, render, servers, stacks

EXPECTED_STACKS = {"cuda128", "cuda130", "cuda130-next"}
SERVED = [(server, stack) for server in ("kimi-k2.5", "kimi-k2.5-eagle3") for stack in stacks()]


def test_the_stacks_are_the_ones_that_are_meant() -> None:
    assert set(stacks()) == EXPECTED_STACKS


def test_nothing_is_expected_of_what_is_gone() -> None:
    kept = {f"{server}/{stack}" for server in servers() for stack in stacks()}
    assert {str(path.relative_to(EXPECTED)) for path in EXPECTED.glob("*/*")} == kept, "make rendered"


@pytest.mark.parametrize("stack", stacks())
@pytest.mark.parametrize("server", servers())
def test_the_bytes_are_the_expected_ones(server: str, stack: str) -> None:
    old, new = expected(server, stack), render(server, stack)
    assert old == new, "not as expected; make rendered writes it anew:\n" + difference(old, new, f"{server}/{stack}")


@pytest.mark.parametrize(("server", "stack"), SERVED)
def test_the_mission_is_served_without_a_warning(server: str, stack: str) -> None:
    files = render(server, stack)
    assert sorted(files) == ["env", "release.json", "serve"], files.get("refused.txt", b"").decode()
    release = Release.model_validate_json(files["release.json"])
    assert release.to_bytes() == files["release.json"]
    assert release.files == {name: sha256_hex(files[name]) for name in ("env", "serve")}
    assert (release.tp_size, release.context_length, release.nccl_profile) == (8, 131_072, "pcie-only")
    assert (release.engine_name, release.overrides) == ("sglang", {})
    assert release.draft_path == ("/srv/models/kimi-k2.5-eagle3" if server.endswith("eagle3") else None)


@pytest.mark.parametrize(("server", "stack"), SERVED)
def test_every_flag_is_one_of_the_version(server: str, stack: str) -> None:
    described = load_stack(ROOT / "stacks" / stack)
    table = load_table(table_path(ROOT, stack, described.engine.name, described.engine.version))
    words = shlex.split(render(server, stack)["serve"].decode().splitlines()[-1])
    flags = [word for word in words if word.startswith("--")]
    assert len(flags) > 12
    assert {spelling(flag) for flag in flags} <= set(table.keys)
    assert len(set(flags)) == len(flags)


def test_the_two_arms_of_a_comparison_have_equal_limits() -> None:
    def limits(server: str) -> dict[str, str]:
        words = shlex.split(render(server, "cuda130-next")["serve"].decode().splitlines()[-1])
        named = ("--max-running-requests", "--cuda-graph-max-bs-decode", "--context-length", "--chunked-prefill-size")
        return {name: words[words.index(name) + 1] for name in named}

    assert limits("kimi-k2.5") == limits("kimi-k2.5-eagle3")


def test_the_environment_is_that_of_the_profile_of_nccl() -> None:
    env = render("kimi-k2.5", "cuda130-next")["env"].decode().splitlines()
    assert 'NCCL_NVLS_ENABLE="0"' in env
    assert not [line for line in env if line.startswith("NCCL_P2P_DISABLE")]


def test_every_key_of_a_profile_is_documented() -> None:
    text = Path(ROOT / "docs" / "servers.md").read_text()
    assert [name for name in Server.model_fields if f"`{name}`" not in text and f"[{name}" not in text] == []

"""The hub's own client against a local server that speaks the part of its API in use. The real hub is never reached.

What only the real one could show: Xet storage behind plain HTTP addresses, its rate limits, its certificates.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from gpubox.errors import GpuboxError, InputError
from gpubox.weights.fetch import Progress, fetch
from gpubox.weights.http import Patience
from gpubox.weights.hub import HubSource
from gpubox.weights.records import Records
from gpubox.weights.verify import verify
from tests import mirror as faults
from tests.checkpoints import model
from tests.mirror import Hub, Mirror, mirror

REVISION = "0123456789abcdef0123456789abcdef01234567"
FILES = {**model(), ".gitattributes": b"*.safetensors filter=lfs\n", "README.md": b"# words\n"}
SHARD = "model-00002-of-00003.safetensors"
HURRY = Patience(connect_s=2, stall_s=0.3, attempts=4, progress=10**9, backoff_s=0.01, backoff_limit_s=0.1)


@pytest.fixture
def server() -> Iterator[Mirror]:
    with mirror({}) as running:
        running.hub = Hub("owner/name", REVISION, FILES)
        yield running


@pytest.fixture(autouse=True)
def no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)


def source(server: Mirror, **options: Any) -> HubSource:
    return HubSource("owner/name", REVISION, endpoint=server.url, patience=HURRY, **options)


def fetched(server: Mirror, tmp_path: Path, **options: Any) -> Path:
    quiet = Progress(lambda what, size: None, lambda count: None)
    fetch(source(server, **options), tmp_path / "to", Records(tmp_path / "state"), jobs=2, progress=quiet)
    return tmp_path / "to"


def test_a_commit(server: Mirror, tmp_path: Path) -> None:
    to = fetched(server, tmp_path)
    assert {name: (to / name).read_bytes() for name in FILES} == FILES
    found = verify(to, Records(tmp_path / "state"))
    assert found.proved and found.read == 0
    assert f"# owner/name at {REVISION}, fetched by gpubox" in (to / "SHA256SUMS").read_text()
    assert len([seen for seen in server.seen if seen.path.startswith("/api/")]) > 2  # it followed the pages


@pytest.mark.parametrize("revision", ["main", "v1.0", "0123456", REVISION.upper(), REVISION + "0", ""])
def test_only_a_commit(revision: str) -> None:
    with pytest.raises(InputError, match="not a commit"):
        HubSource("owner/name", revision)


@pytest.mark.parametrize("name", ["name", "a/b/c", "../x/y", "owner/na me", "https://host/owner/name"])
def test_only_a_repository(name: str) -> None:
    with pytest.raises(InputError, match="not the name of a repository"):
        HubSource(name, REVISION)


def test_an_unknown_commit(server: Mirror) -> None:
    with pytest.raises(GpuboxError, match="404") as error:
        HubSource("owner/name", "f" * 40, endpoint=server.url).wanted()
    assert "check the name and the commit" in error.value.hint


def test_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the client waits between its tries
    with pytest.raises(GpuboxError, match=f"owner/name at {REVISION}: .*refused"):
        HubSource("owner/name", REVISION, endpoint="http://127.0.0.1:1").wanted()


@pytest.mark.parametrize("fault", [faults.cut(1000), faults.corrupt, faults.stall(1000), faults.status(503)])
def test_the_hubs_store_misbehaves(server: Mirror, tmp_path: Path, fault: faults.Fault) -> None:
    server.faults[f"/cdn/{SHARD}"] = [fault]
    to = fetched(server, tmp_path)
    assert (to / SHARD).read_bytes() == FILES[SHARD]


def test_a_small_file_with_other_bytes(server: Mirror, tmp_path: Path) -> None:
    """It has no sha256 on the hub: its git id tells."""
    assert server.hub is not None
    tree = server.hub.tree()
    server.hub.files = {**FILES, "config.json": FILES["config.json"][::-1]}
    server.hub.tree = lambda: tree  # type: ignore[method-assign]
    with pytest.raises(GpuboxError, match=r"config.json .*other bytes twice.*expected git"):
        fetched(server, tmp_path)


class TestToken:
    TOKEN = "hf_abcdefghijklmnop"

    @pytest.fixture(autouse=True)
    def gated(self, server: Mirror) -> None:
        assert server.hub is not None
        server.hub.token = self.TOKEN

    def test_without(self, server: Mirror) -> None:
        with pytest.raises(GpuboxError) as error:
            source(server).wanted()
        assert "needs a token: HF_TOKEN or --token-file" in error.value.hint

    def test_from_the_environment(self, server: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_TOKEN", self.TOKEN)
        assert fetched(server, tmp_path).is_dir()

    def test_from_a_file_and_never_to_another_host(self, server: Mirror, tmp_path: Path) -> None:
        (tmp_path / "token").write_text(f"{self.TOKEN}\n")
        fetched(server, tmp_path, token_file=tmp_path / "token")
        asked = {seen.authorization for seen in server.seen if "/resolve/" in seen.path}
        assert asked == {f"Bearer {self.TOKEN}"}
        assert {seen.authorization for seen in server.seen if seen.path.startswith("/cdn/")} == {None}

    def test_in_no_message(self, server: Mirror, tmp_path: Path) -> None:
        """Neither the token nor the signature of the store's address."""
        (tmp_path / "token").write_text(self.TOKEN)
        server.faults[f"/cdn/{SHARD}"] = [faults.redirect("http://127.0.0.1:1/x?X-Signature=secret-of-the-cdn")] * 50
        with pytest.raises(GpuboxError) as error:
            fetched(server, tmp_path, token_file=tmp_path / "token")
        assert "ConnectionError" in str(error.value) and "?..." in str(error.value)
        assert self.TOKEN not in str(error.value) and "secret-of-the-cdn" not in str(error.value)

    @pytest.mark.parametrize("content", ["", "two words", "a\nb"])
    def test_a_file_that_holds_none(self, server: Mirror, tmp_path: Path, content: str) -> None:
        (tmp_path / "token").write_text(content)
        with pytest.raises(InputError, match="holds no token") as error:
            source(server, token_file=tmp_path / "token")
        assert not content or content not in str(error.value)


def test_the_command_from_the_environment(server: Mirror, tmp_path: Path) -> None:
    """As an operator calls it: endpoint and token by environment, nothing in the arguments."""
    assert server.hub is not None
    server.hub.token = TestToken.TOKEN
    program = [sys.executable, "-c", "from gpubox.cli.main import main; main()", "weights", "fetch", "owner/name"]
    environment = {"HF_ENDPOINT": server.url, "HF_TOKEN": TestToken.TOKEN, "HOME": str(tmp_path), "PATH": "/usr/bin"}
    arguments = ["--revision", REVISION, "--to", str(tmp_path / "to"), "--state", str(tmp_path / "state")]
    done = subprocess.run([*program, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 files fetched" in done.stdout and "content     proved" in done.stdout
    assert TestToken.TOKEN not in done.stdout + done.stderr

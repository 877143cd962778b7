"""Model directories of an operator: whole ones pass, and whatever is missing, cut or noise is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubox.errors import InputError
from gpubox.specs.checkpoint import check_model_directory, check_shard


def shard(**sizes: int) -> bytes:
    """A safetensors file of zeros: so many bytes for each tensor."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(end)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two shards, an index and a config."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(shard(a=10, b=20))
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(shard(c=30))
    weight_map = dict.fromkeys("ab", "model-00001-of-00002.safetensors") | {"c": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


class TestModelDirectory:
    def test_whole(self, checkpoint: Path) -> None:
        check_model_directory(checkpoint)
        (checkpoint / "model.safetensors.index.json").unlink()
        check_model_directory(checkpoint)

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
    @pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"a":'])
    def test_broken_json(self, checkpoint: Path, name: str, content: bytes) -> None:
        (checkpoint / name).write_bytes(content)
        with pytest.raises(InputError, match=name):
            check_model_directory(checkpoint)

    @pytest.mark.parametrize("indexed", [True, False])
    def test_missing_shard_is_named(self, checkpoint: Path, indexed: bool) -> None:
        (checkpoint / "model-00002-of-00002.safetensors").unlink()
        if not indexed:
            (checkpoint / "model.safetensors.index.json").unlink()
        with pytest.raises(InputError, match=r"model-00002-of-00002.safetensors: is missing"):
            check_model_directory(checkpoint)

    def test_tensor_missing_from_its_shard(self, checkpoint: Path) -> None:
        (checkpoint / "model-00001-of-00002.safetensors").write_bytes(shard(a=10))
        with pytest.raises(InputError, match=r"model-00001-of-00002.safetensors: lacks b"):
            check_model_directory(checkpoint)

    @pytest.mark.parametrize("place", [".cache/huggingface/download/x.incomplete", "x.incomplete"])
    def test_unfinished_download(self, checkpoint: Path, place: str) -> None:
        (checkpoint / place).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / place).touch()
        with pytest.raises(InputError, match=r"x.incomplete: an unfinished download"):
            check_model_directory(checkpoint)

    def test_unfinished_blob_of_a_cache(self, checkpoint: Path) -> None:
        snapshot = checkpoint / "hub" / "snapshots" / "0123"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        (snapshot / "model.safetensors").write_bytes(shard(a=1))
        check_model_directory(snapshot)
        (checkpoint / "hub" / "blobs").mkdir()
        (checkpoint / "hub" / "blobs" / "ab.incomplete").touch()
        with pytest.raises(InputError, match=r"ab.incomplete"):
            check_model_directory(snapshot)

    def test_no_directory_or_no_config(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="no such model directory"):
            check_model_directory(tmp_path / "nope")
        with pytest.raises(InputError, match=r"config.json: not readable JSON"):
            check_model_directory(tmp_path)

    @given(cut=st.integers(0, len(shard(a=10, b=20)) - 1), extra=st.binary(max_size=9))
    def test_any_cut_shard_is_refused(self, tmp_path_factory: pytest.TempPathFactory, cut: int, extra: bytes) -> None:
        path = tmp_path_factory.getbasetemp() / "cut.safetensors"
        whole = shard(a=10, b=20)
        path.write_bytes(whole[:cut])
        with pytest.raises(InputError, match=r"cut.safetensors"):
            check_shard(path)
        path.write_bytes(whole + extra)
        if extra:
            with pytest.raises(InputError, match="its header says"):
                check_shard(path)
        else:
            assert check_shard(path) == {"a", "b"}

    @given(st.binary(max_size=200))
    def test_noise_is_refused_never_a_crash(self, tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
        path = tmp_path_factory.getbasetemp() / "noise.safetensors"
        path.write_bytes(len(noise).to_bytes(8, "little") + noise)
        with pytest.raises(InputError):
            check_shard(path)
        path.write_bytes(noise)
        with pytest.raises(InputError):
            check_shard(path)

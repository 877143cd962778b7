"""Converting drafts: into the model store under a name of its digest, whole or not at all, and right afterwards."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from gpubox.drafts import convert
from gpubox.drafts.case import Serving
from gpubox.drafts.check import check_draft
from gpubox.drafts.convert import Converted, Provenance, convert_draft
from gpubox.drafts.findings import Level
from gpubox.errors import BrokenError, GpuboxError, InputError, ProofError
from gpubox.layout import Layout
from gpubox.weights.safetensors import read_header, read_values
from tests.unit import drafts
from tests.unit.drafts import Draft, speculators_draft, tensor, write_target, write_tensors

NEW, MIDDLE = "0.5.17", "0.5.11"


class Workshop:
    """A box with a target; what was said while converting."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.layout = Layout(root / "opt")
        self.target = write_target(root / "target")
        self.said: list[str] = []

    def convert(
        self, source: Path, version: str = NEW, trained: list[int] | None = None, name: str = "k2-draft"
    ) -> Converted:
        return convert_draft(source, name, self.target, version, self.layout, trained=trained, say=self.said.append)

    def store(self) -> list[str]:
        return sorted(path.name for path in self.layout.models.iterdir()) if self.layout.models.is_dir() else []


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


class TestSpeculators:
    def test_what_the_check_refused_is_served_by_every_version_afterwards(self, shop: Workshop) -> None:
        source = speculators_draft().write(shop.root / "source")
        before = contents(source)
        assert [f.name for f in check_draft(source, shop.target, MIDDLE).failures] == ["format", "tensors"]
        done = shop.convert(source)
        assert contents(source) == before
        assert done.directory.parent == shop.layout.models
        for version in ("0.5.10", MIDDLE, "0.5.12", "0.5.13", NEW):
            report = check_draft(done.directory, shop.target, version, serving=Serving(fused_allreduce=False))
            assert not report.failures
            assert not report.of(Level.WARN)
            assert report.capture is not None
            assert report.capture.trained == report.capture.eager == report.capture.graph == [2, 30, 58]

    def test_the_config(self, shop: Workshop) -> None:
        done = shop.convert(speculators_draft().write(shop.root / "source"))
        config = json.loads((done.directory / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert config["eagle_config"] == {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [1, 29, 57],
        }
        assert "target_hidden_size" not in config
        assert "transformer_layer_config" not in config
        assert config["torch_dtype"] == "bfloat16"  # float32 would be served as float16
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 50000.0

    @pytest.mark.parametrize(
        ("version", "layers", "ids"),
        [(MIDDLE, [3, 31, 59], [2, 30, 58]), ("0.5.13", [3, 31, 59], [3, 31, 59]), ("0.5.13", [2, 9, 20], [1, 8, 19])],
    )
    def test_layer_inputs_become_the_ids_of_the_version(
        self, shop: Workshop, version: str, layers: list[int], ids: list[int]
    ) -> None:
        draft = speculators_draft()
        draft.config["eagle_aux_hidden_state_layer_ids"] = layers
        done = shop.convert(draft.write(shop.root / "source"), version)
        config = json.loads((done.directory / "config.json").read_text())
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == ids

    def test_served_by_another_version_than_converted_for(self, shop: Workshop) -> None:
        """draft.json remembers what was trained, so the shifted reading is seen."""
        draft = speculators_draft()
        draft.config["eagle_aux_hidden_state_layer_ids"] = [3, 31, 59]
        done = shop.convert(draft.write(shop.root / "source"), MIDDLE)
        report = check_draft(done.directory, shop.target, "0.5.13")
        assert [finding.name for finding in report.failures] == ["captured layers"]
        assert "2/30/58, but the draft was trained on 3/31/59" in report.failures[0].what

    def test_converted_again_for_the_other_version(self, shop: Workshop) -> None:
        draft = speculators_draft()
        draft.config["eagle_aux_hidden_state_layer_ids"] = [3, 31, 59]
        first = shop.convert(draft.write(shop.root / "source"), MIDDLE)
        second = shop.convert(first.directory, "0.5.13")
        assert not second.report.failures
        config = json.loads((second.directory / "config.json").read_text())
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [3, 31, 59]
        assert len(shop.store()) == 2

    def test_trained_in_a_way_that_is_not_served(self, shop: Workshop) -> None:
        draft = speculators_draft()
        draft.config["norm_before_residual"] = True
        with pytest.raises(ProofError, match="trained with the normed state"):
            shop.convert(draft.write(shop.root / "source"))
        assert shop.store() == []

    @pytest.mark.parametrize(
        "change",
        [
            {"speculators_model_type": "eagle"},
            {"transformer_layer_config": 7},
            {"transformer_layer_config": {"model_type": "qwen3"}},
            {"eagle_aux_hidden_state_layer_ids": "2,30,58"},
            {"eagle_aux_hidden_state_layer_ids": [1, 30, 58]},  # 0.5.17 cannot be told to capture what enters layer 1
        ],
    )
    def test_what_cannot_be_flattened(self, shop: Workshop, change: dict[str, object]) -> None:
        draft = speculators_draft()
        draft.config |= change
        with pytest.raises(InputError):
            shop.convert(draft.write(shop.root / "source"))
        assert shop.store() == []


class TestTensors:
    def test_renamed_and_otherwise_the_same_bytes(self, shop: Workshop) -> None:
        draft = speculators_draft()
        done = shop.convert(draft.write(shop.root / "source"))
        header = read_header(done.directory / "model.safetensors")
        data = (done.directory / "model.safetensors").read_bytes()[header.data_start :]
        expected = {
            name.replace("layers.0.", "midlayer."): value
            for name, value in draft.tensors.items()
            if not name.startswith("verifier")
        }
        assert {
            name: (info.dtype, info.shape, data[info.begin : info.end]) for name, info in header.tensors.items()
        } == expected

    def test_a_flat_draft_with_old_names(self, shop: Workshop) -> None:
        draft = Draft(tensors={f"model.{name}": value for name, value in drafts.weights("layers.0.").items()})
        del draft.config["draft_vocab_size"], draft.config["tie_word_embeddings"]
        done = shop.convert(draft.write(shop.root / "source"), MIDDLE)
        assert read_header(done.directory / "model.safetensors").tensors.keys() == drafts.weights().keys()
        assert json.loads((done.directory / "config.json").read_text())["draft_vocab_size"] == drafts.DRAFT_VOCABULARY

    def test_two_spellings_of_one_tensor(self, shop: Workshop) -> None:
        draft = speculators_draft()
        draft.tensors["midlayer.mlp.up_proj.weight"] = tensor((32, 16))
        with pytest.raises(InputError, match="would both become"):
            shop.convert(draft.write(shop.root / "source"))

    def test_shards_stay_shards(self, shop: Workshop) -> None:
        done = shop.convert(speculators_draft().write(shop.root / "source", shards=3))
        assert {path.name for path in done.directory.iterdir()} == {
            *(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)),
            *("config.json", "draft.json", "model.safetensors.index.json"),
        }
        index = json.loads((done.directory / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() >= drafts.weights().keys()

    def test_an_mla_draft(self, shop: Workshop) -> None:
        draft = Draft(tensors={name.replace("midlayer.", "layers.0."): v for name, v in drafts.mla_weights().items()})
        draft.config |= {**drafts.MLA, "architectures": ["Eagle3DeepseekV2ForCausalLM"], "num_key_value_heads": 4}
        done = shop.convert(draft.write(shop.root / "source"))
        assert not done.report.failures

    def test_damaged(self, shop: Workshop) -> None:
        source = speculators_draft().write(shop.root / "source")
        os.truncate(source / "model.safetensors", 3000)
        with pytest.raises(BrokenError, match=r"model\.safetensors"):
            shop.convert(source)
        assert shop.store() == []


class TestLayers:
    def test_given_by_hand(self, shop: Workshop) -> None:
        draft = Draft()
        del draft.config["eagle_config"]
        done = shop.convert(draft.write(shop.root / "source"), trained=[3, 31, 59])
        assert done.report.capture is not None
        assert done.report.capture.eager == [3, 31, 59]

    def test_not_known(self, shop: Workshop) -> None:
        """Nothing is made up: the ids stay as they are, and the record says that nobody knows."""
        done = shop.convert(Draft().write(shop.root / "source"))
        assert json.loads((done.directory / "draft.json").read_text())["trained_layers"] is None
        config = json.loads((done.directory / "config.json").read_text())
        assert config["eagle_config"] == drafts.CONFIG["eagle_config"]


class TestStore:
    def test_the_record(self, shop: Workshop) -> None:
        source = speculators_draft().write(shop.root / "source")
        done = shop.convert(source)
        record = Provenance.model_validate_json((done.directory / "draft.json").read_bytes())
        assert record.source.keys() == {"config.json", "model.safetensors"}
        assert record.source["config.json"] == convert._sha256(source / "config.json")
        assert record.source_format == "speculators"
        assert record.dropped == ["verifier_norm.weight"]
        assert record.renamed["layers.0.mlp.up_proj.weight"] == "midlayer.mlp.up_proj.weight"
        for name, file in record.files.items():
            assert convert._sha256(done.directory / name) == file.sha256
            assert (done.directory / name).stat().st_size == file.size

    def test_again_changes_nothing(self, shop: Workshop) -> None:
        source = speculators_draft().write(shop.root / "source")
        first = shop.convert(source)
        stamps = {path: path.stat().st_mtime_ns for path in first.directory.iterdir()}
        assert shop.convert(source).directory == first.directory
        assert {path: path.stat().st_mtime_ns for path in first.directory.iterdir()} == stamps
        assert shop.said[-1].endswith("is converted already")
        assert shop.store() == [first.directory.name]

    def test_equal_on_every_box(self, shop: Workshop, tmp_path: Path) -> None:
        source = speculators_draft().write(shop.root / "source")
        first = shop.convert(source)
        other = Workshop(tmp_path / "other")
        shutil.copytree(source, other.root / "elsewhere")
        second = other.convert(other.root / "elsewhere")
        assert second.directory.name == first.directory.name
        assert contents(second.directory) == contents(first.directory)

    def test_other_weights_other_name(self, shop: Workshop) -> None:
        draft = speculators_draft()
        first = shop.convert(draft.write(shop.root / "source"))
        draft.tensors["fc.weight"] = tensor((16, 48), fill=b"\x00\x40")
        second = shop.convert(draft.write(shop.root / "source"))
        assert first.directory != second.directory
        assert len(shop.store()) == 2

    @pytest.mark.parametrize("name", ["", "../up", "Upper", "a/b", ".hidden", "a" * 65, "a\n"])
    def test_names(self, shop: Workshop, name: str) -> None:
        with pytest.raises(InputError, match="--name"):
            shop.convert(speculators_draft().write(shop.root / "source"), name=name)

    def test_interrupted_after_any_write_goes_on(self, shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
        """Killed at the n-th durable step: the next run has the same result, and keeps the shards that were whole."""
        source = speculators_draft().write(shop.root / "source", shards=4)
        reference = Workshop(shop.root / "reference")
        expected = reference.convert(source)
        real = os.fsync
        for limit in range(12):
            fresh = Workshop(shop.root / f"run{limit}")
            left = [limit]

            def killed(descriptor: int, left: list[int] = left) -> None:
                if left[0] == 0:
                    raise KeyboardInterrupt
                left[0] -= 1
                real(descriptor)

            monkeypatch.setattr(os, "fsync", killed)
            try:
                fresh.convert(source)
            except KeyboardInterrupt:
                assert all(name.startswith(".building-") for name in fresh.store()) or fresh.store() == [
                    expected.directory.name
                ]
            monkeypatch.setattr(os, "fsync", real)
            done = fresh.convert(source)
            assert contents(done.directory) == contents(expected.directory)
            assert fresh.store() == [expected.directory.name]
            kept = sum(text.endswith("is there already") for text in fresh.said)
            assert kept == min(limit, 4) or fresh.said[-1].endswith("converted already")

    def test_half_built_ones_of_other_bytes_are_removed(self, shop: Workshop) -> None:
        models = shop.layout.models
        for name in (
            ".building-k2-draft-000000000000",
            ".building-k2-draft-more-000000000000",
            "k2-draft-000000000000",
        ):
            (models / name).mkdir(parents=True)
        done = shop.convert(speculators_draft().write(shop.root / "source"))
        assert shop.store() == sorted(
            [".building-k2-draft-more-000000000000", "k2-draft-000000000000", done.directory.name]
        )

    def test_a_result_that_somebody_changed(self, shop: Workshop) -> None:
        source = speculators_draft().write(shop.root / "source")
        done = shop.convert(source)
        with (done.directory / "config.json").open("a") as stream:
            stream.write(" ")
        with pytest.raises(BrokenError, match=r"config\.json has another size"):
            shop.convert(source)
        (done.directory / "draft.json").unlink()
        with pytest.raises(BrokenError, match="is not as it was converted"):
            shop.convert(source)

    def test_a_source_that_is_written_to_meanwhile(self, shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
        source = speculators_draft().write(shop.root / "source")
        real = convert._write_shard

        def slow(*arguments: object) -> object:
            done = real(*arguments)  # type: ignore[arg-type]
            write_tensors(source / "model.safetensors", speculators_draft().tensors)
            return done

        monkeypatch.setattr(convert, "_write_shard", slow)
        with pytest.raises(GpuboxError, match="somebody wrote to it"):
            shop.convert(source)
        assert shop.store() == []

    def test_a_full_disk_is_seen_before_copying(self, shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))  # type: ignore[attr-defined]
        with pytest.raises(GpuboxError, match="are free"):
            shop.convert(speculators_draft().write(shop.root / "source"))


def test_d2t_arrives_whole(shop: Workshop) -> None:
    done = shop.convert(speculators_draft().write(shop.root / "source"))
    header = read_header(done.directory / "model.safetensors")
    assert list(read_values(header, "d2t")) == list(range(drafts.DRAFT_VOCABULARY))

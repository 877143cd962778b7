"""The check of a draft: a right one passes, and each thing that can be wrong gives exactly the finding of its name."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpubox.drafts.case import Serving
from gpubox.drafts.check import check_draft
from gpubox.drafts.findings import Level, Report
from gpubox.errors import InputError
from gpubox.specs import patch_names
from tests.unit import drafts
from tests.unit.drafts import Draft, Tensor, booleans, integers, tensor, write_target, write_tensors

NEW, OLD, MIDDLE = "0.5.17", "0.5.9", "0.5.11"
OLD_PATCHES = (patch_names.HOOKS, patch_names.GRAPH_LAYERS, patch_names.CAPTURE_AFTER_REDUCE)
RECORDED = Path(__file__).parents[1] / "fixtures" / "draft-smollm2"
SMOLLM2 = {
    **{"architectures": ["LlamaForCausalLM"], "hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152},
    **{"max_position_embeddings": 8192, "rope_theta": 100000, "torch_dtype": "bfloat16"},
}

Change = Callable[[Draft], object]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target")


@pytest.fixture
def draft() -> Draft:
    return Draft()


def config(**changes: Any) -> Change:
    """None removes a key."""

    def change(draft: Draft) -> None:
        for key, value in changes.items():
            if value is None:
                draft.config.pop(key, None)
            else:
                draft.config[key] = value

    return change


def null(key: str) -> Change:
    return lambda draft: draft.config.__setitem__(key, None)


def ids(*layers: int, **more: Any) -> Change:
    return config(eagle_config={"eagle_aux_hidden_state_layer_ids": list(layers), **more})


def tensors(**changes: Tensor | None) -> Change:
    """Names with __ for dots; None removes."""

    def change(draft: Draft) -> None:
        for key, value in changes.items():
            name = key.replace("__", ".")
            draft.tensors.pop(name, None)
            if value is not None:
                draft.tensors[name] = value

    return change


def both(*changes: Change) -> Change:
    return lambda draft: [change(draft) for change in changes]


def mla(draft: Draft) -> None:
    draft.config |= {
        **drafts.MLA,
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "num_key_value_heads": drafts.HEADS,
    }
    draft.tensors = drafts.mla_weights()


def rename(old: str, new: str) -> Change:
    def change(draft: Draft) -> None:
        draft.tensors = {name.replace(old, new): value for name, value in draft.tensors.items()}

    return change


def found(report: Report, level: Level) -> list[str]:
    return [finding.name for finding in report.of(level)]


FC_NORMS = tensors(**{f"fc_norm__{index}__weight": tensor((16,)) for index in range(3)})
INPUT_NORM = tensors(input_norm__weight=tensor((48,)))
NO_MAP: dict[str, None] = {"d2t": None, "t2d": None}


class TestRightOnes:
    @pytest.mark.parametrize(("version", "patches"), [(OLD, OLD_PATCHES), ("0.5.10", ()), (MIDDLE, ()), (NEW, ())])
    def test_passes(self, tmp_path: Path, draft: Draft, target: Path, version: str, patches: tuple[str, ...]) -> None:
        """[1, 29, 57] is the one spelling that means the same in every version."""
        serving = Serving(fused_allreduce=False, tensor_parallel=2)
        report = check_draft(draft.write(tmp_path / "d"), target, version, patches=patches, serving=serving)
        assert not report.of(Level.FAIL)
        assert not report.of(Level.WARN)
        assert report.capture is not None
        assert report.capture.eager == report.capture.graph == [2, 30, 58]

    def test_the_draft_trained_on_an_h200(self, tmp_path: Path) -> None:
        """Its recorded config and tensor list; the values are made up."""
        smollm2 = write_target(tmp_path / "target", SMOLLM2, files=False)
        report = check_draft(recorded_draft(tmp_path / "d"), smollm2, NEW)
        assert not [str(finding) for finding in report.failures]
        assert found(report, Level.WARN) == ["target files"]
        assert report.capture is not None
        assert report.capture.eager == [2, 15, 27]

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param(rename("midlayer", "layers.0"), id="new spelling"),
            pytest.param(rename("midlayer", "model.midlayer"), id="below model"),
            pytest.param(both(null("draft_vocab_size"), tensors(lm_head__weight=None, **NO_MAP)), id="borrows head"),
            pytest.param(
                both(config(draft_vocab_size=64), tensors(lm_head__weight=tensor((64, 16)), **NO_MAP)), id="all words"
            ),
            pytest.param(tensors(t2d=None), id="no t2d"),
            pytest.param(tensors(embed_tokens__weight=tensor((64, 16))), id="own embedding"),
            pytest.param(both(config(fc_norm=True), FC_NORMS), id="fc_norm"),
            pytest.param(both(config(use_aux_norm=True), FC_NORMS, rename("fc_norm.2", "aux_norm_high")), id="aux"),
            pytest.param(both(config(norm_before_fc=True), INPUT_NORM), id="norm_before_fc"),
            pytest.param(both(ids(1, 15, 29, 57), tensors(fc__weight=tensor((16, 64)))), id="four layers"),
            pytest.param(mla, id="MLA"),
            pytest.param(tensors(d2t=integers(list(range(24)), "I32")), id="d2t of 32 bits"),
            pytest.param(tensors(midlayer__self_attn__rotary_emb__inv_freq=tensor((2,))), id="inv_freq"),
        ],
    )  # fmt: skip
    def test_other_right_ones(self, tmp_path: Path, draft: Draft, target: Path, change: Change) -> None:
        change(draft)
        serving = Serving(trained_layers=(2, 16, 30, 58) if "15" in str(draft.config["eagle_config"]) else None)
        report = check_draft(draft.write(tmp_path / "d"), target, NEW, serving=serving)
        assert not [str(finding) for finding in report.failures]

    def test_a_smaller_draft_with_its_own_embedding(self, tmp_path: Path, target: Path) -> None:
        draft = Draft()
        small = {name: (dtype, shape, data) for name, (dtype, shape, data) in drafts.weights().items()}
        for name, (dtype, shape, _) in drafts.weights().items():
            if dtype == "BF16":
                small[name] = tensor(tuple({drafts.HIDDEN: 8, 2 * drafts.HIDDEN: 16}.get(size, size) for size in shape))
        for name in ("q", "o"):
            small[f"midlayer.self_attn.{name}_proj.weight"] = tensor((16, 16) if name == "q" else (8, 16))
        for name, shape in {"gate": (32, 8), "up": (32, 8), "down": (8, 32)}.items():
            small[f"midlayer.mlp.{name}_proj.weight"] = tensor(shape)
        draft.tensors = {**small, "embed_tokens.weight": tensor((64, 8)), "fc.weight": tensor((8, 48))}
        draft.config |= {"hidden_size": 8, "target_hidden_size": 16}
        report = check_draft(draft.write(tmp_path / "d"), target, NEW)
        assert not [str(finding) for finding in report.failures]
        del draft.tensors["embed_tokens.weight"]
        report = check_draft(draft.write(tmp_path / "e"), target, NEW)
        assert found(report, Level.FAIL) == ["tensors"]


NAN = struct.pack("<f", float("nan"))[2:]
INFINITE = struct.pack("<f", float("inf"))[2:]

WRONG: list[tuple[str, str, Change, str]] = [
    # the names of the findings, the version, the one change, what the first finding says
    ("format", NEW, lambda draft: draft.config.update(drafts.SPECULATORS), "speculators"),
    ("architecture", NEW, config(architectures=["LlamaForCausalLM"]), "no EAGLE-3 draft class"),
    ("config", NEW, config(hidden_size=None), "hidden_size: Field required"),
    ("config", NEW, config(hidden_size="16"), "hidden_size = '16'"),
    ("config", NEW, config(vocab_size=-1), "vocab_size = -1"),
    ("config", NEW, config(eagle_config=[1, 2]), "eagle_config"),
    ("config", NEW, ids(1, -29, 57), "eagle_aux_hidden_state_layer_ids.1 = -29"),
    ("layers", MIDDLE, config(num_hidden_layers=2), "num_hidden_layers is 2"),
    ("hidden size, tensors, shapes", NEW, config(target_hidden_size=32), "the target has 16"),
    ("hidden size", NEW, null("target_hidden_size"), "target_hidden_size is null"),
    ("vocabulary, t2d", NEW, config(vocab_size=65), "vocab_size is 65, the target has 64"),
    ("vocabulary, shapes, d2t", NEW, config(draft_vocab_size=None), "draft_vocab_size is missing"),
    ("vocabulary, shapes, d2t", NEW, config(draft_vocab_size=65), "more than vocab_size"),
    ("vocabulary", NEW, config(tie_word_embeddings=True), "tie_word_embeddings is true"),
    ("attention, shapes", NEW, config(num_key_value_heads=3), "no multiple of 3"),
    ("positions", NEW, config(max_position_embeddings=2048), "allows 2048 tokens"),
    ("rotary base", OLD, config(rope_theta=None, rope_parameters={"rope_theta": 5e4}), "does not read rope_parameters"),
    ("rotary base", NEW, config(rope_theta=None), "rope_theta is missing"),
    ("weight type", NEW, config(torch_dtype=None), "torch_dtype is missing"),
    ("weight type", NEW, config(torch_dtype="float32"), "torch_dtype is float32"),
    ("weight type", NEW, config(torch_dtype="float16"), "the target's bfloat16"),
    ("quantization", NEW, config(quantization_config={"quant_method": "fp8"}), "quantization_config"),
    ("norm_before_residual", NEW, config(norm_before_residual=True), "trained with the normed state"),
    ("norms before fc", MIDDLE, both(config(norm_before_fc=True), INPUT_NORM), "norm_before_fc"),
    ("norms before fc", MIDDLE, both(config(fc_norm=True), FC_NORMS), "fc_norm"),
    ("norms before fc", NEW, both(mla, config(norm_before_fc=True), INPUT_NORM), "norm_before_fc is true"),
    ("norm_output", MIDDLE, config(norm_output=True), "normed state"),
    ("target hooks", OLD, lambda d: None, "no EAGLE-3 hooks in 0.5.9"),
    ("layer ids", NEW, ids(1, 29, 57, use_aux_hidden_state=False), "use_aux_hidden_state is false"),
    ("layer ids, shapes", NEW, config(num_aux_hidden_states=4), "3 ids, but num_aux_hidden_states is 4"),
    ("captured layers", "0.5.10", ids(2, 30, 58), "eager 3/31/59, under CUDA graphs 2/30/58"),
    ("captured layers", NEW, ids(0, 29, 57), "layer 0 is the embedding|the embedding"),
    ("captured layers", NEW, ids(2, 30, 61), "the last that is, is 60"),
    ("captured layers", MIDDLE, ids(2, 30, 60), "layer 61 is captured"),
    ("tensors", NEW, tensors(fc__weight=None), "1 of 13 are missing: fc.weight"),
    ("tensors", NEW, tensors(lm_head__weight=None), "lm_head.weight"),
    ("tensors", NEW, config(bias=True), "2 of 15 are missing: fc.bias"),
    ("tensors", MIDDLE, rename("midlayer", "layers.0"), "10 of 13 are missing"),
    ("tensors", NEW, tensors(layers__0__mlp__up_proj__weight=tensor((32, 16))), "load into the same parameter"),
    ("tensors", NEW, rename("lm_head", "model.lm_head"), "lm_head.weight"),
    ("tensors", NEW, both(mla, rename("fc.", "model.fc.")), "fc.weight"),
    ("unread tensors", NEW, tensors(input_norm__weight=tensor((48,))), "a norm that config.json does not ask for"),
    ("shapes", NEW, tensors(fc__weight=tensor((16, 64))), "fc.weight is [16, 64], not [16, 48]"),
    ("shapes", NEW, tensors(midlayer__self_attn__q_proj__weight=tensor((16, 16))), "not [16, 32]"),
    ("shapes", NEW, tensors(embed_tokens__weight=tensor((64, 8))), "embed_tokens.weight is [64, 8]"),
    ("shapes", NEW, tensors(lm_head__weight=tensor((25, 16))), "lm_head.weight is [25, 16]"),
    ("types", NEW, tensors(fc__weight=tensor((16, 48), "I8", b"\1")), "I8"),
    ("types", NEW, tensors(fc__weight=tensor((16, 48), "F8_E4M3", b"\1")), "F8_E4M3"),
    ("d2t", NEW, tensors(d2t=None, t2d=None), "missing, with 24 of 64 tokens"),
    ("d2t", NEW, tensors(d2t=integers([0] * 23 + [41]), t2d=None), "draft token 23 maps to 64"),
    ("d2t", NEW, tensors(d2t=integers([-1] + [0] * 23), t2d=None), "maps to -1"),
    ("d2t", NEW, tensors(d2t=integers([1, 0] + [0] * 22), t2d=None), "1 draft tokens map to a target token"),
    ("d2t", NEW, tensors(d2t=integers([2 * i for i in range(24)]), t2d=None), "outside 0 to 63"),
    ("d2t", NEW, tensors(d2t=integers([0] * 23), t2d=None), "not integers [24]"),
    ("d2t", NEW, tensors(d2t=tensor((24,), "F32"), t2d=None), "F32 [24]"),
    ("t2d", NEW, tensors(t2d=booleans([i < 24 for i in range(64)])), "12|in one of them only"),
    ("t2d", NEW, tensors(t2d=booleans([True] * 63)), "not booleans [64]"),
    ("norm values", NEW, tensors(norm__weight=tensor((16,), fill=NAN)), "16 of 16 are not finite"),
    ("norm values", NEW, tensors(norm__weight=tensor((16,), fill=b"\x80\x3f" * 15 + INFINITE)), "1 of 16"),
    ("norm values", NEW, tensors(norm__weight=tensor((16,), fill=b"\0\0")), "all zero"),
]  # fmt: skip


class TestWrongOnes:
    @pytest.mark.parametrize(("name", "version", "change", "says"), WRONG)
    def test_one_change_one_failure(
        self, tmp_path: Path, draft: Draft, target: Path, name: str, version: str, change: Change, says: str
    ) -> None:
        change(draft)
        patches = OLD_PATCHES if version == OLD and name != "target hooks" else ()
        report = check_draft(draft.write(tmp_path / "d"), target, version, patches=patches)
        assert found(report, Level.FAIL) == name.split(", "), [str(finding) for finding in report.failures]
        finding = report.failures[0]
        assert any(part in finding.what for part in says.split("|")), finding.what

    @pytest.mark.parametrize(
        ("name", "version", "change"),
        [
            ("rotary base", NEW, config(rope_theta=10000.0)),
            ("norm_output", NEW, config(norm_output=True)),
            ("norm_output", MIDDLE, config(norm_output=False)),
            ("layer ids", NEW, config(eagle_config=None)),
            ("layer ids", NEW, config(eagle_config={})),
            ("captured layers", NEW, ids(3, 31, 59)),
            ("unread tensors", NEW, tensors(verifier_norm__weight=tensor((16,)))),
            ("types", NEW, tensors(fc__weight=tensor((16, 48), "F32", struct.pack("<f", 1)))),
            ("d2t", NEW, tensors(d2t=integers([0] * 24), t2d=booleans([i < 24 for i in range(64)]))),
            ("engine", "0.9.9", lambda d: None),
            ("vocabulary", NEW, both(mla, config(tie_word_embeddings=None))),
        ],
    )
    def test_one_change_one_warning(
        self, tmp_path: Path, draft: Draft, target: Path, name: str, version: str, change: Change
    ) -> None:
        change(draft)
        serving = Serving(fused_allreduce=False)
        report = check_draft(draft.write(tmp_path / "d"), target, version, serving=serving)
        assert not [str(finding) for finding in report.failures]
        assert found(report, Level.WARN) == [name]

    def test_d2t_of_target_ids_is_recognized(self, tmp_path: Path, draft: Draft, target: Path) -> None:
        tensors(d2t=integers([40 + i for i in range(24)]), t2d=None)(draft)
        report = check_draft(draft.write(tmp_path / "d"), target, NEW)
        assert "look like target ids" in report.failures[0].why

    @pytest.mark.parametrize(
        ("serving", "says"),
        [
            (Serving(tensor_parallel=3), "4 heads cannot be split over 3 GPUs"),
            (Serving(tensor_parallel=8), "4 heads cannot be split over 8 GPUs"),
            (Serving(context_length=5000), "of the server has 5000"),
            (Serving(trained_layers=(3, 31, 59)), "the draft was trained on 3/31/59"),
            (Serving(gpu_bytes=10**6, memory_fraction=0.9), "needs"),
        ],
    )
    def test_how_it_is_served(self, tmp_path: Path, draft: Draft, target: Path, serving: Serving, says: str) -> None:
        report = check_draft(draft.write(tmp_path / "d"), target, NEW, serving=serving)
        assert len(report.failures) == 1
        assert says in report.failures[0].what

    def test_weight_type_by_argument(self, tmp_path: Path, draft: Draft, target: Path) -> None:
        config(torch_dtype=None)(draft)
        path = draft.write(tmp_path / "d")
        assert check_draft(path, target, NEW, serving=Serving(dtype="auto")).failures
        assert not check_draft(path, target, NEW, serving=Serving(dtype="bfloat16")).failures

    def test_what_a_file_says_is_printed_harmless(self, tmp_path: Path, draft: Draft, target: Path) -> None:
        draft.tensors["\x1b[2J"] = tensor((1,))
        config(architectures=["\x1b[31mred"], torch_dtype="\x07")(draft)
        report = check_draft(draft.write(tmp_path / "d"), target, NEW)
        assert len(report.failures) == 2
        for finding in report.findings:
            assert (finding.what + finding.why + finding.fix).isprintable()

    def test_key_value_heads_are_split_or_repeated(self, tmp_path: Path, draft: Draft, target: Path) -> None:
        config(num_attention_heads=6, num_key_value_heads=2, head_dim=4)(draft)
        tensors(
            midlayer__self_attn__q_proj__weight=tensor((24, 32)), midlayer__self_attn__o_proj__weight=tensor((16, 24))
        )(draft)
        path = draft.write(tmp_path / "d")
        assert not check_draft(path, target, NEW, serving=Serving(tensor_parallel=2)).failures
        report = check_draft(path, target, NEW, serving=Serving(tensor_parallel=3))
        assert "2 key-value heads can neither" in report.failures[0].what

    @pytest.mark.parametrize(
        ("fused", "version", "patches", "level"),
        [
            (None, "0.5.13", (), Level.WARN),
            (True, "0.5.13", (), Level.FAIL),
            (False, "0.5.13", (), Level.PASS),
            (True, "0.5.13", (patch_names.CAPTURE_AFTER_REDUCE,), Level.PASS),
            (True, "0.5.14", (), Level.PASS),
        ],
    )
    def test_fused_all_reduce(
        self,
        tmp_path: Path,
        draft: Draft,
        target: Path,
        fused: bool | None,
        version: str,
        patches: tuple[str, ...],
        level: Level,
    ) -> None:
        path = draft.write(tmp_path / "d")
        report = check_draft(path, target, version, patches=patches, serving=Serving(fused_allreduce=fused))
        assert [finding.level for finding in report.findings if finding.name == "captured sums"] == [level]

    def test_patches_by_file_name(self, tmp_path: Path, draft: Draft, target: Path) -> None:
        config(norm_before_residual=True)(draft)
        path = draft.write(tmp_path / "d")
        report = check_draft(path, target, NEW, patches=[f"{patch_names.NORM_BEFORE_RESIDUAL}.patch", "other.patch"])
        assert not report.failures

    def test_a_quantized_draft_on_purpose(self, tmp_path: Path, draft: Draft, target: Path) -> None:
        config(quantization_config={"quant_method": "fp8"})(draft)
        tensors(fc__weight=tensor((16, 48), "F8_E4M3", b"\1"))(draft)
        path = draft.write(tmp_path / "d")
        report = check_draft(path, target, NEW, serving=Serving(quantized_on_purpose=True))
        assert not report.failures
        assert "quantization" in found(report, Level.WARN)


class TestTarget:
    def changed(self, **changes: Any) -> dict[str, Any]:
        value = copy.deepcopy(drafts.TARGET)
        value["text_config"] |= changes  # type: ignore[index]
        return value

    def test_unknown_architecture(self, tmp_path: Path, draft: Draft) -> None:
        other = {**drafts.TARGET, "architectures": ["NewForCausalLM"]}
        report = check_draft(draft.write(tmp_path / "d"), write_target(tmp_path / "t", other), NEW)
        assert not report.failures
        assert found(report, Level.WARN) == ["target hooks", "captured layers"]
        assert report.capture is None

    def test_gpt_oss_gives_also_what_leaves_its_last_layer(self, tmp_path: Path, draft: Draft) -> None:
        gpt_oss = write_target(tmp_path / "t", {**drafts.TARGET, "architectures": ["GptOssForCausalLM"]})
        ids(2, 31, 61)(draft)
        path = draft.write(tmp_path / "d")
        known = Serving(trained_layers=(2, 31, 61))
        assert not check_draft(path, gpt_oss, "0.5.17", serving=known).failures
        report = check_draft(path, gpt_oss, "0.5.16", serving=known)
        assert "layer 62 is captured" in report.failures[0].what

    def test_config_and_files_of_two_models(self, tmp_path: Path, draft: Draft, target: Path) -> None:
        write_tensors(target / "model-00001-of-00002.safetensors", {"model.embed_tokens.weight": tensor((64, 8))})
        report = check_draft(draft.write(tmp_path / "d"), target, NEW)
        assert found(report, Level.FAIL) == ["target files"]
        assert "embed_tokens.weight is [64, 8]" in report.failures[0].what

    def test_only_a_config(self, tmp_path: Path, draft: Draft) -> None:
        report = check_draft(draft.write(tmp_path / "d"), write_target(tmp_path / "t", files=False), NEW)
        assert not report.failures
        assert found(report, Level.WARN) == ["target files"]

    def test_a_damaged_shard(self, tmp_path: Path, draft: Draft, target: Path) -> None:
        (target / "model-00002-of-00002.safetensors").write_bytes(b"x")
        report = check_draft(draft.write(tmp_path / "d"), target, NEW)
        assert found(report, Level.FAIL) == ["files"]

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a":1,"a":2}', b"\xff", b'{"a":NaN}', b"[" * 10**5])
    def test_config_that_is_no_config(self, tmp_path: Path, draft: Draft, target: Path, content: bytes) -> None:
        path = draft.write(tmp_path / "d")
        (target / "config.json").write_bytes(content)
        with pytest.raises(InputError, match=r"target/config\.json"):
            check_draft(path, target, NEW)

    def test_config_without_a_key(self, tmp_path: Path, draft: Draft) -> None:
        value = self.changed()
        del value["text_config"]["hidden_size"]
        with pytest.raises(InputError, match="hidden_size: Field required"):
            check_draft(draft.write(tmp_path / "d"), write_target(tmp_path / "t", value), NEW)


class TestFiles:
    def test_nothing_there(self, tmp_path: Path, draft: Draft, target: Path) -> None:
        with pytest.raises(InputError, match="no such draft directory"):
            check_draft(tmp_path / "nothing", target, NEW)
        with pytest.raises(InputError, match=r"config\.json: cannot be read"):
            check_draft(draft.write(tmp_path / "d"), tmp_path / "nothing", NEW)
        (tmp_path / "d" / "model.safetensors").unlink()
        with pytest.raises(InputError, match=r"holds no \*\.safetensors"):
            check_draft(tmp_path / "d", target, NEW)

    @pytest.mark.parametrize("version", ["", "latest", "0.5.6", "0.5.9.dev0", "0.5.9rc1"])
    def test_version_that_no_table_knows(self, tmp_path: Path, draft: Draft, target: Path, version: str) -> None:
        with pytest.raises(InputError, match="engine version"):
            check_draft(draft.write(tmp_path / "d"), target, version)

    @pytest.mark.parametrize("version", ["0.5.9", "0.5.9+cu130", "0.5.12.post1"])
    def test_spellings_of_versions(self, tmp_path: Path, draft: Draft, target: Path, version: str) -> None:
        assert check_draft(draft.write(tmp_path / "d"), target, version, patches=OLD_PATCHES).failures == []

    def test_cut_off(self, tmp_path: Path, draft: Draft, target: Path) -> None:
        shard = draft.write(tmp_path / "d") / "model.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1])
        report = check_draft(tmp_path / "d", target, NEW)
        assert found(report, Level.FAIL) == ["files"]
        assert "model.safetensors: has" in report.failures[0].what

    def test_several_shards(self, tmp_path: Path, draft: Draft, target: Path) -> None:
        assert not check_draft(draft.write(tmp_path / "d", shards=3), target, NEW).failures

    def test_the_same_tensor_in_two_shards(self, tmp_path: Path, draft: Draft, target: Path) -> None:
        path = draft.write(tmp_path / "d")
        write_tensors(path / "more.safetensors", {"fc.weight": tensor((16, 48))})
        report = check_draft(path, target, NEW)
        assert "fc.weight stands in" in report.failures[0].what

    def test_what_the_index_does_not_name_is_not_loaded(self, tmp_path: Path, draft: Draft, target: Path) -> None:
        path = draft.write(tmp_path / "d", shards=2)
        index = {"weight_map": dict.fromkeys(list(draft.tensors)[::2], "model-00001-of-00002.safetensors")}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        assert "tensors" in found(check_draft(path, target, NEW), Level.FAIL)

    @pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", ".."])
    def test_an_index_that_leads_elsewhere(self, tmp_path: Path, draft: Draft, target: Path, name: str) -> None:
        path = draft.write(tmp_path / "d")
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": name}}))
        with pytest.raises(InputError, match="is not the name of a safetensors file"):
            check_draft(path, target, NEW)

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
    @given(key=st.sampled_from(sorted({*drafts.CONFIG, "rope_scaling", "rope_parameters", "target_hidden_size",
                                        "quantization_config", "norm_output", "transformer_layer_config"})),
           value=st.recursive(
               st.none() | st.booleans() | st.integers() | st.text(max_size=5)
               | st.floats(allow_nan=False, allow_infinity=False),
               lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
                   ["factor", "rope_theta", "rope_type", "eagle_aux_hidden_state_layer_ids", "x"]), inner),
           ))  # fmt: skip
    def test_any_value_of_any_key(self, tmp_path: Path, key: str, value: Any) -> None:
        """A report or an error that says what to do; never a crash."""
        target = write_target(tmp_path / "target")
        draft = Draft()
        draft.config[key] = value
        path = draft.write(tmp_path / "d")
        for version in (OLD, NEW):
            report = check_draft(path, target, version, patches=OLD_PATCHES)
            assert report.findings
        other = {**copy.deepcopy(drafts.TARGET), key: value}
        (target / "config.json").write_text(json.dumps(other))
        try:
            check_draft(path, target, NEW)
        except InputError as error:
            assert "config.json" in error.message


def recorded_draft(directory: Path) -> Path:
    directory.mkdir()
    (directory / "config.json").write_bytes((RECORDED / "config.json").read_bytes())
    listed = json.loads((RECORDED / "tensors.json").read_text())
    made: dict[str, Tensor] = {}
    for name, (dtype, shape) in listed.items():
        if name == "d2t":
            made[name] = integers([0] * (shape[0] - 1) + [5])
        elif name == "t2d":
            count = listed["d2t"][1][0]
            made[name] = booleans([token < count - 1 or token == count + 4 for token in range(shape[0])])
        else:
            made[name] = tensor(tuple(shape), dtype)
    write_tensors(directory / "model.safetensors", made)
    return directory

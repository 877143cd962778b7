"""A release's draft before activation, and the verbs of `gpubox draft`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import gpubox.cli.draft as verbs
from gpubox.cli.main import main
from gpubox.drafts.findings import Level
from gpubox.drafts.preflight import ReleaseDraft, argument, check_release_draft, serving_engine
from gpubox.errors import BrokenError, InputError, RefusedError
from gpubox.layout import Layout
from tests.unit.drafts import Draft, speculators_draft, write_target

NEW = "0.5.17"
ARGUMENTS = ("--tp-size", "2", "--context-length", "4096", "--speculative-algorithm", "EAGLE3")


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "opt")


@pytest.fixture
def release(layout: Layout, tmp_path: Path) -> ReleaseDraft:
    draft = Draft().write(layout.models / "k2-draft-000000000000")
    return ReleaseDraft(draft, write_target(tmp_path / "target"), NEW, arguments=ARGUMENTS)


class TestReleaseDraft:
    def test_fits(self, layout: Layout, release: ReleaseDraft) -> None:
        report = check_release_draft(release, layout)
        assert not report.failures
        assert report.engine_version == NEW

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"arguments": ("--speculative-algorithm", "EAGLE")}, "--speculative-algorithm is EAGLE"),
            ({"arguments": ("--speculative-algorithm=NEXTN",)}, "--speculative-algorithm is NEXTN"),
            ({"arguments": (*ARGUMENTS, "--context-length=9000")}, "positions: "),
            ({"arguments": (*ARGUMENTS, "--tp", "3")}, "attention: "),
            (
                {"arguments": ("--tp", "2", "--enable-flashinfer-allreduce-fusion"), "engine_version": "0.5.12"},
                "captured sums",
            ),
            ({"arguments": ("--tp", "many")}, "engine arguments"),
            ({"arguments": ("--mem-fraction-static", "0.99"), "gpu_bytes": 10**6}, "memory: "),
            ({"engine_version": "0.5.9"}, "target hooks: "),
            ({"engine_version": "main"}, "engine version 'main'"),
            ({"model_path": Path("/nowhere")}, "/nowhere"),
        ],
    )
    def test_does_not_fit(self, layout: Layout, release: ReleaseDraft, change: dict[str, Any], says: str) -> None:
        with pytest.raises(RefusedError, match=says):
            check_release_draft(dataclasses.replace(release, **change), layout)

    @pytest.mark.parametrize("path", ["/tmp/draft", "/var/tmp/x/draft", "/dev/shm/draft", "relative/draft"])
    def test_places_that_a_reboot_empties(self, layout: Layout, release: ReleaseDraft, path: str) -> None:
        outside = Layout(Path("/opt/gpubox"))
        with pytest.raises(RefusedError, match=r"emptied at boot|not an absolute path"):
            check_release_draft(dataclasses.replace(release, draft_path=Path(path)), outside)

    def test_not_there(self, layout: Layout, release: ReleaseDraft) -> None:
        with pytest.raises(BrokenError, match=r"has no config\.json"):
            check_release_draft(dataclasses.replace(release, draft_path=layout.models / "gone"), layout)

    def test_damaged(self, layout: Layout, release: ReleaseDraft) -> None:
        (release.draft_path / "model.safetensors").write_bytes(b"")
        with pytest.raises(BrokenError, match="files: "):
            check_release_draft(release, layout)

    def test_warnings_are_for_the_caller(self, layout: Layout, release: ReleaseDraft) -> None:
        report = check_release_draft(dataclasses.replace(release, engine_version="0.5.12", arguments=()), layout)
        assert [finding.name for finding in report.of(Level.WARN)] == ["captured sums"]


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ((), None),
        (("--tp", "2"), "2"),
        (("--tp=2",), "2"),
        (("--tp", "2", "--tp-size", "4"), "4"),
        (("--tp",), ""),
        (("--tpx", "2"), None),
    ],
)
def test_argument(words: tuple[str, ...], value: str | None) -> None:
    assert argument(words, "--tp", "--tp-size") == value


def serve(layout: Layout, spec: object) -> None:
    """A current release whose stack says `spec`."""
    stack = layout.stacks / "s-000000000000"
    release = layout.releases / "r-000000000000"
    for directory in (stack, release):
        directory.mkdir(parents=True)
    (stack / "stack.json").write_text(json.dumps({"spec": spec}))
    (release / "release.json").write_text(json.dumps({"stack_id": stack.name}))
    layout.current.symlink_to(release)


class TestServingEngine:
    def test_of_the_current_release(self, layout: Layout) -> None:
        serve(layout, {"engine": {"version": "0.5.9"}, "patches": ["a.patch"]})
        assert serving_engine(layout) == ("0.5.9", ("a.patch",))

    @pytest.mark.parametrize("spec", [None, [], {}, {"engine": []}, {"engine": {"version": 5}}])
    def test_a_record_without_it(self, layout: Layout, spec: object) -> None:
        serve(layout, spec)
        with pytest.raises(InputError, match="names no engine version"):
            serving_engine(layout)

    def test_nothing_served(self, layout: Layout) -> None:
        with pytest.raises(InputError, match="no release is active"):
            serving_engine(layout)


class TestVerbs:
    @pytest.fixture(autouse=True)
    def box(self, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(verbs, "Layout", lambda: layout)
        layout.state.mkdir(parents=True)

    def call(self, *words: object) -> Result:
        return CliRunner().invoke(main, ["draft", *map(str, words)])

    def test_check(self, release: ReleaseDraft) -> None:
        done = self.call("check", release.draft_path, "--target", release.model_path, "--engine", NEW)
        assert done.exit_code == 0
        lines = done.output.splitlines()
        assert any(
            line.split() == ["pass", "captured", "layers", "2/30/58,", "every", "trainer's", "default"]
            for line in lines
        )
        assert "  eager         2, 30, 58" in lines
        assert "  CUDA graphs   2, 30, 58" in lines
        assert lines[-1].endswith("on sglang 0.5.17: 28 pass, 0 warn, 0 fail")

    def test_check_fails(self, release: ReleaseDraft) -> None:
        done = self.call("check", release.draft_path, "--target", release.model_path, "--engine", "0.5.10",
                         "--trained-layers", "3,31,59")  # fmt: skip
        assert done.exit_code == 1
        assert "FAIL captured layers: 2/30/58, but the draft was trained on 3/31/59" in done.output
        assert "eagle_aux_hidden_state_layer_ids = [2, 30, 58]" in done.output
        assert "for CUDA graphs the patch aux-layers-before-graph-capture" in done.output

    def test_json(self, release: ReleaseDraft) -> None:
        done = self.call("check", release.draft_path, "--target", release.model_path, "--engine", NEW, "--json")
        value = json.loads(done.stdout)
        assert value["capture"]["graph"] == [2, 30, 58]
        assert {finding["level"] for finding in value["findings"]} == {"pass"}

    def test_patches_with_commas_or_several_times(self, release: ReleaseDraft) -> None:
        words = ("check", release.draft_path, "--target", release.model_path, "--engine", "0.5.9", "--json")
        hooks, more = "kimi-k25-eagle3-hooks", "aux-layers-before-graph-capture"
        assert self.call(*words).exit_code == 1
        for patches in (["--patches", f"{hooks},{more}"], ["--patches", hooks, "--patches", more]):
            done = self.call(*words, *patches)
            assert done.exit_code == 0
            assert json.loads(done.stdout)["patches"] == [more, hooks]

    def test_engine_of_the_box(self, layout: Layout, release: ReleaseDraft) -> None:
        words = ("check", release.draft_path, "--target", release.model_path)
        refused = self.call(*words)
        assert refused.exit_code == 2
        assert "--engine" in refused.output
        serve(layout, {"engine": {"version": "0.5.9"}, "patches": ["kimi-k25-eagle3-hooks.patch"]})
        done = self.call(*words)
        assert done.exit_code == 0
        assert "on sglang 0.5.9 with kimi-k25-eagle3-hooks:" in done.output

    @pytest.mark.parametrize("layers", ["", "2,,3", "3,2", "2,2", "-1,2", "a", "2,30,58,"])
    def test_layers_that_are_no_layers(self, release: ReleaseDraft, layers: str) -> None:
        done = self.call("check", release.draft_path, "--target", release.model_path, "--engine", NEW,
                         f"--trained-layers={layers}")  # fmt: skip
        assert done.exit_code == 2

    def test_convert(self, tmp_path: Path, layout: Layout, release: ReleaseDraft) -> None:
        source = speculators_draft().write(tmp_path / "source")
        words = ("convert", source, "--name", "mine", "--target", release.model_path, "--engine", NEW)
        done = self.call(*words)
        assert done.exit_code == 0, done.output
        path = Path(done.output.splitlines()[-1])
        assert path.parent == layout.models
        assert path.name.startswith("mine-")
        again = self.call(*words, "--json")
        assert json.loads(again.stdout)["draft"] == str(path)
        assert "is converted already" in again.stderr

    def test_layers_by_the_word_default(self, tmp_path: Path, release: ReleaseDraft) -> None:
        source = Draft().write(tmp_path / "source")
        done = self.call("convert", source, "--name", "mine", "--target", release.model_path, "--engine", NEW,
                         "--trained-layers", "default", "--json")  # fmt: skip
        assert json.loads(done.stdout)["capture"]["trained"] == [2, 30, 58]

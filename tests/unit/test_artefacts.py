"""artefacts.toml: what it may say, how it binds the lock, and how an entry becomes proved.

Hard cases: a file published again under its name (H13), a build from the wrong index (H15), CUDA 13 in the stack to
roll back to (H16), a cuDNN that stops multimodal models (H17).
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gpubox.build.artefact_proof import ArtefactProof, mark_proved, prove_artefacts
from gpubox.cli.main import main
from gpubox.errors import BrokenError, GpuboxError, InputError, ProofError
from gpubox.specs.artefacts import (
    Artefacts,
    Pinned,
    RepublishedError,
    check_address,
    check_digest,
    index_address,
    load_artefacts,
    pins,
)
from gpubox.specs.spec import read_spec
from gpubox.specs.stack import StackBuild, brings_python, locked_packages, pinned_artefacts, stack_spec
from tests.unit.index import Index, serving
from tests.unit.wheels import Workshop, library, write_spec

REPO = Path(__file__).resolve().parents[2]
CUDA130 = REPO / "stacks" / "cuda130"
CUDA128 = REPO / "stacks" / "cuda128"
KERNEL = "4be1313f82808f0fb6df8107e79f6b6cea07a4aa2b20139e0342eafe31eb28bd"


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    """A copy of the production stack to break."""
    return shutil.copytree(CUDA130, tmp_path / "stacks" / "cuda130")


@pytest.fixture
def rollback(tmp_path: Path) -> Path:
    """A copy of the stack to roll back to, to break."""
    return shutil.copytree(CUDA128, tmp_path / "stacks" / "cuda128")


def edit(directory: Path, file: str, old: str, new: str) -> None:
    """Replace the text `old`; a version in it may be written as *."""
    text = (directory / file).read_text()
    changed = re.sub(re.escape(old).replace(r"\*", r"[0-9.]+"), new.replace("\\", r"\\"), text, count=1)
    assert changed != text
    (directory / file).write_text(changed)


def problem(directory: Path, python: str = "3.12") -> str:
    with pytest.raises(InputError) as caught:
        stack_spec(directory, python, None)
    return str(caught.value)


def test_the_production_stack_is_exactly_what_was_asked_for() -> None:
    spec = stack_spec(CUDA130, "3.12", None)
    versions = locked_packages(spec).expected("3.12")
    assert {
        name: versions[name]
        for name in ("torch", "torchvision", "sgl-kernel", "flashinfer-python", "flashinfer-cubin", "sglang")
    } == {
        "torch": "2.9.1+cu130",
        "torchvision": "0.24.1+cu130",
        "sgl-kernel": "0.3.21+cu130",
        "flashinfer-python": "0.6.4",
        "flashinfer-cubin": "0.6.4",
        "sglang": "0.5.9",
    }
    assert spec.build.cuda is not None
    assert (spec.build.cuda.toolkit, spec.build.cuda.min_driver) == ("13.0.1", "580")
    assert {pinned.index for pinned in pinned_artefacts(spec)} == {
        "pytorch-cu130",
        "sgl-cu130",
        "python-build-standalone-20260807",
    }
    assert brings_python(spec)
    own = [data for name, data in spec.files.items() if not name.startswith("patches/")]
    assert b"://" not in b"".join(own), "addresses of indexes are the operator's"


def test_a_spec_with_artefacts_survives_the_way_to_the_box(tmp_path: Path) -> None:
    spec = stack_spec(CUDA130, "3.12", None)
    write_spec(spec, tmp_path)
    assert pinned_artefacts(read_spec(StackBuild, tmp_path)) == pinned_artefacts(spec)


def test_h13_another_publication_is_refused_and_told_from_an_older_one() -> None:
    kernel = next(pinned for pinned in pinned_artefacts(stack_spec(CUDA130, "3.12", None)) if "sgl" in pinned.name)
    check_digest(kernel, KERNEL, "here")
    with pytest.raises(RepublishedError) as caught:
        check_digest(kernel, "b1f78776faf6" + "0" * 52, "https://mirror/x.whl")
    assert "re-published upstream: https://mirror/x.whl has sha256 b1f78776faf6" in caught.value.message
    assert f"locked is {KERNEL}" in caught.value.message
    assert "an older publication of that name" in caught.value.hint
    with pytest.raises(RepublishedError) as caught:
        check_digest(kernel, "0" * 64, "there")
    assert "older" not in caught.value.hint
    assert "wheelhouse" in caught.value.hint


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        # H15: one source for each build, and the lock agrees with it
        (
            "artefacts.toml",
            'name = "torchvision"',
            'name = "torchvison"',
            "is torchvision 0.24.1+cu130, not torchvison",
        ),
        ("artefacts.toml", f'"{KERNEL}"', f'"{"0" * 64}"', "sgl-kernel is locked with other hashes"),
        ("requirements.lock", "sgl-kernel==0.3.21+cu130", "sgl-kernel==0.3.21", "holds sgl-kernel 0.3.21, artefacts"),
        ("requirements.lock", "torchao==0.9.0", "torchao==0.9.0+cu130", "torchao==0.9.0+cu130 has no source"),
        ("stack.toml", 'version = "13.0"', 'version = "13.1"', "sgl-kernel 0.3.21+cu130 is not of CUDA 13.1"),
        ("stack.toml", 'pythons = ["3.12"]', 'pythons = ["3.12", "3.13"]', ""),
        # H17
        (
            "requirements.lock",
            "nvidia-cudnn-cu13==9.28.1.4",
            "nvidia-cudnn-cu13==9.13.0.50",
            "multimodal model will not",
        ),
        ("stack.toml", "[engine]", 'environment = { SGLANG_DISABLE_CUDNN_CHECK = "1" }\n[engine]', "hides a cuDNN"),
        # two halves of one thing
        ("requirements.lock", "flashinfer-cubin==0.6.4", "flashinfer-cubin==0.6.3", "must be equal"),
        ("requirements.lock", "cuda-bindings==*", "cuda-bindings==12.9.10", "not of CUDA 13: cuda-bindings"),
    ],
)
def test_a_stack_that_does_not_hold_together(stack: Path, file: str, old: str, new: str, says: str) -> None:
    edit(stack, file, old, new)
    text = problem(stack, "3.13" if "3.13" in new else "3.12")
    if "3.13" in new:  # the lock's markers end before 3.13: nothing holds there
        assert "holds sglang None" in text
    else:
        assert says in text
        assert "what to do" in text


def test_h15_an_index_without_an_address_is_an_error_and_no_other_is_tried(stack: Path) -> None:
    torch = next(p for p in pins(load_artefacts(stack)) if p.name == "torch")
    assert index_address(torch, {"pytorch-cu130": "https://m/whl/cu130/"}) == "https://m/whl/cu130"
    with pytest.raises(InputError, match=r"'pytorch-cu130', which has no address here \(known: sgl-cu130\)") as caught:
        index_address(torch, {"sgl-cu130": "https://m"})
    assert "wheelhouse" in caught.value.hint


@pytest.mark.parametrize(
    "line", ["nvidia-cudnn-cu13==9.28.1.4", "nvidia-cuda-runtime==13.0.96", "cuda-toolkit==13.0.3"]
)
def test_h16_a_cuda_13_package_in_the_rollback_stack_is_refused_before_any_download(rollback: Path, line: str) -> None:
    with (rollback / "requirements.lock").open("a") as lock:
        lock.write(f"{line} \\\n    --hash=sha256:{'0' * 64}\n")
    text = problem(rollback)
    assert "not of CUDA 12: " in text
    assert "excludes.txt" in text


def test_h16_the_committed_rollback_stack_is_clean_and_its_own() -> None:
    one, other = ((REPO / "stacks" / name / "requirements.lock").read_text() for name in ("cuda128", "cuda130"))
    assert "cu13" not in one
    assert "cu12" not in other


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('kind = "python"', 'kind = "ruby"', "kind = 'ruby'"),
        ('version = "3.12.13"', 'version = "3.11.13"', "none of the stack's"),
        ('version = "3.12.13"', 'version = "x"', "is no version"),
        ('index = "sgl-cu130"', 'index = "https://x"', "index = 'https://x'"),
        ('file = "cpython', 'file = "../cpython', "file = '../cpython"),
        ('sha256 = "c9a389f5eca0"', 'sha256 = "c9a3"', "superseded.0.sha256 = 'c9a3'"),
        ('requires = ["numpy"', 'requires = ["numpy =="', "is no requirement"),
        ('name = "cpython"', 'name = "cpython"\ncommit = "' + "0" * 40 + '"', "commit is what a source has"),
        ('kind = "python"\nname = "cpython"', 'kind = "python"\nname = "cpython"\nsize = 1', "unknown key"),
    ],
)
def test_bad_values_name_file_and_key(stack: Path, old: str, new: str, says: str) -> None:
    edit(stack, "artefacts.toml", old, new)
    text = problem(stack)
    assert says in text
    assert "artefacts.toml" in text


@pytest.mark.parametrize(
    "address", ["ftp://x/", "x", "https://me:secret@mirror/whl", "https://me@mirror/whl", "https://"]
)
def test_an_address_is_a_place_without_a_password(address: str) -> None:
    with pytest.raises(ValueError, match=r"address|is not https"):
        check_address(address)


@given(st.text())
def test_any_address_is_taken_or_refused(address: str) -> None:
    try:
        check_address(address)
    except ValueError:
        return


# Proving, with a small stack of its own and a real index on this machine.


@pytest.fixture
def index() -> Iterator[Index]:
    with serving() as found:
        yield found


@pytest.fixture
def kernels(tmp_path: Path) -> Workshop:
    shop = Workshop(tmp_path)
    shop.wheel("engine", "1.0", {"engine.py": ""})
    ops = library(tmp_path / "gcc", "int f;", needs={"libcudart.so.13": "int c;"})
    shop.wheel("kernels", "1.0+cu130", {"kernels/ops.so": ops}, says="1.0", requires=["engine>=1.0"], into="upstream")
    return shop


CUDA = 'cuda = { version = "13.0", toolkit = "13.0.1", min_driver = "580", linked_major = 13 }\n'
ENTRY = """\
# What no default index has.

[[unproved]]
name = "kernels"    # a comment
version = "1.0+cu130"
file = "kernels-1.0+cu130-py3-none-any.whl"
index = "ours"
requires = ["engine>=1.0"]

[[unproved.candidates]]
sha256 = "{sha256}"
source = "somebody's lock"

# Of another kind.
[[proved]]
kind = "python"
name = "cpython"
version = "3.99.1"
file = "cpython.tar.gz"
index = "pythons"
sha256 = "{zeros}"
size = 5
"""


def make(shop: Workshop, sha256: str | None = None, **change: str) -> Path:
    wheel = next((shop.root / "upstream").iterdir())
    text = ENTRY.format(sha256=sha256 or hashlib.sha256(wheel.read_bytes()).hexdigest(), zeros="0" * 64)
    for old, new in change.items():
        text = text.replace(old, new)
    directory = shop.stack(extra=CUDA)
    (directory / "artefacts.toml").write_text(text)
    return directory


def prove(directory: Path, index: Index, into: Path) -> list[ArtefactProof]:
    return prove_artefacts(directory, into, indexes={"ours": index.url}, offline=False, report=lambda text: None)


def offer(shop: Workshop, index: Index) -> None:
    wheel = next((shop.root / "upstream").iterdir())
    index.add("kernels", wheel.name, wheel.read_bytes(), "#sha256=" + "1" * 64, "#sha256=" + "2" * 64)


def test_the_first_machine_that_fetches_records_the_proof(kernels: Workshop, index: Index, tmp_path: Path) -> None:
    directory = make(kernels)
    offer(kernels, index)
    before = load_artefacts(directory)
    (proof,) = prove(directory, index, tmp_path / "kept")
    after = load_artefacts(directory)
    assert proof.cuda_majors == [13]
    assert after.unproved == []
    assert {a.file: a.accepted for a in after.all} == {a.file: a.accepted for a in before.all}
    assert pins(after) == pins(before), "a proof changes no stack's digest"
    text = (directory / "artefacts.toml").read_text()
    assert 'name = "kernels"    # a comment' in text
    assert "# What no default index has." in text
    assert "# Of another kind." in text
    assert "candidates" not in text
    assert (tmp_path / "kept" / proof.file).stat().st_size == proof.size
    asked = len(index.asked)
    assert prove(directory, index, tmp_path / "kept") == []
    assert len(index.asked) == asked


def test_h13_bytes_that_nobody_knew_prove_nothing(kernels: Workshop, index: Index, tmp_path: Path) -> None:
    directory = make(kernels, sha256="3" * 64)
    offer(kernels, index)
    before = (directory / "artefacts.toml").read_text()
    with pytest.raises(RepublishedError, match="re-published upstream"):
        prove(directory, index, tmp_path / "kept")
    assert (directory / "artefacts.toml").read_text() == before
    assert list((tmp_path / "kept").iterdir()) == []


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({'requires = ["engine>=1.0"]': 'requires = ["engine>=2.0"]'}, ProofError, "asks for other things"),
        ({'"ours"': '"theirs"'}, InputError, "'theirs', which has no address"),
    ],
)
def test_a_wheel_that_is_not_what_the_lock_assumed(
    kernels: Workshop, index: Index, tmp_path: Path, change: dict[str, str], error: type[GpuboxError], says: str
) -> None:
    directory = make(kernels, **change)
    offer(kernels, index)
    with pytest.raises(error, match=says) as caught:
        prove(directory, index, tmp_path / "kept")
    if error is ProofError:
        assert caught.value.detail.splitlines() == ["+ engine>=1.0", "- engine>=2.0"]
    assert load_artefacts(directory).unproved


def test_h13_a_wheel_of_the_other_cuda_under_the_right_name(kernels: Workshop, index: Index, tmp_path: Path) -> None:
    ops = library(tmp_path / "gcc", "int f;", needs={"libcudart.so.12": "int c;"})
    kernels.wheel("kernels", "1.0+cu130", {"k/ops.so": ops}, says="1.0", requires=["engine>=1.0"], into="upstream")
    directory = make(kernels)
    offer(kernels, index)
    with pytest.raises(ProofError, match="links CUDA 12, the stack declares CUDA 13"):
        prove(directory, index, tmp_path / "kept")


def test_what_is_no_wheel(kernels: Workshop, index: Index, tmp_path: Path) -> None:
    next((tmp_path / "upstream").iterdir()).write_bytes(b"<html>404</html>")
    directory = make(kernels)
    offer(kernels, index)
    with pytest.raises(BrokenError, match="no wheel"):
        prove(directory, index, tmp_path / "kept")


def test_the_command(kernels: Workshop, index: Index, tmp_path: Path) -> None:
    directory = make(kernels)
    offer(kernels, index)
    words = ["stack", "prove", str(directory), "--dir", str(tmp_path / "kept")]
    wrong = CliRunner().invoke(main, [*words, "--index", "ours"])
    assert wrong.exit_code == 2
    assert "is not NAME=URL" in wrong.output
    done = CliRunner().invoke(main, [*words, "--index", f"ours={index.url}", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)[0]["cuda_majors"] == [13]
    again = CliRunner().invoke(main, words)
    assert "nothing is unproved" in again.output


@given(st.sampled_from(["torch", "torchvision", "sgl-kernel", "cpython"]), st.booleans())
def test_marking_one_entry_leaves_the_others(name: str, twice: bool) -> None:
    text = (CUDA130 / "artefacts.toml").read_text()
    before = Artefacts.model_validate(tomllib.loads(text))
    for chosen in [name, "torch"] if twice else [name]:
        entry = next(artefact for artefact in before.all if artefact.name == chosen)
        text = mark_proved(text, entry.file, ArtefactProof(entry.file, entry.accepted[0], 7, [13]))
    after = Artefacts.model_validate(tomllib.loads(text))
    assert {artefact.name for artefact in after.proved} == ({name, "torch"} if twice else {name})
    assert pins(after) == pins(before)
    assert text.count("\n#") == (CUDA130 / "artefacts.toml").read_text().count("\n#")


def test_pins_are_by_file_name() -> None:
    found: list[Pinned] = pins(load_artefacts(CUDA130))
    assert [pinned.file for pinned in found] == sorted(pinned.file for pinned in found)

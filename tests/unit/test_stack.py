"""Stacks and overlays as data, and the spec as a pure function of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gpubox.canonical import sha256_hex
from gpubox.errors import BrokenError, InputError
from gpubox.specs.spec import read_spec
from gpubox.specs.stack import StackBuild, load_overlay, load_stack, stack_spec
from tests.unit.wheels import write_spec

REPO = Path(__file__).resolve().parents[2]
CUDA128 = REPO / "stacks" / "cuda128"
CPU = REPO / "overlays" / "cpu"


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    """A copy of a real stack to break."""
    return shutil.copytree(CUDA128, tmp_path / "stacks" / "cuda128")


def edit(directory: Path, old: str, new: str, file: str = "stack.toml") -> None:
    text = (directory / file).read_text()
    assert old in text
    (directory / file).write_text(text.replace(old, new))


def problem(directory: Path, python: str = "3.11") -> str:
    with pytest.raises(InputError) as caught:
        stack_spec(directory, python, None)
    return str(caught.value)


@pytest.mark.parametrize("name", ["cuda128", "cuda130-next"])
@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_the_real_stacks_render(name: str, python: str) -> None:
    plain = stack_spec(REPO / "stacks" / name, python, None)
    lab = stack_spec(REPO / "stacks" / name, python, load_overlay(CPU))
    assert plain.id.startswith(f"{name}-")
    assert plain.id != lab.id
    assert plain == stack_spec(REPO / "stacks" / name, python, None)
    patches = {f"patches/{name}" for name in plain.build.patches}
    assert set(plain.files) == {"spec.json", "requirements.lock"} | patches
    assert bool(patches) == (name != "cuda130-next")
    assert plain.build.inputs["requirements.lock"] == sha256_hex(plain.files["requirements.lock"])


def test_all_real_stacks_differ() -> None:
    overlays = (None, load_overlay(CPU))
    names, pythons = ("cuda128", "cuda130-next"), ("3.11", "3.12")
    ids = {stack_spec(REPO / "stacks" / n, p, o).id for n in names for p in pythons for o in overlays}
    assert len(ids) == 8


def test_only_what_decides_the_stack_changes_its_id(stack: Path) -> None:
    before = stack_spec(stack, "3.11", None).id
    edit(stack, "the stack to roll back to", "another description")
    (stack / "requirements.in").write_text("# other words\n")
    overlay = load_overlay(CPU).model_copy(update={"libcuda_standin": False})
    assert stack_spec(stack, "3.11", overlay).id == before
    edit(stack, "# This file", "# this file", "requirements.lock")
    changed_lock = stack_spec(stack, "3.11", None).id
    edit(stack, 'toolkit = "12.8.1"', 'toolkit = "12.8.0"')
    changed_toolkit = stack_spec(stack, "3.11", None).id
    edit(stack, "[engine]", 'environment = { NCCL_DEBUG = "INFO" }\n[engine]')
    changed_environment = stack_spec(stack, "3.11", None).id
    patch = stack / "patches" / "01-kimi-k25-eagle3-hooks.patch"
    patch.write_text(patch.read_text().replace("on CPU", "on a CPU"))
    other_words = stack_spec(stack, "3.11", None).id
    edit(stack, '    "01-kimi-k25-eagle3-hooks.patch",\n', "")
    without = stack_spec(stack, "3.11", None).id
    assert len({before, changed_lock, changed_toolkit, changed_environment, other_words, without}) == 6


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("min_driver", "min_drivr", "unknown key 'cuda.min_drivr'"),
        ("patches = [", "patchs = [", "did you mean 'patches'?"),
        ('pythons = ["3.11", "3.12"]', "pythons = [3.11]", "pythons.0 = 3.11"),
        ('pythons = ["3.11", "3.12"]', 'pythons = ["3"]', "pythons.0 = '3'"),
        ('pythons = ["3.11", "3.12"]', "pythons = []", "pythons = []"),
        ("linked_major = 12", "linked_major = 13", "different CUDA majors"),
        ('name = "cuda128"', 'name = "cuda129"', "but the directory is 'cuda128'"),
        ('version = "0.5.9"', 'version = "0.5.10"', "holds sglang 0.5.9"),
        ('["sgl-kernel"]', '["sgl-kernels"]', "does not hold 'sgl-kernels'"),
        ('"sgl_kernel"', '"sgl-kernel"', "proof.imports.1 = 'sgl-kernel'"),
        ("01-kimi-k25-eagle3-hooks.patch", "../x", "patches.0 = '../x'"),
        ("01-kimi-k25-eagle3-hooks.patch", "x.patch", "patches/x.patch: No such file"),
        ("[engine]", 'environment = { "A B" = "1" }\n[engine]', "'A B' is not an environment variable name"),
        ("[engine]", "[engine", "not valid TOML"),
    ],
)
def test_bad_values_name_file_key_and_value(stack: Path, old: str, new: str, says: str) -> None:
    edit(stack, old, new)
    text = problem(stack)
    assert says in text
    assert str(stack) in text
    assert "what to do" in text or "not valid TOML" in text


def test_patches_are_checked_before_anything_is_uploaded(stack: Path) -> None:
    edit(stack, '"sglang==0.5.9"', '"sglang==0.5.8"', "patches/01-kimi-k25-eagle3-hooks.patch")
    assert "holds sglang 0.5.9, 01-kimi-k25-eagle3-hooks.patch is for 0.5.8" in problem(stack)
    edit(stack, "@@ -", "@@ ", "patches/01-kimi-k25-eagle3-hooks.patch")
    assert "01-kimi-k25-eagle3-hooks.patch:" in problem(stack)
    edit(stack, '    "01-kimi-k25-eagle3-hooks.patch",\n    "02-allreduce-fusion-sm120.patch",\n', "")
    edit(stack, '    "05-aux-capture-after-fused-allreduce.patch",\n', "")
    edit(stack, "patches = [", 'patches = [\n    "05-aux-capture-after-fused-allreduce.patch",')
    edit(stack, '    "07-', '    "02-allreduce-fusion-sm120.patch",\n    "07-')
    assert "02-allreduce-fusion-sm120.patch: applies to another sglang/srt/layers/communicator.py" in problem(stack)


def test_a_lock_with_the_other_cuda_is_refused_before_any_download(stack: Path) -> None:
    edit(stack, 'version = "12.8"\ntoolkit = "12.8.1"', 'version = "13.0"\ntoolkit = "13.0.1"')
    edit(stack, "linked_major = 12", "linked_major = 13")
    text = problem(stack)
    assert "not of CUDA 13: " in text
    assert "nvidia-cublas-cu12==12.8.4.1" in text


def test_python_that_was_not_locked(stack: Path) -> None:
    assert "use one of 3.11, 3.12" in problem(stack, "3.13")


def test_unknown_stack_and_overlay_suggest_the_nearest(stack: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'cuda128'"):
        load_stack(stack.parent / "cuda12")
    with pytest.raises(InputError, match="did you mean 'cpu'"):
        load_overlay(CPU.parent / "cpus")


def test_the_cpu_overlay_is_for_machines_without_a_driver() -> None:
    assert load_overlay(CPU).refuse_nvidia_driver


def test_a_standin_without_refusal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "overlay.toml").write_text('name = "x"\ndescription = ""\nlibcuda_standin = true\n')
    with pytest.raises(InputError, match="needs refuse_nvidia_driver = true"):
        load_overlay(tmp_path / "x")


def test_an_uploaded_spec_is_read_back_and_any_change_is_seen(stack: Path, tmp_path: Path) -> None:
    spec = stack_spec(stack, "3.11", None)
    write_spec(spec, tmp_path / "in")
    assert read_spec(StackBuild, tmp_path / "in") == spec
    lock = tmp_path / "in" / "requirements.lock"
    lock.write_bytes(lock.read_bytes() + b"\n")
    with pytest.raises(BrokenError, match=r"requirements\.lock: sha256 is"):
        read_spec(StackBuild, tmp_path / "in")
    lock.unlink()
    with pytest.raises(BrokenError, match=r"No such file.*requirements\.lock"):
        read_spec(StackBuild, tmp_path / "in")
    (tmp_path / "in" / "spec.json").write_text("{}")
    with pytest.raises(BrokenError, match="not a whole spec"):
        read_spec(StackBuild, tmp_path / "in")

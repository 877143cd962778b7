"""The patches of SGLang 0.5.9 on the real wheels: each exercise fails without them and passes with them.

No box is needed: a venv of the stack's lock is linked from the lab's wheel cache (filled from the index when it is
empty), and the stack's own Python runs patch_exercises.py on CPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpubox.build.libcuda_standin import build_standin, driver_symbols
from gpubox.build.patches import PatchReport, State, apply_patches, check_patches, read_patches, revert_patches
from gpubox.rollout.running import uv_program
from gpubox.specs.patch import Patch
from gpubox.specs.stack import load_stack
from lab.settings import UV_CACHE

HERE = Path(__file__).parent
STACK = HERE.parents[1] / "stacks" / "cuda128"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

# By exercise, what the wheel does without the patch.
UNPATCHED = {
    "kimi_hooks": "no attribute 'set_eagle3_layers_to_capture'",
    "fusion_gate": "capability 12, flag True: wanted [False, True, True, False], found [False, False, False, False]",
    "declined_fusion": "norm of the sum: off by",
    "symmetric_memory": "KeyError: 12",
    "declined_symmetric_memory": "4 of torch.float32: off by",
    "layers_in_graphs": "layers at capture: wanted [[3, 31, 59]], found [[2, 30, 58]]",
    "layers_in_warm_up": "layers in the warm-up: wanted [3, 31, 59], found [2, 30, 58]",
    "capture_under_fusion": "captured hidden states: off by",
    "vision_blocks": "rows on capability 12: wanted (64, 64), found (128, 128)",
    "flashinfer_targets": "No supported CUDA architectures found for major versions [9, 10]",
}


def patches() -> list[Patch]:
    return read_patches(STACK / "patches", load_stack(STACK).patches)


def states(reports: list[PatchReport]) -> set[State]:
    return {report.state for report in reports}


@pytest.fixture(scope="module")
def workplace() -> Iterator[Path]:
    """Beside the wheel cache: links do not cross file systems, and copies would be 10 GB."""
    UV_CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=UV_CACHE.parent, prefix=".patches-") as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def site_packages(workplace: Path) -> Path:
    """The locked wheels, as they are published."""
    environment = os.environ | {"UV_CACHE_DIR": str(UV_CACHE)}
    venv = workplace / "venv"
    uv = uv_program()
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, venv], env=environment, check=True)
    install = [uv, "pip", "sync", "--quiet", "--python", venv / "bin" / "python", "--require-hashes", "--no-build"]
    subprocess.run([*install, "--link-mode", "hardlink", STACK / "requirements.lock"], env=environment, check=True)
    return venv / "lib" / f"python{PYTHON}" / "site-packages"


@pytest.fixture(scope="module")
def patched(workplace: Path, site_packages: Path) -> Path:
    """Links to all files of the engine and to the other files that patches change; patched."""
    tree = workplace / "patched"
    shutil.copytree(site_packages / "sglang", tree / "sglang", copy_function=os.link)
    for path in {file.path for patch in patches() for file in patch.header.files}:
        if not (tree / path).exists():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            os.link(site_packages / path, tree / path)
    assert apply_patches(patches(), tree) == load_stack(STACK).patches
    return tree


def test_the_patches_fit_the_real_wheels_and_leave_them_alone(site_packages: Path, patched: Path) -> None:
    assert states(check_patches(patches(), patched)) == {State.APPLIED}
    assert states(check_patches(patches(), site_packages)) == {State.APPLICABLE}


def test_each_exercise_fails_without_and_passes_with_the_patches(
    workplace: Path, site_packages: Path, patched: Path
) -> None:
    standin = build_standin(workplace / "lib", driver_symbols(site_packages / "sgl_kernel"))
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(workplace),
        "LD_LIBRARY_PATH": str(standin.parent),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPYCACHEPREFIX": str(workplace / "pycache"),
    }
    command = [site_packages.parents[2] / "bin" / "python", HERE / "patch_exercises.py", patched]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    results = json.loads(run.stdout)
    assert results["patched"] == dict.fromkeys(results["patched"]), run.stderr
    assert set(results["patched"]) == set(results["unpatched"]) == set(UNPATCHED), run.stderr
    for exercise, says in UNPATCHED.items():
        assert says in str(results["unpatched"][exercise]), run.stderr


def test_and_back(site_packages: Path, patched: Path) -> None:
    assert revert_patches(patches(), patched) == load_stack(STACK).patches[::-1]
    for path in {file.path for patch in patches() for file in patch.header.files}:
        assert (patched / path).read_bytes() == (site_packages / path).read_bytes()

"""Building small stacks for real: uv, venvs, hard links, the proof by the stack's own Python. No network, no root."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpubox.build.builder import build_stack
from gpubox.build.install import Sources, progress_of
from gpubox.cli.main import main
from gpubox.errors import BrokenError, GpuboxError, InputError, ProofError, RefusedError
from gpubox.layout import Layout
from gpubox.rollout.status import stack_problems
from gpubox.specs.artefacts import RepublishedError
from gpubox.specs.stack import load_overlay
from tests.unit.index import ARTEFACT, Index, serving
from tests.unit.patching import patch_text, sha
from tests.unit.wheels import PYTHON, Workshop, library

REPO = Path(__file__).resolve().parents[2]
SITE = Path("venv", "lib", f"python{PYTHON}", "site-packages")
ORIGINAL, CHANGED = "VALUE = 1\n", "VALUE = 2\n"
IMPORTS = '[proof]\nimports = ["engine", "helper"]\n'
CUDA = """
[cuda]
version = "13.0"
toolkit = "13.0.1"
min_driver = "580"
linked_major = 13
[proof]
kernel_distributions = ["kernels"]
"""


class Box:
    """A layout in a temporary directory, and what a build reported."""

    def __init__(self, root: Path, workshop: Workshop) -> None:
        self.layout = Layout(root)
        self.workshop = workshop
        self.said: list[str] = []

    def build(self, spec: Path, owner: str | None = None, sources: Sources | None = None) -> Path:
        self.said.clear()
        sources = sources or Sources(self.workshop.wheelhouse, offline=True)
        return build_stack(spec, self.layout, sources=sources, report=self.said.append, cache_owner=owner)

    def names(self) -> list[str]:
        """Final names below stacks/: what a release could use."""
        entries = self.layout.stacks.iterdir() if self.layout.stacks.exists() else iter(())
        return sorted(entry.name for entry in entries if not entry.name.startswith("."))


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    workshop = Workshop(tmp_path)
    workshop.wheel("engine", "1.0", {"engine/__init__.py": "import helper\nVALUE = helper.VALUE\n"})
    workshop.wheel("helper", "2.0", {"helper.py": "VALUE = 1\n"})
    return workshop


@pytest.fixture(scope="module")
def uv_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests: what uv finds out about the interpreter takes half a second each time."""
    return tmp_path_factory.mktemp("uv")


@pytest.fixture
def box(tmp_path: Path, shop: Workshop, uv_cache: Path) -> Box:
    box = Box(tmp_path / "box", shop)
    box.layout.wheel_cache.parent.mkdir(parents=True)
    box.layout.wheel_cache.symlink_to(uv_cache)
    return box


def run_in(stack: Path, code: str) -> str:
    command = [stack / "venv" / "bin" / "python", "-B", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, env={}).stdout.strip()


def test_a_built_stack_works_under_its_final_name_and_is_not_built_twice(box: Box, shop: Workshop) -> None:
    spec = shop.upload(shop.stack(extra=IMPORTS))
    stack = box.build(spec)
    assert box.names() == [stack.name] == [spec.name]
    assert (
        run_in(stack, "import engine; print(engine.VALUE, engine.__file__)") == f"1 {stack / SITE}/engine/__init__.py"
    )
    assert (stack / SITE / "helper.py").stat().st_nlink > 1, "wheels are linked from the cache, not copied"
    assert not list(stack.rglob("__pycache__"))
    assert not list(box.layout.stacks.glob(".building-*"))
    assert (stack / "requirements.lock").read_bytes() == (spec / "requirements.lock").read_bytes()
    before = (stack / "stack.json").stat().st_mtime_ns
    assert box.build(spec) == stack
    assert (stack / "stack.json").stat().st_mtime_ns == before
    assert box.said == [f"stack {stack.name} is built already"]


def test_two_boxes_have_equal_proofs_and_they_say_what_was_proved(tmp_path: Path, shop: Workshop) -> None:
    spec = shop.upload(shop.stack(extra=IMPORTS))
    one, two = (Box(tmp_path / name, shop).build(spec) for name in ("one", "a-longer-name-of-a-box"))
    record = (one / "stack.json").read_bytes()
    assert record == (two / "stack.json").read_bytes()
    assert str(tmp_path).encode() not in record
    proved = json.loads(record)["proved"]
    assert proved["versions"] == {"engine": "1.0", "helper": "2.0"}
    assert proved["python"].startswith(f"{PYTHON}.")


def test_the_service_gets_the_bytecode_of_the_imports(box: Box, shop: Workshop) -> None:
    stack = box.build(shop.upload(shop.stack(extra=IMPORTS)), owner=subprocess.getoutput("id -un"))
    warm = box.layout.jit_cache(stack.name) / "pycache" / stack.relative_to("/") / SITE
    assert [path.name.split(".")[0] for path in (warm / "engine").iterdir()] == ["__init__"]
    code = "import sys, engine; print(engine.__cached__)"
    prefix = str(box.layout.jit_cache(stack.name) / "pycache")
    command = [stack / "venv" / "bin" / "python", "-B", "-v", "-X", f"pycache_prefix={prefix}", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={})
    assert f"matches {stack / SITE}/helper.py" in done.stderr


def test_a_cache_owner_who_does_not_exist(box: Box, shop: Workshop) -> None:
    with pytest.raises(InputError, match="'no-such-user': no such user"):
        box.build(shop.upload(shop.stack()), owner="no-such-user")


def test_a_wheel_with_another_hash(box: Box, shop: Workshop) -> None:
    locked = shop.locked["helper"]
    shop.wheel("helper", "2.0", {"helper.py": "VALUE = 'published anew'\n"})
    got, shop.locked["helper"] = shop.locked["helper"], locked
    spec = shop.upload(shop.stack(extra=IMPORTS))
    with pytest.raises(GpuboxError) as caught:
        box.build(spec)
    assert f"helper==2.0: locked is sha256 {locked[1]}, got {got[1]}" in caught.value.message
    assert "tampered with" in caught.value.hint
    assert box.names() == []
    shop.wheel("helper", "2.0", {"helper.py": "VALUE = 1\n"})
    assert run_in(box.build(spec), "import helper; print(helper.VALUE)") == "1"
    assert "starting over" in box.said[0]


def test_a_package_that_is_nowhere(box: Box, shop: Workshop) -> None:
    shop.locked["not-there"] = ("1.0", "00" * 32)
    with pytest.raises(GpuboxError, match="not-there is not in the cache of this box") as caught:
        box.build(shop.upload(shop.stack()))
    assert "--wheelhouse" in caught.value.hint
    assert box.names() == []


def test_an_import_that_fails_leaves_nothing_under_the_final_name(box: Box, shop: Workshop) -> None:
    shop.wheel("loud", "1.0", {"loud.py": "import os\nprint('{}')\nos.write(1, b'not json')\n"})
    shop.wheel("broken", "1.0", {"broken.py": "import absent_module\n"})
    spec = shop.upload(shop.stack(extra='[proof]\nimports = ["loud", "broken"]\n'))
    with pytest.raises(ProofError) as caught:
        box.build(spec)
    assert "import broken failed (missing module)" in caught.value.message
    assert 'broken.py", line 1' in caught.value.detail
    assert box.names() == []


def test_an_import_that_kills_the_process_is_named(box: Box, shop: Workshop) -> None:
    shop.wheel("killer", "1.0", {"killer.py": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"})
    with pytest.raises(ProofError, match=r"import killer failed \(crash\): died of SIGSEGV"):
        box.build(shop.upload(shop.stack(extra='[proof]\nimports = ["engine", "killer"]\n')))


def test_a_half_built_stack_is_built_anew(box: Box, shop: Workshop) -> None:
    spec = shop.upload(shop.stack(extra=IMPORTS))
    half = box.layout.stacks / f".building-{spec.name}"
    (half / SITE).mkdir(parents=True)
    (half / "venv" / "pyvenv.cfg").write_text("garbage")
    (half / SITE / "stray.py").write_text("")
    stack = box.build(spec)
    assert not (stack / SITE / "stray.py").exists()


def test_a_damaged_spec_builds_nothing(box: Box, shop: Workshop) -> None:
    spec = shop.upload(shop.stack())
    (spec / "requirements.lock").write_text(shop.lock_text() + "# edited\n")
    with pytest.raises(BrokenError, match="deploy again"):
        box.build(spec)
    assert not box.layout.stacks.exists()


def test_a_patch_changes_one_stack_and_not_the_cache(box: Box, shop: Workshop) -> None:
    new = "VALUE = 'patched'\n"
    patch = patch_text({"helper.py": ("VALUE = 1\n", new)})
    plain = box.build(shop.upload(shop.stack("plain")))
    patched = box.build(shop.upload(shop.stack("patched", patches={"value.patch": patch})))
    assert run_in(patched, "import engine; print(engine.VALUE)") == "patched"
    assert run_in(plain, "import engine; print(engine.VALUE)") == "1"
    record = json.loads((patched / "stack.json").read_bytes())
    assert record["patches"] == [{"name": "value.patch", "files": {"helper.py": sha(new)}}]
    assert json.loads((plain / "stack.json").read_bytes())["patches"] == []


def test_a_patch_for_other_bytes_ends_the_build(box: Box, shop: Workshop) -> None:
    patch = patch_text({"helper.py": ("VALUE = 7\n", "VALUE = 8\n")})
    with pytest.raises(RefusedError, match=r"value\.patch: helper\.py has sha256 \w+, neither"):
        box.build(shop.upload(shop.stack(patches={"value.patch": patch})))
    assert box.names() == []


def test_a_patched_stack_that_changed_on_disk_is_told(
    box: Box, shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = patch_text({"helper.py": (ORIGINAL, CHANGED)})
    stack = box.build(shop.upload(shop.stack(patches={"value.patch": patch})))
    monkeypatch.setattr("gpubox.cli.patches.Layout", lambda: box.layout)
    assert stack_problems(stack) == []
    applied = CliRunner().invoke(main, ["patches", "check", "small"])
    assert (applied.exit_code, applied.output) == (0, "value.patch: applied\n  helper.py: applied\n")
    (stack / SITE / "helper.py").unlink()
    (stack / SITE / "helper.py").write_text(ORIGINAL)
    assert stack_problems(stack) == [
        f"{stack.name}: helper.py is {sha(ORIGINAL)}, after value.patch it was {sha(CHANGED)}"
    ]
    reverted = CliRunner().invoke(main, ["patches", "check", stack.name])
    assert (reverted.exit_code, reverted.output) == (5, "value.patch: applicable\n  helper.py: applicable\n")


@pytest.fixture
def kernels(tmp_path: Path, shop: Workshop) -> Workshop:
    """A wheel with a kernel library that links CUDA's runtime, which a second wheel brings, and the driver."""
    runtime = {"libcudart.so.13": "int cudaFree(void) { return 0; }"}
    driver = {"libcuda.so.1": "int cuInit(int x) { return 0; }"}
    code = "int cudaFree(); int cuInit(int); int f() { return cudaFree() + cuInit(0); }"
    ops = library(tmp_path / "gcc", code, needs=runtime | driver)
    shop.wheel("kernels", "1.0", {"kernels/ops.abi3.so": ops})
    return shop


def test_a_kernel_library_whose_cuda_is_missing_is_told(box: Box, kernels: Workshop) -> None:
    with pytest.raises(ProofError) as caught:
        box.build(kernels.upload(kernels.stack(extra=CUDA)))
    assert "load kernels/ops.abi3.so failed (missing file): " in caught.value.message


@pytest.mark.skipif(os.path.exists("/sys/module/nvidia"), reason="the stand-in is refused on a host with a driver")  # noqa: PTH110
def test_the_cpu_overlay_makes_kernels_load_without_a_driver(box: Box, kernels: Workshop, tmp_path: Path) -> None:
    # A kernel library finds CUDA's runtime through torch; this one is loaded by the engine's name for it.
    only_driver = {"libcuda.so.1": "int cuInit(int x) { return 0; }"}
    code = "int cuInit(int); int f() { return cuInit(0); }"
    kernels.wheel("kernels", "1.0", {"kernels/ops.abi3.so": library(tmp_path / "gcc", code, needs=only_driver)})
    spec = kernels.upload(kernels.stack(extra='[proof]\nkernel_distributions = ["kernels"]\n'))
    with pytest.raises(ProofError, match=r"libcuda\.so\.1: cannot open shared object file"):
        box.build(spec)
    stack = box.build(
        kernels.upload(
            kernels.stack("with-overlay", extra='[proof]\nkernel_distributions = ["kernels"]\n'),
            load_overlay(REPO / "overlays" / "cpu"),
        )
    )
    record = json.loads((stack / "stack.json").read_bytes())
    assert record["libcuda_standin"] == ["cuInit"]
    assert record["proved"]["kernels"] == {"kernels": {"kernels/ops.abi3.so": ["libcuda.so.1"]}}
    assert (stack / "overlay" / "lib" / "libcuda.so.1").is_file()


def test_kernels_of_the_other_cuda(box: Box, kernels: Workshop, tmp_path: Path) -> None:
    runtime = {"libcudart.so.12": "int cudaFree(void) { return 0; }"}
    ops = library(tmp_path / "gcc", "int cudaFree(); int f() { return cudaFree(); }", needs=runtime)
    kernels.wheel("kernels", "1.0", {"kernels/ops.abi3.so": ops})
    with pytest.raises(ProofError, match=r"links libcudart\.so\.12, but the stack declares CUDA 13"):
        box.build(kernels.upload(kernels.stack(extra=CUDA)))


def test_torch_of_another_cuda(box: Box, shop: Workshop) -> None:
    """The torch here is a stand-in of three lines that only tells its version."""
    code = "import types\n__version__ = '2.9.1+cu128'\nversion = types.SimpleNamespace(cuda='12.8')\n"
    shop.wheel("torch", "2.9.1", {"torch.py": code})
    with pytest.raises(ProofError, match=r"torch 2\.9\.1\+cu128 is of CUDA 12\.8, stack\.toml says '13\.0'"):
        box.build(shop.upload(shop.stack(extra=CUDA.replace('["kernels"]', "[]"))))


TORCH = """import types
__version__ = '{version}'
version = types.SimpleNamespace(cuda='13.0')
cuda = types.SimpleNamespace(is_available=lambda: False)
"""


def test_h14_another_torch_in_place_of_the_locked_one_is_called_abi(box: Box, shop: Workshop) -> None:
    """A later step replaced files of torch and left its metadata; a kernel wheel fits one torch only."""
    shop.wheel("torch", "2.9.1", {"torch.py": TORCH.format(version="2.10.0+cu130")})
    with pytest.raises(ProofError, match=r"torch 2\.9\.1 is locked, torch 2\.10\.0\+cu130 runs \(ABI"):
        box.build(shop.upload(shop.stack(extra=CUDA.replace('["kernels"]', "[]"))))
    shop.wheel("torch", "2.9.1", {"torch.py": TORCH.format(version="2.9.1+cu130")})
    box.build(shop.upload(shop.stack(extra=CUDA.replace('["kernels"]', "[]"))))


def test_h16_cuda_of_another_major_under_a_neutral_name(box: Box, shop: Workshop) -> None:
    shop.wheel("helpers-of-many-gpus", "1.0", {"helpers/libcublas.so.12": b"any bytes"})
    with pytest.raises(ProofError, match=r"not of CUDA 13: helpers/libcublas\.so\.12 is CUDA 12's") as caught:
        box.build(shop.upload(shop.stack(extra=CUDA.replace('["kernels"]', "[]"))))
    assert "excludes.txt" in caught.value.hint
    assert box.names() == []


def test_the_profiler_that_triton_brings_is_of_no_stack(box: Box, shop: Workshop) -> None:
    """triton 3.6.0, which torch 2.11 for CUDA 13 needs, holds triton/backends/nvidia/lib/cupti/libcupti.so.12."""
    shop.wheel("helpers-of-many-gpus", "1.0", {"helpers/cupti/libcupti.so.12": b"any bytes"})
    box.build(shop.upload(shop.stack(extra=CUDA.replace('["kernels"]', "[]"))))
    assert box.names() != []


@pytest.fixture
def index() -> Iterator[Index]:
    with serving() as found:
        yield found


@pytest.fixture
def upstream(shop: Workshop, index: Index, tmp_path: Path) -> Path:
    """A stack whose kernel wheel only the index `ours` has, as the real one: +cu130 in its file's name alone."""
    runtime = library(tmp_path / "gcc", "int cudaFree(void) { return 0; }")
    links = {"libcudart.so.13": "int cudaFree(void) { return 0; }"}
    ops = library(tmp_path / "gcc", "int cudaFree(); int f() { return cudaFree(); }", needs=links)
    loads = (
        "import ctypes, pathlib\nctypes.CDLL(pathlib.Path(__file__).with_name('libcudart.so.13'), ctypes.RTLD_GLOBAL)\n"
    )
    shop.wheel("torch", "2.9.1", {
        "torch/__init__.py": loads + TORCH.format(version="2.9.1+cu130"), "torch/libcudart.so.13": runtime
    })  # fmt: skip
    wheel = shop.wheel("kernels", "1.0+cu130", {"kernels/ops.so": ops}, says="1.0", into="upstream")
    index.add("kernels", wheel.name, wheel.read_bytes())
    directory = shop.stack(extra=CUDA)
    (directory / "artefacts.toml").write_text(ARTEFACT.format(sha256=shop.locked["kernels"][1]))
    return directory


def test_h15_an_artefact_comes_from_its_index_and_is_proved_by_what_it_links(
    box: Box, shop: Workshop, index: Index, upstream: Path
) -> None:
    stack = box.build(shop.upload(upstream), sources=Sources(shop.wheelhouse, indexes={"ours": index.url}))
    record = json.loads((stack / "stack.json").read_bytes())
    assert record["proved"]["versions"]["kernels"] == "1.0", "installed, it does not tell which CUDA it is of"
    assert record["proved"]["kernels"] == {"kernels": {"kernels/ops.so": ["libcudart.so.13"]}}
    assert {path for path, _ in index.asked} == {"kernels", "files/kernels-1.0+cu130-py3-none-any.whl"}
    assert sorted(path.name for path in stack.iterdir()) == [
        "artefacts.json", "requirements.lock", "spec.json", "stack.json", "venv",
    ]  # fmt: skip
    index.asked.clear()
    box.build(shop.upload(shop.stack("again", extra=CUDA, artefacts=upstream / "artefacts.toml")))
    assert index.asked == [], "our own copy is kept"


def test_h15_no_other_source_is_tried(box: Box, shop: Workshop, index: Index, upstream: Path) -> None:
    spec = shop.upload(upstream)
    with pytest.raises(InputError, match=r"the index 'ours', which has no address here \(known: theirs\)"):
        box.build(spec, sources=Sources(shop.wheelhouse, indexes={"theirs": index.url}))
    with pytest.raises(GpuboxError, match="is not on this box, and no network is to be used"):
        box.build(spec)
    assert index.asked == []


PYTHON_BUILD = """
[[proved]]
kind = "python"
name = "cpython"
version = "{minor}.99"
file = "cpython-{minor}.99+20260101.tar.gz"
index = "pythons"
sha256 = "{sha256}"
size = 1
"""


def test_a_python_build_is_used_where_the_system_has_none(
    box: Box, shop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build here only starts this machine's Python: what matters is where it came from and where it lies."""
    real = Path(sys.base_prefix, "bin", f"python{PYTHON}")
    (tmp_path / "python" / "bin").mkdir(parents=True)
    (tmp_path / "python" / "bin" / "python3").write_text(f'#!/bin/sh\nexec {real} "$@"\n')
    (tmp_path / "python" / "bin" / "python3").chmod(0o755)
    archive = shop.wheelhouse / f"cpython-{PYTHON}.99+20260101.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "python", "python")
    text = PYTHON_BUILD.format(minor=PYTHON, sha256=hashlib.sha256(archive.read_bytes()).hexdigest())
    directory = shop.stack()
    (directory / "artefacts.toml").write_text(text)
    spec = shop.upload(directory)
    box.build(spec)
    assert not box.layout.pythons.exists(), "the system's is preferred: its updates maintain it"
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == f"python{PYTHON}" else which(name))
    shutil.rmtree(box.layout.stacks / spec.name)
    box.build(spec)
    assert f"making a venv for Python {PYTHON} from {archive.name}" in box.said
    unpacked = box.layout.pythons / archive.name.removesuffix(".tar.gz")
    assert os.access(unpacked / "python" / "bin" / "python3", os.X_OK)
    assert not list(box.layout.pythons.glob(".building-*"))


def test_h13_what_the_index_publishes_anew_is_not_installed(
    box: Box, shop: Workshop, index: Index, upstream: Path
) -> None:
    spec, file = shop.upload(upstream), "kernels-1.0+cu130-py3-none-any.whl"
    good = index.files[file]
    index.files[file] = good + b"rebuilt"
    with pytest.raises(RepublishedError, match="re-published upstream"):
        box.build(spec, sources=Sources(shop.wheelhouse, indexes={"ours": index.url}))
    assert box.names() == []
    (shop.wheelhouse / file).write_bytes(good)
    assert box.build(spec).name == spec.name, "a copy in the wheelhouse serves as before"


def test_h14_a_kernel_wheel_for_another_cuda_names_the_library_it_wants(
    box: Box, shop: Workshop, index: Index, upstream: Path, tmp_path: Path
) -> None:
    wants = {"libcudart.so.13": "int c;", "libnvrtc.so.13": "int d;"}
    ops = library(tmp_path / "gcc", "int f;", needs=wants)
    wheel = shop.wheel("kernels", "1.0+cu130", {"kernels/ops.so": ops}, says="1.0", into="upstream")
    (upstream / "artefacts.toml").write_text(ARTEFACT.format(sha256=shop.locked["kernels"][1]))
    shop.stack(extra=CUDA)
    index.files[wheel.name] = wheel.read_bytes()
    with pytest.raises(ProofError, match=r"load kernels/ops\.so failed \(missing file\): .*libnvrtc\.so\.13"):
        box.build(shop.upload(upstream), sources=Sources(shop.wheelhouse, indexes={"ours": index.url}))


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("Downloading torch (506.0MiB)", "Downloading torch (506.0MiB)"),
        ("Downloading torch (1.1GiB)", "Downloading torch (1.1GiB)"),
        ("Downloading six (11.0KiB)", None),
        (" + six==1.17.0", None),
        (" Downloaded torch", None),
        ("Installed 210 packages in 2.19s", "Installed 210 packages in 2.19s"),
    ],
)
def test_progress_is_what_takes_long(line: str, text: str | None) -> None:
    assert progress_of(line) == text


def test_copies_instead_of_links_are_said_in_our_words() -> None:
    line = "warning: Failed to hardlink files; falling back to full copy. This may lead to degraded performance."
    assert "copied, not linked" in (progress_of(line) or "")

"""Locks and builds with the real package index, real CUDA wheels of a few MB, a disk that fills up, and kill -9."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpubox.build.builder import build_stack
from gpubox.devtools.lock import BUILD_INPUT, LOCK, StaleLockError, check_lock, compile_build_lock, compile_lock
from gpubox.errors import GpuboxError, InputError, ProofError
from gpubox.layout import Layout
from gpubox.specs.lockfile import parse_lock
from gpubox.specs.stack import BUILD_LOCK, stack_spec
from tests.unit.wheels import PYTHON, write_spec

REPO = Path(__file__).resolve().parents[2]
STACK = """\
name = "{name}"
description = "a few real wheels"
pythons = ["{python}"]
engine = {{ name = "nvidia-nvtx-cu12", version = "12.8.90", module = "nvidia.nvtx" }}
"""
CUDA = """
[cuda]
version = "{major}.0"
toolkit = "{major}.0.1"
min_driver = "580"
linked_major = {major}
[proof]
kernel_distributions = ["torch-memory-saver"]
"""


def make_stack(root: Path, *requirements: str, extra: str = "", name: str = "tiny") -> Path:
    directory = root / name
    directory.mkdir(parents=True)
    (directory / "stack.toml").write_text(STACK.format(name=name, python=PYTHON) + extra)
    (directory / "requirements.in").write_text("\n".join(("nvidia-nvtx-cu12==12.8.90", *requirements)) + "\n")
    (directory / LOCK).write_text(compile_lock(directory))
    return directory


def upload(directory: Path) -> Path:
    spec = stack_spec(directory, PYTHON, None)
    write_spec(spec, directory.parent / "incoming" / spec.id)
    return directory.parent / "incoming" / spec.id


def build(spec: Path, root: Path) -> tuple[Path, list[str]]:
    said: list[str] = []
    return build_stack(spec, Layout(root), report=said.append), said


def final_names(root: Path) -> list[str]:
    return [path.name for path in (root / "stacks").iterdir() if not path.name.startswith(".")]


def session_members(session: int) -> list[str]:
    return subprocess.run(["pgrep", "-s", str(session)], capture_output=True, text=True, check=False).stdout.split()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "gpubox-test", disk], check=True)
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_the_committed_locks_fit_their_inputs() -> None:
    for directory in sorted(path.parent for path in (REPO / "stacks").glob("*/stack.toml")):
        check_lock(directory)


def test_a_lock_is_stale_when_its_inputs_or_its_lines_change(tmp_path: Path) -> None:
    directory = make_stack(tmp_path, "six==1.16.0")
    check_lock(directory)
    text = (directory / LOCK).read_text()
    (directory / LOCK).write_text(text.partition("six==")[0])
    with pytest.raises(StaleLockError, match=r"make lock STACK=tiny(.|\n)*\+six==1\.16\.0"):
        check_lock(directory)
    (directory / LOCK).write_text(text)
    (directory / "overrides.txt").write_text("six==1.17.0\n")
    with pytest.raises(StaleLockError, match=r"-six==1\.16\.0(.|\n)*\+six==1\.17\.0"):
        check_lock(directory)


UNPROVED = """
[[unproved]]
name = "kernels-nobody-can-fetch"
version = "1.0+cu130"
file = "kernels_nobody_can_fetch-1.0+cu130-py3-none-any.whl"
index = "elsewhere"
requires = ["six==1.16.0"]
[[unproved.candidates]]
sha256 = "{one}"
source = "somebody"
[[unproved.candidates]]
sha256 = "{two}"
source = "somebody else"
"""


def test_what_nobody_here_can_fetch_is_locked_with_what_it_asks_for(tmp_path: Path) -> None:
    directory = make_stack(tmp_path)
    (directory / "artefacts.toml").write_text(UNPROVED.format(one="1" * 64, two="2" * 64))
    with (directory / "requirements.in").open("a") as requirements:
        requirements.write("kernels-nobody-can-fetch==1.0+cu130\n")
    with pytest.raises(StaleLockError):
        check_lock(directory)
    text = compile_lock(directory)
    (directory / LOCK).write_text(text)
    check_lock(directory)
    locked = {entry.name: entry for entry in parse_lock(text).entries}
    assert locked["kernels-nobody-can-fetch"].hashes == {"1" * 64, "2" * 64}
    assert locked["six"].version == "1.16.0"
    (directory / "artefacts.toml").write_text(UNPROVED.format(one="1" * 64, two="3" * 64))
    with pytest.raises(StaleLockError, match=r"-.*--hash=sha256:2222(.|\n)*\+.*--hash=sha256:3333"):
        check_lock(directory)


def test_what_builds_an_engine_from_source_is_locked_too(tmp_path: Path) -> None:
    directory = make_stack(tmp_path)
    (directory / BUILD_INPUT).write_text("setuptools==80.9.0\n")
    with pytest.raises(StaleLockError, match=r"build-requirements\.lock: no such file"):
        check_lock(directory)
    (directory / BUILD_LOCK).write_text(compile_build_lock(directory))
    check_lock(directory)
    (directory / BUILD_INPUT).write_text("setuptools==80.8.0\n")
    with pytest.raises(StaleLockError, match=r"build-requirements\.lock: does not fit"):
        check_lock(directory)


def test_what_has_no_wheel_cannot_be_locked(tmp_path: Path) -> None:
    with pytest.raises(GpuboxError, match="cannot be locked") as caught:
        make_stack(tmp_path, "docopt==0.6.2")
    assert "docopt" in caught.value.detail


def test_real_wheels_build(tmp_path: Path) -> None:
    spec = upload(make_stack(tmp_path, "six"))
    stack, _ = build(spec, tmp_path / "box")
    assert next(stack.rglob("libnvToolsExt.so.1")).stat().st_nlink == 2


def test_real_kernels_of_the_other_cuda_are_refused_by_what_they_link(tmp_path: Path) -> None:
    """torch-memory-saver brings libraries for both CUDA majors, so it is right for none."""
    directory = make_stack(tmp_path, "torch-memory-saver==0.0.10", extra=CUDA.format(major=12))
    with pytest.raises(ProofError, match=r"libcudart\.so\.13, but the stack declares CUDA 12"):
        build(upload(directory), tmp_path / "box")
    assert final_names(tmp_path / "box") == []


def test_a_package_that_no_index_has(tmp_path: Path) -> None:
    directory = make_stack(tmp_path)
    name = "gpubox-test-of-a-name-that-no-index-has"
    with (directory / LOCK).open("a") as lock:
        lock.write(f"{name}==1.0 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(InputError, match=f"no index has a package {name}"):
        build(upload(directory), tmp_path / "box")
    assert final_names(tmp_path / "box") == []


def test_a_network_that_is_down_and_then_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = upload(make_stack(tmp_path))
    with monkeypatch.context() as patch:
        patch.setenv("UV_HTTP_RETRIES", "0")
        for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
            patch.setenv(name, "http://127.0.0.1:9")
        with pytest.raises(GpuboxError, match="package index cannot be reached") as caught:
            build(spec, tmp_path / "box")
    assert "--wheelhouse" in caught.value.hint
    _, said = build(spec, tmp_path / "box")
    assert "starting over" in said[0]


def test_a_full_disk_and_then_more_room(tmp_path: Path, small_disk: Path) -> None:
    spec = upload(make_stack(tmp_path, "setuptools==80.9.0"))
    with pytest.raises(GpuboxError, match="the disk is full"):
        build(spec, small_disk)
    assert final_names(small_disk) == []
    subprocess.run(["mount", "-o", "remount,size=100m", small_disk], check=True)
    stack, said = build(spec, small_disk)
    assert "starting over" in said[0]
    assert final_names(small_disk) == [stack.name]


@pytest.mark.parametrize("after_line", range(5))
def test_killed_anywhere_the_next_build_ends_well(tmp_path: Path, after_line: int) -> None:
    spec = upload(make_stack(tmp_path, "setuptools==80.9.0"))
    code = (
        "import sys; from pathlib import Path\n"
        "from gpubox.build.builder import build_stack; from gpubox.layout import Layout\n"
        "build_stack(Path(sys.argv[1]), Layout(Path(sys.argv[2])), report=lambda text: print(text, flush=True))"
    )
    command = [sys.executable, "-c", code, str(spec), str(tmp_path / "box")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPO, start_new_session=True) as process:
        assert process.stdout is not None
        for _ in range(after_line + 1):
            process.stdout.readline()
        time.sleep(0.02)
        process.kill()
    for _ in range(100):
        if not session_members(process.pid):
            break
        time.sleep(0.02)
    assert session_members(process.pid) == [], "what the killed build had started must not go on"
    stack, _ = build(spec, tmp_path / "box")
    assert final_names(tmp_path / "box") == [stack.name]
    assert (stack / "stack.json").is_file()

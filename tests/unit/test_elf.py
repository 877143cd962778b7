"""What real shared libraries, compiled here, ask for; and the libcuda stand-in made from it."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from gpubox.build.elf import cuda_library_major, read_linkage, shared_libraries, undefined_symbols
from gpubox.build.libcuda_standin import NO_DEVICE, build_standin, driver_symbols, refuse_on_nvidia_host
from gpubox.errors import RefusedError
from tests.unit.wheels import library

KERNEL = "int cuInit(int); int cuMemFree_v2(void*); int custom(void); int work() { return cuInit(0) + custom(); }"
DRIVER = "int cuInit(int x) { return x; } int cuMemFree_v2(void *p) { return 0; }"


def test_linkage_of_a_real_library(tmp_path: Path) -> None:
    needs = {"libcudart.so.13": "int c;", "libcuda.so.1": DRIVER, "libcufft.so.12": "int f;"}
    path = tmp_path / "kernel.so"
    path.write_bytes(library(tmp_path / "build", KERNEL, needs=needs))
    linkage = read_linkage(path)
    assert linkage is not None
    assert set(needs) < set(linkage.needed)
    assert linkage.cuda == ("libcuda.so.1", "libcudart.so.13")
    assert linkage.cuda_majors == {13}
    assert {"cuInit", "custom"} <= undefined_symbols(path)
    assert "work" not in undefined_symbols(path)


@pytest.mark.parametrize("data", [b"", b"\x7f", b"GROUP ( libc.so.6 )", b"\x7fELF", b"\x7fELF" + bytes(200)])
def test_what_is_no_library_has_no_linkage(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.so").write_bytes(data)
    assert read_linkage(tmp_path / "x.so") is None


def test_this_python_links_libc() -> None:
    linkage = read_linkage(Path(sys.executable).resolve())
    assert linkage is not None
    assert "libc.so.6" in linkage.needed
    assert linkage.cuda == ()


@pytest.mark.parametrize(
    ("name", "major"),
    [("libcudart.so.12", 12), ("libcublasLt.so.13", 13), ("libcufft.so.12", None), ("libcuda.so.1", None), ("x", None)],
)
def test_cuda_major_of_a_soname(name: str, major: int | None) -> None:
    assert cuda_library_major(name) == major


def test_links_and_other_files_are_no_libraries_to_read(tmp_path: Path) -> None:
    for name in ("b.so", "a.so.1.2", "no.sock", "data.so.txt"):
        (tmp_path / name).touch()
    (tmp_path / "link.so").symlink_to("b.so")
    assert [path.name for path in shared_libraries(tmp_path)] == ["a.so.1.2", "b.so"]


def test_the_standin_has_what_the_kernels_want_and_answers_no_device(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    kernel = packages / "kernel.so"
    kernel.write_bytes(library(tmp_path / "build", KERNEL, needs={"libcuda.so.1": DRIVER}))
    (packages / "unrelated.so").write_bytes(
        library(tmp_path / "build", "int cuNotWanted(); int f() { return cuNotWanted(); }")
    )
    symbols = driver_symbols(packages)
    assert symbols == ["cuInit"]  # called; cuMemFree_v2 is only declared, custom is no name of the driver
    standin = build_standin(tmp_path / "one", symbols)
    assert ctypes.CDLL(str(standin)).cuInit(0) == NO_DEVICE
    assert build_standin(tmp_path / "two", symbols).read_bytes() == standin.read_bytes()
    script = f"import ctypes, os; ctypes.CDLL({str(kernel)!r}, mode=os.RTLD_LAZY)"
    run = [sys.executable, "-c", script]
    assert b"libcuda.so.1: cannot open" in subprocess.run(run, capture_output=True, check=False, env={}).stderr
    subprocess.run(run, check=True, env={"LD_LIBRARY_PATH": str(standin.parent)})


@pytest.mark.parametrize("trace", ["sys/module/nvidia", "proc/driver/nvidia/version", "dev/nvidiactl"])
def test_the_standin_is_refused_beside_a_driver(tmp_path: Path, trace: str) -> None:
    """By the kernel's list of modules; by the other two where sysfs is not mounted."""
    refuse_on_nvidia_host("stack x", tmp_path)
    (tmp_path / trace).parent.mkdir(parents=True)
    (tmp_path / trace).touch()
    with pytest.raises(RefusedError, match=f"stack x: this host has an NVIDIA driver .*/{trace} exists"):
        refuse_on_nvidia_host("stack x", tmp_path)


def test_a_device_node_without_its_module_is_no_driver(tmp_path: Path) -> None:
    for path in ("sys/module", "proc/driver/nvidia", "dev"):
        (tmp_path / path).mkdir(parents=True)
    for path in ("proc/driver/nvidia/version", "dev/nvidiactl"):
        (tmp_path / path).touch()
    refuse_on_nvidia_host("stack x", tmp_path)

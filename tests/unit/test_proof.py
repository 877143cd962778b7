"""The rules of the proof. Messages are those of real imports: a library moved away, kernels beside another torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpubox.build.proof import check_versions, kernel_links
from gpubox.build.proof_errors import death, explain, step_failed
from gpubox.errors import ProofError
from tests.unit.wheels import library

# What sgl_kernel says when its library does not load; the cause is in the line before the last.
SGL_KERNEL = """ImportError: \n[sgl_kernel] CRITICAL: Could not load any common_ops library!

Attempted locations:
1. Architecture-specific pattern: /x/sgl_kernel/sm100/common_ops.* - found files: ['/x/common_ops.abi3.so']
2. Fallback pattern: /x/sgl_kernel/common_ops.* - found files: []
3. Standard Python import: common_ops - failed

GPU Info:
- Compute capability: None
- Expected variant: CPU/No GPU detected (using precise math)

Error details from previous import attempts:
- ImportError: {cause}
- ModuleNotFoundError: No module named 'common_ops'
"""
NO_FILE = "{}: cannot open shared object file: No such file or directory"


@pytest.mark.parametrize(
    ("message", "kind", "advice"),
    [
        (SGL_KERNEL.format(cause=NO_FILE.format("libcuda.so.1")), "missing file", "overlay 'cpu'"),
        (
            SGL_KERNEL.format(cause=NO_FILE.format("libnvrtc.so.12")),
            "missing file",
            "CUDA 12, the stack declares CUDA 13",
        ),
        (NO_FILE.format("ImportError: libcublas.so.13"), "missing file", "lost its files"),
        (NO_FILE.format("OSError: libnuma.so.1"), "missing file", "apt install libnuma1"),
        (NO_FILE.format("OSError: libfoo.so.7"), "missing file", "apt-file search libfoo.so.7"),
        (
            SGL_KERNEL.format(
                cause="/x/common_ops.abi3.so: undefined symbol: _ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_ib"
            ),
            "ABI",
            "built for another torch",
        ),
        (SGL_KERNEL.format(cause="/x/common_ops.abi3.so: undefined symbol: cuMemAddressFree"), "ABI", "driver"),
        ("OSError: x.so: undefined symbol: other", "ABI", "two wheels do not fit"),
        ("ImportError: /lib/libc.so.6: version `GLIBC_2.38' not found (required by x.so)", "ABI", "newer release"),
        (
            "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device",
            "architecture",
            "compute capability",
        ),
        ("ModuleNotFoundError: No module named 'torch'", "missing module", "'torch'"),
        (death(-4), "architecture", "this CPU"),
        (death(-11), "crash", "detail"),
        (death(3), "crash", "detail"),
        ("ValueError: something else", "unknown", "detail"),
    ],
)
def test_failures_are_told_apart(message: str, kind: str, advice: str) -> None:
    explanation = explain(message, 13)
    assert explanation.kind == kind
    assert advice in explanation.next_step


def test_the_first_line_shows_the_line_that_tells() -> None:
    error = step_failed("cuda128", "import sgl_kernel", SGL_KERNEL.format(cause=NO_FILE.format("libnuma.so.1")), "", 12)
    assert error.message == (
        "cuda128: import sgl_kernel failed (missing file): "
        "ImportError: libnuma.so.1: cannot open shared object file: No such file or directory"
    )
    assert error.hint == "apt install libnuma1"


def test_every_difference_to_the_lock_is_listed() -> None:
    found = {"Py_YAML": ["6.0"], "torch": ["2.9.1"], "six": ["1.0", "1.1"], "pip": ["24"], "attrs": ["25.1.0"]}
    expected = {"py-yaml": "6.0", "torch": "2.11.0", "six": "1.1", "numpy": "2.0", "attrs": "25.1"}
    with pytest.raises(ProofError) as caught:
        check_versions(found, expected)
    assert caught.value.message == "the venv is not what the lock says (4 differences)"
    assert caught.value.detail.splitlines() == [
        "numpy==2.0 is locked and not there",
        "pip==24 is there and not locked",
        "six is there 2 times: 1.0, 1.1",
        "torch==2.11.0 is locked, 2.9.1 is there",
    ]
    del found["torch"], found["six"], found["pip"]
    assert check_versions(found, {"py-yaml": "6.0", "attrs": "25.1"}) == {"attrs": "25.1.0", "py-yaml": "6.0"}


def test_kernels_of_the_other_cuda_are_seen_in_their_files(tmp_path: Path) -> None:
    needs = {"libcudart.so.12": "int c;", "libcuda.so.1": "int d;"}
    (tmp_path / "ops.so").write_bytes(library(tmp_path / "build", "int f;", needs=needs))
    (tmp_path / "plain.so").write_bytes(library(tmp_path / "build", "int f;"))
    links = kernel_links("sgl-kernel", tmp_path, ["ops.so", "plain.so"], 12)
    assert links == {"ops.so": ["libcuda.so.1", "libcudart.so.12"], "plain.so": []}
    with pytest.raises(ProofError, match=r"ops\.so links libcuda\.so\.1, libcudart\.so\.12, but .* declares CUDA 13"):
        kernel_links("sgl-kernel", tmp_path, ["ops.so", "plain.so"], 13)
    with pytest.raises(ProofError, match="none of its 1 shared libraries links CUDA's"):
        kernel_links("sgl-kernel", tmp_path, ["plain.so"], 12)
    with pytest.raises(ProofError, match="none of its 0 shared libraries"):
        kernel_links("sgl-kernel", tmp_path, [], 12)

"""Tell ABI from architecture from a missing file in what an import says, and name the next step."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass

from gpubox.build.elf import cuda_library_major
from gpubox.errors import ProofError

_DEBIAN_PACKAGES = {"libnuma.so.1": "libnuma1", "libgomp.so.1": "libgomp1", "libstdc++.so.6": "libstdc++6"}


@dataclass(frozen=True)
class Explanation:
    """`kind` is one of ABI, architecture, missing file, missing module, crash, unknown."""

    kind: str
    next_step: str


def explain(message: str, major: int | None = None) -> Explanation:
    """What kind of failure an import or a load reports, and what to do about it. `major`: the declared CUDA major."""
    for pattern, kind, next_step in _RULES:
        match = re.search(pattern, message)
        if match:
            return Explanation(kind, next_step if isinstance(next_step, str) else next_step(match[1], major))
    return Explanation("unknown", "read the detail below")


def step_failed(name: str, step: str, message: str, detail: str, major: int | None) -> ProofError:
    """The error for one failed step of a proof. Of a message of many lines the first line shows the telling one."""
    explanation = explain(message, major)
    lines = [line.strip().lstrip("- ") for line in message.splitlines() if line.strip()]
    telling = next((line for line in lines if explain(line, major) == explanation), lines[-1] if lines else "")
    return ProofError(
        f"{name}: {step} failed ({explanation.kind}): {telling}",
        hint=explanation.next_step,
        detail="\n".join((detail or message).splitlines()[-20:]),
    )


def death(status: int) -> str:
    """Words for an exit status; negative means a signal."""
    return f"died of {signal.Signals(-status).name}" if status < 0 else f"died with exit status {status}"


def _about_symbol(symbol: str, major: int | None) -> str:
    del major
    if re.match(r"cu[A-Z]", symbol):
        return f"the driver or its stand-in lacks {symbol}; a driver below min_driver of stack.toml is too old"
    if re.match(r"_ZNK?(3c10|2at|5torch)", symbol):
        return "the wheel is built for another torch: lock the pair that belongs together"
    return "two wheels do not fit each other: lock the pair that belongs together"


def _about_library(library: str, major: int | None) -> str:
    if library == "libcuda.so.1":
        return "no NVIDIA driver here: install it, or deploy a machine without a GPU with the overlay 'cpu'"
    wanted = cuda_library_major(library)
    if wanted is not None and major is not None and wanted != major:
        return f"that belongs to CUDA {wanted}, the stack declares CUDA {major}: lock the wheel built for CUDA {major}"
    if wanted is not None:
        return f"the wheel that brings {library} is not in the lock or lost its files: lock it, or build again"
    package = _DEBIAN_PACKAGES.get(library)
    return f"apt install {package}" if package else f"find the package that brings it: apt-file search {library}"


_RULES: tuple[tuple[str, str, str | Callable[[str, int | None], str]], ...] = (
    (r"undefined symbol: (\w+)", "ABI", _about_symbol),
    (r"(\S+): cannot open shared object file", "missing file", _about_library),
    (
        r"version `\w+_[\d.]+' not found",
        "ABI",
        "the wheel is built for a newer C or C++ library: the box needs a newer release of its system",
    ),
    (
        r"no kernel image is available|is not compatible with the current PyTorch installation",
        "architecture",
        "the wheel has no kernels for this GPU's compute capability: use a stack whose torch and kernels have them",
    ),
    (r"SIGILL", "architecture", "the wheel uses instructions that this CPU does not have"),
    (r"^died", "crash", "read the detail below"),
    (
        r"No module named '([^']+)'",
        "missing module",
        lambda module, _: f"add what brings {module!r} to the stack's requirements.in and lock it again",
    ),
)

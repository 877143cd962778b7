"""Run by a stack's own Python to say what is really in it. Standard library only: the stack holds nothing of gpubox.

    python -I -X pycache_prefix=DIR proof_probe.py '{"imports": [...], "kernel_distributions": [...]}'

Prints one JSON object a line, as it goes: {"step": NAME} before each step and {"step": NAME, ...result} after it, so
that the reader also knows which step a crash ended. Everything that imported modules print goes to standard error.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

RTLD_NOW_LOCAL = os.RTLD_NOW | os.RTLD_LOCAL  # as an import does it

Result = dict[str, Any]


def main() -> None:
    request = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def step(name: str, work: Callable[[], Result]) -> None:
        print(json.dumps({"step": name}), file=out)
        print(json.dumps({"step": name, **work()}), file=out)

    libraries = kernel_libraries(request["kernel_distributions"])
    step("python", lambda: {"version": platform.python_version()})
    step("distributions", lambda: {"versions": distributions()})
    step("kernels", lambda: {"libraries": libraries})
    if importlib.util.find_spec("torch") is not None:
        step("torch", torch_facts)
    # After torch, since kernel libraries find torch's and CUDA's libraries among what torch has loaded.
    for path in sorted(path for paths in libraries.values() for path in paths):
        step(f"load {path}", lambda path=path: in_child(lambda: load(path)))  # type: ignore[misc]
    for module in request["imports"]:
        step(f"import {module}", lambda module=module: attempt(lambda: importlib.import_module(module)))  # type: ignore[misc]
    if "torch" in sys.modules:
        step("device", device)


def distributions() -> dict[str, list[str]]:
    """Every version found of each name as its metadata spells it; more than one means a damaged venv."""
    found: dict[str, list[str]] = {}
    for distribution in importlib.metadata.distributions():
        found.setdefault(distribution.metadata["Name"] or "?", []).append(distribution.version)
    return found


def kernel_libraries(names: list[str]) -> dict[str, list[str]]:
    """Shared libraries of each distribution (absent ones have none), as paths relative to site-packages."""
    found: dict[str, list[str]] = {}
    for name in names:
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            files = []
        found[name] = sorted(str(file) for file in files if ".so" in file.suffixes)
    return found


def torch_facts() -> Result:
    facts: Result = {}

    def look() -> None:
        torch = importlib.import_module("torch")
        facts.update(version=torch.__version__, cuda=torch.version.cuda)

    return {**attempt(look), **facts}


def load(path: str) -> None:
    ctypes.CDLL(str(Path(sysconfig.get_path("platlib"), path)), mode=RTLD_NOW_LOCAL)


def device() -> Result:
    """A real kernel on the real device, where there is one."""
    torch: Any = sys.modules["torch"]
    if not torch.cuda.is_available():
        return {"device": None}
    outcome = attempt(lambda: (torch.ones(8, device="cuda") * 2).sum().item())
    return {"device": torch.cuda.get_device_name(), **outcome}


def in_child(work: Callable[[], object]) -> Result:
    """Run `work` in a fork: two builds of one kernel register the same operators, and a process takes only one."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.write(writer, json.dumps(attempt(work)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        text = stream.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"exit_status": os.waitstatus_to_exitcode(status)}


def attempt(work: Callable[[], object]) -> Result:
    try:
        work()
    except BaseException as error:  # SystemExit of a module at import, too
        last = "".join(traceback.format_exception_only(type(error), error)).strip()
        return {"error": last, "traceback": traceback.format_exc()}
    return {}


if __name__ == "__main__":
    main()

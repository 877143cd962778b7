"""Small real wheels and stacks, made without a network: real zip files with real metadata, installed by the real uv."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpubox.specs.stack import Overlay, StackSpec, stack_spec

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
EPOCH = (2026, 1, 1, 0, 0, 0)


@dataclass
class Workshop:
    """A directory with a wheelhouse and a stack that is locked to what was added."""

    root: Path
    locked: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def wheelhouse(self) -> Path:
        return self.root / "wheelhouse"

    def wheel(
        self,
        name: str,
        version: str,
        files: Mapping[str, bytes | str],
        *,
        says: str | None = None,
        requires: Sequence[str] = (),
        into: str = "wheelhouse",
    ) -> Path:
        """Make a wheel, lock it, and return it. `says`: the version in its metadata when it is not its file name's."""
        (self.root / into).mkdir(exist_ok=True)
        stem = f"{name.replace('-', '_')}-{version}"
        path = self.root / into / f"{stem}-py3-none-any.whl"
        info = f"{name.replace('-', '_')}-{says or version}.dist-info"
        asks = "".join(f"Requires-Dist: {text}\n" for text in requires)
        contents = {
            **files,
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {says or version}\n{asks}",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        contents[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*contents, f"{info}/RECORD"])
        with zipfile.ZipFile(path, "w") as archive:
            for file, data in contents.items():
                archive.writestr(zipfile.ZipInfo(file, EPOCH), data)
        self.locked[name] = (version, hashlib.sha256(path.read_bytes()).hexdigest())
        return path

    def lock_text(self) -> str:
        return "".join(
            f"{name}=={version} \\\n    --hash=sha256:{sha}\n" for name, (version, sha) in self.locked.items()
        )

    def stack(
        self,
        name: str = "small",
        *,
        extra: str = "",
        patches: Mapping[str, str] | None = None,
        artefacts: Path | None = None,
    ) -> Path:
        """Write stacks/<name>; the first wheel is the engine. `extra` is TOML added to stack.toml."""
        directory = self.root / name
        (directory / "patches").mkdir(parents=True, exist_ok=True)
        engine, (version, _) = next(iter(self.locked.items()))
        (directory / "stack.toml").write_text(
            f'name = "{name}"\ndescription = "a test"\npythons = ["{PYTHON}"]\npatches = {list(patches or {})}\n'
            f'engine = {{ name = "{engine}", version = "{version}", module = "engine" }}\n{extra}'
        )
        (directory / "requirements.lock").write_text(self.lock_text())
        if artefacts is not None:
            (directory / "artefacts.toml").write_bytes(artefacts.read_bytes())
        for file, text in (patches or {}).items():
            (directory / "patches" / file).write_text(text)
        return directory

    def upload(self, directory: Path, overlay: Overlay | None = None, into: str = "incoming") -> Path:
        """Render the stack's spec and write it as the controller would; returns the spec's directory."""
        spec = stack_spec(directory, PYTHON, overlay)
        target = self.root / into / spec.id
        write_spec(spec, target)
        return target


def write_spec(spec: StackSpec, target: Path) -> None:
    for name, data in spec.files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(data)


def library(directory: Path, source: str, *, needs: Mapping[str, str] | None = None, missing: str = "") -> bytes:
    """A real shared library of the C `source`, linked to libraries with the sonames `needs` (soname -> C source).

    `missing` is C code whose undefined symbols are allowed.
    """
    directory.mkdir(exist_ok=True)
    linked = []
    for soname, code in (needs or {}).items():
        _compile(directory / soname, code, f"-Wl,-soname,{soname}")
        linked.append(str(directory / soname))
    out = directory / "out.so"
    _compile(out, source + missing, "-Wl,--no-as-needed", *linked)
    return out.read_bytes()


def _compile(out: Path, source: str, *options: str) -> None:
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-x", "none", *options, "-o", out],
        input=source,
        text=True,
        check=True,
        capture_output=True,
    )

"""Where everything lives on a box. The one place that spells these paths."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DEFAULT_ROOT = Path("/opt/gpubox")
SERVICE_USER = "gpubox"  # the server runs as it, unless settings name another


@dataclass(frozen=True)
class Layout:
    """Paths below one root. `root` is /opt/gpubox on a box and a temporary directory in unit tests."""

    root: Path = DEFAULT_ROOT

    @property
    def stacks(self) -> Path:
        return self.root / "stacks"

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def releases(self) -> Path:
        return self.root / "releases"

    @property
    def incoming(self) -> Path:
        """Specs the controller uploads: inputs of builds, never used by a running server."""
        return self.root / "incoming"

    @property
    def current(self) -> Path:
        return self.root / "current"

    @property
    def previous(self) -> Path:
        return self.root / "previous"

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def weights(self) -> Path:
        """What was read of model directories: digests by path, size, mtime and inode."""
        return self.state / "weights"

    @property
    def wheel_cache(self) -> Path:
        """uv's cache. It must share one mount with `stacks`: uv hard-links, and link(2) does not cross mounts."""
        return self.root / "cache" / "uv"

    @property
    def artefacts(self) -> Path:
        """Files that no default index has, as fetched, by hash-checked name."""
        return self.root / "cache" / "artefacts"

    @property
    def pythons(self) -> Path:
        """Relocatable Python builds, for stacks whose Python the system does not have."""
        return self.root / "pythons"

    def jit_cache(self, stack_id: str) -> Path:
        """Compile caches of one stack (triton, inductor, flashinfer, bytecode), never shared between stacks."""
        return self.root / "cache" / stack_id

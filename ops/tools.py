"""The box's own tools: the command `gpubox` and uv, in a venv of their own, apart from every stack."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

from pyinfra import host
from pyinfra.api import FileUploadCommand, StringCommand, operation

from facts.box import box_state
from gpubox.canonical import DIGEST_LENGTH
from ops.streamed import Streamed

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "tools" / "requirements.lock"

# The link moves last, so a toolset that the link names is complete. The one before stays: it may still be running.
INSTALL = """
set -e
cd /opt/gpubox
new=toolsets/{digest}
old=$(readlink tools || true)
echo "installing gpubox tools {digest}"
rm -rf "$new"
python3 -m venv "$new"
pip="$new/bin/pip --quiet --disable-pip-version-check install"
$pip --require-hashes --only-binary :all: {where} -r {incoming}/requirements.lock
$pip --no-deps --no-index {incoming}/{wheel}
ln -sfn "$new" .tools.new
mv -T .tools.new tools
ln -sfn /opt/gpubox/tools/bin/gpubox /usr/local/bin/gpubox
for toolset in toolsets/*; do
  [ "$toolset" = "$new" ] || [ "$toolset" = "$old" ] || rm -rf "$toolset"
done
"""


def tools_digest() -> str:
    """Of everything that decides the tools: the package's sources and the lock."""
    digest = hashlib.sha256(LOCK.read_bytes() + (ROOT / "pyproject.toml").read_bytes())
    for path in sorted((ROOT / "gpubox").rglob("*.py")):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:DIGEST_LENGTH]


@operation()
def installed(digest: str, wheelhouse: str | None, offline: bool) -> Iterator[Any]:
    """The tools of this commit are on the box and `gpubox` is on the path."""
    seen = box_state()
    if seen.get("tools") == digest and seen.get("gpubox"):
        host.noop(f"tools {digest} are installed")
        return
    incoming = f"/opt/gpubox/incoming/tools-{digest}"
    name, wheel = _wheel()
    where = [*(["--find-links", wheelhouse] if wheelhouse else []), *(["--no-index"] if offline else [])]
    yield StringCommand("mkdir", "-p", incoming)
    yield FileUploadCommand(str(LOCK), f"{incoming}/requirements.lock")
    yield FileUploadCommand(BytesIO(wheel), f"{incoming}/{name}")
    script = INSTALL.format(digest=digest, incoming=incoming, wheel=name, where=shlex.join(where))
    yield Streamed("sh", "-c", shlex.quote(script))


def _wheel() -> tuple[str, bytes]:
    """The package as a wheel: file name and bytes, equal for equal sources (SOURCE_DATE_EPOCH)."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", directory]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": "315532800"}  # the oldest time a zip file can hold
        subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
        wheel = next(Path(directory).glob("*.whl"))
        return wheel.name, wheel.read_bytes()

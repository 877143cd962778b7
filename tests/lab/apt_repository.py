"""A small signed apt repository and the packages in it, made here: names and dependencies as NVIDIA's, contents empty.

It stands in for the vendor's, of which no test may fetch gigabytes. Flat ("Suites: /"), with InRelease, as that one is.
"""

from __future__ import annotations

import hashlib
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass(frozen=True)
class Deb:
    """A package without contents but for what is named.

    executable: the path of a program that prints its version. files: path -> content; `modes`: of those that are not
    0644. scripts: name -> sh of a maintainer script. fields: further lines of its control file.
    """

    name: str
    version: str
    depends: str = ""
    executable: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    modes: Mapping[str, int] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    scripts: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)

    def build(self, directory: Path) -> Path:
        root = directory / f".{self.name}"
        control = [f"Package: {self.name}", f"Version: {self.version}", "Architecture: amd64"]
        control += ["Maintainer: gpubox tests <tests@example>", "Description: stand-in"]
        control += [f"Depends: {self.depends}"] if self.depends else []
        control += [f"{name}: {value}" for name, value in self.fields.items()]
        _write(root / "DEBIAN/control", "\n".join(control) + "\n")
        for name, script in self.scripts.items():
            _write(root / f"DEBIAN/{name}", f"#!/bin/sh\nset -e\n{script}", mode=0o755)
        if self.executable:
            _write(root / self.executable.lstrip("/"), f"#!/bin/sh\necho {self.version}\n", mode=0o755)
        for path, content in self.files.items():
            _write(root / path.lstrip("/"), content, mode=self.modes.get(path, 0o644))
        for path, goal in self.links.items():
            (root / path.lstrip("/")).symlink_to(goal)
        target = directory / f"{self.name}_{self.version}_amd64.deb"
        subprocess.run(["dpkg-deb", "--root-owner-group", "--build", root, target], check=True, capture_output=True)
        subprocess.run(["rm", "-r", root], check=True)
        return target


def toolkit(cuda: str, version: str, nvcc: str, *, also: str = "") -> list[Deb]:
    """A toolkit's own package and one part of it. `also`: a further dependency of the toolkit."""
    dashed = cuda.replace(".", "-")
    part = Deb(f"cuda-nvcc-{dashed}", nvcc, executable=f"/usr/local/cuda-{cuda}/bin/nvcc")
    depends = f"cuda-nvcc-{dashed} (>= {nvcc})" + (f", {also}" if also else "")
    return [Deb(f"cuda-toolkit-{dashed}", version, depends), part]


# What the committed stacks declare, with the version that each nvcc prints by home.
BOTH_TOOLKITS = [*toolkit("13.0", "13.0.1-1", "13.0.88-1"), *toolkit("12.8", "12.8.1-1", "12.8.93-1")]
NVCC = {"/usr/local/cuda-13.0": "13.0.88-1", "/usr/local/cuda-12.8": "12.8.93-1"}


class Signer:
    """A GnuPG key of its own; `fingerprint` and the public key are what an operator would get."""

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir(mode=0o700)
        self._gpg("--quick-generate-key", "gpubox-test", "ed25519", "sign", "never")
        listed = self._gpg("--with-colons", "--list-keys").decode().splitlines()
        self.fingerprint = next(line.split(":")[9] for line in listed if line.startswith("fpr:"))
        self.public_key = self._gpg("--export", "--armor")

    def sign(self, text: str) -> bytes:
        return self._gpg("--clearsign", "--output", "-", text=text)

    def close(self) -> None:
        subprocess.run(["gpgconf", "--homedir", self.home, "--kill", "all"], check=True)

    def _gpg(self, *arguments: str, text: str = "") -> bytes:
        command = ["gpg", "--homedir", str(self.home), "--batch", "--quiet", "--pinentry-mode", "loopback"]
        command += ["--passphrase", "", *arguments]
        return subprocess.run(command, input=text.encode(), capture_output=True, check=True).stdout


def make_repository(directory: Path, debs: Iterable[Deb], signer: Signer) -> None:
    """Packages, index and InRelease in `directory`, which is made when it is not there."""
    directory.mkdir(exist_ok=True)
    index = "\n".join(_entry(deb.build(directory)) for deb in debs)
    (directory / "Packages").write_text(index)
    sign(directory, signer)


def sign(directory: Path, signer: Signer) -> None:
    """InRelease anew, by this signer."""
    index = (directory / "Packages").read_bytes()
    release = f"Origin: gpubox-test\nDate: {formatdate(usegmt=True)}\nSHA256:\n"
    release += f" {hashlib.sha256(index).hexdigest()} {len(index)} Packages\n"
    (directory / "InRelease").write_bytes(signer.sign(release))


@contextmanager
def served(directory: Path, address: str) -> Iterator[str]:
    """`directory` over http on a free port of `address`; yields its address. Ends with the block."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer((address, 0), partial(Quiet, directory=str(directory)))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://{address}:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


@contextmanager
def toolkit_settings(directory: Path, debs: list[Deb], address: str) -> Iterator[dict[str, str]]:
    """`toolkits` of a box: a repository of `debs` and its key, made in `directory` and served until the block ends."""
    signer = Signer(directory / "gnupg")
    try:
        make_repository(directory / "repository", debs, signer)
        key = directory / "key.asc"
        key.write_bytes(signer.public_key)
        with served(directory / "repository", address) as url:
            yield {"repository": url, "key": str(key), "fingerprint": signer.fingerprint}
    finally:
        signer.close()


def _entry(deb: Path) -> str:
    control = subprocess.run(["dpkg-deb", "--field", deb], capture_output=True, text=True, check=True).stdout
    data = deb.read_bytes()
    return f"{control}Filename: ./{deb.name}\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n"


def _write(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o755)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)

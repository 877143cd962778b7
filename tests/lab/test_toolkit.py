"""CUDA toolkits in a real box, by real apt, from a small signed repository and from a directory of .debs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lab.boxes import Box
from lab.settings import GATEWAY, KNOWN_HOSTS, REPOSITORY, SSH_KEY
from lab.shell import Completed
from tests.lab.apt_repository import BOTH_TOOLKITS, Deb, Signer, make_repository, served, sign, toolkit

DEPLOY = """
from pyinfra import host
from facts.box import Question, look_at
from gpubox.specs.plan import plan_box
from gpubox.settings import load_settings
from roles.cuda_toolkit import cuda_toolkit, files
from roles.keys import ROOT

plan = plan_box(ROOT, load_settings(host.data.dict(), host.name))
look_at(Question(plan.settings, (), tuple(file.path for file in files(plan)), plan.server.port, ""))
cuda_toolkit(plan)
"""
SETTINGS = {"stack": "cuda130-next", "standby_stacks": ["cuda128"], "server": "smollm2", "python": "3.11"}
# 13.0.2 is there too, and newer: it must not be taken.
TOOLKITS = [
    *BOTH_TOOLKITS,
    Deb("cuda-toolkit-13-0", "13.0.2-1", "cuda-nvcc-13-0 (>= 13.0.88-1)"),
    Deb("libcuda1", "590.48.01-1"),
    Deb("cuda-drivers", "590.48.01-1", "libcuda1"),
]
INSTALLED = "dpkg-query -W -f '${Status} ${Version} ${Package}\\n' 'cuda-*' 'libcuda*' 2>/dev/null | sort"
BOTH = [
    "hold ok installed 12.8.1-1 cuda-toolkit-12-8",
    "hold ok installed 12.8.93-1 cuda-nvcc-12-8",
    "hold ok installed 13.0.1-1 cuda-toolkit-13-0",
    "hold ok installed 13.0.88-1 cuda-nvcc-13-0",
]
OURS = ["/etc/apt/sources.list.d/gpubox-cuda.sources", "/etc/apt/keyrings/gpubox-cuda.asc", "/var/lib/gpubox/debs"]
OURS += ["/etc/apt/preferences.d/gpubox-*", "/etc/apt/apt.conf.d/52gpubox-*", "/etc/ld.so.conf.d/compat.conf"]


@dataclass
class Bench:
    """A box without toolkits, a repository for it, and the role alone."""

    box: Box
    root: Path
    signer: Signer
    url: str
    settings: dict[str, object] = field(default_factory=dict)

    def deploy(self, **changes: object) -> Completed:
        (self.root / "deploy.py").write_text(DEPLOY)
        data = {"ssh_hostname": self.box.address, "ssh_user": "root", "ssh_key": str(SSH_KEY), **SETTINGS}
        data |= {"ssh_known_hosts_file": str(KNOWN_HOSTS), "toolkits": self.settings | changes}
        (self.root / "inventory.py").write_text(f"boxes = [({self.box.name!r}, {data!r})]\n")
        command = [Path(sys.executable).with_name("pyinfra"), self.root / "inventory.py", self.root / "deploy.py", "-y"]
        return subprocess.run(
            command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False
        )

    def installed(self) -> list[str]:
        listed = self.box.run(INSTALLED, check=False).stdout.splitlines()
        return [line for line in listed if " installed " in line]


@pytest.fixture(scope="module")
def box(lab) -> Box:
    for program in ("gpg", "dpkg-deb"):
        if shutil.which(program) is None:
            pytest.skip(f"the test repository is made with {program}")
    return lab.up("test4")[0]


@pytest.fixture
def bench(box: Box, tmp_path: Path) -> Iterator[Bench]:
    signer = Signer(tmp_path / "gnupg")
    repository = tmp_path / "repository"
    make_repository(repository, TOOLKITS, signer)
    (tmp_path / "key.asc").write_bytes(signer.public_key)
    try:
        with served(repository, str(GATEWAY)) as url:
            settings = {"repository": url, "key": str(tmp_path / "key.asc"), "fingerprint": signer.fingerprint}
            yield Bench(box, tmp_path, signer, url, settings)
    finally:
        signer.close()
        box.restore_network()
        box.run("dpkg --purge --force-all $(dpkg-query -W -f '${Package}\\n' 'cuda-*' 'libcuda*' 2>/dev/null) || true")
        box.run(f"rm -rf {' '.join(OURS)} /srv/debs; ldconfig; rm -f /var/lib/apt/lists/{GATEWAY}*", check=False)


def changes(done: Completed) -> tuple[int, int]:
    """Operations that changed something and that failed, from pyinfra's table."""
    totals = re.findall(r"Grand total\W+(\d+|-)\W+(\d+|-)\W+(\d+|-)\W+(\d+|-)", done.stderr + done.stdout)
    assert totals, done.stderr
    _, changed, _, failed = (0 if cell == "-" else int(cell) for cell in totals[-1])
    return changed, failed


def test_two_toolkits_side_by_side_and_a_second_run_changes_nothing(bench: Bench) -> None:
    done = bench.deploy()
    assert done.returncode == 0, done.stderr
    assert bench.installed() == BOTH
    assert bench.box.run("/usr/local/cuda-13.0/bin/nvcc; /usr/local/cuda-12.8/bin/nvcc").stdout.split() == [
        "13.0.88-1",
        "12.8.93-1",
    ]
    assert changes(done) == (3, 0), done.stderr
    again = bench.deploy()
    assert again.returncode == 0, again.stderr
    assert changes(again) == (0, 0), again.stderr

    upgrade = bench.box.run("apt-get upgrade --simulate && apt-get dist-upgrade --simulate").stdout
    assert "Inst cuda-" not in upgrade, "13.0.2 is in the repository, and nothing moves"
    for name in ("libcuda1", "cuda-drivers"):
        assert "Candidate: (none)" in bench.box.run(f"apt-cache policy {name}").stdout
        assert bench.box.run(f"apt-get install --simulate {name}", check=False).returncode != 0


def test_a_repository_signed_by_another_key_is_refused(bench: Bench) -> None:
    other = Signer(bench.root / "other")
    try:
        sign(bench.root / "repository", other)
    finally:
        other.close()
    done = bench.deploy()
    assert done.returncode == 1
    assert "signature does not verify with toolkits.key" in done.stderr
    assert bench.installed() == []

    sign(bench.root / "repository", bench.signer)
    assert bench.deploy().returncode == 0, "the same box goes on when the signature is right"
    assert bench.installed() == BOTH


def test_a_key_of_another_fingerprint_is_refused_before_anything_changes(bench: Bench) -> None:
    done = bench.deploy(fingerprint="0" * 40)
    assert done.returncode == 1
    assert f"holds {bench.signer.fingerprint}, expected is {'0' * 40}" in done.stderr
    assert bench.box.run(f"ls -d {' '.join(OURS)}", check=False).stdout == ""


def test_h7_a_toolkit_that_drags_a_driver_in_is_refused(bench: Bench) -> None:
    dragging = toolkit("13.0", "13.0.1-1", "13.0.88-1", also="cuda-drivers (>= 580)")
    make_repository(bench.root / "repository", [*dragging, *TOOLKITS[2:]], bench.signer)
    done = bench.deploy()
    assert done.returncode == 1
    assert "wants driver packages, which are pinned away: cuda-drivers" in done.stderr
    assert bench.installed() == []


def test_a_version_that_the_repository_does_not_have(bench: Bench) -> None:
    make_repository(bench.root / "repository", TOOLKITS[2:], bench.signer)
    done = bench.deploy()
    assert done.returncode == 1
    assert "the repository does not have cuda-toolkit-13-0=13.0.1-1" in done.stderr
    assert bench.installed() == []


def test_exact_versions_of_parts(bench: Bench) -> None:
    newer = Deb("cuda-nvcc-13-0", "13.0.99-1", executable="/usr/local/cuda-13.0/bin/nvcc")
    make_repository(bench.root / "repository", [*TOOLKITS, newer], bench.signer)
    done = bench.deploy(versions={"cuda-nvcc-13-0": "13.0.88-1"})
    assert done.returncode == 0, done.stderr
    assert bench.installed() == BOTH
    moved = bench.deploy(versions={"cuda-nvcc-13-0": "13.0.99-1"})
    assert moved.returncode == 0, moved.stderr
    assert "hold ok installed 13.0.99-1 cuda-nvcc-13-0" in bench.installed(), "held packages move when the settings do"


def test_a_directory_of_debs_without_any_network(bench: Bench) -> None:
    bench.box.run("mkdir -p /srv/debs")
    for deb in (bench.root / "repository").glob("*.deb"):
        shutil.copy(deb, bench.box.rootfs / "srv/debs")
    bench.settings = {"repository": "/srv/debs"}
    bench.box.cut_internet()
    done = bench.deploy()
    assert done.returncode == 0, done.stderr
    assert bench.installed() == BOTH
    assert changes(bench.deploy()) == (0, 0)


def test_an_empty_directory(bench: Bench) -> None:
    bench.box.run("mkdir -p /srv/debs")
    bench.settings = {"repository": "/srv/debs"}
    done = bench.deploy()
    assert done.returncode == 1
    assert "no .deb there on the box" in done.stderr


def test_h7_a_compat_directory_on_the_loaders_path_is_found(bench: Bench) -> None:
    bench.box.write("/etc/ld.so.conf.d/compat.conf", "/usr/local/cuda-13.0/compat\n")
    done = bench.deploy()
    assert done.returncode == 1
    assert "/etc/ld.so.conf.d/compat.conf puts /usr/local/cuda-13.0/compat on the loader's path" in done.stderr

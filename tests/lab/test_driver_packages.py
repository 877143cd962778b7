"""The driver from apt on a node that was bare, and in its container, by real apt from a small signed repository.

One node for all tests, which follow each other: refused, installed, left alone by upgrades, taken back, changed to the
.run file. H4, H5, H6, H7 number hard cases that broke other projects: closed modules, a kernel without the module, an
upgrade in the background, a driver where none belongs.
"""

from __future__ import annotations

import runpy
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lab import driver_run
from lab.node import Guest, Node
from lab.node_packages import KERNELS
from lab.settings import GATEWAY
from tests.lab.apt_repository import Deb, Signer, make_repository, served
from tests.lab.conftest import TestBoxes
from tests.lab.driver_debs import driver
from tests.lab.node_deploys import NodeDeploys, bare_node, replaced

OLDER, VERSION, NEWER = "590.44.01", "590.48.01", "595.58.03"
DEPLOY = """
from pyinfra import host
from facts.box import Question, look_at
from gpubox.nvidia.driver_packages import PLACE
from gpubox.settings import load_settings
from gpubox.specs.plan import plan_box
from roles.container import container
from roles.keys import ROOT
from roles.nodes_come_first import nodes_come_first
from roles.nvidia_userland import files, nvidia_userland
from roles.proxmox_node import preflight_node, proxmox_node

if "proxmox_nodes" in host.groups:
    proxmox_node(preflight_node())
    container()
nodes_come_first()
if "gpu_boxes" in host.groups:
    plan = plan_box(ROOT, load_settings(host.data.dict(), host.name))
    paths = [*(file.path for file in files(plan.settings)), PLACE.sources]
    look_at(Question(plan.settings, (), tuple(paths), plan.server.port, ""))
    nvidia_userland(plan)
"""
INSTALLED = (
    "dpkg-query -W -f '${db:Status-Abbrev} ${Version} ${Package}\\n' 'nvidia*' 'libnvidia*' 'libcuda*' 'firmware-*'"
    " 2>/dev/null | grep -v '^un' | sort -k 3"
)
LIBRARIES = ["libcuda1", "libnvidia-ml1", "libnvidia-nvvm704", "nvidia-driver-cuda"]
HOST = [
    *("firmware-nvidia-gsp", *LIBRARIES, "nvidia-kernel-open-dkms", "nvidia-modprobe", "nvidia-persistenced"),
]
UNATTENDED = (
    '#clear Unattended-Upgrade::Origins-Pattern;\nUnattended-Upgrade::Origins-Pattern { "origin=gpubox-test"; };\n'
)


@dataclass(frozen=True, kw_only=True)
class Deploys(NodeDeploys):
    """Node and container, both with `driver`; nothing else of the box."""

    signer: Signer
    url: str
    values: dict[str, Any] = field(default_factory=dict)

    def inventory(self, node: dict[str, Any] | None = None, container: dict[str, Any] | None = None) -> Path:
        file = super().inventory(node, container or {})
        read = runpy.run_path(str(file))
        ((name, box),) = read["gpu_boxes"]
        boxes = [(name, {**box, "driver": (node or {})["driver"]})]
        file.write_text(f"proxmox_nodes = {read['proxmox_nodes']!r}\ngpu_boxes = {boxes!r}\n")
        return file

    def command(self, *arguments: str, **values: dict[str, Any] | None) -> list[str]:
        deploy = self.directory / "deploy.py"
        deploy.write_text(DEPLOY)
        words = super().command(*arguments, **values)
        words[words.index("deploy.py")] = str(deploy)
        limit = words.index("--limit")
        return words[:limit] + words[limit + 2 :]

    def packaged(self, version: str = VERSION, **changes: Any) -> dict[str, Any]:
        source = {"repository": self.url, "key": str(self.directory / "key.asc")}
        return {"version": version, **source, "fingerprint": self.signer.fingerprint, **changes}

    def offer(self, *debs: Deb) -> None:
        make_repository(self.directory / "repository", debs, self.signer)


def installed(host: Node | Guest) -> list[str]:
    """As dpkg -l shows it: "hi" is installed and on hold."""
    return host.run(INSTALLED, check=False).stdout.splitlines()


def held(names: list[str], version: str) -> list[str]:
    return [f"hi  {version} {name}" for name in names]


@pytest.fixture(scope="module")
def node(lab: TestBoxes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deploys]:
    for program in ("gpg", "dpkg-deb", "gcc"):
        if shutil.which(program) is None:
            pytest.skip(f"the test repository is made with {program}")
    directory = tmp_path_factory.mktemp("driver")
    signer = Signer(directory / "gnupg")
    (directory / "key.asc").write_bytes(signer.public_key)
    make_repository(directory / "repository", offered(), signer)
    try:
        with bare_node(lab, directory) as bare, served(directory / "repository", str(GATEWAY)) as url:
            yield Deploys(bare.node, directory, signer=signer, url=url)
    finally:
        signer.close()


def offered() -> list[Deb]:
    return [*driver(OLDER), *driver(VERSION, newer=True), Deb("gpubox-harmless", "1")]


def test_a_version_that_is_not_there_is_refused_with_those_that_are(node: Deploys) -> None:
    said = node.refused(node={"driver": node.packaged("590.11.01")})
    assert f"driver.version = '590.11.01': {node.url} has no nvidia-driver-cuda of it" in said
    assert f"it has: {OLDER}-1, {VERSION}-1" in said
    assert installed(node.node) == []


def test_a_key_of_another_fingerprint_is_refused_before_anything_changes(node: Deploys) -> None:
    before = node.node.run("find /etc -type f -exec sha256sum {} + | sort").stdout
    said = node.refused(node={"driver": node.packaged(fingerprint="0" * 40)})
    assert f"driver.key = '{node.directory}/key.asc': holds {node.signer.fingerprint}, expected is {'0' * 40}" in said
    assert node.node.run("find /etc -type f -exec sha256sum {} + | sort").stdout == before


def test_h5_a_module_that_does_not_build_ends_the_deploy_and_the_next_one_goes_on(node: Deploys) -> None:
    """apt leaves the package half configured; that is no driver from a .run file. Nothing is rebooted or pinned."""
    booted = node.boot_id()
    node.node.run("apt-get install -y -qq --no-install-recommends dkms")
    failing = (
        '#!/bin/sh\ncase $1 in install) echo "Error! Bad return status" >&2; exit 10 ;; esac\nexec "$0.real" "$@"\n'
    )
    with replaced(node.node, "/usr/sbin/dkms", failing):
        said = node.refused(node={"driver": node.packaged(), "allow_reboot": True})
    assert "Bad return status" in said
    assert f"iF  {VERSION}-1 nvidia-kernel-open-dkms" in installed(node.node)
    assert node.boot_id() == booted
    assert node.read("/etc/kernel/proxmox-boot-pin") == ""


def test_node_and_container_get_it_and_a_second_run_changes_nothing(node: Deploys) -> None:
    """H4: the open modules; H6: every package on hold; nothing that builds modules in the container."""
    booted = node.boot_id()
    wanted = {"driver": node.packaged()}
    node.converges(node=wanted)
    assert installed(node.node) == held(HOST, f"{VERSION}-1")
    assert installed(node.guest) == held(LIBRARIES, f"{VERSION}-1")
    assert node.node.run("modinfo -F license nvidia").stdout == "Dual MIT/GPL\n"
    assert node.guest.run("nvidia-smi -L").stdout.count("GPU ") == 2
    assert node.guest.run("dpkg -l dkms 2>/dev/null | grep ^.i", check=False).stdout == ""
    assert node.changes(node=wanted) == []
    assert node.boot_id() == booted


def test_h6_a_newer_one_in_the_repository_moves_nothing(node: Deploys) -> None:
    """Neither by hand nor unattended; a package beside it, which shows that both look there, is moved."""
    hosts: list[Node | Guest] = [node.node, node.guest]
    for host in hosts:
        host.run("apt-get install -y -qq --no-install-recommends gpubox-harmless unattended-upgrades")
        host.run(f"echo '{UNATTENDED}' >/etc/apt/apt.conf.d/99-test")  # nothing of Debian's is waited for
    node.offer(*offered(), *driver(VERSION, "2", newer=True), *driver(NEWER, newer=True), Deb("gpubox-harmless", "2"))
    for host in hosts:
        before = installed(host)
        host.run("apt-get update -qq")
        for verb in ("upgrade", "dist-upgrade"):
            planned = host.run(f"apt-get {verb} --simulate").stdout
            assert "Inst gpubox-harmless [1]" in planned
            moved = [name for name in HOST if f"Inst {name} " in planned]
            assert moved == [], planned
        host.run("unattended-upgrade")
        assert host.run("dpkg-query -W -f '${Version}' gpubox-harmless").stdout == "2"
        assert installed(host) == before


def test_h6_what_somebody_took_off_hold_still_does_not_leave_its_version_and_is_held_again(node: Deploys) -> None:
    node.node.run("apt-mark unhold libcuda1 nvidia-kernel-open-dkms")
    planned = node.node.run("apt-get dist-upgrade --simulate").stdout
    assert f"Inst libcuda1 [{VERSION}-1] ({VERSION}-2" in planned, "a revision, and not the newer driver"
    assert NEWER not in planned
    assert [name.rpartition(" | ")[2] for name in node.changes(node={"driver": node.packaged()})] == ["On hold"]
    assert installed(node.node) == held(HOST, f"{VERSION}-1")


def test_the_closed_modules_and_what_builds_modules_in_a_container_are_not_installable(node: Deploys) -> None:
    """H4, H7."""
    for host, name in [
        *((node.node, name) for name in ("nvidia-kernel-dkms", "cuda-drivers")),
        *((node.guest, name) for name in ("nvidia-kernel-dkms", "nvidia-kernel-open-dkms", "nvidia-open")),
    ]:
        assert "Candidate: (none)" in host.run(f"apt-cache policy {name}").stdout, name
        assert host.run(f"apt-get install --simulate {name}", check=False).returncode == 100, name


def test_the_other_way_is_refused_before_anything_changes(node: Deploys) -> None:
    before = installed(node.node), node.node.run("dkms status; ls /usr/bin/nvidia-*").stdout
    said = node.refused(node={"driver": driver_run.settings(), "allow_reboot": True})
    assert "apt has installed driver packages here: firmware-nvidia-gsp, libcuda1" in said
    assert "give driver a repository instead of run" in said
    assert (installed(node.node), node.node.run("dkms status; ls /usr/bin/nvidia-*").stdout) == before


def test_a_loaded_driver_is_not_replaced_under_running_boxes(node: Deploys) -> None:
    before = installed(node.node)
    said = node.refused(node={"driver": node.packaged(OLDER)})
    assert f"driver {VERSION} is loaded and boxes may be using it; {OLDER} is wanted" in said
    assert installed(node.node) == before


def test_an_older_one_for_another_kernel_with_one_reboot(node: Deploys) -> None:
    """H5, H6: all packages go back, on node and container; the one that the older driver had not is removed."""
    boots = int(node.read("/var/lib/gpubox-lab/boots"))
    wanted = {"driver": node.packaged(OLDER), "kernel": KERNELS[1], "allow_reboot": True}
    node.converges(node=wanted)
    assert installed(node.node) == held([name for name in HOST if name != "libnvidia-nvvm704"], f"{OLDER}-1")
    assert installed(node.guest) == held([name for name in LIBRARIES if name != "libnvidia-nvvm704"], f"{OLDER}-1")
    assert node.node.run("uname -r; modinfo -F version nvidia").stdout.split() == [KERNELS[1], OLDER]
    assert int(node.read("/var/lib/gpubox-lab/boots")) == boots + 1
    assert node.guest.run("nvidia-smi -L").stdout.count("GPU ") == 2
    assert node.changes(node=wanted) == []


def test_what_the_refusals_say_to_do_leads_to_the_run_file_and_back(node: Deploys) -> None:
    kernel = {"kernel": KERNELS[1], "allow_reboot": True}
    for host in (node.node, node.guest):
        names = [line.split()[2] for line in installed(host)]
        host.run(f"apt-get purge -y --allow-change-held-packages {' '.join(names)}")
    node.converges(node={"driver": driver_run.settings(), **kernel})
    assert node.read("/etc/apt/sources.list.d/gpubox-driver.sources") == "", "a repository that nobody asks for is gone"
    assert node.changes(node={"driver": driver_run.settings(), **kernel}) == []

    said = node.refused(node={"driver": node.packaged(), **kernel})
    assert f"a driver from a .run file ({VERSION}) is installed here, and driver.repository asks for packages" in said
    assert "nvidia-uninstall --silent" in said
    assert installed(node.node) == []
    for host in (node.node, node.guest):
        host.run("nvidia-uninstall --silent")
    node.converges(node={"driver": node.packaged(), **kernel})
    assert {line.split()[1] for line in installed(node.node) + installed(node.guest)} == {f"{VERSION}-2"}
    assert node.changes(node={"driver": node.packaged(), **kernel}) == []


def test_a_directory_of_debs_without_the_internet(node: Deploys, tmp_path: Path) -> None:
    """The same packages put on node and container; the repository's address is not asked."""
    source = node.directory / "repository"
    for host in (node.node, node.guest):
        target = host.rootfs / "srv/driver"
        target.mkdir()
        for deb in source.glob(f"*_{OLDER}-1_amd64.deb"):
            shutil.copy(deb, target)
    node.guest.cut_internet()
    try:
        local = {"version": OLDER, "repository": "/srv/driver"}
        wanted = {"driver": local, "kernel": KERNELS[1], "allow_reboot": True}
        node.converges(node=wanted)
        assert {line.split()[1] for line in installed(node.node) + installed(node.guest)} == {f"{OLDER}-1"}
        assert node.changes(node=wanted) == []
    finally:
        node.guest.restore_internet()

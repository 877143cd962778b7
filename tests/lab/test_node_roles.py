"""The role proxmox_node on a node that was bare: what must stop it, and the reboots that it does and does not do.

One node for all tests, which follow each other from bare to converged to another kernel. H4, H5, ... number hard cases
that broke other projects: a closed module, a kernel without the module, a second driver, a needless reboot.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import driver_run
from lab.node_packages import KERNELS
from lab.settings import REPOSITORY
from lab.shell import Completed
from tests.lab.apt_repository import Deb
from tests.lab.conftest import TestBoxes
from tests.lab.node_deploys import NODE, NodeDeploys, another_user, bare_node, replaced

FIRST, SECOND, TOO_NEW = KERNELS[0], KERNELS[1], KERNELS[3]
OTHER_DRIVER = "590.44.01"
LOST = "/var/lib/gpubox-lab/lost-gpus"


@pytest.fixture(scope="module")
def node(lab: TestBoxes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeDeploys]:
    with bare_node(lab, tmp_path_factory.mktemp("node")) as made:
        yield made


def report(node: NodeDeploys, *arguments: str) -> Completed:
    command = [sys.executable, "node_report.py", str(node.inventory()), *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)


def verdicts(done: Completed) -> dict[str, str]:
    """Check to verdict, from the JSON lines of a report on one node."""
    (data,) = map(json.loads, done.stdout.splitlines())
    assert data["host"] == NODE
    return {check["name"]: check["verdict"] for check in data["checks"]}


def traces_of_a_driver(node: NodeDeploys) -> str:
    return node.node.run(
        "dkms status; ls -d /usr/src/nvidia-* /usr/bin/nvidia-* /proc/driver/nvidia; ls /lib/modules/*/updates/dkms",
        check=False,
    ).stdout


def power_cycle(node: NodeDeploys) -> None:
    node.node.hard_stop()
    node.node.start()


def test_the_report_passes_a_bare_node_and_changes_nothing(node: NodeDeploys) -> None:
    done = report(node, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert verdicts(done)["driver"] == "warn"
    assert traces_of_a_driver(node) == ""


def test_secure_boot_fails_the_report_and_stops_the_deploy(node: NodeDeploys) -> None:
    packages = node.node.run("dpkg -l | sha256sum").stdout
    with replaced(node.node, "/usr/bin/mokutil", "#!/bin/sh\necho SecureBoot enabled\n"):
        done = report(node, "--json")
        said = node.refused()
    assert done.returncode == 1
    assert [name for name, verdict in verdicts(done).items() if verdict == "fail"] == ["Secure Boot"]
    assert "Secure Boot is on: the kernel refuses the unsigned modules" in said
    assert "turn Secure Boot off in the firmware" in said
    assert node.node.run("dpkg -l | sha256sum").stdout == packages


def test_a_kernel_on_which_the_driver_does_not_build_is_refused(node: NodeDeploys) -> None:
    """H5: before anything runs, with the kernels that would do."""
    said = node.refused(node={"kernel": TOO_NEW, "allow_reboot": True})
    assert f"kernel {TOO_NEW}: driver 590.48.01 does not build on it" in said
    assert f"on this node: {FIRST}" in said
    assert node.node.run(f"ls /etc/kernel/proxmox-boot-pin /boot/vmlinuz-{TOO_NEW}", check=False).stdout == ""


def test_a_driver_file_of_another_hash_is_not_executed(node: NodeDeploys) -> None:
    path, text = "/root/other.run", "#!/bin/sh\ntouch /root/executed\n"
    node.node.write(path, text)
    driver = {**driver_run.settings(), "run": path}
    said = node.refused(node={"driver": driver, "allow_reboot": True})
    got = hashlib.sha256(text.encode()).hexdigest()
    assert f"{path}: its sha256 is {got}, driver.sha256 is {driver['sha256']}: not executed" in said
    assert "compare both with what NVIDIA publishes for 590.48.01" in said
    assert node.read(path) == text, "the operator's file stays"
    assert node.node.run("ls /root/executed", check=False).returncode != 0
    assert traces_of_a_driver(node) == ""


def test_the_closed_flavour_is_found_out_before_a_reboot(node: NodeDeploys) -> None:
    """H4: a Blackwell GPU does not start with it; the license of the module tells."""
    booted = node.boot_id()
    closed = '#!/bin/sh\n"$0.real" "$@" | sed "s,Dual MIT/GPL,NVIDIA,"\n'
    with replaced(node.node, "/sbin/modinfo", closed):
        said = node.refused(node={"kernel": SECOND, "allow_reboot": True})
    assert f"the nvidia module for kernel {SECOND} is version '590.48.01', license 'NVIDIA'" in said
    assert "wanted: 590.48.01, 'Dual MIT/GPL' (the open modules: the only ones that run a Blackwell GPU)" in said
    assert node.boot_id() == booted
    node.node.run("nvidia-uninstall --silent; proxmox-boot-tool kernel unpin; rm -rf /var/lib/gpubox/node")


def test_a_bare_node_is_ready_without_a_reboot(node: NodeDeploys) -> None:
    """H25: and the second run changes and reboots nothing."""
    booted = node.boot_id()
    node.converges(node={"kernel": FIRST})
    assert node.node.run("dkms status").stdout.count(f"{FIRST}, x86_64: installed") == 1
    assert node.node.run("modinfo -F license nvidia").stdout == "Dual MIT/GPL\n"
    assert node.node.run("ls -d /dev/nvidia[0-9]*").stdout.split() == ["/dev/nvidia0", "/dev/nvidia1"]
    assert node.changes(node={"kernel": FIRST, "allow_reboot": True}) == []
    assert node.boot_id() == booted


def test_the_report_passes_the_ready_node(node: NodeDeploys) -> None:
    done = report(node, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    seen = verdicts(done)
    for check in ("number of GPUs", "device nodes", "driver", "open modules", "next kernel"):
        assert seen[check] == "pass", done.stdout
    assert report(node, "--limit", "pve9").returncode == 2


def test_no_repository_brings_a_second_driver(node: NodeDeploys, tmp_path: Path) -> None:
    """H6: neither asked for by name nor as a dependency nor by unattended upgrades."""
    debs = [
        Deb("nvidia-driver", "999"),
        Deb("nvidia-open", "999"),
        Deb("cuda-drivers", "999"),
        Deb("libcuda1", "999"),
        Deb("wants-a-driver", "1", "libcuda1"),
        Deb("gpubox-harmless", "1"),
    ]
    repository = "/srv/repository"
    node.node.run(f"mkdir -p {repository}")
    for deb in debs:
        built = deb.build(tmp_path)
        (node.node.rootfs / repository.lstrip("/") / built.name).write_bytes(built.read_bytes())
    source = "/etc/apt/sources.list.d/other.list"
    node.node.run(f"cd {repository} && dpkg-scanpackages -m . >Packages 2>/dev/null")
    node.node.write(source, f"deb [trusted=yes] file:{repository} ./\n")
    try:
        only = f"-o Dir::Etc::sourcelist={source} -o Dir::Etc::sourceparts=- -o APT::Get::List-Cleanup=0"
        node.node.run(f"apt-get update -qq {only}")
        for name in ("nvidia-driver", "nvidia-open", "cuda-drivers", "libcuda1"):
            done = node.node.run(f"apt-get -s install {name}", check=False)
            assert done.returncode == 100, done.stdout
            assert f"Package '{name}' has no installation candidate" in done.stderr
        done = node.node.run("apt-get -s install wants-a-driver", check=False)
        assert "wants-a-driver : Depends: libcuda1 but it is not installable" in done.stdout
        assert "Inst gpubox-harmless" in node.node.run("apt-get -s install gpubox-harmless").stdout
    finally:
        node.node.run(f"rm -rf {repository} {source} && apt-get update -qq")
    blacklist = node.node.run("apt-config dump Unattended-Upgrade::Package-Blacklist").stdout
    patterns = re.findall(r'^Unattended-Upgrade::Package-Blacklist:: "(.*)";$', blacklist, re.MULTILINE)
    for name in ("nvidia-driver", "libnvidia-ml1", "libcuda1", "cuda-drivers", "nvidia-open"):
        assert any(re.match(pattern, name) for pattern in patterns), (name, patterns)


def test_another_kernel_waits_for_the_operator_to_allow_its_reboot(node: NodeDeploys) -> None:
    """H5: the module is there for the next kernel, and what is pending is said."""
    booted = node.boot_id()
    said = node.refused(node={"kernel": SECOND})
    assert "a reboot is pending:\n" in said
    assert f"kernel {FIRST} runs, {SECOND} is pinned" in said
    assert "reboot the node yourself, or deploy with allow_reboot = True" in said
    assert f"{SECOND}, x86_64: installed" in node.node.run("dkms status").stdout
    assert node.boot_id() == booted


def test_no_reboot_into_a_kernel_without_the_module(node: NodeDeploys) -> None:
    """H5: allowed, and refused all the same: somebody chose another kernel for the next boot."""
    booted = node.boot_id()
    node.node.run(f"apt-get install -y -qq proxmox-kernel-{KERNELS[2]}-signed")
    node.node.run(f"proxmox-boot-tool kernel pin --next-boot {KERNELS[2]}")
    said = node.refused(node={"kernel": SECOND, "allow_reboot": True})
    assert "not rebooting, since the node would come back without GPUs" in said
    assert f"the next boot takes kernel {KERNELS[2]}, not {SECOND}" in said
    assert node.boot_id() == booted
    node.node.run("proxmox-boot-tool kernel unpin --next-boot")


def test_the_allowed_reboot_is_done_once(node: NodeDeploys) -> None:
    """H5, H25: for a kernel with the module built; the second run reboots and changes nothing."""
    boots = int(node.read("/var/lib/gpubox-lab/boots"))
    node.converges(node={"kernel": SECOND, "allow_reboot": True})
    assert node.node.run("uname -r").stdout.strip() == SECOND
    assert node.changes(node={"kernel": SECOND, "allow_reboot": True}) == []
    assert int(node.read("/var/lib/gpubox-lab/boots")) == boots + 1
    assert verdicts(report(node, "--json"))["next kernel"] == "pass"


def test_a_kernel_for_which_dkms_fails_does_not_boot(node: NodeDeploys) -> None:
    """H5: a failed build ends the deploy, and the kernel that has the module stays pinned."""
    booted = node.boot_id()
    failing = f"""#!/bin/sh
case "$*" in
  autoinstall*{KERNELS[2]}) exit 0 ;;
  install*{KERNELS[2]}) echo "Error! Bad return status" >&2; exit 10 ;;
esac
exec "$0.real" "$@"
"""
    with replaced(node.node, "/usr/sbin/dkms", failing):
        said = node.refused(node={"kernel": KERNELS[2], "allow_reboot": True})
    assert "Bad return status" in said
    assert node.boot_id() == booted
    assert node.read("/etc/kernel/proxmox-boot-pin").strip() == SECOND


def test_another_user_than_root_is_told_so(node: NodeDeploys) -> None:
    with another_user(node.node) as user:
        said = node.refused(node={"ssh_user": user})
    assert f"connected as {user}, who is not root" in said
    assert 'ssh_user = "root"' in said


def test_a_loaded_driver_is_not_replaced_under_running_boxes(node: NodeDeploys) -> None:
    other = driver_run.settings(OTHER_DRIVER)
    (node.node.rootfs / other["run"].lstrip("/")).write_bytes(driver_run.content(OTHER_DRIVER))
    before = traces_of_a_driver(node)
    said = node.refused(node={"kernel": SECOND, "driver": other})
    assert f"driver 590.48.01 is loaded and boxes may be using it; {OTHER_DRIVER} is wanted" in said
    assert "plan an interruption of every box of this node" in said
    assert traces_of_a_driver(node) == before


def test_a_lost_gpu_stops_the_deploy_with_the_numbers(node: NodeDeploys) -> None:
    """On PCI, and not with the driver: the report says the same."""
    node.node.write(LOST, "0000:00:07.0\n")
    power_cycle(node)
    said = node.refused(node={"kernel": SECOND})
    assert "PCI 2, driver 1, device nodes 1, nvidia-smi 1" in said
    done = report(node, "--json")
    assert done.returncode == 1
    assert verdicts(done)["number of GPUs"] == "fail"
    node.node.run(f"rm {LOST}")
    power_cycle(node)
    assert node.changes(node={"kernel": SECOND}) == []

"""The stand-ins of the lab's node against what they stand for: PVE's sources, and recordings of real machines."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubox.errors import InputError
from lab import driver_run, node_packages, node_setup, settings
from lab.pve import cli, config, guests, pct, pveam, storage, update
from lab.pve.errors import PveError
from lab.pve.options import DEVICE, MOUNT, NETWORK
from lab.pve.schema import parse_property_string, print_property_string


def run(program: str, commands: dict, *arguments: str) -> int:
    return cli.main(program, commands, arguments)


@pytest.fixture
def pve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node named pve1 in a directory: /etc/pve and the file systems of its storages. As root, as on a node."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(config, "ETC", tmp_path / "etc/pve")
    monkeypatch.setattr(storage, "ETC", tmp_path / "etc/pve")
    monkeypatch.setattr(config, "LOCKS", tmp_path / "lock")
    monkeypatch.setattr(config, "node_name", lambda: "pve1")
    monkeypatch.setattr(pct.lxc, "is_running", lambda _vmid: False)
    (tmp_path / "etc/pve/nodes/pve1/lxc").mkdir(parents=True)
    text = node_setup.STORAGE.replace("/var/lib/vz", str(tmp_path / "vz"))
    (tmp_path / "etc/pve/storage.cfg").write_text(text)
    (tmp_path / "vz/template/cache").mkdir(parents=True)
    return tmp_path


def write(pve: Path, text: str, vmid: str = "101") -> Path:
    file = pve / f"etc/pve/nodes/pve1/lxc/{vmid}.conf"
    file.write_text(text)
    return file


CONTAINER = "arch: amd64\nhostname: ct\nmemory: 512\nostype: debian\nrootfs: local-zfs:subvol-101-disk-0,size=8G\n"


# What PVE prints, from pve-container, pve-common and pve-guest-common: (arguments, status, standard error).
REFUSALS = {
    "no container": (["status", "999"], 2, "Configuration file 'nodes/pve1/lxc/999.conf' does not exist\n"),
    "stopped, stop": (["stop", "101"], 255, "CT 101 not running\n"),
    "stopped, exec": (["exec", "101", "--", "true"], 255, "container '101' not running!\n"),
    "stopped, push": (["push", "101", "/a", "/b"], 255, "can only push files to a running CT\n"),
    "no lock": (["unlock", "101"], 255, "no lock found trying to remove any lock\n"),
    "nothing to set": (["set", "101"], 255, "no options specified\n"),
    "device": (["set", "101", "--dev0", "/dev/gone"], 255, "Device /dev/gone does not exist\n"),
    "required": (["set", "101", "--delete", "memory"], 255, "unable to delete required option 'memory'\n"),
    "read-only": (["set", "101", "--unprivileged", "1"], 255, "unable to modify read-only option: 'unprivileged'\n"),
    "vmid": (
        ["start", "99"],
        255,
        "400 Parameter verification failed.\nvmid: invalid format - value does not look like a valid VM ID\n\n"
        "pct start <vmid> [OPTIONS]\n",
    ),
    "option": (
        ["set", "101", "--nope", "1"],
        255,
        "Unknown option: nope\n400 unable to parse option\npct set <vmid> [OPTIONS]\n",
    ),
    "option of the command, without --": (
        ["exec", "101", "ls", "-l"],
        255,
        "Unknown option: l\n400 unable to parse option\npct exec <vmid> [<extra-args>] [OPTIONS]\n",
    ),
    "arguments": (["status"], 255, "400 not enough arguments\npct status <vmid> [OPTIONS]\n"),
    "boolean": (
        ["set", "101", "--onboot", "perhaps"],
        255,
        "400 unable to parse boolean option\npct set <vmid> [OPTIONS]\n",
    ),
    "mode": (
        ["set", "101", "--dev0", "/dev/null,mode=666"],
        255,
        "400 Parameter verification failed.\ndev0: invalid format - format error\n"
        "mode: value does not match the regex pattern\n\npct set <vmid> [OPTIONS]\n",
    ),
    "unset option": (
        ["set", "101", "--delete", "nothing"],
        255,
        "400 Parameter verification failed.\ndelete: unknown option 'nothing'\npct set <vmid> [OPTIONS]\n",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_are_pves(pve: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    arguments, status, message = REFUSALS[name]
    before = write(pve, CONTAINER).read_bytes()
    assert run("pct", pct.COMMANDS, *arguments) == status
    assert capsys.readouterr().err == message
    assert write(pve, CONTAINER).read_bytes() == before


def test_another_user_than_root_is_refused(pve: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert run("pct", pct.COMMANDS, "list") == 255
    assert capsys.readouterr().err == "please run as root\n"


@pytest.mark.parametrize("command", [["set", "101", "--memory", "1024"], ["start", "101"], ["destroy", "101"]])
def test_a_locked_container_is_left_alone(pve: Path, capsys, command: list[str]) -> None:
    file = write(pve, f"lock: backup\n{CONTAINER}")
    assert run("pct", pct.COMMANDS, *command) == 255
    assert capsys.readouterr().err == "CT is locked (backup)\n"
    assert file.exists()


def test_protection_keeps_a_container(pve: Path, capsys) -> None:
    file = write(pve, f"{CONTAINER}protection: 1\n")
    assert run("pct", pct.COMMANDS, "destroy", "101") == 255
    assert capsys.readouterr().err == "can't remove CT 101 - protection mode enabled\n"
    assert file.exists()


def test_a_digest_that_does_not_fit_stops_a_change(pve: Path, capsys) -> None:
    write(pve, CONTAINER)
    assert run("pct", pct.COMMANDS, "set", "101", "--memory", "1024", "--digest", "0" * 40) == 255
    assert "detected modified configuration" in capsys.readouterr().err


def test_options_are_read_as_getopt_long_reads_them() -> None:
    command = pct.COMMANDS["exec"]
    assert cli.read(command, ["101", "--keep-env", "0", "--", "ls", "-l"])[1] == ["ls", "-l"]
    assert cli.read(command, ["-keep", "0", "101", "--", "x"])[0] == {"keep-env": "0", "vmid": "101"}
    assert cli.read(pct.COMMANDS["set"], ["101", "--hostn=a"])[0] == {"hostname": "a", "vmid": "101"}
    assert cli.read(pct.COMMANDS["set"], ["101", "--onboot"])[0] == {"onboot": "1", "vmid": "101"}
    assert cli.read(pct.COMMANDS["set"], ["101", "--delete", "a1", "--delete", "b1"])[0]["delete"] == "a1,b1"
    with pytest.raises(PveError, match="400 unable to parse option"):  # dev0, dev1, ...
        cli.read(pct.COMMANDS["set"], ["101", "--dev", "/dev/null"])


def test_list_prints_nothing_without_containers(pve: Path, capsys) -> None:
    assert run("pct", pct.COMMANDS, "list") == 0
    assert capsys.readouterr().out == ""


def test_list_and_status_are_formatted_as_pve_formats_them(pve: Path, capsys) -> None:
    write(pve, f"lock: create\n{CONTAINER}")
    run("pct", pct.COMMANDS, "list")
    run("pct", pct.COMMANDS, "status", "101")
    assert capsys.readouterr().out == (
        "VMID       Status     Lock         Name                \n"
        "101        stopped    create       ct                  \n"
        "status: stopped\n"
    )


WITH_SNAPSHOT = """\
#GPU box%3A do not touch
arch: amd64
lxc.cgroup2.cpuset.cpus: 0-3
lxc.mount.entry = /a a none bind 0 0
lxc.mount.entry: /b b none bind 0 0
memory: 1024
memory: 512

[pve:pending]
memory: 2048

[before]
arch: amd64
memory: 256
snaptime: 1700000000
"""


def test_a_configuration_is_written_as_pve_writes_it() -> None:
    """Keys sorted, the last of equal ones, lxc lines last in their order and with a colon, sections kept."""
    written = config.render(config.parse("101", WITH_SNAPSHOT))
    assert written == (
        "#GPU box%3A do not touch\n"
        "arch: amd64\nmemory: 512\n"
        "lxc.cgroup2.cpuset.cpus: 0-3\nlxc.mount.entry: /a a none bind 0 0\nlxc.mount.entry: /b b none bind 0 0\n"
        "\n[pve:pending]\nmemory: 2048\n"
        "\n[before]\narch: amd64\nmemory: 256\nsnaptime: 1700000000\n"
    )


def test_what_pve_does_not_understand_is_said_and_lost(capsys) -> None:
    text = "arch: amd64\nlxc.rootfs.path: /x\nlxc.nonsense: 1\n!!\n"
    assert config.render(config.parse("101", text)) == "arch: amd64\n"
    said = capsys.readouterr().err
    assert "vm 101 - lxc.rootfs.path: lxc.rootfs.path is auto generated from rootfs" in said
    assert said.count("unable to parse config") == 2


SETTINGS = st.dictionaries(
    st.sampled_from(["memory", "swap", "hostname", "onboot", "tags", "description", "unknown_key"]),
    st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_characters="\x7f\x85\xa0"), min_size=1)
    .map(str.strip)
    .filter(bool),
)
RAW = st.lists(st.tuples(st.sampled_from(["lxc.mount.entry", "lxc.idmap", "lxc.prlimit.memlock"]), st.just("x y")))


@given(current=SETTINGS, pending=SETTINGS, snapshot=SETTINGS, raw=RAW)
def test_writing_what_was_read_changes_nothing(current, pending, snapshot, raw) -> None:
    made = config.Config(settings=current, raw=raw, pending=config.Section(settings=pending))
    made.snapshots["before"] = config.Section(settings=snapshot)
    once = config.render(config.parse("101", config.render(made)))
    assert config.render(config.parse("101", once)) == once
    assert config.parse("101", once).raw == raw


def test_a_running_container_takes_what_pve_8_applies_at_once_and_keeps_the_rest_pending() -> None:
    changed = config.Config(settings={"memory": "512", "hostname": "old"})
    changed.pending.settings |= {"hostname": "new", "dev0": "/dev/null"}
    changed.set_pending_deletes(["memory"])
    update.apply_pending("101", changed, running=True)
    assert changed.settings == {"memory": "512", "hostname": "new"}
    assert changed.pending.settings == {"dev0": "/dev/null", "delete": "memory"}
    assert update.shown(changed, current=True).settings == {"memory": "512", "hostname": "new"}
    assert update.shown(changed, current=False).settings == {"hostname": "new", "dev0": "/dev/null"}
    update.apply_pending("101", changed, running=False)
    assert changed.settings == {"hostname": "new", "dev0": "/dev/null"}
    assert changed.pending.settings == {}


def test_property_strings_come_back_in_pves_order() -> None:
    net = "ip=10.0.0.2/24,name=eth0,hwaddr=BC:24:11:00:00:01,bridge=vmbr0"
    ordered = "name=eth0,bridge=vmbr0,hwaddr=BC:24:11:00:00:01,ip=10.0.0.2/24"
    assert print_property_string(NETWORK, parse_property_string(NETWORK, net)) == ordered
    assert parse_property_string(DEVICE, "/dev/nvidia0,mode=0666") == {"path": "/dev/nvidia0", "mode": "0666"}
    assert parse_property_string(MOUNT, "/srv,mp=/models,ro=on")["ro"] == "1"


def test_a_creation_is_refused_before_anything_is_made(pve: Path, capsys) -> None:
    (pve / "vz/template/cache/t.tar.zst").touch()
    cases: list[tuple[list[str], str]] = [
        (["--rootfs", "nope:8"], "storage 'nope' does not exist\n"),
        (["--rootfs", "local:8"], "storage: storage 'local' does not support container directories\n"),
        (["--mp0", "/a,mp=/b"], "mount points configured, but 'rootfs' not set - aborting\n"),
        (["--rootfs", "local-zfs:8", "--dev0", "/dev/gone"], "Device /dev/gone does not exist\n"),
    ]
    for options, message in cases:
        assert run("pct", pct.COMMANDS, "create", "102", "local:vztmpl/t.tar.zst", *options) == 255
        assert message in capsys.readouterr().err
    write(pve, CONTAINER)
    assert run("pct", pct.COMMANDS, "create", "101", "local:vztmpl/t.tar.zst", "--rootfs", "local-zfs:8") == 255
    assert capsys.readouterr().err == "unable to create CT 101 - CT 101 already exists on node 'pve1'\n"
    assert [file.name for file in (pve / "etc/pve/nodes/pve1/lxc").iterdir()] == ["101.conf"]


def test_templates_are_offered_only_after_an_update(pve: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    index = pve / "index"
    index.mkdir()
    (index / "debian.tar.zst").write_bytes(b"x" * 1024**2)
    digest = subprocess.run(["sha512sum", index / "debian.tar.zst"], capture_output=True, text=True, check=True)
    (index / "debian.tar.zst.json").write_text(f'{{"section": "system", "sha512": "{digest.stdout.split()[0]}"}}')
    monkeypatch.setattr(pveam, "INDEX", index)
    monkeypatch.setattr(pveam, "UPDATED", pve / "updated")
    assert run("pveam", pveam.COMMANDS, "download", "local", "debian.tar.zst") == 255
    refused = "400 Parameter verification failed.\ntemplate: no such template\npveam download <storage> <template>\n"
    assert capsys.readouterr().err == refused
    for arguments in (["update"], ["available", "--section", "system"], ["download", "local", "debian.tar.zst"]):
        assert run("pveam", pveam.COMMANDS, *arguments) == 0
    assert "system          debian.tar.zst\n" in capsys.readouterr().out
    run("pveam", pveam.COMMANDS, "list", "local")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{'NAME':<60} {'SIZE':<6}", f"{'local:vztmpl/debian.tar.zst':<60} 1.00MB"]
    (index / "debian.tar.zst").write_bytes(b"other")
    (pve / "vz/template/cache/debian.tar.zst").unlink()
    assert run("pveam", pveam.COMMANDS, "download", "local", "debian.tar.zst") == 255
    assert "checksum mismatch" in capsys.readouterr().err
    assert list((pve / "vz/template/cache").iterdir()) == []


def test_guests_start_by_order_and_those_without_one_last(pve: Path) -> None:
    orders = {"103": "onboot: 1\n", "104": "onboot: 1\nstartup: order=2\n", "105": "onboot: 1\nstartup: 1,up=3\n"}
    for vmid, lines in ({"102": "onboot: 0\n"} | orders).items():
        write(pve, CONTAINER + lines, vmid)
    assert [vmid for _, vmid, _ in guests.in_order(only_onboot=True)] == ["105", "104", "103"]
    assert guests.in_order(only_onboot=True)[0][2] == {"order": 1, "up": 3}


def test_every_stand_in_says_what_it_is() -> None:
    modules = {entry.partition(":")[0] for entry in node_setup.PROGRAMS.values()}
    programs = [node_setup.SOURCE / f"{module}.py" for module in modules]
    programs += [driver_run.SOURCE / source for source in driver_run.FILES.values()]
    for program in programs:
        head = program.read_text()[:400]
        assert re.search("stand-in|The lab's own", head, re.IGNORECASE), program


def test_the_nodes_repository_has_headers_for_every_kernel() -> None:
    names = {package.name for package in node_packages.packages()}
    for kernel in node_packages.KERNELS:
        assert {f"proxmox-headers-{kernel}", f"proxmox-kernel-{kernel}-signed"} <= names
    assert {"proxmox-default-headers", "dkms"} <= names


def test_containers_of_nodes_have_addresses_of_their_own() -> None:
    guests_of = [settings.guest_address(node, vmid) for node in settings.NODES for vmid in range(101, 105)]
    everyone = [*guests_of, *map(settings.address, settings.HOST_NUMBERS), settings.GATEWAY]
    assert len(set(everyone)) == len(everyone)
    assert all(address in settings.SUBNET for address in everyone)
    for node, vmid in (("box1", 101), ("node1", 105), ("node1", 100)):
        with pytest.raises(InputError, match="no address for container"):
            settings.guest_address(node, vmid)

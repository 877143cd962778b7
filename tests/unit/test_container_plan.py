"""What a container has to become: from nothing, from what is there, from what somebody made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubox.container import ContainerConfig, parse, parse_property
from gpubox.errors import RefusedError
from gpubox.nvidia.gpu_count import DeviceNode
from gpubox.proxmox.container_plan import (
    check_same_container,
    configured_gpus,
    create_arguments,
    notes,
    plan_raw,
    plan_settings,
    restart_reasons,
)
from gpubox.proxmox.settings import ContainerSettings
from tests.containers import VMID, container_settings
from tests.gpus import UVM_MAJOR, device_nodes

DATA = {"cpuset": "0-15", "models": "/srv/models"}
SETTINGS = container_settings(**DATA)
MINORS = [0, 1]
UVM = UVM_MAJOR
NODES = device_nodes(MINORS)
CONVERGED = """\
arch: amd64
dev0: /dev/nvidia0,mode=0666
dev1: /dev/nvidia1,mode=0666
dev2: /dev/nvidiactl,mode=0666
dev3: /dev/nvidia-uvm,mode=0666
dev4: /dev/nvidia-uvm-tools,mode=0666
features: nesting=1
hostname: gpu-box
memory: 65536
mp0: /srv/models,mp=/models,ro=1,backup=0
net0: name=eth0,bridge=vmbr0,hwaddr=BC:24:11:5A:00:01,ip=dhcp,type=veth
onboot: 1
ostype: debian
rootfs: local-zfs:subvol-101-disk-0,size=64G
startup: order=1
swap: 0
unprivileged: 1
lxc.prlimit.memlock: unlimited
lxc.prlimit.nofile: 1048576
lxc.cgroup2.cpuset.cpus: 0-15
"""
# What the wikis taught before PVE had devN; the operator's own things between.
OLD_STYLE = """\
#made by hand
arch: amd64
cores: 32
dev4: /dev/ttyUSB0,gid=20
features: keyctl=1,nesting=1
hostname: gpu-box
memory: 65536
mp0: tank:subvol-101-disk-1,mp=/data,size=500G
mp1: /srv/models,mp=/models,shared=1
net0: name=eth0,bridge=vmbr1,hwaddr=BC:24:11:5A:00:01,ip=10.0.0.5/24,gw=10.0.0.1,tag=7,type=veth
onboot: 1
ostype: debian
rootfs: local-zfs:subvol-101-disk-0,size=64G
startup: up=10,order=3,down=120
swap: 0
unprivileged: 1
lxc.cgroup2.devices.allow: c 195:* rwm
lxc.cgroup2.devices.allow: c 510:* rwm
lxc.cgroup.devices.allow: c 195:255 rw
lxc.cgroup2.devices.allow: c 226:* rwm
lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file
lxc.mount.entry = /dev/nvidiactl dev/nvidiactl none bind,optional,create=file
lxc.mount.entry: /dev/nvidia-uvm dev/nvidia-uvm none bind,optional,create=file
lxc.mount.entry: /dev/nvidia-caps dev/nvidia-caps none bind,optional,create=dir
lxc.mount.entry: /dev/dri dev/dri none bind,optional,create=dir

[clean]
hostname: gpu-box
lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file
"""


def settings(**changes: Any) -> ContainerSettings:
    return container_settings(**{**DATA, **changes})


def applied(config: ContainerConfig, arguments: list[str]) -> ContainerConfig:
    """`pct set` on a stopped container: keys sorted, raw lines behind them, as PVE writes."""
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    deleted = options.pop("--delete", "").split(",")
    values = {**config.intended, **{key.removeprefix("--"): value for key, value in options.items()}}
    body = [f"{key}: {value}" for key, value in sorted(values.items()) if key not in deleted]
    raw = [f"{key}: {value}" for key, value in config.lxc]
    return parse("\n".join([*body, *raw, ""]))


def converge(config: ContainerConfig, wanted: ContainerSettings, minors: list[int]) -> ContainerConfig:
    changed = applied(config, plan_settings(config, wanted, minors, tuple(NODES)).arguments)
    return parse(plan_raw(changed, wanted, minors, UVM).config.render())


def is_converged(config: ContainerConfig, wanted: ContainerSettings, minors: list[int]) -> bool:
    change, raw = plan_settings(config, wanted, minors, tuple(NODES)), plan_raw(config, wanted, minors, UVM)
    return not (change.arguments or change.diff or raw.diff or raw.limits) and raw.config is config


def test_how_a_container_is_made() -> None:
    assert create_arguments(VMID, SETTINGS, MINORS) == [
        *("create", "101", "local:vztmpl/debian-12-standard_12.12-1_amd64.tar.zst"),
        *("--hostname", "gpu-box"),
        *("--ostype", "debian"),
        *("--unprivileged", "1"),
        *("--rootfs", "local-zfs:64"),
        *("--memory", "65536"),
        *("--swap", "0"),
        *("--features", "nesting=1"),
        *("--onboot", "1"),
        *("--startup", "order=1"),
        *("--net0", "name=eth0,bridge=vmbr0,ip=dhcp"),
        *("--mp0", "/srv/models,mp=/models,ro=1,backup=0"),
        *("--dev0", "/dev/nvidia0,mode=0666"),
        *("--dev1", "/dev/nvidia1,mode=0666"),
        *("--dev2", "/dev/nvidiactl,mode=0666"),
        *("--dev3", "/dev/nvidia-uvm,mode=0666"),
        *("--dev4", "/dev/nvidia-uvm-tools,mode=0666"),
    ]


def test_a_container_of_a_node_without_gpus_gets_no_devices() -> None:
    arguments = create_arguments(VMID, settings(models=None, address="10.0.0.5/24", gateway="10.0.0.1"), [])
    assert not [word for word in arguments if word.startswith(("--dev", "--mp"))]
    assert "name=eth0,bridge=vmbr0,ip=10.0.0.5/24,gw=10.0.0.1" in arguments


def test_converged_is_nothing_to_do() -> None:
    config = parse(CONVERGED)
    assert is_converged(config, SETTINGS, MINORS)
    assert notes(VMID, config, SETTINGS) == []
    check_same_container(VMID, config, SETTINGS)


def test_what_was_just_created_needs_only_its_raw_lines() -> None:
    arguments = create_arguments(VMID, SETTINGS, MINORS)[3:]
    config = applied(parse("arch: amd64\n"), arguments)
    assert plan_settings(config, SETTINGS, MINORS, tuple(NODES)).arguments == []
    raw = plan_raw(config, SETTINGS, MINORS, UVM)
    assert (
        raw.limits
        == raw.diff
        == [
            "+ lxc.prlimit.memlock: unlimited",
            "+ lxc.prlimit.nofile: 1048576",
            "+ lxc.cgroup2.cpuset.cpus: 0-15",
        ]
    )


def test_old_style_passthrough_becomes_devices_and_the_operators_lines_stay() -> None:
    config = parse(OLD_STYLE)
    change = plan_settings(config, SETTINGS, MINORS, tuple(NODES))
    assert change.arguments == [
        *("--startup", "order=1,up=10,down=120"),
        *("--mp1", "/srv/models,mp=/models,shared=1,ro=1,backup=0"),
        *("--dev0", "/dev/nvidia0,mode=0666"),
        *("--dev1", "/dev/nvidia1,mode=0666"),
        *("--dev2", "/dev/nvidiactl,mode=0666"),
        *("--dev3", "/dev/nvidia-uvm,mode=0666"),
        *("--dev5", "/dev/nvidia-uvm-tools,mode=0666"),
        *("--delete", "cores"),
    ]
    assert "- cores: 32" in change.diff
    raw = plan_raw(config, SETTINGS, MINORS, UVM)
    assert raw.config.lxc == [
        ("lxc.cgroup2.devices.allow", "c 226:* rwm"),
        ("lxc.mount.entry", "/dev/nvidia-caps dev/nvidia-caps none bind,optional,create=dir"),
        ("lxc.mount.entry", "/dev/dri dev/dri none bind,optional,create=dir"),
        ("lxc.prlimit.memlock", "unlimited"),
        ("lxc.prlimit.nofile", "1048576"),
        ("lxc.cgroup2.cpuset.cpus", "0-15"),
    ]
    assert raw.config.render().endswith(OLD_STYLE[OLD_STYLE.index("\n[clean]") :]), "snapshots are history"
    assert raw.limits == [line for line in raw.diff if line.startswith("+")], "a removed bind mount needs no restart"


def test_modeset_is_replaced_too_where_the_node_has_it() -> None:
    config = parse("lxc.mount.entry: /dev/nvidia-modeset dev/nvidia-modeset none bind,optional,create=file\n")
    with_node = plan_settings(config, SETTINGS, MINORS, (*NODES, "/dev/nvidia-modeset"))
    assert "/dev/nvidia-modeset,mode=0666" in with_node.arguments
    assert "/dev/nvidia-modeset,mode=0666" not in plan_settings(config, SETTINGS, MINORS, tuple(NODES)).arguments


def test_without_gpus_nothing_replaces_the_old_style_so_it_stays() -> None:
    config = parse(OLD_STYLE)
    assert plan_raw(config, SETTINGS, [], None).config.lxc[:9] == config.lxc
    assert not [word for word in plan_settings(config, SETTINGS, []).arguments if word.startswith("--dev")]


def test_another_dynamic_major_stays_and_is_pointed_at() -> None:
    config = parse("lxc.cgroup2.devices.allow: c 508:* rwm\n")
    assert ("lxc.cgroup2.devices.allow", "c 508:* rwm") in plan_raw(config, SETTINGS, MINORS, UVM).config.lxc
    assert "508 was nvidia-uvm in an earlier boot" in notes(VMID, config, SETTINGS)[0]


def test_devices_keep_their_numbers_and_strays_go() -> None:
    config = parse(
        "dev0: /dev/ttyS0\ndev7: mode=0666,path=/dev/nvidia1\ndev8: /dev/nvidia0\ndev9: /dev/nvidia0,mode=0666\n"
        "dev10: /dev/nvidia5,mode=0666\ndev11: /dev/nvidia-caps/nvidia-cap1\n"
    )
    arguments = plan_settings(config, SETTINGS, MINORS).arguments
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert {key: value for key, value in options.items() if key.startswith("--dev")} == {
        "--dev1": "/dev/nvidiactl,mode=0666",
        "--dev2": "/dev/nvidia-uvm,mode=0666",
        "--dev3": "/dev/nvidia-uvm-tools,mode=0666",
    }
    assert options["--delete"] == "dev8,dev10", "of two entries of one GPU the right one stays"


def test_a_number_whose_removal_is_pending_is_not_given_away() -> None:
    config = parse("dev0: /dev/ttyS0\n\n[pve:pending]\ndelete: dev0\n")
    assert "--dev0" not in plan_settings(config, SETTINGS, MINORS).arguments


@pytest.mark.parametrize("mount", ["/srv/models,mp=/models,ro=1", "/srv/models,ro=on,mp=/models,backup=0,shared=1"])
def test_a_mount_that_does_it_is_left_alone(mount: str) -> None:
    config = parse(CONVERGED.replace("/srv/models,mp=/models,ro=1,backup=0", mount))
    assert plan_settings(config, SETTINGS, MINORS).arguments == []


def test_words_and_defaults_of_pve_are_understood() -> None:
    config = parse(CONVERGED.replace("onboot: 1", "onboot: yes").replace("startup: order=1", "startup: 1,up=5"))
    assert plan_settings(config, SETTINGS, MINORS).arguments == []
    assert plan_settings(parse(CONVERGED.replace("swap: 0\n", "")), SETTINGS, MINORS).diff == ["+ swap: 0"]


def test_without_a_cpuset_the_operators_cpus_are_left_alone() -> None:
    config = parse(CONVERGED + "cores: 8\n")
    free = settings(cpuset=None)
    assert is_converged(config, free, MINORS)
    assert notes(VMID, config, free) == ["CT 101: lxc.cgroup2.cpuset.cpus: 0-15 stays: no cpuset is set for this box"]


def test_what_is_pending_counts_as_done_and_needs_a_restart() -> None:
    config = parse(CONVERGED.replace("memory: 65536", "memory: 1024") + "\n[pve:pending]\nmemory: 65536\ntty: 4\n")
    assert is_converged(config, SETTINGS, MINORS)
    assert restart_reasons(config, inside=NODES, nodes=NODES) == ["memory: 65536 (pending; is 1024)"]
    assert notes(VMID, config, SETTINGS) == ["CT 101: changes by others are pending: tty"]


def test_a_pending_change_against_the_settings_is_overruled() -> None:
    config = parse(CONVERGED + "\n[pve:pending]\ndelete: dev0\nmemory: 1024\n")
    assert plan_settings(config, SETTINGS, MINORS).diff == [
        "+ dev5: /dev/nvidia0,mode=0666",
        "- memory: 1024",
        "+ memory: 65536",
    ]


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        ({}, "/dev/nvidia-uvm is missing inside and 510:0 on the node"),
        ({"/dev/nvidia-uvm": DeviceNode(508, 0)}, "/dev/nvidia-uvm is 508:0 inside and 510:0 on the node"),
    ],
)
def test_stale_device_nodes_need_a_restart(inside: dict[str, DeviceNode], said: str) -> None:
    others = {path: node for path, node in NODES.items() if path != "/dev/nvidia-uvm"}
    (reason,) = restart_reasons(parse(CONVERGED), inside={**others, **inside}, nodes=NODES)
    assert reason.startswith(said)


def test_limits_written_while_it_ran_need_a_restart() -> None:
    config = parse(CONVERGED)
    assert restart_reasons(config, inside=NODES, nodes=NODES) == []
    (reason,) = restart_reasons(config, changed_raw=["+ lxc.prlimit.nofile: 1048576"], inside=NODES, nodes=NODES)
    assert reason.startswith("+ lxc.prlimit.nofile: 1048576 (written")


@pytest.mark.parametrize(
    ("old", "new", "said", "hint"),
    [
        ("hostname: gpu-box", "hostname: mail", "hostname is 'mail', wanted is 'gpu-box'", "correct the vmid"),
        ("unprivileged: 1\n", "", "unprivileged is False \\(no such line", "set unprivileged = False"),
        ("ostype: debian", "ostype: ubuntu", "ostype is 'ubuntu', wanted is 'debian'", "set ostype = 'ubuntu'"),
        ("local-zfs:", "tank:", "storage of rootfs is 'tank', wanted is 'local-zfs'", "pct move-volume 101 rootfs"),
        ("mp0: /srv/models", "mp0: tank:subvol-101-disk-1", "mp0 mounts the volume 'tank:", "another place"),
        ("swap: 0", "swap: 0\ntemplate: 1", "is a template of PVE", "another vmid"),
    ],
)
def test_what_would_need_another_container_is_refused(old: str, new: str, said: str, hint: str) -> None:
    with pytest.raises(RefusedError, match=said) as refused:
        check_same_container(VMID, parse(CONVERGED.replace(old, new)), SETTINGS)
    assert hint in refused.value.hint


def test_all_of_them_are_said_at_once() -> None:
    config = parse(CONVERGED.replace("ostype: debian", "ostype: ubuntu").replace("local-zfs:", "tank:"))
    with pytest.raises(RefusedError, match="ostype") as refused:
        check_same_container(VMID, config, SETTINGS)
    assert "storage of rootfs" in refused.value.detail


def test_an_id_map_makes_a_container_unprivileged() -> None:
    check_same_container(VMID, parse(CONVERGED.replace("unprivileged: 1\n", "lxc.idmap: u 0 100000 65536\n")), SETTINGS)


def test_another_disk_size_is_a_note() -> None:
    config = parse(CONVERGED.replace("size=64G", "size=32G"))
    assert is_converged(config, SETTINGS, MINORS)
    assert "pct resize 101 rootfs 64G" in notes(VMID, config, SETTINGS)[0]


devices = st.sampled_from([*NODES, "/dev/nvidia7", "/dev/ttyUSB0", "/dev/kvm", "/dev/nvidia-caps/nvidia-cap1"])
config_lines = st.one_of(
    st.builds("dev{}: {},mode={}".format, st.integers(0, 12), devices, st.sampled_from(["0660", "0666"])),
    st.builds("mp{}: /srv/{},mp=/{}".format, st.integers(0, 5), st.just("x"), st.sampled_from(["models", "data"])),
    st.sampled_from(
        ["memory: 1024", "swap: 512", "cores: 8", "features: fuse=1", "startup: 7", "onboot: no", "tty: 4"]
    ),
    st.builds("lxc.mount.entry: {0} dev/x none bind,optional".format, devices),
    st.builds("{}: c {}:* rwm".format, st.just("lxc.cgroup2.devices.allow"), st.sampled_from([195, UVM, 226, 508])),
    st.sampled_from(["lxc.prlimit.memlock = 8388608", "lxc.prlimit.nofile: 1024", "lxc.cgroup2.cpuset.cpus: 0"]),
)


@given(st.lists(config_lines, max_size=25), st.sampled_from([[0], [0, 1], [3, 5]]), st.booleans())
def test_one_pass_converges_whatever_was_there(body: list[str], minors: list[int], with_cpus: bool) -> None:
    wanted = SETTINGS if with_cpus else settings(cpuset=None, models=None)
    before = parse("\n".join([*body, ""]))
    after = converge(before, wanted, minors)
    assert is_converged(after, wanted, minors)
    paths = [parse_property(value, "path")["path"] for key, value in after.values.items() if key.startswith("dev")]
    ours = sorted(path for path in paths if path in NODES or path.removeprefix("/dev/nvidia").isdigit())
    expected = [*(f"/dev/nvidia{minor}" for minor in minors), *list(NODES)[2:]]
    assert ours == sorted(expected), "exactly the GPUs and what goes with them, once each"
    foreign = {
        key: value for key, value in before.values.items() if "tty" in value or "kvm" in value or "data" in value
    }
    assert foreign.items() <= after.values.items(), "what the operator added stays, under its key"
    kept = [entry for entry in before.lxc if "226" in entry[1] or "508" in entry[1] or "/dev/kvm" in entry[1]]
    assert [entry for entry in after.lxc if entry in kept] == kept


def test_old_style_gpus_are_counted() -> None:
    assert configured_gpus(parse(OLD_STYLE)) == 1
    assert configured_gpus(parse(CONVERGED)) == 2

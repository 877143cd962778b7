"""What a node says of a container, and what of that forbids to go on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubox.errors import BrokenError, LockedError, RefusedError
from gpubox.proxmox.container_state import (
    ContainerState,
    NodeState,
    check_changeable,
    check_possible,
    check_template,
    encode,
)
from tests.containers import CREATED, VMID, container_settings

SETTINGS = container_settings(models="/srv/models")


def node(container: ContainerState, **changes: Any) -> NodeState:
    return NodeState(**{"pve": True, "root": True, "containers": {VMID: container}, **changes})


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (NodeState(root=True), "has no pct"),
        (NodeState(pve=True), "only root@pam"),
        (node(ContainerState(elsewhere=("/etc/pve/qemu-server/101.conf",))), "belongs to a VM"),
        (node(ContainerState(elsewhere=("/etc/pve/nodes/b/lxc/101.conf",))), "belongs to a container of another node"),
        (node(ContainerState(models="missing")), "models = '/srv/models': no such directory"),
        (node(ContainerState(models="link")), "through a symbolic link"),
        (node(ContainerState(), storages={"local": True, "local-zfs": False}), "storage = 'local-zfs' cannot hold"),
        (node(ContainerState(raw=b"hostname: mail\n")), "hostname is 'mail'"),
    ],
)
def test_what_no_step_could_put_right_is_refused(seen: NodeState, said: str) -> None:
    with pytest.raises(RefusedError, match=said):
        check_possible("pve1", VMID, SETTINGS, seen)


def test_an_interrupted_creation_is_not_taken_for_another_container() -> None:
    check_possible("pve1", VMID, SETTINGS, node(ContainerState(raw=b"lock: create\n")))


@pytest.mark.parametrize(
    ("container", "said", "hint"),
    [
        (ContainerState(raw=b"lock: backup\n"), r"CT is locked \(backup\)", "pct unlock 101"),
        (ContainerState(raw=b"lock: create\n"), "was interrupted", "pct unlock 101 && pct destroy 101"),
        (ContainerState(raw=b"lock: create\n", held=True), "being created now", "wait"),
    ],
)
def test_locks(container: ContainerState, said: str, hint: str) -> None:
    with pytest.raises(LockedError, match=said) as locked:
        check_changeable("pve1", VMID, node(container))
    assert hint in locked.value.hint


def test_maintenance() -> None:
    with pytest.raises(RefusedError, match="pve1 is in maintenance mode"):
        check_changeable("pve1", VMID, node(ContainerState(), maintenance=True))
    check_changeable("pve1", VMID, node(ContainerState(raw=CREATED.encode())))


def test_a_wrong_template_is_refused_with_both_hashes() -> None:
    check_template(SETTINGS, ContainerState())
    check_template(SETTINGS, ContainerState(template="a" * 128))
    with pytest.raises(BrokenError, match=f"sha512 is {'b' * 128}, wanted is {'a' * 128}"):
        check_template(SETTINGS, ContainerState(template="b" * 128))


@given(st.binary())
def test_no_byte_is_lost(raw: bytes) -> None:
    config = ContainerState(raw=raw).config
    assert config is not None
    assert encode(config) == raw

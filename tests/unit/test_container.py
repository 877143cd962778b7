"""/etc/pve/lxc/ID.conf: nothing is lost, and a change touches what it is about."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubox.container import Kind, is_true, parse, parse_property, render_property

# As PVE wrote it, then edited by hand: both separators, repeated raw keys, a blank line, pending changes, snapshots.
BY_HAND = """\
#gpu box%3A 2x H200
#%C3%BCber vmbr0, frag M.
arch: amd64
cores: 8
dev0: /dev/nvidia0,mode=0666
hostname: gpu-box
memory: 65536

mp0: /srv/models,mp=/models,ro=1
net0: name=eth0,bridge=vmbr0,hwaddr=BC:24:11:5A:00:01,ip=dhcp,type=veth
onboot: 1
memory: 131072
rootfs: local-zfs:subvol-101-disk-0,size=64G
lxc.prlimit.memlock = unlimited
lxc.cgroup2.devices.allow: c 195:* rwm
lxc.cgroup2.devices.allow: c 510:* rwm
lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file
future_key7: kept
  indented: PVE does not read this

[pve:pending]
delete: dev3,!mp1
memory: 98304

[before_upgrade]
#a snapshot%3A
arch: amd64
hostname: old-name
lxc.prlimit.memlock: 1024
snaptime: 1764547200

[Second-1]
hostname: gpu-box
"""

words = st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=20)
lxc_lines = st.builds(
    lambda key, separator, value: f"lxc.{key}{separator}{value}",
    st.sampled_from(["prlimit.memlock", "mount.entry", "cgroup2.devices.allow", "net.0.link"]),
    st.sampled_from([":", ": ", " = ", "=", " : "]),
    words,
)
key_lines = st.builds(
    lambda key, separator, value: f"{key}{separator}{value}",
    st.from_regex(r"[a-z][a-z_]{0,6}[0-9]{0,2}", fullmatch=True),
    st.sampled_from([":", ": ", " :", " = "]),
    words,
)
headers = st.sampled_from(["[pve:pending]", "[PVE:Pending] ", "[snap]", "[Snap-2]\t", "[x]", " [snap]", "[bad name]"])
lines = st.one_of(lxc_lines, key_lines, headers, words, words.map("#{}".format), st.sampled_from(["", " \t", "\r"]))
texts = st.builds(
    lambda body, end: "\n".join(body) + end, st.lists(lines, max_size=30), st.sampled_from(["", "\n", "\n\n"])
)


def sections(text: str) -> str:
    """What is behind the main section, by PVE's own rule for a header."""
    config = parse(text)
    start = next((n for n, line in enumerate(config.lines) if line.kind is Kind.HEADER), len(config.lines))
    return "".join(line.text for line in config.lines[start:])


@given(st.one_of(texts, st.text()))
def test_nothing_is_lost(text: str) -> None:
    assert parse(text).render() == text


@given(texts)
def test_a_second_render_is_the_same(text: str) -> None:
    once = parse(text).with_lxc("lxc.prlimit.memlock", "unlimited")
    again = parse(once.render())
    assert again.lines == once.lines
    assert again.with_lxc("lxc.prlimit.memlock", "unlimited") is again


@given(texts)
def test_a_raw_line_is_set_once_and_nothing_else_changes(text: str) -> None:
    before = parse(text)
    after = parse(before.with_lxc("lxc.prlimit.nofile", "1048576").render())
    assert [value for key, value in after.lxc if key == "lxc.prlimit.nofile"] == ["1048576"]
    assert after.values == before.values
    assert after.pending == before.pending
    assert after.description == before.description
    assert sections(after.render()) == sections(text)
    others = [line.text.rstrip("\n") for line in after.lines if line.key != "lxc.prlimit.nofile"]
    assert others == [line.text.rstrip("\n") for line in before.lines if line.key != "lxc.prlimit.nofile"]


@given(texts)
def test_removed_raw_lines_are_gone_from_the_main_section_only(text: str) -> None:
    before = parse(text)
    after = parse(before.without_lxc(lambda key, _: key == "lxc.mount.entry").render())
    assert after.lxc == [(key, value) for key, value in before.lxc if key != "lxc.mount.entry"]
    assert sections(after.render()) == sections(text)


def test_by_hand() -> None:
    config = parse(BY_HAND)
    assert config.render() == BY_HAND
    assert config.description == "gpu box: 2x H200\nüber vmbr0, frag M.\n"
    assert config.values["memory"] == "131072", "of two, the last counts"
    assert config.values["future_key7"] == "kept"
    assert config.pending == {"memory": "98304"}
    assert config.pending_deletes == {"dev3", "mp1"}
    assert config.intended["memory"] == "98304"
    assert config.snapshots == ["before_upgrade", "Second-1"]
    assert config.lock is None
    assert config.lxc == [
        ("lxc.prlimit.memlock", "unlimited"),
        ("lxc.cgroup2.devices.allow", "c 195:* rwm"),
        ("lxc.cgroup2.devices.allow", "c 510:* rwm"),
        ("lxc.mount.entry", "/dev/nvidia0 dev/nvidia0 none bind,optional,create=file"),
    ]
    assert [line.text for line in config.lines if line.kind is Kind.OTHER] == ["  indented: PVE does not read this\n"]


def test_the_separator_of_the_operator_stays_when_the_value_is_right() -> None:
    config = parse(BY_HAND)
    assert config.with_lxc("lxc.prlimit.memlock", "unlimited") is config


def test_a_new_raw_line_goes_before_pending_and_snapshots() -> None:
    """Appended to the file it would belong to the last snapshot."""
    changed = parse(BY_HAND).with_lxc("lxc.cgroup2.cpuset.cpus", "0-15").render()
    line = "lxc.cgroup2.cpuset.cpus: 0-15\n"
    entry = "lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file\n"
    assert changed == BY_HAND.replace(entry, entry + line)


def test_repeated_raw_lines_become_one_where_the_first_was() -> None:
    config = parse("lxc.prlimit.nofile: 1\nmemory: 512\nlxc.prlimit.nofile = 2\n\n[snap]\nlxc.prlimit.nofile: 3\n")
    expected = "lxc.prlimit.nofile: 9\nmemory: 512\n\n[snap]\nlxc.prlimit.nofile: 3\n"
    assert config.with_lxc("lxc.prlimit.nofile", "9").render() == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "lxc.tty.max: 1\n"),
        ("memory: 512", "memory: 512\nlxc.tty.max: 1\n"),
        ("memory: 512\n\n[snap]\n", "memory: 512\nlxc.tty.max: 1\n\n[snap]\n"),
        ("[snap]\nmemory: 1\n", "lxc.tty.max: 1\n[snap]\nmemory: 1\n"),
        ("\n\n[pve:pending]\nmemory: 1", "lxc.tty.max: 1\n\n\n[pve:pending]\nmemory: 1"),
    ],
)
def test_where_a_new_raw_line_goes(text: str, expected: str) -> None:
    assert parse(text).with_lxc("lxc.tty.max", "1").render() == expected


def test_what_perl_takes_for_a_line_is_a_line() -> None:
    """Python's splitlines() would split at these too."""
    config = parse("hostname: a\x0bb\x85c\u2028d\nmemory: 512\r\n")
    assert config.values == {"hostname": "a\x0bb\x85c\u2028d", "memory": "512"}


def test_a_lock_is_seen() -> None:
    assert parse("lock: create\n").lock == "create"
    assert parse("[snap]\nlock: backup\n").lock is None


@given(st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), st.from_regex(r"[a-z0-9=/:.-]*", fullmatch=True)))
def test_property_round_trip(parts: dict[str, str]) -> None:
    assert parse_property(render_property({"volume": "/srv/x", **parts}, "volume"), "volume") == {
        "volume": "/srv/x",
        **parts,
    }


def test_property_with_a_named_default_key() -> None:
    named = parse_property("mode=0666,path=/dev/nvidia0", "path")
    assert named == parse_property("/dev/nvidia0,mode=0666", "path")
    assert render_property(named, "path") == "/dev/nvidia0,mode=0666"


@pytest.mark.parametrize(("value", "truth"), [("1", True), ("Yes", True), ("on", True), ("0", False), (None, False)])
def test_booleans(value: str | None, truth: bool) -> None:
    assert is_true(value) is truth

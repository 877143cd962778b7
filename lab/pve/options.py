"""The settings of a container: `pct set` takes them, /etc/pve/lxc/ID.conf holds them."""

from __future__ import annotations

from collections.abc import Mapping

from .schema import (
    CONFIG_ID,
    DISK_SIZE,
    DNS_NAME,
    MAC,
    Parameter,
    any_ip,
    device_path,
    each,
    ipv4,
    ipv4_config,
    matches,
    mount_source,
    startup_order,
)

BOOLEAN = Parameter("boolean")
INTEGER = Parameter("integer", minimum=0)

DEVICE: Mapping[str, Parameter] = {
    "path": Parameter(check=device_path, default_key=True),
    "mode": Parameter(pattern="0[0-7]{3}"),
    "uid": INTEGER,
    "gid": INTEGER,
    "deny-write": BOOLEAN,
}
ROOTFS: Mapping[str, Parameter] = {
    "volume": Parameter(optional=False, check=mount_source, default_key=True),
    "size": Parameter(check=DISK_SIZE),
    "acl": BOOLEAN,
    "mountoptions": Parameter(pattern=r"(discard|lazytime|noatime|nodev|noexec|nosuid)(;\w+)*"),
    "idmap": Parameter(pattern=r"passthrough|[ug]:\d+:\d+:[1-9]\d*(;[ug]:\d+:\d+:[1-9]\d*)*"),
    "ro": BOOLEAN,
    "quota": BOOLEAN,
    "replicate": BOOLEAN,
    "shared": BOOLEAN,
}
MOUNT: Mapping[str, Parameter] = {
    **ROOTFS,
    "backup": BOOLEAN,
    "mp": Parameter(optional=False, check=mount_source),
    "keepattrs": BOOLEAN,
}
NETWORK: Mapping[str, Parameter] = {
    "type": Parameter(enum=("veth",)),
    "name": Parameter(optional=False, pattern=r"[-_.\w\d]+"),
    "bridge": Parameter(pattern=r"[-_.\w\d]+"),
    "hwaddr": Parameter(check=MAC),
    "mtu": Parameter("integer", minimum=64, maximum=65535),
    "ip": Parameter(check=ipv4_config),
    "gw": Parameter(check=ipv4),
    "ip6": Parameter(),
    "gw6": Parameter(check=any_ip),
    "firewall": BOOLEAN,
    "tag": Parameter("integer", minimum=1, maximum=4094),
    "trunks": Parameter(pattern=r"\d+(?:;\d+)*"),
    "rate": Parameter("number"),
    "link_down": BOOLEAN,
    "host-managed": BOOLEAN,
}
FEATURES: Mapping[str, Parameter] = {
    "mount": Parameter(pattern="[a-zA-Z0-9_; ]+"),
    "nesting": BOOLEAN,
    "keyctl": BOOLEAN,
    "fuse": BOOLEAN,
    "mknod": BOOLEAN,
    "force_rw_sys": BOOLEAN,
}
VOLUME_ID = matches(r"[a-zA-Z][a-zA-Z0-9._-]*[a-zA-Z0-9]:.+", "unable to parse volume ID '{value}'\n")
TAGS = each(matches(r"[a-zA-Z0-9_][a-zA-Z0-9_\-+.]*", "invalid characters in tag"))

SETTINGS: Mapping[str, Parameter] = {
    "lock": Parameter(
        enum=(
            *("backup", "create", "destroyed", "disk", "fstrim", "migrate", "mounted", "rollback", "snapshot"),
            "snapshot-delete",
        )
    ),
    "onboot": BOOLEAN,
    "startup": Parameter(check=startup_order),
    "template": BOOLEAN,
    "arch": Parameter(enum=("amd64", "i386", "arm64", "armhf", "riscv32", "riscv64")),
    "ostype": Parameter(
        enum=(
            *("debian", "devuan", "ubuntu", "centos", "fedora", "opensuse", "archlinux", "alpine", "gentoo", "nixos"),
            "unmanaged",
        )
    ),
    "console": BOOLEAN,
    "tty": Parameter("integer", minimum=0, maximum=6),
    "cores": Parameter("integer", minimum=1, maximum=8192),
    "cpulimit": Parameter("number", minimum=0, maximum=8192),
    "cpuunits": Parameter("integer", minimum=0, maximum=500000),
    "memory": Parameter("integer", minimum=16),
    "swap": INTEGER,
    "hostname": Parameter(check=DNS_NAME, max_length=255),
    "description": Parameter(max_length=1024 * 8),
    "searchdomain": Parameter(check=each(DNS_NAME), is_list=True),
    "nameserver": Parameter(check=each(any_ip), is_list=True),
    "timezone": Parameter(),
    "rootfs": Parameter(keys=ROOTFS),
    "cmode": Parameter(enum=("shell", "console", "tty")),
    "entrypoint": Parameter(),
    "protection": BOOLEAN,
    "unprivileged": BOOLEAN,
    "features": Parameter(keys=FEATURES),
    "env": Parameter(),
    "hookscript": Parameter(check=VOLUME_ID),
    "tags": Parameter(check=TAGS, is_list=True),
    "debug": BOOLEAN,
    **{f"net{index}": Parameter(keys=NETWORK) for index in range(32)},
    **{f"mp{index}": Parameter(keys=MOUNT) for index in range(256)},
    **{f"unused{index}": Parameter(check=VOLUME_ID) for index in range(256)},
    **{f"dev{index}": Parameter(keys=DEVICE) for index in range(256)},
}
INTERNAL: Mapping[str, Parameter] = {  # in a file, and no option of a command
    "parent": Parameter(check=CONFIG_ID, max_length=40),
    "snaptime": INTEGER,
}

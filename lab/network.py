"""The lab's own bridge and nftables table; nobody else's rules are read or changed."""

from __future__ import annotations

from ipaddress import IPv4Address
from pathlib import Path

from lab.settings import BRIDGE, GATEWAY, NFT_TABLE, RUNTIME, SUBNET, address, interface
from lab.shell import run

FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
FORWARDING_BEFORE = RUNTIME / "ip_forward"

# A box in the set `cut` can answer connections from this machine (ssh) and can open none itself.
RULES = f"""
table inet {NFT_TABLE} {{
    set cut {{
        type ipv4_addr
    }}
    chain postrouting {{
        type nat hook postrouting priority srcnat; policy accept;
        ip saddr {SUBNET} ip daddr != {SUBNET} masquerade
    }}
    chain forward {{
        type filter hook forward priority filter; policy accept;
        ip saddr @cut drop
        ip daddr @cut drop
    }}
    chain input {{
        type filter hook input priority filter; policy accept;
        iifname "{BRIDGE}" ip saddr @cut ct state new drop
    }}
}}
"""

# In a host's own network: sshd's packets vanish both ways, so neither side is told that the other is gone.
SILENCE_TABLE = "gpubox_lab_silence"
SILENCE = f"""
table inet {SILENCE_TABLE} {{
    chain input {{
        type filter hook input priority filter; policy accept;
        tcp dport 22 drop
    }}
    chain output {{
        type filter hook output priority filter; policy accept;
        tcp sport 22 drop
    }}
}}
"""


def is_up() -> bool:
    return bridge_exists() and table_exists()


def bridge_exists() -> bool:
    return Path(f"/sys/class/net/{BRIDGE}").exists()


def table_exists() -> bool:
    return run("nft", "list", "table", "inet", NFT_TABLE, check=False).returncode == 0


def ensure_network() -> None:
    """Bridge, masquerading for the lab's subnet, forwarding. What is there already stays as it is."""
    if not bridge_exists():
        run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "address", "replace", f"{GATEWAY}/{SUBNET.prefixlen}", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")
    if not table_exists():
        run("nft", "-f", "-", text=RULES)
    if not FORWARDING_BEFORE.exists():
        RUNTIME.mkdir(parents=True, exist_ok=True)
        FORWARDING_BEFORE.write_text(FORWARDING.read_text())
    FORWARDING.write_text("1\n")


def remove_network() -> None:
    """Undo ensure_network, also one that stopped half-way."""
    if table_exists():
        run("nft", "delete", "table", "inet", NFT_TABLE)
    if bridge_exists():
        run("ip", "link", "delete", BRIDGE)
    if FORWARDING_BEFORE.exists():
        FORWARDING.write_text(FORWARDING_BEFORE.read_text())
        FORWARDING_BEFORE.unlink()


def cut_internet(where: IPv4Address) -> None:
    """Drop what this address sends out, by forwarding or to this machine; ssh from this machine to it still works."""
    run("nft", "add", "element", "inet", NFT_TABLE, "cut", f"{{ {where} }}")


def restore_internet(where: IPv4Address) -> None:
    """Undo cut_internet; fine when it was not cut."""
    listed = run("nft", "list", "set", "inet", NFT_TABLE, "cut").stdout
    if str(where) in listed.replace(",", " ").split():
        run("nft", "delete", "element", "inet", NFT_TABLE, "cut", f"{{ {where} }}")


def silence_ssh(pid: str) -> None:
    """Drop ssh in the network of the process `pid`."""
    run("nsenter", "--net", "--target", pid, "nft", "-f", "-", text=SILENCE)


def restore_ssh(pid: str) -> None:
    run("nsenter", "--net", "--target", pid, "nft", "delete", "table", "inet", SILENCE_TABLE)


def cut_network(name: str) -> None:
    """Pull the box's cable: nothing reaches it but lxc-attach."""
    run("ip", "link", "set", interface(name), "down")


def restore_network(name: str) -> None:
    """Undo both cuts; whole networks are left as they are."""
    restore_internet(address(name))
    if Path(f"/sys/class/net/{interface(name)}").exists():
        run("ip", "link", "set", interface(name), "up")

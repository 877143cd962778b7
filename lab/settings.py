"""Names, addresses and paths of the lab. Nothing here touches the machine, so that an inventory can import it."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from gpubox.errors import InputError

SUBNET = IPv4Network("10.89.77.0/24")
GATEWAY = SUBNET[1]
BRIDGE = "gpubox-lab0"
NFT_TABLE = "gpubox_lab"

# box1.. and node1.. are for people and demos, test1.. and testnode1.. for the test run, so that a test run never takes
# away one in use. A node is a stand-in for a Proxmox VE node; its containers have addresses on the same subnet.
HOST_NUMBERS = {"box1": 11, "box2": 12, "box3": 13, "box4": 14, "test1": 21, "test2": 22, "test3": 23, "test4": 24}
HOST_NUMBERS |= {"node1": 31, "node2": 32, "testnode1": 41, "testnode2": 42}
NODES = ("node1", "node2", "testnode1", "testnode2")
FIRST_GUEST = 51  # host number of the first container of the first node
VMIDS = range(101, 105)  # of a node's containers

CONTAINER_PREFIX = "gpubox-lab-"  # keeps the lab's containers apart from the user's own
LXC_ROOT = Path("/var/lib/lxc")
CACHE = Path("/var/cache/gpubox-lab")  # kept by `down`: the image and the shared uv cache
UV_CACHE = CACHE / "uv"
RUNTIME = Path("/run/gpubox-lab")  # what only holds until the next boot, as the bridge does

REPOSITORY = Path(__file__).resolve().parent.parent
STATE = REPOSITORY / ".lab"  # the key pair and the known host keys; git ignores it
SSH_KEY = STATE / "id_ed25519"
KNOWN_HOSTS = STATE / "known_hosts"


def address(name: str) -> IPv4Address:
    """The fixed address of the box `name`. Raises InputError for a name that is not in HOST_NUMBERS."""
    if name not in HOST_NUMBERS:
        raise InputError(f"lab: there is no box named {name!r}", hint=f"choose from {', '.join(HOST_NUMBERS)}")
    return SUBNET[HOST_NUMBERS[name]]


def guest_address(node: str, vmid: int) -> IPv4Address:
    """The address for the container `vmid` of `node`. Raises InputError for another one."""
    if node not in NODES or vmid not in VMIDS:
        raise InputError(
            f"lab: no address for container {vmid} of {node!r}",
            hint=f"nodes: {', '.join(NODES)}; containers: {VMIDS[0]} to {VMIDS[-1]}",
        )
    return SUBNET[FIRST_GUEST + NODES.index(node) * len(VMIDS) + VMIDS.index(vmid)]


def hardware_address(name: str) -> str:
    """The same at every boot, as on a real box: this machine remembers a neighbour's for half a minute."""
    return ":".join(["02", "00", *(f"{byte:02x}" for byte in address(name).packed)])


def interface(name: str) -> str:
    """The host's end of the box's virtual cable (at most 15 characters, as the kernel wants)."""
    return f"{CONTAINER_PREFIX}{address(name).packed[-1]}"


def discarded() -> list[Path]:
    """What is left of boxes that are gone: their files, still to be removed."""
    return sorted(LXC_ROOT.glob(f".{CONTAINER_PREFIX}*"))


def lxc_lock(container: str) -> Path:
    """A file that LXC makes for each container name and does not remove with the container."""
    return Path("/run/lxc/lock") / LXC_ROOT.relative_to("/") / f".{container}"

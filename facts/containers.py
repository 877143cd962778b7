"""Everything the role `container` asks of a node, in one remote command: its GPUs, and the containers it shall have.

Files and LXC are asked, not `pct`: each start of a program of PVE costs half a second, and they read the same places.
Only for a container that is absent is a storage asked, and its template hashed.
"""

from __future__ import annotations

import base64
import shlex
from collections import defaultdict
from dataclasses import dataclass

from pyinfra import host
from pyinfra.api import FactBase

from facts import gpus
from facts.per_host import PerHost
from gpubox.nvidia.gpu_count import device_nodes, read_gpus
from gpubox.proxmox.container_plan import template_volume
from gpubox.proxmox.container_state import ContainerState, NodeState
from gpubox.proxmox.settings import ContainerSettings

# Raw lines written while a container ran: the first line names that run of it (`instance`), the others are the lines.
CHANGED = "/run/gpubox/restart-{vmid}"
# Names a container's run: the id of its init, and when that started, in ticks since the node's boot.
INSTANCE = r"""
instance() {
  pid=$(lxc-info -n "$1" -pH 2>/dev/null)
  [ "${pid:-0}" -gt 0 ] 2>/dev/null && echo "$pid $(sed 's/.*) //' "/proc/$pid/stat" | cut -d' ' -f20)"
}
"""

# POSIX sh. Every line of output is 'key value' or 'key vmid value'; always exits 0.
SCRIPT = (
    INSTANCE
    + r"""
# Another user's PATH may lack it.
{ command -v pct || [ -x /usr/sbin/pct ]; } >/dev/null && echo 'pve yes'
[ "$(id -u)" = 0 ] && echo 'root yes'
grep -qs "\"$(uname -n | cut -d. -f1)\":\"maintenance\"" /etc/pve/ha/manager_status && echo 'maintenance yes'
absent=
container() {
  conf=/etc/pve/lxc/$1.conf lock=/run/lock/lxc/pve-config-$1.lock changed=/run/gpubox/restart-$1
  for f in /etc/pve/qemu-server/$1.conf /etc/pve/nodes/*/qemu-server/$1.conf /etc/pve/nodes/*/lxc/$1.conf; do
    [ -e "$f" ] && echo "elsewhere $1 $f"
  done
  [ -e "$lock" ] && ! flock -n "$lock" true && echo "held $1 yes"
  if [ -n "$3" ]; then
    if [ ! -d "$3" ]; then echo "models $1 missing"
    elif [ "$(readlink -f "$3")" != "$3" ]; then echo "models $1 link"; fi
  fi
  if [ ! -f "$conf" ]; then
    absent=yes
    template=$(pvesm path "$2" 2>/dev/null) && [ -f "$template" ] &&
      echo "template $1 $(sha512sum <"$template" | cut -d' ' -f1)"
    return
  fi
  echo "config $1 $(base64 -w 0 <"$conf")"
  run=$(instance "$1")
  [ -n "$run" ] || return
  echo "running $1 yes"
  [ "$(head -n 1 "$changed" 2>/dev/null)" = "$run" ] && sed -n "2,\$s/^/changed $1 /p" "$changed"
  root=/proc/${run% *}/root
  nvidia_nodes "$root" | sed "s/^/inside $1 /"
  [ -n "$4" ] && size=$(stat -c %s "$root$4" 2>/dev/null) || return
  [ "$(stat -c %s "$4" 2>/dev/null || echo "$size")" = "$size" ] && echo "run_file $1 yes"
}
"""
)
STORAGES = r"""
[ -n "$absent" ] && pvesm status --content rootdir 2>/dev/null | awk 'NR > 1 { print "storage", $1, $3 }'
"""


@dataclass(frozen=True)
class Target:
    """A container that the node shall have. `stop_timeout_s`: for a clean shutdown.

    run_file: the driver's .run file, a path on the node and then in the container; None when it needs none from here.
    """

    vmid: int
    settings: ContainerSettings
    stop_timeout_s: int
    run_file: str | None = None


class Containers(FactBase[NodeState]):
    """The state of a node. Of a machine that answers nothing: it is no node."""

    def command(self, containers: list[tuple[int, str, str, str]]) -> str:
        """containers: vmid, the volume of its template, the directory of its models or "", the .run file or ""."""
        calls = [f"container {vmid} {shlex.join(words)}" for vmid, *words in containers]
        script = "\n".join([gpus.SHELL, SCRIPT, *calls, STORAGES, gpus.COUNT, gpus.ASK_SMI, "true"])
        return f"sh -c {shlex.quote(script)}"

    def process(self, output: list[str]) -> NodeState:
        said: defaultdict[str, list[str]] = defaultdict(list)
        for line in output:
            key, _, value = line.partition(" ")
            said[key].append(value)
        per_container: defaultdict[int, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for key in ("elsewhere", "held", "models", "template", "config", "running", "changed", "inside", "run_file"):
            for value in said[key]:
                vmid, _, rest = value.partition(" ")
                per_container[int(vmid)][key].append(rest)
        return NodeState(
            pve="pve" in said,
            root="root" in said,
            maintenance="maintenance" in said,
            storages={name: status == "active" for name, status in map(str.split, said["storage"])},
            gpus=read_gpus(said),
            containers={vmid: _container(about) for vmid, about in per_container.items()},
        )

    @staticmethod
    def default() -> NodeState:
        return NodeState()


def _container(about: dict[str, list[str]]) -> ContainerState:
    return ContainerState(
        raw=base64.b64decode(about["config"][0]) if "config" in about else None,
        running="running" in about,
        held="held" in about,
        elsewhere=tuple(about["elsewhere"]),
        template=about["template"][0] if "template" in about else "",
        models=about["models"][0] if "models" in about else "directory",
        changed_raw=tuple(about["changed"]),
        inside=device_nodes(about["inside"]),
        has_run_file="run_file" in about,
    )


def _read(targets: tuple[Target, ...]) -> NodeState:
    asked = [(t.vmid, template_volume(t.settings), t.settings.models or "", t.run_file or "") for t in targets]
    seen: NodeState = host.get_fact(Containers, containers=asked)
    return seen


_nodes = PerHost(_read)
look_at = _nodes.ask
node_state = _nodes.answer
read_node_state = _nodes.read_now

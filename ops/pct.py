"""A container on its node: made, converged, running. By `pct`, as root on the node; never destroyed, never made anew.

Each operation decides from the node's state, so whatever was interrupted is taken up by the next run. What forbids to
go on fails the operation with what to do; PVE's own messages are shown as they are, with what to do after them.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from pyinfra import host, state
from pyinfra.api import FunctionCommand, QuoteString, StringCommand, operation
from pyinfra.api.host import Host
from pyinfra.api.state import State, StateStage
from pyinfra.connectors.util import CommandOutput

from facts.containers import CHANGED, INSTANCE, Target, node_state, read_node_state
from gpubox.container import ContainerConfig, parse
from gpubox.errors import BrokenError, RefusedError
from gpubox.nvidia.gpu_count import Configured, check_gpu_count
from gpubox.proxmox.container_plan import (
    RawPlan,
    configured_gpus,
    create_arguments,
    notes,
    plan_raw,
    plan_settings,
    restart_reasons,
    template_volume,
)
from gpubox.proxmox.container_state import (
    ContainerState,
    NodeState,
    check_changeable,
    check_possible,
    check_template,
    encode,
)
from gpubox.proxmox.pct_errors import advice
from ops.refusal import refusal, stop

# The name may be newer than the node's list of templates. `pveam update` says on standard error when it cannot.
DOWNLOAD = """
set -e
pveam available | awk '{{ print $2 }}' | grep -Fxq {template} || pveam update >/dev/null || true
pveam download {storage} {template}
file=$(pvesm path {volume})
got=$(sha512sum <"$file" | cut -d' ' -f1)
if [ "$got" != {sha512} ]; then
  echo "template {volume}: sha512 is $got, wanted is {sha512}" >&2
  echo "  what to do: correct template_sha512 if that file is meant; else pveam remove {volume} and find out why" >&2
  exit 1
fi
"""

# In a session of its own, with its output in a file, so that the loss of this connection does not reach it: a worker of
# PVE dies at its next line once nobody reads (PVE::RESTEnvironment, fork_worker: SIGPIPE is DEFAULT), and what it then
# leaves has a whole configuration without a lock, and no first set-up inside.
CREATE = """
mkdir -p /run/gpubox && : >{log} || exit 1
setsid {command} </dev/null >{log} 2>&1 &
tail -n +1 -s 0.3 -f --pid=$! {log}
wait $!
"""

WAIT = """
echo "CT {vmid} is being {what}: waiting for that to end"
flock -w 600 {lock} true || {{ echo "CT {vmid} is still being {what} after 10 minutes" >&2; exit 1; }}
cat {log} 2>/dev/null || true
"""
CREATION_LOG = "/run/gpubox/create-{vmid}.log"

# Under the lock that PVE's own programs take, and as they write: a whole file beside, then a rename.
WRITE = """
set -e
mkdir -p /run/lock/lxc
exec 9>>{lock}
flock -w 10 9 || {{ echo "can't lock file '{lock}' - got timeout" >&2; exit 1; }}
sum() {{ sha256sum <"$1" | cut -d' ' -f1; }}
if [ "$(sum {conf})" != {old} ]; then
  echo "CT {vmid}: detected modified configuration: it changed since it was read; nothing was written" >&2
  exit 1
fi
new={conf}.tmp.$$
trap 'rm -f "$new"' EXIT
base64 -d >"$new"
[ "$(sum "$new")" = {new} ] || {{ echo "CT {vmid}: the new configuration did not arrive whole" >&2; exit 1; }}
{note}
mv -f "$new" {conf}
"""
# Before the new file is in place: a kill in between costs a needless restart, never a forgotten one.
NOTE = """
run=$(instance {vmid}) || run=
if [ -n "$run" ]; then
  mkdir -p /run/gpubox
  {{ echo "$run"; [ "$(head -n 1 {changed} 2>/dev/null)" = "$run" ] && sed 1d {changed}; printf '%s\\n' {lines}; }} \\
    >{changed}.new
  mv -f {changed}.new {changed}
fi
"""

# What follows needs init and the network inside. A container without an address may be meant: said, and left at that.
UP = """
timeout 120 pct exec {vmid} -- systemctl is-system-running --wait >/dev/null 2>&1 || true
pct exec {vmid} -- sh -c 'i=0; until [ -n "$(hostname -I)" ]; do i=$((i+1)); [ $i -le 60 ] || exit 1; sleep 1; done' ||
  echo "CT {vmid} runs, and has no address after 60 s: pct exec {vmid} -- ip address"
"""


class PveCommand(StringCommand):
    """A program of PVE, about one container: its output is shown as it comes, then what to do about a failure."""

    def __init__(self, vmid: int, *words: str) -> None:
        super().__init__(*(QuoteString(word) for word in words))
        self.vmid = vmid

    def execute(self, state: State, host: Host, connector_arguments: Any) -> tuple[bool, CommandOutput]:
        status, output = host.run_shell_command(
            self, print_output=True, print_input=state.print_input, **connector_arguments
        )
        if not status and (text := advice(output.output, host.name, self.vmid)):
            host.log_styled(f"  what to do: {text}", fg="red")
        return status, CommandOutput([])  # shown already


@operation()
def template_stored(target: Target) -> Iterator[Any]:
    """The template of a container still to be made is in its storage, with the right hash."""
    seen, settings = node_state().container(target.vmid), target.settings
    if seen.raw is not None:
        host.noop(f"CT {target.vmid} exists and needs no template")
        return
    if problem := refusal(lambda: check_template(settings, seen)):
        yield problem
    elif seen.template:
        host.noop(f"{template_volume(settings)} is stored")
    else:
        script = DOWNLOAD.format(
            storage=shlex.quote(settings.template_storage),
            template=shlex.quote(settings.template),
            volume=shlex.quote(template_volume(settings)),
            sha512=settings.template_sha512,
        )
        yield PveCommand(target.vmid, "sh", "-c", script)


@operation()
def container_present(target: Target) -> Iterator[Any]:
    """The container exists. One that PVE is creating just now (an ssh connection was lost) is waited for.

    Its lock goes from the configuration before its first set-up, so any program that works on it is waited for.
    """
    node = node_state()
    seen = node.container(target.vmid)
    if seen.held and (seen.config is None or seen.config.lock in ("create", None)):
        what = "worked on" if seen.config is not None and seen.config.lock is None else "created"
        log = CREATION_LOG.format(vmid=target.vmid)
        wait = WAIT.format(vmid=target.vmid, what=what, lock=_lock(target.vmid), log=log)
        yield PveCommand(target.vmid, "sh", "-c", wait)
        node = read_node_state()
        seen = node.container(target.vmid)
    if seen.config is not None and seen.config.lock != "create":
        host.noop(f"CT {target.vmid} exists")
        return
    problem = (
        _impossible(target, node)
        or refusal(lambda: check_changeable(host.name, target.vmid, node))
        or _gpus_differ(target, node, None)
    )
    if problem:
        yield problem
        return
    arguments = create_arguments(target.vmid, target.settings, node.gpus.wanted_minors)
    options = arguments[3:]
    _show([f"+ {key.removeprefix('--')}: {value}" for key, value in zip(options[::2], options[1::2], strict=True)])
    command = CREATE.format(command=shlex.join(["pct", *arguments]), log=CREATION_LOG.format(vmid=target.vmid))
    yield PveCommand(target.vmid, "sh", "-c", command)


@operation()
def container_converged(target: Target) -> Iterator[Any]:
    """Its configuration says what the settings say; what the operator added stays."""
    node = node_state()
    seen = node.container(target.vmid)
    if seen.config is None:  # in a plan only: the operation before this one makes it
        yield _written(target, seen, _raw_plan(target, node, parse("")))
        return
    if problem := _impossible(target, node) or _gpus_differ(target, node, seen.config):
        yield problem
        return
    gpus = node.gpus
    change = plan_settings(seen.config, target.settings, gpus.wanted_minors, tuple(gpus.nodes))
    raw = _raw_plan(target, node, seen.config)
    if not change.arguments and raw.config == seen.config:
        said = notes(target.vmid, seen.config, target.settings)
        host.noop("; ".join([f"CT {target.vmid} is as its settings say", *said]))
        return
    if problem := refusal(lambda: check_changeable(host.name, target.vmid, node)):
        yield problem
        return
    _show(change.diff + raw.diff)
    if change.arguments:
        yield PveCommand(target.vmid, "pct", "set", str(target.vmid), *change.arguments, "--digest", seen.sha1)
        node = read_node_state()  # PVE has written the file anew
        seen = node.container(target.vmid)
        if seen.config is None:
            yield stop(BrokenError(f"CT {target.vmid} is gone: its configuration was there a moment ago"))
            return
        raw = _raw_plan(target, node, seen.config)
    if raw.config != seen.config:
        yield _written(target, seen, raw)


@operation()
def container_running(target: Target) -> Iterator[Any]:
    """It runs as configured. A running one is restarted when it must be and may be; else the deploy stops here."""
    node = node_state()
    seen = node.container(target.vmid)
    reasons = _restart_reasons(seen, node)
    if seen.running and not reasons:
        host.noop(f"CT {target.vmid} runs")
        return
    problem = refusal(lambda: check_changeable(host.name, target.vmid, node))
    if seen.running and not target.settings.allow_restart:
        problem = stop(
            RefusedError(
                f"CT {target.vmid} runs, and must be restarted before these count:",
                hint="set allow_restart = True in this box's container settings and run again; or, when it suits, "
                f"pct reboot {target.vmid} on {host.name}, and run again",
                detail="\n".join(reasons),
            )
        )
    if problem:
        yield problem
        return
    _show([f"restart for {reason}" for reason in reasons] if seen.running else [])
    vmid = str(target.vmid)
    how = ["reboot", vmid, "--timeout", str(target.stop_timeout_s)] if seen.running else ["start", vmid]
    yield PveCommand(target.vmid, "pct", *how)
    yield StringCommand("sh", "-c", QuoteString(UP.format(vmid=vmid)))
    if state.current_stage == StateStage.Execute and (problem := _still_wrong(target)):
        yield problem


@operation()
def run_file_pushed(target: Target) -> Iterator[Any]:
    """The driver's .run file of the node is in the container, where the role nvidia_userland looks for it."""
    if target.run_file is None:
        host.noop(f"CT {target.vmid} needs no file of the driver from the node")
        return
    if node_state().container(target.vmid).has_run_file:
        host.noop(f"{target.run_file} is there")
        return
    vmid, path = str(target.vmid), shlex.quote(target.run_file)
    parent = shlex.quote(str(PurePosixPath(target.run_file).parent))
    yield PveCommand(target.vmid, "sh", "-c", f"pct exec {vmid} -- mkdir -p {parent} && pct push {vmid} {path} {path}")


def _still_wrong(target: Target) -> FunctionCommand | None:
    """After a start: what its configuration says holds, or no run would ever get further."""
    node = read_node_state()
    seen = node.container(target.vmid)
    reasons = _restart_reasons(seen, node) if seen.running else ["it does not run"]
    if not reasons:
        return None
    return stop(
        BrokenError(
            f"CT {target.vmid} was started and is not what its configuration says",
            hint=f"pct config {target.vmid}, pct pending {target.vmid}, journalctl -b -u pve-container@{target.vmid}",
            detail="\n".join(reasons),
        )
    )


def _restart_reasons(seen: ContainerState, node: NodeState) -> list[str]:
    if seen.config is None or not seen.running:
        return []
    return restart_reasons(seen.config, changed_raw=seen.changed_raw, inside=seen.inside, nodes=node.gpus.nodes)


def _raw_plan(target: Target, node: NodeState, config: ContainerConfig) -> RawPlan:
    uvm = node.gpus.nodes.get("/dev/nvidia-uvm")
    return plan_raw(config, target.settings, node.gpus.wanted_minors, uvm.major if uvm else None)


def _written(target: Target, seen: ContainerState, raw: RawPlan) -> StringCommand:
    """The raw lines, unless the file changed since it was read. The new text goes in on standard input."""
    new = encode(raw.config)
    changed = CHANGED.format(vmid=target.vmid)
    note = INSTANCE + NOTE.format(vmid=target.vmid, changed=changed, lines=shlex.join(raw.limits))
    script = WRITE.format(
        vmid=target.vmid,
        conf=f"/etc/pve/lxc/{target.vmid}.conf",
        lock=_lock(target.vmid),
        old=seen.sha256,
        new=hashlib.sha256(new).hexdigest(),
        note=note if raw.limits else "",
    )
    return StringCommand("sh", "-c", QuoteString(script), _stdin=base64.encodebytes(new).decode())


def _lock(vmid: int) -> str:
    return f"/run/lock/lxc/pve-config-{vmid}.lock"


def _impossible(target: Target, node: NodeState) -> FunctionCommand | None:
    return refusal(lambda: check_possible(host.name, target.vmid, target.settings, node))


def _gpus_differ(target: Target, node: NodeState, config: ContainerConfig | None) -> FunctionCommand | None:
    """Not in a plan: the driver may be among what the same run brings."""
    if state.current_stage != StateStage.Execute:
        return None
    configured = Configured(f"CT {target.vmid}", None if config is None else configured_gpus(config))
    return refusal(lambda: check_gpu_count(host.name, node.gpus, configured))


def _show(lines: list[str]) -> None:
    for line in lines:
        host.log_styled(f"  {line}", fg={"+": "green", "-": "red"}.get(line[0], "yellow"))

"""The containers of a node: every box of the inventory that is reached as @pct/<this node>/<vmid> and has settings."""

from __future__ import annotations

from collections.abc import Iterable

from pyinfra import host, state
from pyinfra.api import deploy
from pyinfra.api.exceptions import DeployError
from pyinfra.api.host import Host

from facts.containers import Target, look_at, node_state
from gpubox.errors import GpuboxError, InputError
from gpubox.nvidia.driver import AnyDriver, RunFileDriver
from gpubox.proxmox.container_state import check_possible
from gpubox.settings import load_settings
from ops import pct

# Beyond the server's own stop timeout: for everything else that a clean shutdown ends.
SHUTDOWN_MARGIN_S = 60


def targets_on(node: str, boxes: Iterable[Host]) -> tuple[Target, ...]:
    """The containers that `node` shall have. Raises InputError."""
    prefix = f"@pct/{node}/"
    found = []
    for box in boxes:
        if not box.name.startswith(prefix):
            continue
        vmid = box.name.removeprefix(prefix)
        if not vmid.isdigit() or int(vmid) < 100:
            raise InputError(f"host {box.name}: {vmid!r} is no vmid", hint="allowed: a number from 100, as in pct list")
        settings = load_settings(box.data.dict(), box.name)
        if settings.container is not None:
            found.append(
                Target(
                    int(vmid),
                    settings.container,
                    settings.stop_timeout_s + SHUTDOWN_MARGIN_S,
                    _pushed(settings.driver),
                )
            )
    return tuple(sorted(found, key=lambda target: target.vmid))


def _pushed(driver: AnyDriver | None) -> str | None:
    """The .run file that a container gets from its node."""
    return driver.run if isinstance(driver, RunFileDriver) and driver.run.startswith("/") else None


@deploy("Container")
def container() -> None:
    """Raises DeployError for what no operation of this run could put right, before the first of them."""
    try:
        targets = targets_on(host.name, state.inventory)
        look_at(targets)
        for target in targets:
            check_possible(host.name, target.vmid, target.settings, node_state())
    except GpuboxError as error:
        raise DeployError(str(error)) from None
    for target in host.loop(targets):
        pct.template_stored(name=f"CT {target.vmid}: template", target=target)
        pct.container_present(name=f"CT {target.vmid}: present", target=target)
        pct.container_converged(name=f"CT {target.vmid}: configuration", target=target)
        pct.container_running(name=f"CT {target.vmid}: running", target=target)
        pct.run_file_pushed(name=f"CT {target.vmid}: driver file", target=target)

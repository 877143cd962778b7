"""An end of one host's deploy, as a command: --dry shows it and goes on, where an exception would end the run."""

from __future__ import annotations

from collections.abc import Callable

from pyinfra import host as this_host
from pyinfra.api import FunctionCommand
from pyinfra.api.exceptions import DeployError
from pyinfra.api.host import Host
from pyinfra.api.state import State

from gpubox.errors import GpuboxError


def stop(problem: GpuboxError | str) -> FunctionCommand:
    return FunctionCommand(failed, (str(problem),), {})


def refusal(*checks: Callable[[], object]) -> FunctionCommand | None:
    """The end that the first of the checks raises; None when none raises."""
    try:
        for check in checks:
            check()
    except GpuboxError as error:
        return stop(error)
    return None


def before_anything_ran(error: GpuboxError) -> DeployError:
    """What a preflight raises: no operation of this run has run, on any host. It names the host once."""
    return DeployError(f"host {this_host.name}: {str(error).removeprefix(f'host {this_host.name}: ')}")


def failed(state: State, host: Host, problem: str) -> bool:
    host.log_styled(f"{host.name}: {problem}", fg="red")
    return False

"""An end of one host's deploy, as a command: --dry shows it and goes on, where an exception would end the run."""

from __future__ import annotations

from collections.abc import Callable

from pyinfra.api import FunctionCommand
from pyinfra.api.host import Host
from pyinfra.api.state import State

from gpubox.errors import GpuboxError


def stop(problem: GpuboxError | str) -> FunctionCommand:
    return FunctionCommand(failed, (str(problem),), {})


def refusal(check: Callable[[], object]) -> FunctionCommand | None:
    """The end that `check` raises; None when it raises nothing."""
    try:
        check()
    except GpuboxError as error:
        return stop(error)
    return None


def failed(state: State, host: Host, problem: str) -> bool:
    host.log_styled(f"{host.name}: {problem}", fg="red")
    return False

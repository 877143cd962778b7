"""A command whose output is judged by a rule rather than only by its exit status."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyinfra.api import StringCommand
from pyinfra.api.host import Host
from pyinfra.api.state import State
from pyinfra.connectors.util import CommandOutput

from gpubox.errors import GpuboxError
from ops.refusal import failed

Judge = Callable[[bool, str], None]  # did it exit with 0, and what it printed; raises GpuboxError


class Judged(StringCommand):
    """`judge` decides whether the command did what it should, and its error is all that is shown."""

    def __init__(self, *words: str | StringCommand, judge: Judge) -> None:
        super().__init__(*words)
        self.judge = judge

    def execute(self, state: State, host: Host, connector_arguments: Any) -> tuple[bool, CommandOutput]:
        connector_arguments.update(self.connector_arguments)
        status, output = host.run_shell_command(self, print_input=state.print_input, **connector_arguments)
        try:
            self.judge(status, output.output)
        except GpuboxError as error:
            failed(state, host, str(error))
            return False, CommandOutput([])
        return True, CommandOutput([])

"""A command whose output is shown while it runs."""

from __future__ import annotations

from typing import Any

from pyinfra.api import StringCommand
from pyinfra.api.host import Host
from pyinfra.api.state import State
from pyinfra.connectors.util import CommandOutput


class Streamed(StringCommand):
    """pyinfra keeps the output of a command until it fails; a build or an activation takes minutes and is watched."""

    def execute(self, state: State, host: Host, connector_arguments: Any) -> tuple[bool, CommandOutput]:
        connector_arguments.update(self.connector_arguments)
        status, _ = host.run_shell_command(
            self, print_output=True, print_input=state.print_input, **connector_arguments
        )
        return status, CommandOutput([])  # shown already: nothing is left to repeat on failure

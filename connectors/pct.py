"""@pct/<node>/<vmid>: a container on a Proxmox VE node, through the node's ssh and lxc-attach. See docs/pct.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from io import IOBase, TextIOBase
from typing import IO, Any, TypedDict, cast

import gevent
from paramiko import Channel, SSHException
from pyinfra import logger
from pyinfra.api import QuoteString, StringCommand
from pyinfra.api.exceptions import ConnectError, InventoryError
from pyinfra.api.output import echo
from pyinfra.api.state import StateStage
from pyinfra.api.util import get_file_io
from pyinfra.connectors.base import BaseConnector, DataMeta
from pyinfra.connectors.util import (
    CommandOutput,
    OutputLine,
    execute_command_with_sudo_retry,
    extract_control_arguments,
    make_unix_command_for_host,
    read_output_buffers,
    write_stdin,
)

from connectors.container import Container, text_lines
from connectors.node import node_for

NAME = re.compile(r"(?P<node>[^/]+)/(?P<vmid>[1-9][0-9]{2,8})")
CHUNK = 256 * 1024  # bytes read from a file at once
PACKET = 32 * 1024  # bytes sent at once; a larger slice would be copied again for each packet made of it

# The destination changes in one step, when all has arrived: the size tells a whole file from a broken connection.
# Like a write through sftp it follows a link, and keeps mode and owner of what is there.
UPLOAD = """
die() { echo "$*" >&2; exit 1; }
[ ! -L "$1" ] || set -- "$(readlink -f -- "$1")" "$2"
[ ! -d "$1" ] || die "$1 is a directory"
if [ -e "$1" ] && [ ! -f "$1" ]; then exec cat > "$1"; fi
case $1 in */*) directory=${1%/*}/ ;; *) directory=./ ;; esac
new=$(mktemp -- "$directory.pyinfra-XXXXXXXXXX") || exit 1
trap 'rm -f -- "$new"' EXIT
trap 'exit 1' HUP INT TERM
cat > "$new" || exit 1
size=$(wc -c < "$new")
[ "$size" -eq "$2" ] || die "$size of $2 bytes arrived"
if [ -e "$1" ]; then cp --attributes-only --preserve=mode,ownership -- "$1" "$new"
else chmod "$(umask -S),a-x" "$new"; fi && mv -fT -- "$new" "$1"
"""


class PctData(TypedDict):
    pct_node: str
    pct_vmid: int


class PctConnector(BaseConnector):
    """Runs commands as root in a container. Until the container runs, planning sees an empty machine."""

    handles_execution = True
    data_cls = PctData
    data_meta = {"pct_node": DataMeta("the node, as the inventory names it"), "pct_vmid": DataMeta("the container")}
    data: PctData

    _container: Container

    @staticmethod
    def make_names_data(name: str) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
        match = NAME.fullmatch(name or "")
        if not match:
            raise InventoryError(f"@pct/{name}: must be @pct/<node>/<vmid>, as in @pct/pve1/101 (vmid: 100 and up)")
        data = {"ssh_hostname": match["node"], "pct_node": match["node"], "pct_vmid": int(match["vmid"])}
        yield f"@pct/{name}", data, ["@pct"]

    def connect(self) -> None:
        """Raises ConnectError when the node cannot be reached; a container that never ran in this run may be absent."""
        name = self.data["pct_node"]
        try:
            if not hasattr(self, "_container"):
                node = node_for(self.state, name, self.host)
                self._container = Container(node, self.data["pct_vmid"], planning=self._planning)
            running = self._container.is_running(ask=True)
        except (ConnectError, SSHException, OSError) as error:
            raise ConnectError(str(error) if name in str(error) else f"node {name}: {error}") from error
        if running:
            return
        if self._container.ran:
            raise ConnectError(self._container.problem())  # as after a reboot, which pyinfra waits for
        logger.warning(
            f"{self.host.print_prefix}{self._container.problem()}: planned as an empty machine until it runs"
        )

    def disconnect(self) -> None:
        """The node's connection stays, as other containers use it."""
        self._container.close()

    def run_shell_command(
        self,
        command: StringCommand,
        print_output: bool = False,
        print_input: bool = False,
        **arguments: Any,
    ) -> tuple[bool, CommandOutput]:
        if not self._container.is_running():
            return self._answer_for_absent(command, [])
        control = extract_control_arguments(cast(Any, arguments))
        pty = control.get("_get_pty", False)

        def execute() -> tuple[int, CommandOutput]:
            unix = make_unix_command_for_host(self.state, self.host, command, **arguments)
            logger.debug("Running command on %s: (pty=%s) %s", self.host.name, pty, unix)
            if print_input:
                echo(f"{self.host.print_prefix}>>> {unix}", err=True)
            channel = self._container.start(unix, wrap=_is_shell_text(arguments), pty=pty)
            try:
                if control.get("_stdin"):
                    write_stdin(control["_stdin"], channel.makefile_stdin("wb"))
                channel.shutdown_write()
                output = read_output_buffers(
                    text_lines(channel.makefile("rb")),
                    text_lines(channel.makefile_stderr("rb")),
                    timeout=control.get("_timeout"),
                    print_output=print_output,
                    print_prefix=self.host.print_prefix,
                )
                code, problem = self._container.exit_status(channel)
            finally:
                channel.close()
            if problem:
                output.combined_lines.append(OutputLine("stderr", problem))
            return code, output

        code, output = execute_command_with_sudo_retry(self.host, cast(Any, arguments), execute)
        if code in (control.get("_success_exit_codes") or [0]):
            return True, output
        if self._container.stopped_under(code, output.stderr):
            return self._answer_for_absent(command, output.combined_lines)
        return False, output

    def put_file(
        self,
        filename_or_io: str | IOBase,
        remote_filename: str,
        remote_temp_filename: str | None = None,
        print_output: bool = False,
        print_input: bool = False,
        **arguments: Any,
    ) -> bool:
        """Raises OSError when the file did not get there; then the destination is as it was."""
        with get_file_io(cast(Any, filename_or_io)) as opened:
            file = opened.buffer if isinstance(opened, TextIOBase) and hasattr(opened, "buffer") else opened
            size = file.seek(0, 2)
            file.seek(0)
            script = StringCommand("{", "set", "--", QuoteString(remote_filename), str(size), ";", UPLOAD, "}")
            shown = f"upload {size} bytes to {remote_filename}"
            channel = self._start_transfer(script, shown, print_input, arguments)
            try:
                _send(file, channel)
                self._finish_transfer(channel, f"upload of {remote_filename} to {self.host.name}")
            finally:
                channel.close()
        if print_output:
            echo(f"{self.host.print_prefix}file uploaded: {remote_filename}", err=True)
        return True

    def get_file(
        self,
        remote_filename: str,
        filename_or_io: str | IOBase,
        remote_temp_filename: str | None = None,
        print_output: bool = False,
        print_input: bool = False,
        **arguments: Any,
    ) -> bool:
        """Raises OSError when the file did not get here whole."""
        script = StringCommand("cat", "--", QuoteString(remote_filename))
        channel = self._start_transfer(script, f"download {remote_filename}", print_input, arguments)
        try:
            channel.shutdown_write()
            with get_file_io(cast(Any, filename_or_io), "wb") as file:
                while chunk := channel.recv(CHUNK):
                    file.write(chunk)
            self._finish_transfer(channel, f"download of {remote_filename} from {self.host.name}")
        finally:
            channel.close()
        if print_output:
            echo(f"{self.host.print_prefix}file downloaded: {remote_filename}", err=True)
        return True

    def check_can_rsync(self) -> None:
        raise NotImplementedError(
            f"{self.host.name} is reached through its node, where rsync cannot follow: use files.put or files.sync, "
            "or give the box an sshd and put it into the inventory as an ssh host"
        )

    def rsync(self, src: str, dest: str, flags: Iterable[str], *_: Any, **__: Any) -> bool:
        self.check_can_rsync()
        return False

    def _start_transfer(
        self, command: StringCommand, shown: str, print_input: bool, arguments: dict[str, Any]
    ) -> Channel:
        if not self._container.is_running():
            raise OSError(self._container.problem())
        extract_control_arguments(cast(Any, arguments))
        arguments.pop("_su_password", None)  # pyinfra would pipe it into stdin, which is the file's; root needs none
        unix = make_unix_command_for_host(self.state, self.host, command, **arguments)
        logger.debug("Running command on %s: %s", self.host.name, shown)
        if print_input:
            echo(f"{self.host.print_prefix}>>> {shown}", err=True)
        return self._container.start(unix, wrap=_is_shell_text(arguments))

    def _finish_transfer(self, channel: Channel, what: str) -> None:
        stderr = " ".join(map(str.strip, text_lines(channel.makefile_stderr("rb"))))
        code, problem = self._container.exit_status(channel)
        if code == 0:
            return
        why = self._container.problem() if self._container.stopped_under(code, stderr) else stderr or problem
        raise OSError(f"{what}: {why or f'exit status {code}'}")

    def _planning(self) -> bool:
        return self.state.current_stage < StateStage.Execute

    def _answer_for_absent(self, command: StringCommand, said: list[OutputLine]) -> tuple[bool, CommandOutput]:
        if self._planning():
            return True, CommandOutput([OutputLine("stdout", line) for line in empty_machine(str(command))])
        hint = f"`pct start {self.data['pct_vmid']}`, or is it the wrong number or node?"
        problem = OutputLine("stderr", f"{self._container.problem()}: nothing can run in it ({hint})")
        return False, CommandOutput([*said, problem])


def empty_machine(command: str) -> list[str]:
    """What a machine with nothing on it answers to a fact: nothing, but it is Linux and has the usual tools."""
    if command.strip() == "uname -s":
        return ["Linux"]
    lookup = re.match(r"(?:which|command -v) +(['\"]?)([\w.+-]+)\1(?= |$)", command)
    return [f"/usr/bin/{lookup[2]}"] if lookup else []


def _is_shell_text(arguments: dict[str, Any]) -> bool:
    """Whether pyinfra makes more of a command than plain words: a pipe for su, or text without a shell around it."""
    return bool(arguments.get("_su_user")) or arguments.get("_shell_executable", "sh") is None


def _send(file: IO[Any], channel: Channel) -> None:
    """Stream `file` into the command's stdin. Stops where the command stops reading."""
    while chunk := file.read(CHUNK):
        data = chunk.encode() if isinstance(chunk, str) else chunk
        try:
            for start in range(0, len(data), PACKET):
                channel.sendall(data[start : start + PACKET])
        except OSError:
            return  # the command ended early; its stderr and exit status say why
        gevent.sleep(0)  # a fast network never blocks, and other hosts want to run too
    channel.shutdown_write()

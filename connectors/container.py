"""A container as its node's LXC sees it: whether it runs, and commands started in it over the node's connection."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from paramiko import Channel, SSHException
from pyinfra.api import QuoteString, StringCommand
from pyinfra.api.exceptions import ConnectError

from connectors.keepalive import WHAT_TO_DO, lost
from connectors.node import Node

# What sshd would give root; /etc/environment of the container is laid over it, as pam_env does.
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "LANG": "C.UTF-8",
}
VARIABLE = re.compile(r"""\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=("|'|)(.*?)\2\s*""")

# A process inside the container that ends with the ssh connection, and when the container stops. gpubox anchors its
# lock in it, as it does in sshd's process of a box that is reached by ssh.
SESSION = 'cat /etc/environment 2>/dev/null; echo; echo "pct-session $$"; exec cat >/dev/null'
SESSION_LINE = re.compile(r"pct-session (\d+)")
SESSION_VARIABLE = "GPUBOX_SESSION_PID"
STATES = {"STOPPED", "STARTING", "RUNNING", "STOPPING", "ABORTING", "FREEZING", "FROZEN", "THAWED"}  # lxc-info's

ASK_S = 60  # a container answers whether it runs within this


class Container:
    """What can fail raises OSError or SSHException, which pyinfra takes for a failed operation."""

    def __init__(self, node: Node, vmid: int, *, planning: Callable[[], bool]) -> None:
        """`planning`: whether nothing is executed yet; until then the first answer about the state stands."""
        self._node, self._vmid, self._planning = node, vmid, planning
        self._session: Channel | None = None
        self._said: str | None = None  # lxc-info's last answer
        self._variables = ENVIRONMENT
        self.ran = False

    def close(self) -> None:
        """End the session; the next command opens another."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def is_running(self, *, ask: bool = False) -> bool:
        """Its session is open, or can be opened now. While planning, only `ask` asks the node again."""
        if self._session is not None:
            if not (self._session.closed or self._session.exit_status_ready()):
                return True
            self._session = None
        elif self._planning() and self._said is not None and not ask:
            return False
        return self._open_session()

    def problem(self) -> str:
        """Why it does not run."""
        what = f"is {self._said}" if self._said in STATES else "does not exist, or was never started"
        if self._said == "RUNNING":
            what = "runs, but lxc-attach does not get in"
        return f"container {self._vmid} on node {self._node.name} {what}"

    def start(self, command: StringCommand, *, wrap: bool = False, pty: bool = False) -> Channel:
        """Start a command inside. `wrap`: it is shell text; else it is plain words, which need no shell around them."""
        return self._start_on_node(self._attach(command, wrap=wrap), pty=pty)

    def exit_status(self, channel: Channel) -> tuple[int, str]:
        """Waits for the end. The text is for a command whose end nobody saw, else empty."""
        code = channel.recv_exit_status()
        if code == -1 and not _is_connected(channel):
            return code, f"{lost(f'node {self._node.name}')}; what to do: {WHAT_TO_DO}"
        return code, ""

    def stopped_under(self, code: int, stderr: str) -> bool:
        """Whether a command failed because the container no longer runs. Of a node that is gone, nobody knows."""
        if self._session is not None and not _is_connected(self._session):
            return False
        if self._session is not None and (code == -1 or code > 128 or stderr.startswith("lxc-attach: ")):
            self._session.status_event.wait(1)  # had the container stopped, the news of its session is on the way
        try:
            return not self.is_running()
        except (SSHException, OSError):
            return False

    def _attach(self, command: StringCommand, *, wrap: bool) -> StringCommand:
        if wrap:
            command = StringCommand("sh", "-c", QuoteString(command))
        variables = [QuoteString(f"--set-var={name}={value}") for name, value in self._variables.items()]
        return StringCommand("exec lxc-attach -n", str(self._vmid), "--clear-env", *variables, "--", command)

    def _start_on_node(self, command: StringCommand, *, pty: bool = False) -> Channel:
        try:
            line = command.get_raw_value().encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise OSError(errno.EILSEQ, "the command holds a character that is neither UTF-8 nor a byte") from None
        if b"\0" in line:
            raise OSError(errno.EINVAL, "the command holds a NUL byte, which no argument can hold")
        try:
            channel = self._node.open_channel()
        except ConnectError as error:
            raise OSError(f"node {self._node.name}: {error}") from error
        if pty:
            channel.get_pty()
        channel.exec_command(cast(Any, line))  # paramiko takes bytes; its types do not say so
        return channel

    def _open_session(self) -> bool:
        """Ask for the state and, if it runs, start the session, in one command."""
        self._variables = ENVIRONMENT
        attach = self._attach(StringCommand(SESSION), wrap=True)
        ask = f'state=$(lxc-info -n {self._vmid} -sH 2>&1); echo "$state"; [ "$state" = RUNNING ] &&'
        channel = self._start_on_node(StringCommand(ask, attach))
        channel.settimeout(ASK_S)
        try:
            return self._read_session(channel)
        except TimeoutError:
            channel.close()
            raise OSError(f"container {self._vmid} gave no sign of life within {ASK_S} s") from None

    def _read_session(self, channel: Channel) -> bool:
        lines = text_lines(channel.makefile("rb"))
        self._said = next(lines, "").strip()
        if self._said not in STATES and not self._said.endswith("doesn't exist"):
            answer = " ".join([self._said, *map(str.strip, lines)]).strip() or "no answer"
            where = f"container {self._vmid} on node {self._node.name}"
            raise OSError(f"{where}: no state from lxc-info (Proxmox VE, reached as root?): {answer}")
        inside: list[str] = []
        for line in lines if self._said == "RUNNING" else ():
            if match := SESSION_LINE.fullmatch(line.strip()):
                channel.settimeout(None)
                self._variables = {**ENVIRONMENT, **variables_of(inside), SESSION_VARIABLE: match[1]}
                self._session, self.ran = channel, True
                return True
            inside.append(line)
        channel.close()
        return False


def _is_connected(channel: Channel) -> bool:
    transport = channel.get_transport()
    return bool(transport and transport.is_active())


def variables_of(lines: Iterable[str]) -> dict[str, str]:
    """What pam_env reads from the lines of /etc/environment."""
    return {match[1]: match[3] for line in lines if (match := VARIABLE.fullmatch(line))}


def text_lines(file: Iterable[bytes]) -> Iterator[str]:
    """Lines as text whatever bytes they hold: pyinfra's own reader would stop at a byte that is not UTF-8."""
    for line in file:
        yield line.decode("utf-8", "backslashreplace")

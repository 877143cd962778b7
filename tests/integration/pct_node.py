"""A Proxmox node for the tests of @pct: a real ssh server on 127.0.0.1, and stubs of lxc-attach and lxc-info.

The server is paramiko's, in a process of its own, so that the tests run without sshd and without root. The stub of
lxc-attach notes its arguments and runs the command here; what it prints when a container does not run is LXC 5's.

    python -m tests.integration.pct_node DIRECTORY     # prints the port; ends with its stdin
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import paramiko

ATTACH = """#!{python} -ISE
import json, os, sys
base, words = {base!r}, sys.argv[1:]
with open(base + "/attached", "a") as log:
    log.write(json.dumps({{"pid": os.getpid(), "argv": words}}) + chr(10))
name, command = words[words.index("-n") + 1], words[words.index("--") + 1:]
state = base + "/state/" + name
if not os.path.exists(state) or open(state).read() != "RUNNING":
    for line in ("get_attach_context: 406 Connection refused - Failed to get init pid",
                 "lxc_attach: 1470 Connection refused - Failed to get attach context"):
        print(f"lxc-attach: {{name}}: ../src/lxc/attach.c: {{line}}", file=sys.stderr)
    sys.exit(1)
inside = dict(word[len("--set-var="):].split("=", 1) for word in words if word.startswith("--set-var="))
try:
    outside = {{}} if "--clear-env" in words else dict(os.environ)
    os.execvpe(command[0], command, {{**outside, **inside, "container": "lxc"}})
except FileNotFoundError:
    print(f"lxc-attach: {{name}}: ../src/lxc/attach.c: lxc_attach_run_command: 1841 No such file or directory - "
          f'Failed to exec "{{command[0]}}"', file=sys.stderr)
    sys.exit(127)
"""
INFO = """#!/bin/sh
echo "$*" >> {base}/asked
[ "$1 $3" = "-n -sH" ] || exit 2
if [ -f "{base}/state/$2" ]; then cat "{base}/state/$2"; echo; else echo "$2 doesn't exist" >&2; exit 1; fi
"""


class PctNode:
    """The test's side. Its files: state/<vmid> holds RUNNING or STOPPED, or is absent, as the container is."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in ("bin", "state"):
            (directory / name).mkdir()
        for name, text in (("lxc-attach", ATTACH), ("lxc-info", INFO)):
            program = directory / "bin" / name
            program.write_text(text.format(python=sys.executable, base=str(directory)))
            program.chmod(0o755)
        for name in ("id", "host_key"):
            paramiko.ECDSAKey.generate().write_private_key_file(str(directory / name))
        self._process = self._started()
        host_key = paramiko.ECDSAKey(filename=str(directory / "host_key"))
        entry = f"[127.0.0.1]:{self.port} {host_key.get_name()} {host_key.get_base64()}\n"
        (directory / "known_hosts").write_text(entry)

    def _started(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.integration.pct_node", str(self.directory)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        self.port = int(process.stdout.readline())
        return process

    def stop(self) -> None:
        self._process.communicate()

    @property
    def ssh_data(self) -> dict[str, Any]:
        return {
            "ssh_hostname": "127.0.0.1",
            "ssh_port": self.port,
            "ssh_user": "root",
            "ssh_key": str(self.directory / "id"),
            "ssh_known_hosts_file": str(self.directory / "known_hosts"),
            "ssh_strict_host_key_checking": "yes",
        }

    def set_state(self, vmid: int, state: str) -> None:
        """The container's state for lxc-info. One that stops running takes the processes inside with it."""
        (self.directory / "state" / str(vmid)).write_text(state)
        if state != "RUNNING":
            for call in self.attached():
                if call["argv"][:2] == ["-n", str(vmid)]:
                    try:
                        os.kill(call["pid"], signal.SIGKILL)
                    except ProcessLookupError:
                        continue

    def attached(self) -> list[dict[str, Any]]:
        """Every call of lxc-attach: its pid and argv."""
        log = self.directory / "attached"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def connections(self) -> int:
        log = self.directory / "connections"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def limit_sessions(self, number: int) -> None:
        """As MaxSessions of sshd_config does."""
        (self.directory / "max_sessions").write_text(str(number))

    def cut(self) -> None:
        """Drop every connection."""
        self._process.send_signal(signal.SIGUSR1)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Its kernel still acknowledges what arrives, and nobody answers: as sshd of a machine that hangs."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)


class Connection(paramiko.ServerInterface):
    """One connection: the client's key gets in, commands are run by sh with the stubs first on PATH."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = paramiko.ECDSAKey(filename=str(directory / "id"))
        self._sessions: set[int] = set()

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return paramiko.AUTH_SUCCESSFUL if key == self._key else paramiko.AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        limit = self._directory / "max_sessions"
        if limit.exists() and len(self._sessions) >= int(limit.read_text()):
            return paramiko.OPEN_FAILED_CONNECT_FAILED
        self._sessions.add(chanid)
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        threading.Thread(target=self._serve, args=(channel, command), daemon=True).start()
        return True

    def _serve(self, channel: paramiko.Channel, command: bytes) -> None:
        environment = {**os.environ, "PATH": f"{self._directory / 'bin'}:{os.environ['PATH']}", "OF_THE_NODE": "1"}
        pipe = subprocess.PIPE
        process = subprocess.Popen([b"sh", b"-c", command], stdin=pipe, stdout=pipe, stderr=pipe, env=environment)
        assert process.stdin and process.stdout and process.stderr
        threading.Thread(target=_to_process, args=(channel, process.stdin), daemon=True).start()
        outputs = [
            threading.Thread(target=_to_client, args=(process.stdout, channel.sendall)),
            threading.Thread(target=_to_client, args=(process.stderr, channel.sendall_stderr)),
        ]
        for output in outputs:
            output.start()
        for output in outputs:
            output.join()
        code = process.wait()
        self._sessions.discard(channel.chanid)
        channel.send_exit_status(code if code >= 0 else 128 - code)
        channel.close()


def _to_process(channel: paramiko.Channel, stdin: IO[bytes]) -> None:
    try:
        while data := channel.recv(65536):
            stdin.write(data)
            stdin.flush()
        stdin.close()
    except OSError:
        return


def _to_client(pipe: IO[bytes], send: Any) -> None:
    try:
        while data := os.read(pipe.fileno(), 65536):
            send(data)
    except OSError:
        return


def main(directory: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    host_key = paramiko.ECDSAKey(filename=str(directory / "host_key"))
    transports: list[paramiko.Transport] = []
    signal.signal(signal.SIGUSR1, lambda *_: [transport.close() for transport in transports])

    def accept() -> None:
        while True:
            client, _ = listener.accept()
            with (directory / "connections").open("a") as log:
                log.write("connection\n")
            transport = paramiko.Transport(client)
            transport.add_server_key(host_key)
            transport.start_server(event=threading.Event(), server=Connection(directory))
            transports.append(transport)

    threading.Thread(target=accept, daemon=True).start()
    print(listener.getsockname()[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

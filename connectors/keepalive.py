"""An ssh connection whose other end went away without a word is noticed, closed, and told with what to do.

paramiko sends keepalives and never looks for their answers, so such a connection would end only when the kernel gives
up retransmitting: after a quarter of an hour on Linux (net.ipv4.tcp_retries2 = 15), and never while the machine answers
and its sshd does not. OpenSSH's client counts questions that stay unanswered; so does this, by the same two settings.
"""

from __future__ import annotations

import time
from threading import Thread
from weakref import WeakSet

from paramiko import SSHException, Transport
from pyinfra import state
from pyinfra.api.host import Host
from pyinfra.api.state import BaseStateCallback, State
from pyinfra.connectors.ssh import SSHConnector
from pyinfra.connectors.sshuserclient.client import get_ssh_config

# Without ServerAliveInterval and ServerAliveCountMax in the operator's ssh_config: lost within 75 s.
INTERVAL_S = 15
UNANSWERED = 4
# sshd answers a request that it does not know with a failure (RFC 4254, section 4), which is as good a sign of life.
QUESTION = "keepalive@openssh.com"

WHAT_TO_DO = "see that it answers, then run the same again: it waits for what still runs, and takes up the rest"


def lost(name: str) -> str:
    """What is said of a host or node that the connection was lost to."""
    return f"the ssh connection to {name} was lost; what it was doing may still be running there"


def keep_watch(connector: SSHConnector) -> None:
    """Close the connection that `connector` has now once its questions stay unanswered; what waits on it then fails."""
    transport = connector.client and connector.client.get_transport()
    interval_s, unanswered = _patience(connector)
    if transport and interval_s > 0:
        Thread(target=_watch, args=(transport, interval_s, unanswered), daemon=True).start()


def watch_connections() -> None:
    """For a deploy's first line: watch every ssh connection of this run, also those that are made later.

    When a host fails for its lost connection, that and what to do is the last that is said of it.
    """
    run = state.inventory.state
    if run in _watched:
        return
    _watched.add(run)
    run.add_callback_handler(_Watch())
    for host in run.activated_hosts:
        _Watch.host_connect(run, host)


class _Watch(BaseStateCallback):
    @staticmethod
    def host_connect(state: State, host: Host) -> None:
        if isinstance(host.connector, SSHConnector):
            keep_watch(host.connector)

    @staticmethod
    def host_disconnect(state: State, host: Host) -> None:
        if host in state.failed_hosts and isinstance(host.connector, SSHConnector) and _is_closed(host.connector):
            host.log_styled(lost(host.name), fg="red")
            host.log_styled(f"  what to do: {WHAT_TO_DO}", fg="red")


_watched: WeakSet[State] = WeakSet()  # runs; a deploy's code runs once for each host


def _is_closed(connector: SSHConnector) -> bool:
    transport = connector.client and connector.client.get_transport()
    return not (transport and transport.is_active())


def _patience(connector: SSHConnector) -> tuple[int, int]:
    """Seconds between questions, 0 for none, and how many of these may pass without an answer."""
    config = get_ssh_config(connector.data["ssh_config_file"])
    said = config.lookup(connector.data["ssh_hostname"] or connector.host.name) if config else {}
    return int(said.get("serveraliveinterval", INTERVAL_S)), int(said.get("serveralivecountmax", UNANSWERED))


def _watch(transport: Transport, interval_s: int, unanswered: int) -> None:
    while transport.is_active():
        time.sleep(interval_s)
        question = Thread(target=_ask, args=(transport,), daemon=True)
        question.start()
        for _ in range(unanswered):  # in turns: when this process was busy itself, it must first get to read the answer
            question.join(interval_s)
            if not question.is_alive():
                break
        else:
            transport.close()


def _ask(transport: Transport) -> None:
    """Returns on the answer, or when the connection is closed."""
    try:
        transport.global_request(QUESTION, wait=True)
    except (SSHException, OSError, EOFError):
        return  # closed

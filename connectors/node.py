"""The ssh connection to a Proxmox VE node, shared by every container on it in one run."""

from __future__ import annotations

import socket
from weakref import WeakKeyDictionary

from gevent.lock import BoundedSemaphore
from paramiko import Channel, ChannelException, SSHClient, SSHException, Transport
from pyinfra.api.exceptions import ConnectError
from pyinfra.api.host import Host
from pyinfra.api.state import State
from pyinfra.connectors.ssh import SSHConnector

from connectors.keepalive import keep_watch

OPEN_S = 30  # paramiko's own limit for opening a channel is an hour
ATTEMPTS = 8


class Node:
    """Channels to one node. A second connection is made only when the node refuses another channel (MaxSessions)."""

    def __init__(self, name: str, state: State, owner: Host) -> None:
        """`owner`: whose ssh_* data to connect with."""
        self.name = name
        self._state, self._owner = state, owner
        self._clients: list[SSHClient] = []
        self._connecting = BoundedSemaphore()

    def open_channel(self) -> Channel:
        """Connects anew when the connection was lost. Raises ConnectError."""
        refused: list[SSHClient] = []
        problem: Exception | None = None
        for _ in range(ATTEMPTS):
            client = self._client(refused)
            try:
                return _transport(client).open_session(timeout=OPEN_S)
            except ChannelException as error:
                problem = error
                refused.append(client)
            except (SSHException, OSError, EOFError) as error:
                problem = error
                client.close()
        raise ConnectError(f"sshd opens no session: {problem}")

    def _client(self, refused: list[SSHClient]) -> SSHClient:
        """A live connection that is not one of `refused`, made if need be. Containers that ask at once share it."""
        with self._connecting:
            self._clients = [client for client in self._clients if _is_alive(client)]
            for client in self._clients:
                if client not in refused:
                    return client
            self._clients.append(self._connected())
            return self._clients[-1]

    def _connected(self) -> SSHClient:
        ssh = SSHConnector(self._state, self._owner)
        ssh.connect()
        assert ssh.client is not None
        keep_watch(ssh)
        transport = _transport(ssh.client)
        if isinstance(transport.sock, socket.socket):
            # Without it every command waits 40 ms: Nagle holds a small packet back for an acknowledgement that is late.
            transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return ssh.client


def _transport(client: SSHClient) -> Transport:
    transport = client.get_transport()
    if transport is None:
        raise SSHException("closed")
    return transport


def _is_alive(client: SSHClient) -> bool:
    transport = client.get_transport()
    return transport is not None and transport.is_active()


_nodes: WeakKeyDictionary[State, dict[tuple[str, str], Node]] = WeakKeyDictionary()


def node_for(state: State, name: str, container: Host) -> Node:
    """The node `name` of this run. Its own entry in the inventory says how to reach it, else the container's data does.

    Raises ConnectError when the inventory reaches the node by something else than ssh.
    """
    inventory = state.inventory
    owner = inventory.get_host(name, None) or inventory.get_host(f"@ssh/{name}", None) or container
    if owner is not container and not issubclass(owner.connector_cls, SSHConnector):
        raise ConnectError(f"node {name} is in the inventory, but not as an ssh host: containers are reached by ssh")
    data = SSHConnector(state, owner).data
    nodes = _nodes.setdefault(state, {})
    return nodes.setdefault((data["ssh_hostname"] or owner.name, repr(data)), Node(name, state, owner))

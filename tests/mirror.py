"""A real HTTP server on 127.0.0.1 that serves files and misbehaves when told; also the part of the hub's API in use.

A path has a list of faults; each request for bytes uses up the first. With none left the server behaves.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

Fault = Callable[["Handler", bytes, int], None]


class Seen(NamedTuple):
    method: str
    path: str
    start: int
    authorization: str | None


class Mirror(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        self.seen: list[Seen] = []
        self.sent: dict[str, int] = defaultdict(int)
        self.closing = threading.Event()
        self.chunk_pause_s = 0.0
        self.hub: Hub | None = None
        self.length_of_head: str | None = None  # what every HEAD announces, instead of the truth

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def starts(self, path: str) -> list[int]:
        """From which byte each GET of `path` asked."""
        return [seen.start for seen in self.seen if seen.path == path and seen.method == "GET"]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of the tests."""


class Hub:
    """The API of a hub, as far as huggingface_hub asks for the list of a commit and for the address of a file.

    Shapes from huggingface_hub 2.4 (hf_api.py, RepoFile and list_repo_tree; file_download.py, hf_hub_url).
    """

    def __init__(self, repository: str, revision: str, files: dict[str, bytes], *, large: int = 100) -> None:
        self.repository, self.revision = repository, revision
        self.files = files
        self.large = large
        self.token: str | None = None
        self.page = 3  # entries a page: the client has to follow links

    def tree(self) -> list[dict[str, Any]]:
        folders = [
            {"type": "directory", "path": name.split("/")[0], "oid": "0" * 40} for name in self.files if "/" in name
        ]
        return folders + [self._entry(name, data) for name, data in self.files.items()]

    def _entry(self, name: str, data: bytes) -> dict[str, Any]:
        if len(data) < self.large:
            return {"type": "file", "path": name, "size": len(data), "oid": git_id(data)}
        lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return {"type": "file", "path": name, "size": len(data), "oid": "f" * 40, "lfs": lfs}


def git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Mirror

    def log_message(self, format: str, *arguments: Any) -> None:
        """Silent."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        found = re.match(r"bytes=(\d+)-$", self.headers.get("Range", ""))
        start = int(found[1]) if found else 0
        self.server.seen.append(Seen(self.command, path, start, self.headers.get("Authorization")))
        if self.server.hub is not None and path.startswith("/api/"):
            self._hub_list(self.server.hub, path)
            return
        if self.server.hub is not None and "/resolve/" in path:
            self._hub_resolve(self.server.hub, path)
            return
        data = self.server.files.get(path)
        if data is None:
            self.say(404)
            return
        if self.command == "GET" and self.server.faults[path]:
            self.server.faults[path].pop(0)(self, data, start)
            return
        self.serve(data, start)

    def serve(self, data: bytes, start: int) -> None:
        """As a good server does."""
        if start and start >= len(data):
            self.say(416, {"Content-Range": f"bytes */{len(data)}"})
            return
        self.head(data, start)
        self.body(data[start:])

    def head(self, data: bytes, start: int, **changed: str) -> None:
        if self.command == "HEAD" and self.server.length_of_head is not None:
            changed["Content_Length"] = self.server.length_of_head
        self.send_response(206 if start else 200)
        headers = {"Content-Length": str(len(data) - start), "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        for name, value in (headers | {name.replace("_", "-"): value for name, value in changed.items()}).items():
            self.send_header(name, value)
        self.end_headers()

    def body(self, data: bytes) -> None:
        if self.command == "HEAD":
            return
        for at in range(0, len(data), 64 * 1024):
            if self.server.chunk_pause_s:
                time.sleep(self.server.chunk_pause_s)
            piece = data[at : at + 64 * 1024]
            self.wfile.write(piece)
            self.server.sent[unquote(urlsplit(self.path).path)] += len(piece)

    def say(self, status: int, headers: dict[str, str] | None = None, data: bytes = b"") -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _hub_list(self, hub: Hub, path: str) -> None:
        if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.say(401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "this repository asks for a token"})
            return
        if path != f"/api/models/{hub.repository}/tree/{hub.revision}":
            self.say(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "no such revision"})
            return
        tree = hub.tree()
        asked = re.search(r"cursor=(\d+)", self.path)
        at = int(asked[1]) if asked else 0
        headers = {"Content-Type": "application/json"}
        if at + hub.page < len(tree):
            again = f"{self.server.url}{path}?recursive=True&cursor={at + hub.page}"
            headers["Link"] = f'<{again}>; rel="next"'
        self.say(200, headers, json.dumps(tree[at : at + hub.page]).encode())

    def _hub_resolve(self, hub: Hub, path: str) -> None:
        """Large files lie elsewhere: another host, at a signed address."""
        prefix = f"/{hub.repository}/resolve/{hub.revision}/"
        name = path.removeprefix(prefix)
        data = hub.files.get(name)
        if data is None or not path.startswith(prefix):
            self.say(404)
        elif hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.say(401)
        elif len(data) < hub.large:
            start = int(found[1]) if (found := re.match(r"bytes=(\d+)-$", self.headers.get("Range", ""))) else 0
            self.serve(data, start)
        else:
            self.server.files[f"/cdn/{name}"] = data
            port = self.server.server_address[1]
            self.say(302, {"Location": f"http://localhost:{port}/cdn/{name}?X-Signature=secret-of-the-cdn"})


def stall(after: int = 0) -> Fault:
    """Some bytes, then silence."""

    def act(handler: Handler, data: bytes, start: int) -> None:
        handler.head(data, start)
        handler.body(data[start : start + after])
        handler.server.closing.wait(20)
        handler.close_connection = True

    return act


def hold(event: threading.Event) -> Fault:
    """Nothing until the test says so, then as a good server."""

    def act(handler: Handler, data: bytes, start: int) -> None:
        event.wait(60)
        handler.serve(data, start)

    return act


def trickle(pause_s: float) -> Fault:
    """A byte now and then: never silent, never done."""

    def act(handler: Handler, data: bytes, start: int) -> None:
        handler.head(data, start)
        for at in range(start, len(data)):
            if handler.server.closing.wait(pause_s):
                break
            handler.wfile.write(data[at : at + 1])
        handler.close_connection = True

    return act


def cut(after: int) -> Fault:
    """The connection ends early."""

    def act(handler: Handler, data: bytes, start: int) -> None:
        handler.head(data, start)
        handler.body(data[start : start + after])
        handler.close_connection = True

    return act


def cut_without_length(after: int) -> Fault:
    """The connection ends early, and no header said how much was to come."""

    def act(handler: Handler, data: bytes, start: int) -> None:
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.body(data[:after])
        handler.close_connection = True

    return act


def corrupt(handler: Handler, data: bytes, start: int) -> None:
    """One bit, in the middle of what is sent."""
    wrong = bytearray(data)
    wrong[(start + len(data)) // 2] ^= 4
    handler.serve(bytes(wrong), start)


def ignore_range(handler: Handler, data: bytes, start: int) -> None:
    handler.serve(data, 0)


def other_range(handler: Handler, data: bytes, start: int) -> None:
    """206, and other bytes than the ones asked for."""
    if not start:
        handler.serve(data, start)
        return
    handler.head(data, start, Content_Range=f"bytes 0-{len(data) - 1 - start}/{len(data)}")
    handler.body(data[: len(data) - start])


def too_long(handler: Handler, data: bytes, start: int) -> None:
    handler.serve(data + b"more", start)


def too_long_without_length(handler: Handler, data: bytes, start: int) -> None:
    handler.send_response(200)
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.body(data + b"more")
    handler.close_connection = True


def status(code: int, **headers: str) -> Fault:
    def act(handler: Handler, data: bytes, start: int) -> None:
        handler.say(code, {name.replace("_", "-"): value for name, value in headers.items()}, b"<html>no</html>")

    return act


def error_page(handler: Handler, data: bytes, start: int) -> None:
    """200, and a page of a proxy instead of the file."""
    handler.say(200, {"Content-Type": "text/html"}, b"<html>please log in</html>")


def redirect(to: str) -> Fault:
    def act(handler: Handler, data: bytes, start: int) -> None:
        handler.say(302, {"Location": to})

    return act


@contextmanager
def mirror(files: dict[str, bytes]) -> Iterator[Mirror]:
    """Serve `files` by path; a manifest of them is /SHA256SUMS unless they hold one."""
    server = Mirror()
    sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {path.lstrip('/')}\n" for path, data in files.items())
    server.files = {"/SHA256SUMS": sums.encode(), **files}
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()

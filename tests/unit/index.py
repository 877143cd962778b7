"""A package index and file server on this machine that can fail: real HTTP, real range requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

# artefacts.toml of a stack whose kernels come from this index, by one candidate.
ARTEFACT = """
[[unproved]]
name = "kernels"
version = "1.0+cu130"
file = "kernels-1.0+cu130-py3-none-any.whl"
index = "ours"
[[unproved.candidates]]
sha256 = "{sha256}"
source = "somebody"
"""


@dataclass
class Index:
    """`files` by name; `pages` by project. `cut_after`: how many bytes an answer has before the connection breaks."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    pages: dict[str, str] = field(default_factory=dict)
    ranges: bool = True
    cut_after: int | None = None
    errors: list[int] = field(default_factory=list)
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    def add(self, project: str, file: str, data: bytes, *fragments: str) -> None:
        """List `file` on the page of `project`, once for each of `fragments` (one without when there are none)."""
        self.files[file] = data
        links = "".join(f'<a href="../files/{file}{fragment}">{file}</a><br>\n' for fragment in fragments or ("",))
        self.pages[project] = self.pages.get(project, "<!DOCTYPE html>\n") + links


@contextmanager
def serving() -> Iterator[Index]:
    index = Index()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(self.path.strip("/"))
            name = path.rpartition("/")[2]
            index.asked.append((path, self.headers.get("Range")))
            if name in index.files and index.errors:
                self.send_error(index.errors.pop(0))
                return
            if path in index.pages:
                self._answer(200, index.pages[path].encode(), {"Content-Type": "text/html"})
            elif name in index.files:
                self._file(index.files[name])
            else:
                self.send_error(404)

        def _file(self, data: bytes) -> None:
            wanted = self.headers.get("Range")
            if not (wanted and index.ranges):
                self._answer(200, data, {})
                return
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(data):
                self.send_error(416)
                return
            self._answer(206, data[start:], {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"})

        def _answer(self, status: int, data: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            cut = index.cut_after
            self.wfile.write(data[:cut] if cut is not None else data)
            if cut is not None and cut < len(data):
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    index.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield index
    finally:
        server.shutdown()
        server.server_close()

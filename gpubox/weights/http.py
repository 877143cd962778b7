"""Bytes over HTTP from servers that stall, cut off, lie about ranges and come back.

A file goes on from where it stopped, in this run and in the next. Every failure that may pass is tried again, a bounded
number of times; what cannot pass (404, 401) ends at once. Whether the bytes are right is told by their digest alone.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Final, NamedTuple, TypeVar
from urllib.parse import quote, urlsplit

import requests
from requests.auth import AuthBase
from urllib3.exceptions import HTTPError

from gpubox.errors import GpuboxError, InputError
from gpubox.weights.hashing import BUFFER, CancelledError, Expected
from gpubox.weights.manifest import MANIFEST, SIZE_LIMIT, Expectations, parse_manifest, read_manifest
from gpubox.weights.sources import AGAIN, Part, Wanted

PASSING: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
NOT_PASSING: Final = (requests.TooManyRedirects, requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema)
Result = TypeVar("Result")


class Patience(NamedTuple):
    """How long a server gets. Times in seconds.

    stall_s: no byte at all, or fewer than `trickle` bytes in three times as long, and the connection is dropped.
    attempts: in a row without `progress` bytes gained; between them backoff_s, doubled each time up to backoff_limit_s.
    """

    connect_s: float = 10.0
    stall_s: float = 30.0
    trickle: int = 64 * 2**10
    attempts: int = 8
    progress: int = 8 * 2**20
    backoff_s: float = 1.0
    backoff_limit_s: float = 60.0


class PassingError(Exception):
    """A failure that may be gone at the next try. `wait_s`: how long the server asked to be left alone."""

    def __init__(self, said: str, wait_s: float = 0.0) -> None:
        super().__init__(said)
        self.wait_s = wait_s


class Bearer(AuthBase):
    """A token for the first host alone: requests drops it on a redirect to another one."""

    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self._token}"
        return request


class Client:
    """Requests to one server."""

    def __init__(
        self, token: str | None = None, patience: Patience | None = None, cancelled: Event | None = None
    ) -> None:
        self._auth = Bearer(token) if token else None
        self._patience = patience or Patience()
        self._cancelled = cancelled or Event()

    def fill(self, url: str, part: Part) -> None:
        """Bring `part` to all that the server has at `url`. Raises GpuboxError when it is not to be had."""
        self._patiently(url, lambda: self._gain(url, part), lambda: part.length)

    def size(self, url: str) -> int | None:
        """Bytes at `url` as the server announces them; None when it does not. Raises GpuboxError when it has none."""

        def ask() -> int | None:
            with self._session() as session:
                answer = session.head(
                    url, allow_redirects=True, timeout=self._timeout, headers=_headers(0), auth=self._auth
                )
                if answer.status_code in (405, 501):
                    return None
                _check_status(answer, url)
                length = answer.headers.get("Content-Length", "")
                return int(length) or None if length.isdecimal() else None  # 0: some say it of whatever is asked

        return self._patiently(url, ask, lambda: 0)

    def small(self, url: str, limit: int) -> bytes:
        """All bytes at `url`, at most `limit`. Raises GpuboxError."""

        def ask() -> bytes:
            with self._session() as session, self._get(session, url, 0) as answer:
                _check_status(answer, url)
                data = bytearray()
                while chunk := answer.raw.read1(BUFFER, decode_content=False):
                    data += chunk
                    if len(data) > limit:
                        raise GpuboxError(f"{shown(url)}: has more than {limit} bytes")
                return bytes(data)

        return self._patiently(url, ask, lambda: 0)

    @property
    def _timeout(self) -> tuple[float, float]:
        return self._patience.connect_s, self._patience.stall_s

    def _session(self) -> requests.Session:
        session = requests.Session()
        session.max_redirects = 10
        return session

    def _get(self, session: requests.Session, url: str, start: int) -> requests.Response:
        return session.get(url, stream=True, timeout=self._timeout, headers=_headers(start), auth=self._auth)

    def _patiently(self, url: str, attempt: Callable[[], Result], gained: Callable[[], int]) -> Result:
        tries, mark = 0, gained()
        while True:
            try:
                return attempt()
            except (requests.RequestException, HTTPError, PassingError) as error:
                if isinstance(error, NOT_PASSING) or "CERTIFICATE_VERIFY_FAILED" in str(error):
                    raise GpuboxError(f"{shown(url)}: {_said(error)}") from None
                if gained() - mark >= self._patience.progress:
                    tries, mark = 0, gained()
                tries += 1
                if tries >= self._patience.attempts:
                    raise GpuboxError(f"{shown(url)}: {_said(error)}, {tries} times in a row", hint=AGAIN) from None
                asked = error.wait_s if isinstance(error, PassingError) else 0.0
                wait = max(asked, self._patience.backoff_s * 2.0 ** (tries - 1))
                if self._cancelled.wait(min(wait, self._patience.backoff_limit_s)):
                    raise CancelledError from None

    def _gain(self, url: str, part: Part) -> None:
        """One request, for what is missing."""
        if part.size is not None and part.length == part.size:
            return
        with self._session() as session, self._get(session, url, part.length) as answer:
            if answer.status_code == 416:
                if _total(answer) == part.length:
                    return
                part.restart()
                raise PassingError("has less than what was fetched of it before")
            _check_status(answer, url)
            total = _place(answer, part)
            if part.size is not None and total is not None and total != part.size:
                raise PassingError(f"offers {total} bytes, {part.size} are expected")
            self._receive(answer, part)
        wanted = total if part.size is None else part.size
        if wanted is not None and part.length != wanted:
            raise PassingError(f"ended after {part.length} of {wanted} bytes")

    def _receive(self, answer: requests.Response, part: Part) -> None:
        """read1 gives what has come: a server that trickles is seen, where read would wait for a full buffer."""
        since, length = time.monotonic(), part.length
        while chunk := answer.raw.read1(BUFFER, decode_content=False):
            if part.size is not None and part.length + len(chunk) > part.size:
                part.restart()
                raise PassingError(f"sent more than the {part.size} bytes that are expected")
            part.append(chunk)
            now = time.monotonic()
            if now - since > 3 * self._patience.stall_s:
                if part.length - length < self._patience.trickle:
                    raise PassingError(f"sent {part.length - length} bytes in {now - since:.0f} s")
                since, length = now, part.length


class MirrorSource:
    """A directory on an HTTP server, with a manifest in it or beside us."""

    def __init__(self, url: str, manifest: Expectations | None, client: Client) -> None:
        self.where = url.rstrip("/")
        self._client = client
        if manifest is None:
            origin = f"{self.where}/{MANIFEST}"
            found = parse_manifest(client.small(origin, SIZE_LIMIT), origin)
            manifest = Expectations(origin, {name: Expected("sha256", value) for name, value in found.items()})
            self.proves = f"the bytes came whole from {self.where}; its manifest came from there too"
        else:
            self.proves = f"the bytes are those of {manifest.origin}"
        self._expected = manifest

    def wanted(self) -> list[Wanted]:
        return [
            Wanted(name, self._client.size(self._url(name)), expected)
            for name, expected in self._expected.files.items()
        ]

    def fill(self, file: Wanted, part: Part) -> None:
        self._client.fill(self._url(file.name), part)

    def _url(self, name: str) -> str:
        return f"{self.where}/{quote(name)}"


def checked_url(url: str) -> str:
    """An address without secrets in it. Raises InputError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError(f"{shown(url)}: not an http or https address")
    if parts.username or parts.password:
        raise InputError(
            f"{parts.scheme}://{parts.hostname}: an address with a password in it ends up in logs and process lists",
            hint="put user and password into ~/.netrc (mode 0600)",
        )
    if parts.query or parts.fragment:
        raise InputError(f"{shown(url)}: an address of a directory has neither ? nor #")
    return url


def shown(url: str) -> str:
    """An address as it may be printed: without user, password and query (a signed address is a secret)."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rsplit('@', 1)[-1]}{parts.path}"


def local_manifest(path: Path | None) -> Expectations | None:
    return read_manifest(path) if path else None


def _headers(start: int) -> dict[str, str]:
    """identity: a digest is of the file, not of its compressed form."""
    return {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})


def _check_status(answer: requests.Response, url: str) -> None:
    status = answer.status_code
    if status in PASSING:
        after = answer.headers.get("Retry-After", "")
        raise PassingError(f"answered {status}", float(after) if after.isdecimal() else 0.0)
    if status in (401, 403):
        raise GpuboxError(
            f"{shown(url)}: answered {status}",
            hint="the token or the password is missing or wrong, or the repository's terms were not accepted",
        )
    if status not in (200, 206):
        raise GpuboxError(f"{shown(url)}: answered {status}", hint="correct the name, the revision or the address")


def _place(answer: requests.Response, part: Part) -> int | None:
    """Whether what comes continues `part`, else it starts anew. The size of the whole file as the server says it."""
    if answer.status_code == 200:
        if part.length:
            part.restart()
        length = answer.headers.get("Content-Length", "")
        return int(length) if length.isdecimal() else None
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", answer.headers.get("Content-Range", ""))
    if not found or int(found[1]) != part.length:
        part.restart()
        raise PassingError("answered with another range than the one asked for")
    return int(found[3]) if found[3] != "*" else None


def _total(answer: requests.Response) -> int | None:
    found = re.fullmatch(r"bytes \*/(\d+)", answer.headers.get("Content-Range", ""))
    return int(found[1]) if found else None


def _said(error: Exception) -> str:
    """What a library says, in one short line and without queries of addresses."""
    if isinstance(error, requests.ConnectTimeout | requests.ReadTimeout) or "timed out" in str(error):
        return "sent nothing for too long"
    text = re.sub(r"\?[^\s'\")]*", "?...", str(error))
    return text if isinstance(error, PassingError) else f"{type(error).__name__}: {text[:200]}"

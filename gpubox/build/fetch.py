"""Fetch one file whose bytes are known: resumed where it broke off, and nothing but those bytes gets the final name."""

from __future__ import annotations

import hashlib
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from html.parser import HTMLParser
from http.client import HTTPException
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from gpubox.errors import GpuboxError, InputError
from gpubox.files import sync_directory

CHUNK = 1 << 20
TIMEOUT_S = 60.0  # of silence, not of the whole file
TRIES = 5
PART = ".part"

Progress = Callable[[int], None]  # bytes that are there, those of an earlier try among them
Check = Callable[[str], None]  # gets the sha256, raises when it is a wrong one


def fetch(address: str, target: Path, check: Check, *, progress: Progress = lambda done: None) -> None:
    """Put the file at `address` (http, https or file) under `target`, once `check` accepts its sha256.

    What is fetched lies in TARGET.part until then; a later call goes on from there. Raises what `check` raises, and
    GpuboxError when the other side fails TRIES times in a row without sending anything new.
    """
    part = target.with_name(target.name + PART)
    target.parent.mkdir(parents=True, exist_ok=True)
    resumed = part.exists() and part.stat().st_size > 0
    _download(address, part, progress)
    digest = sha256_of(part)
    try:
        check(digest)
    except GpuboxError:
        part.unlink()
        if not resumed:
            raise
        # The beginning may be of another publication than the end: only a file fetched in one piece tells.
        _download(address, part, progress)
        digest = sha256_of(part)
        try:
            check(digest)
        except GpuboxError:
            part.unlink()
            raise
    part.replace(target)
    sync_directory(target.parent)


def sha256_of(path: Path, progress: Progress = lambda done: None) -> str:
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress(done)
    return digest.hexdigest()


def find_in_index(index: str, project: str, file: str) -> str:
    """The address of `file` on the project's page of a simple index (PEP 503). Raises GpuboxError.

    Below a file: address the page is the directory's index.html, as pip has it.
    Hashes on the page are not used: a page may list several for one address, and what counts is the lock's.
    """
    page = f"{index.rstrip('/')}/{project}/"
    links = _Links()
    links.feed(_read(f"{page}index.html" if page.startswith("file:") else page).decode(errors="replace"))
    for link in links.found:
        address = urljoin(page, link)
        if unquote(urlsplit(address).path).rpartition("/")[2] == file:
            return urlunsplit(urlsplit(address)._replace(fragment=""))
    raise GpuboxError(f"{page}: does not list {file}", hint="correct the index's address in indexes, or its mirror")


def _download(address: str, part: Path, progress: Progress) -> None:
    failures = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            _continue(address, part, progress)
            return
        except urllib.error.HTTPError as error:
            if error.code == 416:  # what is there is longer than the file, or all of it
                part.unlink(missing_ok=True)
            elif error.code < 500 and error.code not in (408, 429):
                raise GpuboxError(f"{address}: {error.code} {error.reason}", hint="correct the address") from None
            problem = f"{error.code} {error.reason}"
        except urllib.error.URLError as error:
            if isinstance(error.reason, FileNotFoundError):
                raise InputError(f"{address}: no such file", hint="correct the address") from None
            problem = str(error.reason)
        except (HTTPException, OSError) as error:
            if isinstance(error, OSError) and error.errno == 28:  # the disk is full: no try will mend it
                raise
            problem = str(error) or type(error).__name__
        grown = part.exists() and part.stat().st_size > before
        failures = 0 if grown else failures + 1
        if failures >= TRIES:
            have = part.stat().st_size if part.exists() else 0
            raise GpuboxError(
                f"{address}: {problem}, {TRIES} times in a row",
                hint=f"check network and proxy, then run again: {have / 1e6:.1f} MB that are here are kept",
            )
        time.sleep(min(2.0**failures / 2, 8.0))


def _continue(address: str, part: Path, progress: Progress) -> None:
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(address, headers={"User-Agent": "gpubox"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        status, length = getattr(answer, "status", None), answer.headers.get("Content-Length")
        partial = status == 206
        if partial and not re.match(rf"bytes {have}-", answer.headers.get("Content-Range", "")):
            raise HTTPException("another range than the one asked for")
        have = have if partial else 0
        expected = have + int(length) if length is not None else None
        with part.open("ab" if partial else "wb") as stream:
            while chunk := answer.read(CHUNK):
                stream.write(chunk)
                have += len(chunk)
                progress(have)
            stream.flush()
            os.fsync(stream.fileno())
    if expected is not None and have < expected:
        raise HTTPException(f"ended after {have} of {expected} bytes")


def _read(address: str) -> bytes:
    try:
        request = urllib.request.Request(address, headers={"User-Agent": "gpubox", "Accept": "text/html"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return bytes(answer.read())
    except (HTTPException, OSError) as error:
        raise GpuboxError(f"{address}: {error}", hint="check network and proxy, and indexes in the settings") from None


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found += [value for key, value in attrs if key == "href" and value]

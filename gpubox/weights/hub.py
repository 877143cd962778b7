"""A repository of the Hugging Face hub at one commit: listed by the hub's own client, fetched by our downloader.

The client answers what is where: endpoint (HF_ENDPOINT), token (HF_TOKEN, or the file of `hf auth login`), the files
of a commit with their sizes and digests, the address of each. Its own download is not used: in huggingface_hub 2.4
every download has a temporary name of its own and a killed one starts again at byte 0 (file_download.py,
_download_to_tmp_and_move), which a shard of 10 GB on a slow line never survives.
"""

from __future__ import annotations

import re
from pathlib import Path
from threading import Event

from huggingface_hub import HfApi, constants, get_token, hf_hub_url
from huggingface_hub.hf_api import RepoFile

from gpubox.errors import GpuboxError, InputError
from gpubox.weights.hashing import Expected
from gpubox.weights.http import Client, Patience
from gpubox.weights.manifest import checked_name
from gpubox.weights.sources import AGAIN, Part, Wanted


class HubSource:
    """`repository` is owner/name; `endpoint` None: the client's own. Raises InputError for what is no commit."""

    def __init__(
        self,
        repository: str,
        revision: str,
        *,
        endpoint: str | None = None,
        token_file: Path | None = None,
        patience: Patience | None = None,
        cancelled: Event | None = None,
    ) -> None:
        if not re.fullmatch(r"[0-9a-f]{40}", revision):
            raise InputError(
                f"--revision {revision!r}: not a commit (40 hexadecimal digits)",
                hint="a branch or a tag can move; the commit is on the repository's page, under History",
            )
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository, re.ASCII):
            raise InputError(f"{repository!r}: not the name of a repository", hint="owner/name, as on its page")
        self.repository, self.revision = repository, revision
        self._endpoint = endpoint
        self.where = f"{repository} at {revision}"
        self.proves = "large files have the sha256, small ones the git id that the hub lists for this commit"
        self._token = _read_token(token_file) if token_file else get_token()
        self._client = Client(self._token, patience, cancelled)

    def wanted(self) -> list[Wanted]:
        """Raises GpuboxError in the client's own words, InputError for a file too large for plain HTTP."""
        try:
            tree = HfApi(self._endpoint, token=self._token or False).list_repo_tree(
                self.repository, revision=self.revision, recursive=True
            )
            files = [entry for entry in tree if isinstance(entry, RepoFile)]
        except Exception as error:  # each major version of the client raises the errors of another HTTP library
            text = str(error).strip().splitlines() or [type(error).__name__]
            raise GpuboxError(f"{self.where}: {text[0]}", hint=_hint(error), detail="\n".join(text[1:])) from None
        return [self._wanted(file) for file in files]

    def fill(self, file: Wanted, part: Part) -> None:
        """The address is asked for anew with every request: where it leads to is signed and expires."""
        url = hf_hub_url(self.repository, file.name, revision=self.revision, endpoint=self._endpoint)
        self._client.fill(url, part)

    def _wanted(self, file: RepoFile) -> Wanted:
        name = checked_name(file.path, self.where)
        if file.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
            raise InputError(f"{self.where}: {name} has {file.size} bytes: more than the hub gives over plain HTTP")
        if file.lfs is not None:
            return Wanted(name, file.lfs.size, Expected("sha256", file.lfs.sha256))
        return Wanted(name, file.size, Expected("git", file.blob_id))


def _read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--token-file {path}: cannot be read: {error}") from None
    if not token or not token.isprintable() or " " in token:
        raise InputError(f"--token-file {path}: holds no token", hint="one line, nothing else")
    return token


def _hint(error: Exception) -> str:
    if "Gated" in type(error).__name__ or "NotFound" in type(error).__name__:
        return "check the name and the commit; a private or gated repository needs a token: HF_TOKEN or --token-file"
    return AGAIN

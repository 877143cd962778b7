"""The release store: releases, the links current and previous, failed marks, retention."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from gpubox.build.libcuda_standin import STANDIN, refuse_on_nvidia_host
from gpubox.errors import BrokenError, InputError
from gpubox.files import link_atomic, sync_directory, write_atomic
from gpubox.layout import Layout
from gpubox.specs.checkpoint import check_model_directory
from gpubox.specs.release import RELEASE_ID, Release, read_release
from gpubox.toml import nearest


class Store:
    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def ids(self) -> list[str]:
        """Complete releases, by name. What has another name is half-built and invisible."""
        if not self.layout.releases.is_dir():
            return []
        return sorted(entry.name for entry in self.layout.releases.iterdir() if RELEASE_ID.match(entry.name))

    def resolve(self, word: str) -> str:
        """The release that `word` names: a full id, a unique beginning, or a unique digest. Raises InputError."""
        ids = self.ids()
        if word in ids:
            return word
        found = [name for name in ids if name.startswith(word) or name.rsplit("-", 1)[1].startswith(word)]
        if len(found) == 1:
            return found[0]
        if found:
            raise InputError(f"release {word!r} is ambiguous: {', '.join(found)}", hint="give more of it")
        raise InputError(
            f"there is no release {word!r} on this box", hint=nearest(word, ids) if ids else "deploy first"
        )

    def read(self, release_id: str) -> Release:
        return read_release(self.layout.releases / release_id)

    def check(self, release_id: str) -> Release:
        """The release, if all that it needs is there. Raises BrokenError naming what is missing.

        Raises RefusedError for a stack with the libcuda stand-in on a host that has a driver.
        """
        release = self.read(release_id)
        stack = self.layout.stacks / release.stack_id
        if (stack / STANDIN).exists():
            refuse_on_nvidia_host(f"release {release_id}")
        needed = {"stack": stack / "stack.json"}
        if release.model_id:
            needed["model"] = self.layout.models / release.model_id / "model.json"
        else:
            check_model_directory(Path(release.model_path))
        if release.draft_id:
            needed["draft"] = self.layout.models / release.draft_id / "model.json"
        for what, path in needed.items():
            if not path.is_file():
                raise BrokenError(
                    f"release {release_id}: its {what} is not complete: {path} is missing",
                    hint="deploy again: what is missing is rebuilt",
                )
        return release

    def add(self, spec: Path) -> str:
        """Copy a rendered release from `spec` into the store; complete or not at all. Returns its id."""
        release = Release.model_validate_json((spec / "release.json").read_bytes())
        final = self.layout.releases / release.id
        if final.is_dir():
            read_release(final)
            return release.id
        building = self.layout.releases / f".building-{release.id}"
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        for name in ("release.json", *release.files):
            write_atomic(building / name, (spec / name).read_bytes(), 0o755 if name == "serve" else 0o644)
        read_release(building)
        building.rename(final)
        sync_directory(self.layout.releases)
        return release.id

    def current(self) -> str | None:
        return _link_name(self.layout.current)

    def previous(self) -> str | None:
        return _link_name(self.layout.previous)

    def set_current(self, release_id: str | None) -> None:
        """None: nothing is served (the first release of a box failed)."""
        if release_id is None:
            self.layout.current.unlink(missing_ok=True)
            sync_directory(self.layout.root)
        else:
            link_atomic(self.layout.current, f"releases/{release_id}")

    def set_previous(self, release_id: str) -> None:
        link_atomic(self.layout.previous, f"releases/{release_id}")

    def failed_reason(self, release_id: str) -> str | None:
        """Why the release failed when it was last tried, or None."""
        path = self._mark(release_id)
        return str(json.loads(path.read_text())["reason"]) if path.is_file() else None

    def mark_failed(self, release_id: str, reason: str) -> None:
        self._mark(release_id).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self._mark(release_id), json.dumps({"reason": reason}).encode())

    def clear_failed(self, release_id: str) -> None:
        self._mark(release_id).unlink(missing_ok=True)

    def collect(self, keep: int, protect: Iterable[str], newest_first: list[str]) -> list[str]:
        """Remove releases beyond the `keep` newest (order given), then stacks and caches that none of the rest needs.

        What interrupted builds left goes too. The caller holds the box's lock, so none of those is still being built.

        Never touches current, previous or `protect`. Returns what was removed.
        """
        kept = {*protect, *newest_first[:keep], *filter(None, (self.current(), self.previous()))}
        removed = [name for name in self.ids() if name not in kept]
        for name in removed:
            _remove(self.layout.releases / name)
            self.clear_failed(name)
        for parent in (self.layout.releases, self.layout.stacks):
            for leftover in [*parent.glob(".building-*"), *parent.glob(".removing-*")]:
                shutil.rmtree(leftover)
        needed = {self.read(name).stack_id for name in self.ids()}
        for stack in self._complete_stacks():
            if stack not in needed:
                _remove(self.layout.stacks / stack)
                shutil.rmtree(self.layout.jit_cache(stack), ignore_errors=True)
                removed.append(stack)
        return removed

    def _complete_stacks(self) -> list[str]:
        if not self.layout.stacks.is_dir():
            return []
        return sorted(entry.name for entry in self.layout.stacks.iterdir() if not entry.name.startswith("."))

    def _mark(self, release_id: str) -> Path:
        return self.layout.state / "failed" / f"{release_id}.json"


def _link_name(link: Path) -> str | None:
    return link.readlink().name if link.is_symlink() else None


def _remove(directory: Path) -> None:
    """Take the final name away first: a removal that is cut short leaves nothing that looks complete."""
    doomed = directory.with_name(f".removing-{directory.name}")
    directory.rename(doomed)
    shutil.rmtree(doomed)

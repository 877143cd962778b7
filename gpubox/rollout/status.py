"""What the box is doing, read from the box itself: models behind `gpubox status`, `releases` and `verify`."""

from __future__ import annotations

import re
from importlib.metadata import distributions
from pathlib import Path

from pydantic import BaseModel

from gpubox.build.patches import drifted
from gpubox.errors import GpuboxError
from gpubox.rollout.activation import Box, Progress
from gpubox.rollout.history import Entry
from gpubox.specs.lockfile import parse_lock
from gpubox.specs.model import verify_model


class ReleaseRow(BaseModel):
    """One release on the box. `last`: the newest verdict on it; `failed`: why it may not be activated again."""

    id: str
    server: str
    stack: str
    current: bool
    previous: bool
    last: Entry | None
    failed: str | None
    problem: str | None


class Status(BaseModel):
    current: str | None
    previous: str | None
    unit: str
    running: str | None
    restarts: int
    main_pid: int
    address: str | None
    served_model_name: str | None
    last: Entry | None
    lock: str | None
    activation: Progress | None
    interrupted: str | None
    overlay: str | None
    overrides: dict[str, str] = {}
    advice: str


def releases(box: Box) -> list[ReleaseRow]:
    """Every complete release, the current one first."""
    entries = list(box.history)
    current, previous = box.store.current(), box.store.previous()
    rows = [
        ReleaseRow(
            id=name,
            server=name.rsplit("-", 1)[0],
            stack="?",
            current=name == current,
            previous=name == previous,
            last=next((entry for entry in reversed(entries) if entry.to_release == name), None),
            failed=box.store.failed_reason(name),
            problem=None,
        )
        for name in box.store.ids()
    ]
    return sorted((_described(box, row) for row in rows), key=lambda row: (not row.current, not row.previous, row.id))


def _described(box: Box, row: ReleaseRow) -> ReleaseRow:
    try:
        release = box.store.check(row.id)
    except GpuboxError as error:
        return row.model_copy(update={"problem": error.message})
    return row.model_copy(update={"server": release.server, "stack": release.stack})


def status(box: Box) -> Status:
    state = box.service.state()
    current = box.store.current()
    release = box.store.read(current) if current else None
    running = box.service.running_release()
    pending, holder = box.pending(), box.lock.holder()
    busy = box.lock.busy()
    seen = Status(
        current=current,
        previous=box.store.previous(),
        unit=f"{state.active} ({state.sub})",
        running=running,
        restarts=state.restarts,
        main_pid=state.main_pid,
        address=release.base_url if release else None,
        served_model_name=release.served_model_name if release else None,
        last=next(iter(reversed(list(box.history))), None),
        lock=str(holder) if holder else None,
        activation=box.progress() if busy else None,
        interrupted=pending.to_release if pending and not busy else None,
        overlay=release.overlay if release else None,
        overrides=release.overrides if release else {},
        advice="",
    )
    return seen.model_copy(update={"advice": _advice(seen, active=state.active == "active")})


def _advice(seen: Status, *, active: bool) -> str:
    """What to do next, the most urgent first."""
    cases: list[tuple[bool, str]] = [
        (seen.interrupted is not None, "an activation was interrupted: gpubox recover"),
        (seen.activation is not None, "an activation is running: wait, or look again with gpubox status"),
        (seen.current is None, "nothing serves on this box yet: pyinfra inventory.py deploy.py"),
        (not active, "the server is down: journalctl -u sglang -n 50; gpubox rollback puts the previous release back"),
        (seen.running != seen.current, f"the server does not run current: gpubox activate {seen.current}"),
        (seen.restarts > 0, "the server crashed and was restarted: journalctl -u sglang; gpubox rollback"),
    ]
    return next((advice for applies, advice in cases if applies), "nothing; gpubox health asks the server a question")


def verify(box: Box, release_id: str, *, deep: bool) -> list[str]:
    """Problems of a release and all that it needs; empty when it is as it was proved.

    deep: also hash the files of the model.
    """
    try:
        release = box.store.check(release_id)
    except GpuboxError as error:
        return [str(error)]
    problems = stack_problems(box.layout.stacks / release.stack_id)
    if deep and release.model_id:
        try:
            verify_model(box.layout.models / release.model_id)
        except GpuboxError as error:
            problems.append(str(error))
    return problems


def stack_problems(stack: Path) -> list[str]:
    """Distributions that the lock names and the venv lacks, or the other way round; patched files that changed."""
    python = _python_of(stack)
    if python is None:
        return [f"{stack}: its venv is gone"]
    found = {_normal(d.name): d.version for d in distributions(path=[str(python / "site-packages")])}
    expected = locked_versions(stack)
    problems = [
        f"{stack.name}: {name} is {found.get(name, 'missing')}, locked is {version}"
        for name, version in expected.items()
        if found.get(name) != version
    ]
    problems += [f"{stack.name}: {name} {found[name]} is not in the lock" for name in found.keys() - expected.keys()]
    return problems + [f"{stack.name}: {text}" for text in drifted(stack / "stack.json", python / "site-packages")]


def locked_versions(stack: Path) -> dict[str, str]:
    """Versions by distribution that the lock of a built stack names for its Python; empty when its venv is gone."""
    python = _python_of(stack)
    if python is None:
        return {}
    lock = parse_lock((stack / "requirements.lock").read_text(encoding="utf-8"))
    return dict(lock.expected(python.name.removeprefix("python")))


def _python_of(stack: Path) -> Path | None:
    """venv/lib/python3.x"""
    return next((stack / "venv" / "lib").glob("python3.*"), None)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()

"""Which release a rollback goes to."""

from __future__ import annotations

from gpubox.errors import InputError
from gpubox.rollout.activation import Box
from gpubox.rollout.history import Verdict
from gpubox.toml import nearest


def rollback_target(box: Box, *, release: str | None, stack: str | None) -> str:
    """The release to put back: the named one, the newest of a stack, or the previous one. Raises InputError."""
    if release and stack:
        raise InputError("give a release or --stack, not both")
    if release:
        return box.store.resolve(release)
    if stack:
        return _newest_of_stack(box, stack)
    previous = box.store.previous()
    if previous is None:
        raise InputError(
            "there is no previous release: this box has served only one",
            hint="gpubox releases shows what is here; gpubox rollback --stack NAME takes a standby stack",
        )
    return previous


def _newest_of_stack(box: Box, stack: str) -> str:
    """The release of the current server on `stack` that proved last, else one that is only staged."""
    current = box.store.current()
    server = box.store.read(current).server if current else None
    here = {name: box.store.read(name) for name in box.store.ids()}
    candidates = [name for name, r in here.items() if r.stack == stack and server in (None, r.server)]
    if not candidates:
        stacks = sorted({r.stack for r in here.values()})
        raise InputError(
            f"no release of stack {stack!r} is on this box",
            hint=f"{nearest(stack, stacks)}; a deploy brings the standby_stacks of group_data",
        )
    proved = [e.to_release for e in box.history if e.verdict in (Verdict.PROVED, Verdict.RESTORED)]
    order = {name: index for index, name in enumerate(proved) if name}
    staged = {name: (box.layout.releases / name).stat().st_mtime for name in candidates}
    return max(candidates, key=lambda name: (order.get(name, -1), staged[name]))

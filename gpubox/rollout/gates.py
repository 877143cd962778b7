"""What a release must pass beyond its own files: what is judged beside the running server, and what needs its GPUs."""

from __future__ import annotations

from gpubox.collectives import check, record
from gpubox.errors import RefusedError
from gpubox.layout import Layout
from gpubox.rollout.activation import Report
from gpubox.specs.release import Release


class ReleaseGates:
    """The real gates. Unit tests drive the state machine with simulated ones of the same shape."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def before_stop(self, release: Release, *, force: bool, report: Report) -> None:
        """Raises GpuboxError; nothing has changed yet.

        Raises RefusedError for an all-reduce that is known to fail here: stopping a good server would not teach more.
        """
        ranks = check.ranks_of(release)
        if ranks < 2 or force:
            return
        known = record.read(self._layout).under(check.conditions(release, ranks))
        if known and known.failure:
            raise RefusedError(
                f"release {release.id}: on {known.time}, with all as it is now, {known.failure}",
                hint=f"cure it, then prove it with `gpubox collectives check {release.id}`, or --force",
            )

    def before_start(self, release: Release, report: Report) -> None:
        """No server runs. Raises GpuboxError: then the old server comes back, and the release is not to blame."""
        ranks = check.ranks_of(release)
        if ranks < 2:
            return
        known = record.read(self._layout).under(check.conditions(release, ranks))
        if known and known.passed:
            report(f"all-reduce of {ranks} ranks passed on {known.time}, and nothing that decides it has changed")
            return
        check.check(release, ranks, self._layout, report)

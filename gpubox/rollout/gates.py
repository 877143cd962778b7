"""What a release must pass beyond its own files: what is judged beside the running server, and what needs its GPUs."""

from __future__ import annotations

from pathlib import Path

from gpubox.collectives import check, record
from gpubox.drafts.findings import Level
from gpubox.drafts.preflight import ReleaseDraft, check_release_draft, stack_engine
from gpubox.errors import BrokenError, RefusedError
from gpubox.layout import Layout
from gpubox.rollout.activation import Report
from gpubox.specs.release import Release
from gpubox.weights.records import Records
from gpubox.weights.verify import verify

MIB = 1 << 20


class ReleaseGates:
    """The real gates. Unit tests drive the state machine with simulated ones of the same shape."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def before_stop(self, release: Release, *, force: bool, report: Report) -> None:
        """Nothing has changed yet, the old server serves. Raises GpuboxError.

        Raises RefusedError for an all-reduce that is known to fail here: stopping a good server would not teach more.
        """
        if release.model_id is None:
            self._check_weights(Path(release.model_path), report)
        if release.draft_path is not None:
            self._check_draft(release, Path(release.draft_path), report)
        if not force:
            self._refuse_known_hang(release)

    def before_start(self, release: Release, report: Report) -> None:
        """No server runs. Raises GpuboxError: then the old server comes back, and the release is not to blame."""
        ranks = check.ranks_of(release)
        if ranks < 2:
            return
        known = self._known(release, ranks)
        if known and known.passed:
            report(f"all-reduce of {ranks} ranks passed on {known.time}, and nothing that decides it has changed")
            return
        check.check(release, ranks, self._layout, report)

    def _known(self, release: Release, ranks: int) -> record.Record | None:
        """What an all-reduce under the conditions of now is known to do."""
        return record.read(self._layout).under(check.conditions(release, ranks))

    def _check_weights(self, model: Path, report: Report) -> None:
        """By what was read before: no byte is read here, so 547 GB cost nothing."""
        seen = verify(model, Records(self._layout.weights))
        if seen.wrong:
            first = seen.wrong[0]
            raise BrokenError(
                f"{model}: {first.name}: {first.problem}",
                hint=f"fetch it again, then gpubox weights verify {model} --deep",
                detail="\n".join(f"{file.name}: {file.problem}" for file in seen.wrong),
            )
        if seen.proved:
            report(f"weights: every file of {model} is what {seen.origin} says")
        else:
            report(f"weights: the bytes of {model} are not proved: gpubox weights verify {model} --deep")

    def _check_draft(self, release: Release, draft: Path, report: Report) -> None:
        engine_version, patches = stack_engine(self._layout, release.stack_id)
        seen = check_release_draft(
            ReleaseDraft(
                draft_path=draft,
                model_path=Path(release.model_path),
                engine_version=engine_version,
                patches=patches,
                arguments=tuple(release.arguments),
                gpu_bytes=None if release.gpu_memory_mib is None else release.gpu_memory_mib * MIB,
            ),
            self._layout,
        )
        for finding in seen.of(Level.WARN):
            report(f"draft: {finding}")
        report(f"draft {draft} fits its target and sglang {seen.engine_version}")

    def _refuse_known_hang(self, release: Release) -> None:
        ranks = check.ranks_of(release)
        if ranks < 2:
            return
        known = self._known(release, ranks)
        if known and known.failure:
            raise RefusedError(
                f"release {release.id}: on {known.time}, with all as it is now, {known.failure}",
                hint=f"cure it, then prove it with `gpubox collectives check {release.id}`, or --force",
            )

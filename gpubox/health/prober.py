"""The real prober: gpubox.probes against the address of a release."""

from __future__ import annotations

from collections.abc import Callable

from gpubox.health import probes
from gpubox.specs.release import Release


class HttpProber:
    def wait_ready(self, release: Release, is_dead: Callable[[], str | None], report: Callable[[str], None]) -> None:
        """Raises ProofError when the server is dead or not ready by the profile's deadline."""
        probes.wait_ready(release.base_url, release.probes.ready_deadline_s, is_dead, report)

    def prove(self, release: Release, *, forced_kill: bool, report: Callable[[str], None]) -> None:
        """Raises ProofError naming the probe that failed."""
        probes.prove(
            release.base_url, release.served_model_name, release.probes, forced_kill=forced_kill, report=report
        )

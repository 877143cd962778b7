"""What is wrong with a server profile, or may be: found before anything is deployed, told with reason and way out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from gpubox.errors import InputError

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One rule broken in one place. `place` is a dotted key of `file`; docs/servers.md lists the rules by name."""

    rule: str
    severity: Severity
    file: str
    place: str
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.file}: {self.place}: {self.problem} [{self.rule}]"


def refuse(findings: Iterable[Finding], context: str) -> None:
    """Raises InputError for the errors among `findings`: the first one whole, the others in detail below it.

    context: what the profile was judged against, such as 'stack cuda128 (sglang 0.5.9)'.
    """
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        rest = "\n".join(f"{finding}\n  what to do: {finding.fix}" for finding in errors[1:])
        raise InputError(f"{errors[0]}, with {context}", hint=errors[0].fix, detail=rest)

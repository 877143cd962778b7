"""What a check of a draft says: each finding with its reason, where that is known from, and what to do."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class Level(StrEnum):
    """FAIL: it will not start, or serve with other numbers than it was trained on. WARN: cannot be told from here."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


class Finding(BaseModel):
    """`what` stands alone in one line; `why` what it would do; `reference` the source read; `fix` the next step."""

    model_config = ConfigDict(frozen=True)

    level: Level
    name: str
    what: str
    why: str = ""
    fix: str = ""
    reference: str = ""

    def __str__(self) -> str:
        parts = [f"{self.level} {self.name}: {self.what}"]
        parts += [f"  {label}: {text}" for label, text in (("why", self.why), ("fix", self.fix)) if text]
        return "\n".join(parts)


def passed(name: str, what: str) -> Finding:
    return Finding(level=Level.PASS, name=name, what=what)


def warned(name: str, what: str, *, why: str = "", fix: str = "", reference: str = "") -> Finding:
    return Finding(level=Level.WARN, name=name, what=what, why=why, fix=fix, reference=reference)


def failed(name: str, what: str, *, why: str = "", fix: str = "", reference: str = "") -> Finding:
    return Finding(level=Level.FAIL, name=name, what=what, why=why, fix=fix, reference=reference)


class Capture(BaseModel):
    """The target's layers whose input feeds the draft (index i: what enters layer i, the output of layer i - 1)."""

    model_config = ConfigDict(frozen=True)

    configured: list[int] | None
    eager: list[int]
    graph: list[int]
    trained: list[int] | None
    family: str


class Report(BaseModel):
    """Everything that was found about one draft, for one engine version and one target."""

    model_config = ConfigDict(frozen=True)

    draft: str
    target: str
    engine_version: str
    patches: list[str]
    capture: Capture | None
    findings: list[Finding]

    @property
    def failures(self) -> list[Finding]:
        return self.of(Level.FAIL)

    def of(self, level: Level) -> list[Finding]:
        return [finding for finding in self.findings if finding.level is level]

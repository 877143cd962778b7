"""All rules about engine arguments, and the judgement of one profile on one stack. docs/servers.md lists them."""

from __future__ import annotations

from gpubox.specs import rules_draft, rules_gpu, rules_serving, rules_speculation
from gpubox.specs.findings import Finding
from gpubox.specs.rule import Case, Fault, Rule
from gpubox.toml import nearest

RULES: tuple[Rule, ...] = (*rules_serving.RULES, *rules_draft.RULES, *rules_speculation.RULES, *rules_gpu.RULES)
BY_NAME = {item.name: item for item in RULES}


def judge(case: Case) -> list[Finding]:
    """What is wrong with the case, and what may be. A rule that the operator overrides is no finding."""
    broken = {item.name: _finding(case, item, fault) for item in RULES if (fault := item.broken(case))}
    return [
        *(finding for name, finding in broken.items() if not _overridden(case, name)),
        *_useless_overrides(case, set(broken)),
    ]


def overrides_in_force(case: Case) -> dict[str, str]:
    """The rules that are really broken and overridden, each with the operator's reason."""
    return {name: reason for name, reason in case.server.overrides.items() if _in_force(case, name)}


def _in_force(case: Case, name: str) -> bool:
    return _overridden(case, name) and BY_NAME[name].broken(case) is not None


def _overridden(case: Case, name: str) -> bool:
    return name in case.server.overrides and name in BY_NAME and BY_NAME[name].overridable


def _useless_overrides(case: Case, broken: set[str]) -> list[Finding]:
    """Overrides of what is no rule, may not be overridden, or is not broken: a reason that nobody needs misleads."""
    findings = []
    allowed = sorted(item.name for item in RULES if item.overridable)
    for name in case.server.overrides:
        place = f"overrides.{name}"
        if name not in BY_NAME:
            findings.append(Finding("override", "error", case.file, place, "is no rule", nearest(name, allowed)))
        elif not BY_NAME[name].overridable:
            fix = f"keep the rule; only these may be overridden: {', '.join(allowed)}"
            findings.append(Finding("override", "error", case.file, place, "is a rule that cannot be overridden", fix))
        elif name not in broken:
            findings.append(
                Finding("override", "warning", case.file, place, "overrides a rule that is kept", "remove it")
            )
    return findings


def _finding(case: Case, item: Rule, fault: Fault) -> Finding:
    file, place = case.place(fault.place)
    fix = f'{item.fix}; or, knowingly, [overrides] {item.name} = "reason"' if item.overridable else item.fix
    return Finding(item.name, item.severity, file, place, f"{fault.problem}: {item.reason}", fix)

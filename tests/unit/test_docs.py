"""What the docs say of the tests must be true: every test that docs/lessons.md names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from gpubox.specs.engine_rules import RULES

ROOT = Path(__file__).parents[2]
RULE = re.compile(r"rule `([\w-]+)`")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::([\w:]+)`")


def defined(path: Path) -> set[str]:
    """Names of the tests in a file, as pytest spells them: function, or Class::function."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names.update(f"{node.name}::{part.name}" for part in node.body if isinstance(part, ast.FunctionDef))
    return names


def rows(heading: str) -> list[str]:
    """The table rows below a heading of docs/lessons.md, without its two header lines."""
    section = (ROOT / "docs" / "lessons.md").read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("|")][2:]


def test_every_row_names_tests_and_rules_that_exist() -> None:
    for row in rows("Lessons") + rows("Hard cases"):
        named = NAMED.findall(row)
        assert named, row
        assert {rule.name for rule in RULES}.issuperset(RULE.findall(row)), row
        for file, name in named:
            assert (ROOT / file).is_file(), row
            assert name in defined(ROOT / file), f"{name} is not in {file}"


def test_every_lesson_of_the_first_deployment_has_a_row() -> None:
    assert [int(row.split("|")[1]) for row in rows("Lessons")] == list(range(1, 11))

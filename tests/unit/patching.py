"""Patches for tests: a header and a diff that agree, made from what files are and shall be."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping

HEADER = """\
why = "a test"
upstream = ["none"]
distributions = ["helper==2.0"]
verified = ["by this test"]
"""


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def header(files: Mapping[str, tuple[str | None, str]], top: str = HEADER) -> str:
    tables = ""
    for path, (old, new) in files.items():
        applies = f'applies_to = "{sha(old)}"\n' if old is not None else ""
        tables += f'\n[[files]]\npath = "{path}"\n{applies}gives = "{sha(new)}"\n'
    return top + tables + "\n"


def patch_text(files: Mapping[str, tuple[str | None, str]], top: str = HEADER) -> str:
    """`files`: old and new text by path; an old text of None makes the file."""
    return header(files, top) + "".join(diff(path, old, new) for path, (old, new) in files.items())


def diff(path: str, old: str | None, new: str) -> str:
    before = f"a/{path}" if old is not None else "/dev/null"
    lines = difflib.unified_diff(_lines(old or ""), _lines(new), before, f"b/{path}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _lines(text: str) -> list[str]:
    """Lines as diff sees them: only a newline ends one."""
    *whole, rest = text.split("\n")
    return [f"{line}\n" for line in whole] + ([rest] if rest else [])

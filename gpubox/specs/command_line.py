"""Read a command line of the engine, as a release holds it."""

from __future__ import annotations

from collections.abc import Sequence


def argument(words: Sequence[str], *flags: str) -> str | None:
    """The value of the last of `flags` on a command line, in either spelling: --flag value, --flag=value."""
    found = None
    for position, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in flags:
            found = value if equals else words[position + 1] if position + 1 < len(words) else ""
    return found

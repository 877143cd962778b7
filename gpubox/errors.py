"""Errors as part of the interface, and the exit codes of the command `gpubox`.

An error says who it is about, what is wrong, what is allowed and what to do next. The first line stands alone;
detail (a log, a diff) follows below it.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit status of every `gpubox` verb; documented in docs/command.md."""

    OK = 0
    FAILED = 1  # the thing asked for was tried and did not hold (a release did not prove, health is bad)
    USAGE = 2  # the request or an input file is wrong; nothing was changed
    LOCKED = 3  # somebody else is changing this box
    REFUSED = 4  # a rule forbids it (a release that failed before, an overlay on the wrong host)
    BROKEN = 5  # the box is not as gpubox left it (a file missing or edited in a release)


class GpuboxError(Exception):
    """An error an operator can act on.

    message: one line: who, what is wrong. hint: what is allowed, what to do. detail: log lines or a list, printed last.
    """

    exit_code = ExitCode.FAILED

    def __init__(self, message: str, *, hint: str = "", detail: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.detail = detail

    def __str__(self) -> str:
        parts = [self.message]
        if self.hint:
            parts.append(f"  what to do: {self.hint}")
        if self.detail:
            parts.append("\n".join(f"  | {line}" for line in self.detail.rstrip().splitlines()))
        return "\n".join(parts)


class InputError(GpuboxError):
    """A file or a value that the operator wrote is not valid; raised before anything changes."""

    exit_code = ExitCode.USAGE


class LockedError(GpuboxError):
    """Somebody else is changing the box."""

    exit_code = ExitCode.LOCKED


class RefusedError(GpuboxError):
    """A rule forbids what was asked for."""

    exit_code = ExitCode.REFUSED


class BrokenError(GpuboxError):
    """The box is not as gpubox left it."""

    exit_code = ExitCode.BROKEN


class ProofError(GpuboxError):
    """A stack, a model or a server was tried and did not prove."""

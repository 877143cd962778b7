"""Turn what uv says when it fails into an error an operator can act on. The texts are those of uv 0.13."""

from __future__ import annotations

import re

from gpubox.errors import GpuboxError, InputError

TAIL_LINES = 25

# The first that matches is the cause, later ones may be its consequences. {0} is what the pattern caught.
_CAUSES: tuple[tuple[str, type[GpuboxError], str, str], ...] = (
    (
        r"No interpreter found for Python (\S+)",
        GpuboxError,
        "this box has no Python {0}",
        "apt install python{0}, or lock and deploy the stack for the Python that this system has",
    ),
    (
        r"(\S+) was not found in the cache|was not found.*network was disabled",
        GpuboxError,
        "{0} is not in the cache of this box, and no network is to be used",
        "give a directory that holds the wheels with --wheelhouse, or run once without --offline",
    ),
    (
        r"(\S+) was not found in the",
        InputError,
        "no index has a package {0}",
        "correct requirements.in and lock again; a package of your own goes into a --wheelhouse",
    ),
    (
        r"there is no version of (\S+)",
        InputError,
        "no index has {0} (any more)",
        "keep the wheels of a stack in a --wheelhouse, or lock another version",
    ),
    (
        r"(\S+) has no (?:usable wheels|wheels with a matching)",
        InputError,
        "there is no wheel of {0} for this machine's Python and C library",
        "a stack is installed from wheels only; nothing is compiled on a box",
    ),
    (
        r"(dns error|tcp connect error|error sending request|Failed to fetch|timed out)",
        GpuboxError,
        "the package index cannot be reached ({0})",
        "check network and proxy of this box, or copy the wheels here and use --wheelhouse with --offline",
    ),
)


def explain_uv_failure(what: str, output: str, *, free_bytes: int) -> GpuboxError:
    """`what` begins the message; `free_bytes` is what the stack's file system has left."""
    detail = "\n".join(output.splitlines()[-TAIL_LINES:])
    mismatch = re.search(r"Hash mismatch for `([^`]+)`", output)
    if mismatch:
        return _other_hash(what, mismatch[1], output, detail)
    if "No space left on device" in output:
        return disk_full(what, free_bytes, detail)
    flat = " ".join(output.split())  # uv breaks its sentences into lines
    for pattern, error, message, hint in _CAUSES:
        match = re.search(pattern, flat)
        if match:
            subject = match[1] or "a package"
            return error(f"{what}: {message.format(subject)}", hint=hint.format(subject), detail=detail)
    return GpuboxError(f"{what}: uv failed", hint="read what it says below", detail=detail)


def disk_full(what: str, free_bytes: int, detail: str = "") -> GpuboxError:
    return GpuboxError(
        f"{what}: the disk is full ({free_bytes / 1e9:.1f} GB free); a stack with torch and its wheel cache take 10 GB",
        hint="free space (`gpubox release collect` removes old stacks) and run again: what was downloaded is kept",
        detail=detail,
    )


def _other_hash(what: str, package: str, output: str, detail: str) -> GpuboxError:
    expected, _, computed = output.partition("Computed:")
    digest = re.compile(r"sha256:([0-9a-f]{64})")
    locked, got = digest.findall(expected), digest.search(computed)
    more = f" and {len(locked) - 1} more" if len(locked) > 1 else ""
    pair = f"locked is sha256 {locked[0] if locked else 'none'}{more}, got {got[1] if got else 'another'}"
    return GpuboxError(
        f"{what}: {package}: {pair}",
        hint="re-published upstream under its name, or tampered with: find out which before you lock it again; "
        "a copy of the locked file in a --wheelhouse serves as before",
        detail=detail,
    )

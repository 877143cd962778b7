"""How PVE's programs fail: a message on standard error, and an exit status."""

from __future__ import annotations

FAILED = 255  # a task that failed; a parameter that was refused
NOT_FOUND = 2  # Perl's die ends with errno, which is ENOENT after a file that is not there was opened


class PveError(Exception):
    """What PVE's `die` prints, without the line end. `status`: the program's exit status."""

    def __init__(self, message: str, status: int = FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


class RequestError(PveError):
    """A request that is refused before anything is done, as HTTP 400; the program's usage line is shown after it."""

    def __init__(self, message: str, details: dict[str, str] | None = None) -> None:
        shown = "".join(f"{name}: {text}\n" for name, text in (details or {}).items())
        super().__init__(f"400 {message}\n{shown}".removesuffix("\n"))
        self.details = details or {}


def verification_failed(details: dict[str, str]) -> RequestError:
    """Parameters with a value that is not allowed, by name."""
    return RequestError("Parameter verification failed.", details)

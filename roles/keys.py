"""The public key of an apt repository, read on the controller."""

from __future__ import annotations

from gpubox.errors import InputError
from gpubox.nvidia.openpgp import armored, fingerprints
from gpubox.nvidia.repository import Key, Place, RepositorySettings
from roles.templates import ROOT


def key_of(place: Place, settings: object) -> Key | None:
    """None for a directory of .debs, and for settings without a repository. Raises InputError for a bad file."""
    if not isinstance(settings, RepositorySettings) or settings.is_directory:
        return None
    origin = f"{place.who}.key = {settings.key!r}"
    try:
        data = (ROOT / str(settings.key)).read_bytes()
    except OSError as error:
        raise InputError(
            f"{origin}: {error.strerror}",
            hint=f"the repository's public key, as a path below {ROOT} or an absolute one on this machine",
        ) from None
    return Key(armored(data, origin), tuple(fingerprints(data, origin)))

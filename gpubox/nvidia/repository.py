"""An apt repository with NVIDIA's packages: where it is, whose key signs it, and what apt would do with it.

Toolkits and the packaged driver both come from one; here is what they have in common. Settings and pure rules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from gpubox.errors import GpuboxError, InputError, RefusedError
from gpubox.toml import Strict

# System: fingerprint of the key that signs NVIDIA's repository for it. Debian 13's apt refuses the older key since
# 2026-02-01: it is bound by SHA-1 (NVIDIA/cuda-repo-management#34).
_OLDER, _NEWER = "EB693B3035CD5710E231E123A4B469963BF863CC", "02182E60104FCDC26EAE1B8597A5D4CB8793F200"
SYSTEMS = {"debian 12": _OLDER, "debian 13": _NEWER, "ubuntu 22.04": _OLDER, "ubuntu 24.04": _OLDER}

KERNELS = ("linux-image-*", "linux-modules-*", "proxmox-kernel-*")
KERNEL_PACKAGES = ("dkms", "linux-headers-*", "proxmox-headers-*", *KERNELS)

_UNSIGNED = re.compile(
    r"NO_PUBKEY|is not signed|BADSIG|EXPKEYSIG|signatures? (were|was|are|is) invalid|SHA1|Missing key"
)
_TWO_KEYS = re.compile(r"Conflicting values set for option Signed-By regarding source (?P<source>\S+) .*")
# apt-get --simulate: "Inst NAME [OLD] (NEW ORIGIN [ARCH])", "Remv NAME [OLD]".
_STEP = re.compile(r"^(?P<action>Inst|Remv) (?P<name>[^\s:]+)\S*(?: \[[^\]]*\])?(?: \((?P<version>\S+))?", re.MULTILINE)


class RepositorySettings(Strict):
    """NVIDIA's repository, a mirror of it, or a directory of .debs on the host.

    repository: an address, or the absolute path of the directory. suite: "/" for a flat repository, as NVIDIA's are;
    else with `components`. key: the repository's public key, a file here on the controller. fingerprint: of that key;
    without it, NVIDIA's for the host's system.
    """

    repository: Annotated[str, Field(pattern=r"^(/|https?://)\S+$")]
    suite: Annotated[str, Field(pattern=r"^\S+$")] = "/"
    components: list[Annotated[str, Field(pattern=r"^\S+$")]] = []
    key: str | None = None
    fingerprint: str | None = None

    @field_validator("fingerprint")
    @classmethod
    def _hex(cls, value: str | None) -> str | None:
        if value is None:
            return None
        plain = value.replace(" ", "").upper()
        if not re.fullmatch(r"[0-9A-F]{40}|[0-9A-F]{64}", plain):
            raise ValueError("40 hex digits, as gpg --show-keys prints them; blanks are ignored")
        return plain

    @model_validator(mode="after")
    def _key_fits_repository(self) -> Self:
        if self.is_directory and (self.key or self.fingerprint or self.components or self.suite != "/"):
            raise ValueError("a directory of .debs has no key, fingerprint, suite or components")
        if not self.is_directory and not self.key:
            raise ValueError("a repository needs key: its public key, a file on the controller")
        if not self.is_directory and self.suite.endswith("/") == bool(self.components):
            raise ValueError('components go with a suite by name; a suite that ends with "/" has none')
        return self

    @property
    def is_directory(self) -> bool:
        return self.repository.startswith("/")


class Key(NamedTuple):
    """A public key file as the controller read it. `fingerprints`: of the keys in it, which should be one."""

    armored: str
    fingerprints: tuple[str, ...]

    @property
    def path(self) -> str:
        """Where it is on a host. By fingerprint: apt refuses to work when one repository, here that of driver and
        toolkits, names two files for its key."""
        return f"/etc/apt/keyrings/gpubox-{self.fingerprints[0][-16:].lower()}.asc"


@dataclass(frozen=True)
class Place:
    """Where on a host a repository is written. `who`: its key in the settings, for messages.

    index: links to the .debs of a directory, and the index of them that apt reads.
    """

    who: str
    sources: str
    preferences: str
    index: str


class Step(NamedTuple):
    """One line of apt's plan. `action`: "Inst" or "Remv"; `version`: what would be installed, empty for a removal."""

    action: str
    name: str
    version: str


def check_system(place: Place, system: str) -> None:
    """`system`: as "debian 12". Raises RefusedError for one that NVIDIA has no packages for, or nobody has tried."""
    if system not in SYSTEMS:
        raise RefusedError(
            f"{place.who}: this box is {system or 'of an unknown system'}",
            hint=f"supported: {', '.join(SYSTEMS)}; without {place.who} in the settings nothing is installed",
        )


def check_key(place: Place, settings: RepositorySettings, found: tuple[str, ...], system: str) -> None:
    """The key file holds one key, the expected one. Raises InputError."""
    wanted = settings.fingerprint or SYSTEMS[system]
    if found != (wanted,):
        raise InputError(
            f"{place.who}.key = {settings.key!r}: holds {', '.join(found)}, expected is {wanted}",
            hint="set fingerprint if this is the key of your own mirror"
            if settings.fingerprint is None
            else "do not use that file before you know why it differs",
        )


def source_files(place: Place, settings: RepositorySettings, key: Key | None) -> dict[str, str]:
    """Path -> content: the repository for apt, and its key, which counts for this repository alone.

    key: None for a directory.
    """
    if key is None:
        fields = {"URIs": f"file:{place.index}", "Suites": "./", "Trusted": "yes"}
    else:
        fields = {"URIs": settings.repository, "Suites": settings.suite}
        fields |= {"Components": " ".join(settings.components)} if settings.components else {}
        fields |= {"Architectures": "amd64", "Signed-By": key.path}
    source = "".join(f"{name}: {value}\n" for name, value in {"Types": "deb", **fields}.items())
    files = {place.sources: f"# Written by gpubox.\n{source}"}
    return files if key is None else files | {key.path: key.armored}


def steps(output: str) -> list[Step]:
    """apt's plan in the output of apt-get --simulate."""
    return [Step(found["action"], found["name"], found["version"] or "") for found in _STEP.finditer(output)]


def matching(names: list[str], patterns: tuple[str, ...]) -> list[str]:
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def explain(place: Place, output: str, command: str) -> GpuboxError:
    """What a failure of apt-get means when it is about the repository as such. `command`: what to try on the host."""
    if conflict := _TWO_KEYS.search(output):
        return RefusedError(
            f"{place.who}: apt has {conflict['source']} twice, with two files for its key, and does nothing like that",
            hint="take the other entry out of /etc/apt/sources.list.d (often cuda-*.list, of package cuda-keyring), "
            "then deploy again",
            detail=tail(output),
        )
    if _UNSIGNED.search(output):
        return RefusedError(
            f"{place.who}: the repository's signature does not verify with {place.who}.key; nothing was installed",
            hint="if it has a new key, get it from its operator and change key and fingerprint; do not install without",
            detail=tail(output),
        )
    return GpuboxError(f"{place.who}: apt-get failed", hint=f"on the box: {command}", detail=tail(output))


def tail(output: str) -> str:
    """The end of a program's output, for the detail of an error."""
    return "\n".join([line for line in output.splitlines() if line.strip()][-15:])

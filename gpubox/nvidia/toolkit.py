"""CUDA toolkits side by side, each by its exact version, and nothing of a driver with them. Settings and pure rules.

Which toolkits: those that the box's stacks declare. CUDA_HOME of a stack is /usr/local/cuda-X.Y. The link
/usr/local/cuda, which the packages point at whatever is newest, is never used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from gpubox.errors import GpuboxError, InputError, RefusedError
from gpubox.nvidia.box_readings import BoxReadings
from gpubox.nvidia.userland import DRIVER_PACKAGES, guest_problems, loader_problems, raise_problems
from gpubox.specs.stack import StackSpec
from gpubox.toml import Strict

SOURCES = "/etc/apt/sources.list.d/gpubox-cuda.sources"
KEYRING = "/etc/apt/keyrings/gpubox-cuda.asc"
PREFERENCES = "/etc/apt/preferences.d/gpubox-cuda"
LOCAL_INDEX = "/var/lib/gpubox/debs"  # links to the .debs of a directory, and the index that apt reads

# System: fingerprint of the key that signs NVIDIA's repository for it. Debian 13's apt refuses the older key since
# 2026-02-01: it is bound by SHA-1 (NVIDIA/cuda-repo-management#34).
_OLDER, _NEWER = "EB693B3035CD5710E231E123A4B469963BF863CC", "02182E60104FCDC26EAE1B8597A5D4CB8793F200"
SYSTEMS = {"debian 12": _OLDER, "debian 13": _NEWER, "ubuntu 22.04": _OLDER, "ubuntu 24.04": _OLDER}

_KERNEL_PACKAGES = (
    "dkms",
    "linux-image-*",
    "linux-headers-*",
    "linux-modules-*",
    "proxmox-kernel-*",
    "proxmox-headers-*",
)


class ToolkitSettings(Strict):
    """Where the toolkits come from: NVIDIA's repository, a mirror of it, or a directory of .debs on the box.

    repository: an address, or the absolute path of the directory. suite: "/" for a flat repository, as NVIDIA's are;
    else with `components`. key: the repository's public key, a file here on the controller. fingerprint: of that key;
    without it, NVIDIA's for the box's system. versions: exact versions of further packages, since a toolkit's own
    package decides only a lower bound of its parts.
    """

    repository: Annotated[str, Field(pattern=r"^(/|https?://)\S+$")]
    suite: Annotated[str, Field(pattern=r"^\S+$")] = "/"
    components: list[Annotated[str, Field(pattern=r"^\S+$")]] = []
    key: str | None = None
    fingerprint: str | None = None
    versions: dict[
        Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9+.-]+$")], Annotated[str, Field(pattern=r"^\S+$")]
    ] = {}

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


def wanted_packages(stacks: Iterable[StackSpec]) -> dict[str, str]:
    """Package -> version of the toolkits that the stacks declare. Raises InputError for two of one CUDA X.Y.

    They would be one package and one CUDA_HOME.
    """
    wanted: dict[str, str] = {}
    for spec in stacks:
        if spec.build.cuda is None:
            continue
        version = spec.build.cuda.toolkit
        name = f"cuda-toolkit-{'-'.join(version.split('.')[:2])}"
        if wanted.setdefault(name, f"{version}-1") != f"{version}-1":
            raise InputError(
                f"stack {spec.build.name!r}: cuda.toolkit = {version!r}, another stack here wants {wanted[name]}",
                hint=f"both would be {name} in {spec.build.cuda.home}: give the stacks the same one",
            )
    return wanted


def home(package: str) -> str:
    """Where the toolkit of that package is: cuda-toolkit-13-0 -> /usr/local/cuda-13.0."""
    return "/usr/local/cuda-" + package.removeprefix("cuda-toolkit-").replace("-", ".")


def check_system(seen: BoxReadings) -> None:
    """Raises RefusedError for a system that the toolkits are not packaged for, or that nobody has tried."""
    if seen.system not in SYSTEMS:
        raise RefusedError(
            f"toolkits: this box is {seen.system or 'of an unknown system'}",
            hint=f"supported: {', '.join(SYSTEMS)}; without toolkits in the settings nothing is installed",
        )


def check_key(settings: ToolkitSettings, found: list[str], seen: BoxReadings) -> None:
    """The key file holds one key, the expected one. Raises InputError."""
    wanted = settings.fingerprint or SYSTEMS[seen.system]
    if found != [wanted]:
        raise InputError(
            f"toolkits.key = {settings.key!r}: holds {', '.join(found)}, expected is {wanted}",
            hint="set fingerprint if this is the key of your own mirror"
            if settings.fingerprint is None
            else "do not use that file before you know why it differs",
        )


def apt_files(settings: ToolkitSettings, wanted: Mapping[str, str], key: str) -> dict[str, str]:
    """Path -> content: the repository, its key (`key`, armored; "" for a directory) and the exact versions."""
    if settings.is_directory:
        fields = {"URIs": f"file:{LOCAL_INDEX}", "Suites": "./", "Trusted": "yes"}
    else:
        fields = {"URIs": settings.repository, "Suites": settings.suite}
        fields |= {"Components": " ".join(settings.components)} if settings.components else {}
        fields |= {"Architectures": "amd64", "Signed-By": KEYRING}
    source = "".join(f"{name}: {value}\n" for name, value in {"Types": "deb", **fields}.items())
    pins = [
        f"Package: {name}\nPin: version {version}\nPin-Priority: 1001\n"
        for name, version in exact_versions(settings, wanted).items()
    ]
    files = {
        SOURCES: f"# Written by gpubox.\n{source}",
        PREFERENCES: "Explanation: Written by gpubox. Exact versions; above 1000, so that going back works too.\n"
        + "\n".join(pins),
    }
    return files if settings.is_directory else files | {KEYRING: key}


def exact_versions(settings: ToolkitSettings, wanted: Mapping[str, str]) -> dict[str, str]:
    """The toolkits and what the operator named beside them."""
    return {**wanted, **settings.versions}


def missing(exact: Mapping[str, str], seen: BoxReadings) -> dict[str, str]:
    """Those that are not installed at exactly their version."""
    installed = {package.name: package.version for package in seen.cuda_packages}
    return {name: version for name, version in exact.items() if installed.get(name) != version}


def unfrozen(wanted: Mapping[str, str], seen: BoxReadings) -> list[str]:
    """Packages of the toolkits that `apt upgrade` would still move: they are not on hold."""
    endings = tuple(name.removeprefix("cuda-toolkit") for name in wanted)
    ours = [
        p
        for p in seen.cuda_packages
        if p.name.startswith(("cuda-", "nsight-", "gds-tools-")) or p.name.endswith(endings)
    ]
    return sorted(package.name for package in ours if package.selection != "hold") if endings else []


def is_driver(package: str) -> bool:
    return any(fnmatchcase(package, pattern) for pattern in DRIVER_PACKAGES)


def check_simulation(output: str) -> None:
    """Refuse what apt would do beyond installing toolkits. `output`: of apt-get --simulate. Raises RefusedError."""
    planned = [line.split(" ", 2) for line in output.splitlines() if line.startswith(("Inst ", "Remv "))]
    removed = [words[1] for words in planned if words[0] == "Remv"]
    driver = [words[1] for words in planned if words[0] == "Inst" and is_driver(words[1])]
    kernel = [
        words[1] for words in planned if words[0] == "Inst" and any(fnmatchcase(words[1], p) for p in _KERNEL_PACKAGES)
    ]
    for what, names in (("install a driver", driver), ("install packages for a kernel", kernel), ("remove", removed)):
        if names:
            raise RefusedError(
                f"toolkits: apt would {what}: {', '.join(names)}; nothing was changed",
                hint="use a repository whose cuda-toolkit-X-Y packages bring the toolkit only, as NVIDIA's do",
            )


def explain(output: str, exact: Mapping[str, str]) -> GpuboxError:
    """What apt-get's failure means and what to do. `output`: what it printed."""
    tail = "\n".join([line for line in output.splitlines() if line.strip()][-15:])
    wanted = " ".join(f"{name}={version}" for name, version in exact.items())
    drawn = sorted({name for name in re.findall(r"Depends:? ([^\s,]+)", output) if is_driver(name)})
    if drawn:
        return RefusedError(
            f"toolkits: {wanted}: the package wants driver packages, which are pinned away: {', '.join(drawn)}",
            hint="use a repository whose cuda-toolkit-X-Y packages bring the toolkit only, as NVIDIA's do",
            detail=tail,
        )
    absent = re.findall(r"Version '[^']+' for '([^']+)' was not found|Unable to locate package (\S+)", output)
    if absent:
        names = sorted({"".join(pair) for pair in absent})
        shown = ", ".join(f"{name}={exact.get(name, '?')}" for name in names)
        return InputError(
            f"toolkits: the repository does not have {shown}",
            hint=f"apt-cache madison {' '.join(names)} on the box shows what it has",
            detail=tail,
        )
    if re.search(
        r"NO_PUBKEY|is not signed|BADSIG|EXPKEYSIG|signatures? (were|was|are|is) invalid|SHA1|Missing key", output
    ):
        return RefusedError(
            "toolkits: the repository's signature does not verify with toolkits.key; nothing was installed",
            hint="if it has a new key, get it from its operator and change key and fingerprint; do not install without",
            detail=tail,
        )
    return GpuboxError("toolkits: apt-get failed", hint=f"on the box: apt-get install --simulate {wanted}", detail=tail)


def check_proof(wanted: Mapping[str, str], exact: Mapping[str, str], seen: BoxReadings) -> None:
    """The toolkits are there, exactly, and nothing came with them. Raises ProofError."""
    problems = [f"{name} is not installed at version {version}" for name, version in missing(exact, seen).items()]
    problems += [f"{home(name)}/bin/nvcc is missing" for name in wanted if home(name) not in seen.toolkit_homes]
    if not seen.bare_metal and seen.driver_packages:
        problems.append(f"apt has installed driver packages: {', '.join(seen.driver_packages)}")
    problems += [*loader_problems(seen), *guest_problems(seen)]
    raise_problems("the toolkits are not as they must be", problems)

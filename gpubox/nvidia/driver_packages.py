"""The driver as apt packages: which they are, what keeps all of them at one version, what is wrong with those there.

The packages ask for each other by lower bounds (a pinned one was seen to bring a newer driver: NVIDIA developer forum
353805), so the whole family is pinned to the version, moved together and held. Pure rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpubox.errors import GpuboxError, InputError, RefusedError
from gpubox.nvidia import repository
from gpubox.nvidia.box_readings import Package
from gpubox.nvidia.driver import DriverSettings, PackagedDriver, RunFileDriver, numbers
from gpubox.nvidia.repository import KERNEL_PACKAGES, KERNELS, Key, Place, matching, steps, tail

PLACE = Place(
    "driver",
    sources="/etc/apt/sources.list.d/gpubox-driver.sources",
    preferences="/etc/apt/preferences.d/gpubox-driver",
    index="/var/lib/gpubox/driver-debs",
)
UNATTENDED = "/etc/apt/apt.conf.d/52gpubox-driver"

# Every name that a driver has in a repository; fnmatch patterns, as apt and dpkg-query take them. No regular
# expressions: each costs every call of apt half a second and more of CPU, where Debian's lists are loaded.
# `cuda`, `cuda-13-0` and `cuda-runtime-13-0` depend on the driver; the toolkit's own packages (cuda-nvcc-13-0,
# cuda-driver-dev-13-0, libcublas-13-0) match nothing here.
PARTS = ("nvidia*", "libnvidia*", "libcuda*", "firmware-nvidia*", "xserver-xorg-video-nvidia*")
COMPAT = "cuda-compat*"  # for older drivers; first on the loader's path, error 803 (nvidia-container-toolkit#1084)
FAMILY = (*PARTS, COMPAT, "cuda-drivers*")
METAPACKAGES = ("cuda", "cuda-[0-9]*", "cuda-runtime-*", "cuda-demo-suite-*")

# Of the closed modules, unless the name ends in -open. From 615 on some are empty packages that ask for the open ones;
# they are refused too, as their names say the opposite of what they do.
CLOSED = (
    *("nvidia-kernel-dkms", "nvidia-kernel-source", "nvidia-dkms"),
    *("nvidia-dkms-[0-9]*", "nvidia-kernel-source-[0-9]*", "cuda-drivers*"),
)
# What builds modules, which a container has no kernel for.
MODULES = ("nvidia-*dkms*", "nvidia-kernel-source*", "nvidia-open*")

# Of the driver's own version. What else matches has a life of its own: libnvidia-container1 1.19.0-1.
_DRIVER_VERSION = re.compile(r"^\d{3}\.\d+(\.\d+)?-")


@dataclass(frozen=True)
class PackageSet:
    """What to ask apt for; the rest are their dependencies. `tools` make device nodes and keep the GPUs awake."""

    libraries: tuple[str, ...]
    modules: tuple[str, ...]
    tools: tuple[str, ...] = ("nvidia-modprobe", "nvidia-persistenced")


# Names of NVIDIA's repositories: its driver installation guide, "compute-only" of Debian and of Ubuntu. nvidia-smi is
# in nvidia-driver-cuda, which conflicts with a package of that name, and in libnvidia-compute.
SETS = {
    "debian": PackageSet(("nvidia-driver-cuda",), ("nvidia-kernel-open-dkms",)),
    "ubuntu": PackageSet(("libnvidia-compute",), ("nvidia-dkms-open",)),
}
UBUNTU_RENAMED = 590  # from this branch on the names in Ubuntu's repository have no number (the guide, recent updates)


def wanted(driver: DriverSettings, system: str, *, modules: bool) -> tuple[str, ...]:
    """What to ask apt for on `system` ("debian 12"); with `modules` the whole driver, without the libraries alone.

    Empty for a system that `repository.check_system` refuses. Raises InputError for a version that has other names.
    """
    family = system.partition(" ")[0]
    names = SETS.get(family)
    if names is None:
        return ()
    if family == "ubuntu" and numbers(driver.version)[0] < UBUNTU_RENAMED:
        raise InputError(
            f"driver.version = {driver.version!r}: the packages of this branch have other names on {system}",
            hint=f"allowed: {UBUNTU_RENAMED} and newer, or NVIDIA's .run file (run and sha256)",
        )
    return (*names.libraries, *names.modules, *names.tools) if modules else names.libraries


def is_driver(name: str) -> bool:
    return bool(matching([name], FAMILY))


def is_closed(name: str) -> bool:
    return bool(matching([name], CLOSED)) and not name.endswith("-open")


def parts(packages: Iterable[Package]) -> list[Package]:
    """Those of the installed packages that are a driver's, of any version."""
    return [p for p in packages if matching([p.name], PARTS) and _DRIVER_VERSION.match(p.version)]


def names_of(packages: Iterable[Package]) -> str:
    return ", ".join(package.name for package in packages)


def is_at(driver: DriverSettings, version: str) -> bool:
    """Is the version of a package the driver's, in whatever revision?"""
    return version.startswith(f"{driver.version}-")


# --- what keeps apt where it is -----------------------------------------------------------------


def protective_files(driver: DriverSettings | None, *, modules: bool) -> dict[str, str]:
    """Path -> content: what apt and unattended upgrades may do with a driver. `modules`: the host has a kernel.

    apt takes the first entry that fits a version of a package. -1: never installed, also not as a dependency. Above
    1000: going back to an older one works too. What is installed stays, whatever its priority.
    """
    never = _pin("No repository may bring a driver beside the one that is here.", (*FAMILY, *METAPACKAGES), -1)
    if isinstance(driver, PackagedDriver):
        # A pattern cannot tell nvidia-dkms-590 from nvidia-dkms-590-open: apt's plan is looked at for those.
        closed = [name for name in CLOSED if "*" not in name]
        barred = _pin("The closed modules.", closed, -1)
        if not modules:
            barred = _pin("What builds modules, where there is no kernel.", MODULES, -1)
        exact = _pin("All of one driver, at one version.", PARTS, 1001, f"version {driver.version}-*")
        never = "\n".join([barred, exact, never])
    return {
        PLACE.preferences: "Explanation: Written by gpubox.\n" + never,
        UNATTENDED: "// Written by gpubox. Regular expressions, matched at the start of a package's name.\n"
        'Unattended-Upgrade::Package-Blacklist { "nvidia"; "libnvidia"; "libcuda"; "cuda"; "firmware-nvidia"; };\n',
    }


def _pin(why: str, names: Sequence[str], priority: int, pin: str = "release *") -> str:
    return f"Explanation: {why}\nPackage: {' '.join(names)}\nPin: {pin}\nPin-Priority: {priority}\n"


def unheld(packages: Iterable[Package]) -> list[str]:
    """Packages of the driver that an upgrade would move if nothing else stopped it."""
    return sorted(package.name for package in parts(packages) if package.selection != "hold")


# --- what is there ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What a node or a box has of a driver. `modules`: it has a kernel of its own, as a container has not.

    system: "debian 12". run_file: the uninstaller of a .run file is there. libraries: versions of libcuda on disk.
    """

    system: str
    packages: tuple[Package, ...]
    run_file: bool
    libraries: tuple[str, ...]
    modules: bool


def check_source(driver: DriverSettings, key: Key | None, found: Found) -> None:
    """The driver there, if any, came the way that is asked for; the repository is for this system, its key is right.

    key: of a repository that has one. Raises RefusedError or InputError, before anything has changed.
    """
    _check_way(driver, found)
    if isinstance(driver, PackagedDriver):
        repository.check_system(PLACE, found.system)
        wanted(driver, found.system, modules=found.modules)
        if key is not None:
            repository.check_key(PLACE, driver, key.fingerprints, found.system)


def _check_way(driver: DriverSettings, found: Found) -> None:
    """One driver has one source, and open modules. Raises RefusedError before the other way is begun."""
    there = parts(found.packages)
    if compat := [package for package in found.packages if matching([package.name], (COMPAT,))]:
        raise RefusedError(
            f"{names_of(compat)}: its libcuda is for older drivers, and may be found before the driver's own",
            hint=_purge(compat),
        )
    if isinstance(driver, RunFileDriver) and there:
        raise RefusedError(
            f"apt has installed driver packages here: {names_of(there)}",
            hint="two sources of one driver end in a version mismatch. Keep them: give driver a repository instead of "
            f"run. Replace them: stop what uses the GPUs, {_purge(there)}, deploy again",
        )
    if isinstance(driver, RunFileDriver):
        return
    if found.run_file or (found.libraries and not there):
        version = f" ({', '.join(found.libraries)})" if found.libraries else ""
        raise RefusedError(
            f"a driver from a .run file{version} is installed here, and driver.repository asks for packages",
            hint="two sources of one driver end in a version mismatch. Keep it: give driver run and sha256. Replace "
            "it: stop what uses the GPUs, nvidia-uninstall --silent, deploy again",
        )
    if closed := [package for package in found.packages if is_closed(package.name)]:
        raise RefusedError(
            f"packages of the closed modules are installed: {names_of(closed)}",
            hint="only the open modules run a Blackwell GPU, and the two do not stand side by side: stop what uses the "
            f"GPUs, {_purge(closed)}, deploy again",
        )


def _purge(packages: Iterable[Package]) -> str:
    return f"apt-get purge --allow-change-held-packages {' '.join(package.name for package in packages)}"


def problems(driver: DriverSettings, found: Found) -> list[str]:
    """What is missing, half installed or of another version; empty when all of the driver is at its version.

    Empty for a driver from a .run file, of which apt knows nothing.
    """
    if not isinstance(driver, PackagedDriver):
        return []
    there = parts(found.packages)
    names = wanted(driver, found.system, modules=found.modules)
    installed = {package.name for package in there}
    absent = [f"package {name} is not installed" for name in names if name not in installed]
    half = [f"package {p.name} is {p.selection}" for p in there if p.selection not in ("install", "hold")]
    moved = [p for p in there if not is_at(driver, p.version)]
    other = [f"package {p.name} is of version {p.version}, {driver.version} is wanted" for p in moved]
    return [*absent, *half, *other]


# --- what apt would do --------------------------------------------------------------------------


class Policy(NamedTuple):
    """What apt-cache policy says of a package. `versions`: those that a repository has."""

    candidate: str
    versions: tuple[str, ...]


def read_policy(output: str) -> dict[str, Policy]:
    """By package, from the output of apt-cache policy in the C locale."""
    found: dict[str, Policy] = {}
    name = version = ""
    for line in output.splitlines():
        words = line.replace("***", "   ").split()
        if line[:1].strip() and line.endswith(":") and len(words) == 1:
            name = line[:-1].partition(":")[0]
            found[name] = Policy("", ())
        elif name and line.startswith("  Candidate:"):
            found[name] = found[name]._replace(candidate=words[-1])
        elif name and re.match(r" (\*\*\*|   ) \S+ -?\d+$", line):
            version = words[0]
        elif name and re.match(r" {8} *-?\d+ \S", line) and not line.endswith("/dpkg/status"):
            have = found[name].versions
            found[name] = found[name]._replace(versions=have if version in have else (*have, version))
    return found


def choose(
    driver: PackagedDriver, names: Iterable[str], packages: Iterable[Package], policies: Mapping[str, Policy]
) -> list[str]:
    """The words for apt-get install: all of the driver by version, and `NAME-` for what that version no longer has.

    `names`: what is asked for. Raises InputError when the repository does not have it at the driver's version.
    """
    for name in names:
        seen = policies.get(name, Policy("", ()))
        if is_at(driver, seen.candidate):
            continue
        if any(is_at(driver, version) for version in seen.versions):
            raise RefusedError(
                f"driver: apt would take {seen.candidate} of {name}, not {driver.version}",
                hint="another entry in /etc/apt/preferences.d decides before ours (apt-cache policy): take it away",
            )
        versions = ", ".join(sorted(seen.versions, key=numbers))
        raise InputError(
            f"driver.version = {driver.version!r}: {driver.repository} has no {name} of it",
            hint=f"it has: {versions}"
            if versions
            else "it has none at all: is it NVIDIA's repository for this system?",
        )
    there = [package.name for package in parts(packages)]
    words = []
    for name in dict.fromkeys([*names, *there]):
        fits = is_at(driver, policies.get(name, Policy("", ())).candidate)
        words.append(f"{name}={driver.version}-*" if fits else f"{name}-")
    return words


def check_simulation(driver: PackagedDriver, output: str, words: Iterable[str], *, modules: bool) -> None:
    """Refuse what apt would do beyond this driver. `words`: of `choose`. Raises RefusedError; nothing has changed."""
    planned = steps(output)
    installed = [step.name for step in planned if step.action == "Inst"]
    other = [
        f"{step.name} {step.version}"
        for step in planned
        if step.action == "Inst" and is_driver(step.name) and not is_at(driver, step.version)
    ]
    leaving = {word.removesuffix("-") for word in words if word.endswith("-")}
    removed = [step.name for step in planned if step.action == "Remv" and step.name not in leaving]
    closed = [name for name in installed if is_closed(name)]
    kernel = matching(installed, KERNELS if modules else KERNEL_PACKAGES)
    for what, names in (
        (f"install a driver that is not {driver.version}", other),
        ("install the closed modules", closed),
        ("install packages for a kernel", kernel),
        ("remove", removed),
    ):
        if names:
            raise RefusedError(
                f"driver: apt would {what}: {', '.join(names)}; nothing was changed",
                hint="use a repository with NVIDIA's own packages, and purge what does not go with them",
                detail=tail(output),
            )


def explain(driver: PackagedDriver, output: str, words: Iterable[str]) -> GpuboxError:
    """What apt-get's failure means and what to do. `output`: what it printed."""
    blocked = sorted(set(re.findall(r"Depends:? (\S+).*but it is not (?:installable|going to be installed)", output)))
    if blocked:
        return RefusedError(
            f"driver {driver.version}: its packages want what apt may not or cannot install: {', '.join(blocked)}",
            hint="apt-cache policy of them says why: pinned away, of another version, or in a repository that is not "
            "there (NVIDIA's for Debian wants the component contrib)",
            detail=tail(output),
        )
    return repository.explain(PLACE, output, f"apt-get install --simulate {' '.join(words)}")

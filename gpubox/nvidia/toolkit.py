"""CUDA toolkits side by side, each by its exact version, and nothing of a driver with them. Settings and pure rules.

Which toolkits: those that the box's stacks declare. CUDA_HOME of a stack is /usr/local/cuda-X.Y. The link
/usr/local/cuda, which the packages point at whatever is newest, is never used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import Field

from gpubox.errors import GpuboxError, InputError, RefusedError
from gpubox.nvidia import repository
from gpubox.nvidia.box_readings import BoxReadings
from gpubox.nvidia.driver import DriverSettings, PackagedDriver
from gpubox.nvidia.driver_packages import is_driver, names_of
from gpubox.nvidia.repository import (
    KERNEL_PACKAGES,
    Key,
    Place,
    RepositorySettings,
    matching,
    source_files,
    steps,
    tail,
)
from gpubox.nvidia.userland import guest_problems, loader_problems, raise_problems
from gpubox.specs.stack import StackSpec

PLACE = Place(
    "toolkits",
    sources="/etc/apt/sources.list.d/gpubox-cuda.sources",
    preferences="/etc/apt/preferences.d/gpubox-cuda",
    index="/var/lib/gpubox/debs",
)


class ToolkitSettings(RepositorySettings):
    """Where the toolkits come from.

    versions: exact versions of further packages, since a toolkit's own package decides only a lower bound of its parts.
    """

    versions: dict[
        Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9+.-]+$")], Annotated[str, Field(pattern=r"^\S+$")]
    ] = {}


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


def apt_files(settings: ToolkitSettings, wanted: Mapping[str, str], key: Key | None) -> dict[str, str]:
    """Path -> content: the repository, its key (None for a directory) and the exact versions."""
    pins = [
        f"Package: {name}\nPin: version {version}\nPin-Priority: 1001\n"
        for name, version in exact_versions(settings, wanted).items()
    ]
    title = "Explanation: Written by gpubox. Exact versions; above 1000, so that going back works too.\n"
    return {**source_files(PLACE, settings, key), PLACE.preferences: title + "\n".join(pins)}


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


def check_simulation(output: str) -> None:
    """Refuse what apt would do beyond installing toolkits. `output`: of apt-get --simulate. Raises RefusedError."""
    planned = steps(output)
    installed = [step.name for step in planned if step.action == "Inst"]
    removed = [step.name for step in planned if step.action == "Remv"]
    driver = [name for name in installed if is_driver(name)]
    kernel = matching(installed, KERNEL_PACKAGES)
    for what, names in (("install a driver", driver), ("install packages for a kernel", kernel), ("remove", removed)):
        if names:
            raise RefusedError(
                f"toolkits: apt would {what}: {', '.join(names)}; nothing was changed",
                hint="use a repository whose cuda-toolkit-X-Y packages bring the toolkit only, as NVIDIA's do",
            )


def explain(output: str, exact: Mapping[str, str]) -> GpuboxError:
    """What apt-get's failure means and what to do. `output`: what it printed."""
    wanted = " ".join(f"{name}={version}" for name, version in exact.items())
    drawn = sorted({name for name in re.findall(r"Depends:? ([^\s,]+)", output) if is_driver(name)})
    if drawn:
        return RefusedError(
            f"toolkits: {wanted}: the package wants driver packages, which are pinned away: {', '.join(drawn)}",
            hint="use a repository whose cuda-toolkit-X-Y packages bring the toolkit only, as NVIDIA's do",
            detail=tail(output),
        )
    absent = re.findall(r"Version '[^']+' for '([^']+)' was not found|Unable to locate package (\S+)", output)
    if absent:
        names = sorted({"".join(pair) for pair in absent})
        shown = ", ".join(f"{name}={exact.get(name, '?')}" for name in names)
        return InputError(
            f"toolkits: the repository does not have {shown}",
            hint=f"apt-cache madison {' '.join(names)} on the box shows what it has",
            detail=tail(output),
        )
    return repository.explain(PLACE, output, f"apt-get install --simulate {wanted}")


def check_proof(
    wanted: Mapping[str, str], exact: Mapping[str, str], seen: BoxReadings, driver: DriverSettings | None
) -> None:
    """The toolkits are there, exactly, and nothing came with them. `driver`: that of the box. Raises ProofError."""
    problems = [f"{name} is not installed at version {version}" for name, version in missing(exact, seen).items()]
    problems += [f"{home(name)}/bin/nvcc is missing" for name in wanted if home(name) not in seen.toolkit_homes]
    if not seen.bare_metal and seen.driver_packages and not isinstance(driver, PackagedDriver):
        problems.append(f"apt has installed driver packages: {names_of(seen.driver_packages)}")
    problems += [*loader_problems(seen), *guest_problems(seen)]
    raise_problems("the toolkits are not as they must be", problems)

"""The ground: packages, the service user, directories, units. Starts and restarts nothing."""

from __future__ import annotations

from pyinfra.api import deploy

from gpubox.settings import Settings
from gpubox.specs.plan import BoxPlan
from ops import base
from ops.base import Directory, File
from roles.templates import rendered_below

# Compilers and headers: triton, inductor and flashinfer compile kernels and launchers on the box (Python.h included).
COMPILERS = ["g++", "gcc", "libc6-dev", "python3-dev"]
PACKAGES = [*COMPILERS, "ca-certificates", "iproute2", "libnuma1", "procps", "python3", "python3-venv"]
UNITS = ["sglang.service", "gpubox-recover.service"]


def directories(settings: Settings) -> list[Directory]:
    root = [
        Directory(f"/opt/gpubox{path}") for path in ("", "/incoming", "/models", "/releases", "/stacks", "/toolsets")
    ]
    private = [Directory("/opt/gpubox/state", mode="700")]
    return [*root, *private, Directory("/opt/gpubox/cache")]


def rendered(settings: Settings) -> list[File]:
    return rendered_below("templates", settings.model_dump())


@deploy("Box")
def box(plan: BoxPlan) -> None:
    base.packages(name="Debian packages", names=PACKAGES)
    base.service_user(name="Service user", user=plan.settings.service_user, home="/opt/gpubox/cache")
    base.directories(name="Directories", wanted=directories(plan.settings))
    base.rendered_files(name="Unit files", wanted=rendered(plan.settings))
    base.units(name="Units", enabled=UNITS)

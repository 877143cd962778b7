"""What a box says of its driver libraries, GPUs and toolkits: the lines of facts/userland.py's script, typed.

A line that does not read as its key says is dropped: what could not be read is missing, and the rules judge that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gpubox.nvidia.driver import loaded_version
from gpubox.nvidia.gpu_count import Gpus, read_gpus


class Library(NamedTuple):
    """A libcuda.so.1 that the loader finds, and the file that it is a link to."""

    path: str
    file: str


class LoaderDirectory(NamedTuple):
    """A directory where the loader looks for libraries, and the file that says so."""

    origin: str
    path: str


class Package(NamedTuple):
    """An installed package; `selection` is dpkg's: "install" or "hold". One that is only unpacked, or whose
    configuration failed, has that status in its place."""

    selection: str
    version: str
    name: str


class CudaAnswer(NamedTuple):
    """What cuda_probe.py printed. `init` is None when there is no library to ask; `error` then says why."""

    init: int | None
    devices: int
    error: str


@dataclass(frozen=True)
class BoxReadings:
    """`system`: "debian 12"; empty for a machine that did not answer. `container`: "lxc", or "none" on bare metal.

    loaded: version of the kernel module. libraries: versions of libcuda and libnvidia-ml among the system's libraries.
    run_file: the uninstaller that a .run file leaves is there. uvm_major: the major number that the kernel gave to uvm.
    cuda: by user.
    """

    system: str = ""
    container: str = ""
    loaded: str | None = None
    libraries: tuple[str, ...] = ()
    libcuda: tuple[Library, ...] = ()
    loader_directories: tuple[LoaderDirectory, ...] = ()
    driver_packages: tuple[Package, ...] = ()
    run_file: bool = False
    kernel_packages: tuple[str, ...] = ()
    cuda_packages: tuple[Package, ...] = ()
    toolkit_homes: tuple[str, ...] = ()
    gpus: Gpus = field(default_factory=Gpus)
    uvm_major: str = ""
    cuda: Mapping[str, CudaAnswer] = field(default_factory=dict)

    @property
    def answered(self) -> bool:
        return bool(self.system)

    @property
    def bare_metal(self) -> bool:
        return self.container == "none"


def read_box(lines: Mapping[str, list[str]]) -> BoxReadings:
    """The readings in the script's lines, grouped by key. Never raises."""

    def one(key: str) -> str:
        return (lines.get(key) or [""])[-1]

    def many(key: str) -> tuple[str, ...]:
        return tuple(lines.get(key, ()))

    return BoxReadings(
        system=one("os"),
        container=one("container"),
        loaded=loaded_version(one("driver") + "\n"),
        libraries=tuple(sorted(set(many("driver_library")))),
        libcuda=tuple(dict.fromkeys(Library(*words) for words in _words(many("libcuda"), 2))),
        loader_directories=tuple(LoaderDirectory(*words) for words in _words(many("loader_directory"), 2)),
        driver_packages=read_packages(many("driver_package")),
        run_file="run_file" in lines,
        kernel_packages=many("kernel_package"),
        cuda_packages=read_packages(many("cuda_package")),
        toolkit_homes=many("toolkit_home"),
        gpus=read_gpus(lines),
        uvm_major=one("uvm_major"),
        cuda={user: _answer(text) for user, text in _words(many("cuda"), 2)},
    )


def read_packages(values: Iterable[str]) -> tuple[Package, ...]:
    """Of lines 'selection version name'."""
    return tuple(Package(*words) for words in _words(values, 3))


def _words(values: Iterable[str], count: int) -> Iterable[list[str]]:
    """Values that have at least `count` words; the last word takes the rest."""
    split = (value.split(" ", count - 1) for value in values)
    return (words for words in split if len(words) == count)


def _answer(text: str) -> CudaAnswer:
    """Anything but the probe's JSON is an error, shown as it is: a probe that was killed has printed no number."""
    try:
        said = json.loads(text)
        init, devices = said.get("init"), said.get("devices", 0)
        if isinstance(init, int | None) and isinstance(devices, int):
            return CudaAnswer(init, devices, str(said.get("error", "" if init is not None else text)))
    except (ValueError, AttributeError, RecursionError):
        pass
    return CudaAnswer(None, 0, text)

"""What a Proxmox VE node says about itself: the lines of facts/node.py's script as a typed, frozen model.

The script prints `key value` lines. A line that does not read as its key says is dropped: a node with odd output still
gets a plan and a report, in which what could not be read is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from gpubox.nvidia.box_readings import Package, read_packages
from gpubox.nvidia.driver import loaded_version
from gpubox.nvidia.gpu_count import Gpus, read_gpus

_DKMS = re.compile(
    r"^(?P<module>[\w.-]+)(/|, )(?P<version>[\w.~+-]+)(, (?P<kernel>[^,\s]+), (?P<arch>\w+))?: (?P<status>\w+)"
)


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DkmsEntry(Frozen):
    """One line of `dkms status`; `kernel` is empty for a module that is only added."""

    module: str
    version: str
    kernel: str
    status: str


class ModuleFile(Frozen):
    """The nvidia module on disk for one kernel, as modinfo reads it."""

    kernel: str
    version: str
    license: str


class Card(Frozen):
    """A GPU's place on PCI. Widths in lanes, 0 when not readable; `bar_bytes` is its largest memory region.

    `iommu`: the type of its IOMMU group ("identity", "DMA", "DMA-FQ"), "" without one. `parents`: the bridges above it.
    """

    address: str
    device: str
    width: int
    max_width: int
    bar_bytes: int
    iommu: str
    parents: tuple[str, ...] = ()


class AerCount(Frozen):
    """A PCI device's non-zero error counters since boot."""

    address: str
    correctable: int
    nonfatal: int
    fatal: int


class FileSeen(NamedTuple):
    sha256: str
    mode: str
    owner: str


class NodeReadings(Frozen):
    """cards: one for each of gpus.pci, in the same order."""

    release: str = ""
    system: str = ""  # "debian 12"
    user: str = ""  # who asked, when that was not root
    pve: str = ""
    kernels: tuple[str, ...] = ()
    initrds: tuple[str, ...] = ()
    pin: str = ""
    next_boot_pin: str = ""
    bootloaders: tuple[str, ...] = ()
    esp_sync: bool = False
    command_line: str = ""
    kernel_cmdline_file: str = ""
    packages: tuple[str, ...] = ()
    driver_packages: tuple[Package, ...] = ()
    run_file: bool = False  # the uninstaller that a .run file leaves is there
    dkms: tuple[DkmsEntry, ...] = ()
    modules: tuple[ModuleFile, ...] = ()
    loaded_modules: tuple[str, ...] = ()
    loaded_driver: str = ""
    loaded_open: bool = False
    hmm_disabled: str = ""
    libcuda: tuple[str, ...] = ()
    gpus: Gpus = Gpus()
    cards: tuple[Card, ...] = ()
    secure_boot: str = ""
    acs_redirecting: tuple[str, ...] = ()
    acs_read: bool = False
    aer: tuple[AerCount, ...] = ()
    aer_read: bool = False
    root_fs: str = ""
    kernel_log_read: bool = False
    xids: tuple[str, ...] = ()
    files: dict[str, FileSeen] = {}
    stamps: dict[str, str] = {}
    initrd_stale: bool = False
    reload: bool = False
    units_enabled: tuple[str, ...] = ()
    units_active: tuple[str, ...] = ()

    @property
    def running(self) -> bool:
        """False for the readings of a machine that did not answer."""
        return bool(self.release)

    def module_for(self, kernel: str) -> ModuleFile | None:
        return next((module for module in self.modules if module.kernel == kernel), None)


class _Lines:
    """The output grouped by key, in order."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.grouped: dict[str, list[str]] = {}
        for line in lines:
            key, _, value = line.rstrip("\n").partition(" ")
            self.grouped.setdefault(key, []).append(value.strip())

    def one(self, key: str) -> str:
        return self.grouped.get(key, [""])[-1]

    def many(self, key: str) -> tuple[str, ...]:
        return tuple(value for value in self.grouped.get(key, []) if value)

    def has(self, key: str) -> bool:
        return key in self.grouped

    def words(self, key: str, count: int) -> Iterator[list[str]]:
        """The values of `key` that have at least `count` words; the last word takes the rest."""
        for value in self.many(key):
            words = value.split(" ", count - 1)
            if len(words) == count:
                yield words


def read_node(lines: Iterable[str]) -> NodeReadings:
    """The readings in the script's output. Never raises."""
    said = _Lines(lines)
    return NodeReadings(
        release=said.one("release"),
        system=said.one("os"),
        user=said.one("user"),
        pve=said.one("pve"),
        kernels=said.many("kernel"),
        initrds=said.many("initrd"),
        pin=said.one("pin"),
        next_boot_pin=said.one("next_boot_pin"),
        bootloaders=said.many("bootloader"),
        esp_sync=said.has("esp_sync"),
        command_line=said.one("command_line"),
        kernel_cmdline_file=said.one("kernel_cmdline_file"),
        packages=said.many("package"),
        driver_packages=read_packages(said.many("driver_package")),
        run_file=said.has("run_file"),
        dkms=tuple(_dkms(said.many("dkms"))),
        modules=tuple(ModuleFile(kernel=k, version=v, license=text) for k, v, text in said.words("module", 3)),
        loaded_modules=said.many("loaded"),
        loaded_driver=loaded_version(said.one("banner") + "\n") or "",
        loaded_open="Open Kernel Module" in said.one("banner"),
        hmm_disabled=said.one("uvm_disable_hmm"),
        libcuda=said.many("libcuda"),
        gpus=read_gpus(said.grouped),
        cards=tuple(_cards(said)),
        secure_boot=said.one("secure_boot"),
        acs_redirecting=said.many("acs_redirecting"),
        acs_read=said.has("acs_read"),
        aer=tuple(_aer(said)),
        aer_read=said.has("aer_read"),
        root_fs=said.one("root_fs"),
        kernel_log_read=said.has("kernel_log_read"),
        xids=said.many("xid"),
        files={path: FileSeen(sha, mode, owner) for sha, mode, owner, path in said.words("file", 4)},
        stamps={words[0]: words[1] for words in said.words("stamp", 2)},
        initrd_stale=said.has("initrd_stale"),
        reload=said.has("reload"),
        units_enabled=said.many("unit_enabled"),
        units_active=said.many("unit_active"),
    )


def _dkms(lines: Iterable[str]) -> Iterator[DkmsEntry]:
    """Both spellings: 'nvidia/590.48.01, KERNEL, x86_64: installed' (dkms 3) and 'nvidia, 590.48.01, ...' (dkms 2)."""
    for line in lines:
        if found := _DKMS.match(line):
            yield DkmsEntry(
                module=found["module"],
                version=found["version"],
                kernel=found["kernel"] or "",
                status=found["status"],
            )


def _cards(said: _Lines) -> Iterator[Card]:
    parents = {address: tuple(rest.split()) for address, rest in said.words("card_parents", 2)}
    for address, device, width, max_width, bar, iommu in said.words("card", 6):
        yield Card(
            address=address,
            device=device,
            width=_number(width),
            max_width=_number(max_width),
            bar_bytes=_number(bar),
            iommu="" if iommu == "-" else iommu,
            parents=parents.get(address, ()),
        )


def _aer(said: _Lines) -> Iterator[AerCount]:
    for address, correctable, nonfatal, fatal in said.words("aer", 4):
        yield AerCount(
            address=address, correctable=_number(correctable), nonfatal=_number(nonfatal), fatal=_number(fatal)
        )


def _number(text: str) -> int:
    """0 for anything that is not a plain number ("Unknown" in a link width that sysfs cannot tell)."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0

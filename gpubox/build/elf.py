"""What a shared library asks for, read from its file: no loading, no ldd."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

# CUDA libraries whose soname carries CUDA's own major. Others (libcufft.so.12, libcusolver.so.12) count for themselves.
_CUDA_LIBRARY = re.compile(r"^lib(cudart|nvrtc|nvJitLink|cublas|cublasLt|cupti)\.so\.(\d+)$")
_SHARED_LIBRARY = re.compile(r"\.so(\.\d+)*$")


@dataclass(frozen=True)
class Linkage:
    """The libraries a file asks for (DT_NEEDED), in file order."""

    needed: tuple[str, ...]

    @property
    def cuda(self) -> tuple[str, ...]:
        """Those of CUDA's toolkit and driver, sorted."""
        return tuple(sorted(name for name in self.needed if _CUDA_LIBRARY.match(name) or name == "libcuda.so.1"))

    @property
    def cuda_majors(self) -> frozenset[int]:
        return frozenset(major for major in map(cuda_library_major, self.needed) if major is not None)


def cuda_library_major(name: str) -> int | None:
    """13 for libcudart.so.13; None for a library whose name does not tell CUDA's major."""
    match = _CUDA_LIBRARY.match(name)
    return int(match[2]) if match else None


def read_linkage(path: Path) -> Linkage | None:
    """None when `path` is no dynamic ELF file: text linker scripts and data files end in .so, too."""
    with path.open("rb") as stream:
        dynamic = _section(stream, ".dynamic")
        if not isinstance(dynamic, DynamicSection):
            return None
        tags: Iterator[Any] = dynamic.iter_tags("DT_NEEDED")
        return Linkage(tuple(str(tag.needed) for tag in tags))


def undefined_symbols(path: Path) -> frozenset[str]:
    """The dynamic symbols that another library has to bring. Takes seconds for libraries as large as torch's."""
    with path.open("rb") as stream:
        table = _section(stream, ".dynsym")
        if not isinstance(table, SymbolTableSection):
            return frozenset()
        return frozenset(
            symbol.name for symbol in table.iter_symbols() if symbol["st_shndx"] == "SHN_UNDEF" and symbol.name
        )


def shared_libraries(directory: Path) -> Iterator[Path]:
    """Files below `directory` named like shared libraries, sorted; links left out."""
    for path in sorted(directory.rglob("*.so*")):
        if _SHARED_LIBRARY.search(path.name) and path.is_file() and not path.is_symlink():
            yield path


def _section(stream: BinaryIO, name: str) -> object:
    try:
        return ELFFile(stream).get_section_by_name(name)
    except ELFError:
        return None

"""Record that an artefact was fetched and is what artefacts.toml assumes: the entry becomes `[[proved]]`.

Proved means: these bytes were had from the named index; their hash is one that was known before; a wheel says the name,
version and requirements that the lock was resolved with; and its libraries link the CUDA of the stack.
"""

from __future__ import annotations

import email
import re
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from gpubox.build.artefacts import obtain
from gpubox.build.elf import read_linkage
from gpubox.build.fetch import sha256_of
from gpubox.errors import BrokenError, InputError, ProofError
from gpubox.files import write_atomic
from gpubox.specs.artefacts import ARTEFACTS_TOML, Artefact, Artefacts, Unproved, load_artefacts, pins
from gpubox.specs.stack import load_stack

Report = Callable[[str], None]


@dataclass(frozen=True)
class ArtefactProof:
    """`size` in bytes; `cuda_majors`: of the CUDA libraries that a wheel's files link."""

    file: str
    sha256: str
    size: int
    cuda_majors: list[int]


def prove_artefacts(
    directory: Path, store: Path, *, indexes: Mapping[str, str], offline: bool, report: Report
) -> list[ArtefactProof]:
    """Prove what is unproved in the stack in `directory`; the files are kept in `store`, or are there already.

    Each proof is written to artefacts.toml as it is made. Raises RepublishedError for bytes that nobody knew before,
    ProofError for a wheel that is not what was assumed, InputError for an index without an address.
    """
    stack, artefacts = load_stack(directory), load_artefacts(directory)
    major = stack.cuda.linked_major if stack.cuda else None
    proofs = []
    for artefact in artefacts.unproved:
        (pinned,) = pins(Artefacts(unproved=[artefact]))
        path = obtain(pinned, store, wheelhouse=None, indexes=indexes, offline=offline, report=report)
        sha256 = sha256_of(path)
        majors = check_wheel(artefact, path, major) if artefact.kind == "wheel" else []
        proof = ArtefactProof(artefact.file, sha256, path.stat().st_size, majors)
        record(directory, artefact, proof)
        report(f"{artefact.file} is proved")
        proofs.append(proof)
    return proofs


def check_wheel(artefact: Artefact, path: Path, major: int | None) -> list[int]:
    """The CUDA majors that the wheel's libraries link. Raises ProofError when it is not what `artefact` assumes."""
    try:
        with zipfile.ZipFile(path) as wheel:
            _check_metadata(artefact, wheel)
            majors = _linked_majors(wheel)
    except (zipfile.BadZipFile, KeyError, StopIteration) as error:
        raise BrokenError(f"{path}: no wheel: {error}", hint=f"correct its entry in {ARTEFACTS_TOML}") from None
    wrong = sorted(majors - {major}) if major is not None else []
    if wrong:
        raise ProofError(
            f"{path.name}: links CUDA {', '.join(map(str, wrong))}, the stack declares CUDA {major}",
            hint="its name does not tell; take the build that links the declared one",
        )
    return sorted(majors)


def record(directory: Path, artefact: Unproved, proof: ArtefactProof) -> None:
    """Turn the entry into `[[proved]]`, everything else in the file left as it was written."""
    path = directory / ARTEFACTS_TOML
    text = path.read_text(encoding="utf-8")
    written = mark_proved(text, artefact.file, proof)
    write_atomic(path, written.encode())
    left = {entry.file for entry in load_artefacts(directory).unproved}
    if artefact.file in left:
        write_atomic(path, text.encode())
        raise InputError(f"{path}: no [[unproved]] with file = {artefact.file!r} that could be marked", hint="edit it")


def mark_proved(text: str, file: str, proof: ArtefactProof) -> str:
    """artefacts.toml with the entry of `file` proved: its candidates go, what was seen comes in, comments stay."""
    tables = re.split(r"(?m)^(?=[ \t]*\[\[)", text)
    names = [match[1] if (match := re.match(r"\s*\[\[\s*([\w.]+)", table)) else "" for table in tables]
    out, inside = [], False
    for name, table in zip(names, tables, strict=True):
        if name in ("unproved", "proved", ""):
            inside = (
                name == "unproved" and re.search(rf"(?m)^\s*file\s*=\s*[\"']{re.escape(file)}[\"']", table) is not None
            )
        out.append(_proved_table(name, table, proof) if inside else table)
    return "".join(out)


def _proved_table(name: str, table: str, proof: ArtefactProof) -> str:
    if name == "unproved.candidates":
        # What follows the candidate's keys is a comment on the next entry.
        return re.sub(r"\A\s*\[\[.*\n(?:\s*(?:sha256|source)\s*=.*\n)*\n?", "", table)
    table = re.sub(r"\[\[(\s*)unproved", r"[[\1proved", table, count=1)
    if name == "unproved":
        seen = f'sha256 = "{proof.sha256}"\nsize = {proof.size}\n'
        table = re.sub(r"(?m)^(\s*file\s*=.*\n)", rf"\g<1>{seen}", table, count=1)
    return table


def _check_metadata(artefact: Artefact, wheel: zipfile.ZipFile) -> None:
    name = next(n for n in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
    metadata = email.message_from_bytes(wheel.read(name))
    said, version = str(metadata["Name"]), Version(str(metadata["Version"]))
    wanted = Version(artefact.version)
    if canonicalize_name(said) != canonicalize_name(artefact.name) or version.public != wanted.public:
        raise ProofError(f"{artefact.file}: its metadata says {said} {version}", hint=f"correct {ARTEFACTS_TOML}")
    if version.local is not None and version != wanted:
        raise ProofError(
            f"{artefact.file}: its metadata says {version}: another build than its name tells",
            hint="do not install it; find out where it comes from",
        )
    asked = {_normal(text) for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text}
    assumed = {_normal(text) for text in artefact.requires}
    if asked != assumed:
        changes = [f"+ {text}" for text in sorted(asked - assumed)] + [f"- {text}" for text in sorted(assumed - asked)]
        raise ProofError(
            f"{artefact.file}: asks for other things than the lock was made with",
            hint=f"write what it asks for (+) into its requires in {ARTEFACTS_TOML}, then `make lock` and prove again",
            detail="\n".join(changes),
        )


def _normal(text: str) -> str:
    """A requirement for comparison; a marker that says x86-64 Linux says nothing here."""
    requirement = Requirement(text)
    here = {"platform_machine": "x86_64", "platform_system": "Linux", "sys_platform": "linux"}
    marker = str(requirement.marker or "")
    for name, value in here.items():
        marker = re.sub(rf"\s*(and\s+)?{name} == \"{value}\"(\s+and)?\s*", "", marker)
    return f"{canonicalize_name(requirement.name)}{requirement.specifier}{'; ' + marker if marker.strip() else ''}"


def _linked_majors(wheel: zipfile.ZipFile) -> set[int]:
    majors: set[int] = set()
    with tempfile.TemporaryDirectory() as scratch:
        for name in wheel.namelist():
            if re.search(r"\.so(\.\d+)*$", name):
                library = Path(wheel.extract(name, scratch))
                linkage = read_linkage(library)
                majors |= linkage.cuda_majors if linkage else frozenset()
                library.unlink()
    return majors

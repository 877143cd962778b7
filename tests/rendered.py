"""Every server profile rendered for every stack: `make rendered` writes the bytes that are expected and shows the diff.

tests/fixtures/rendered/<server>/<stack>/ holds the files of the release, or refused.txt where a rule refuses the
profile on that stack. The digests of stacks and models stand as zeros: what a lock holds changes no profile.
"""

from __future__ import annotations

import difflib
import shutil
import sys
from pathlib import Path

from gpubox.errors import InputError
from gpubox.specs.engine_table import OtherTables, load_table, table_path
from gpubox.specs.release import render_release
from gpubox.specs.server import load_server
from gpubox.specs.settled import settle
from gpubox.specs.stack import load_stack

ROOT = Path(__file__).resolve().parents[1]
EXPECTED = ROOT / "tests" / "fixtures" / "rendered"
ZEROS = "0" * 12


def servers() -> list[str]:
    return sorted(path.stem for path in (ROOT / "servers").glob("*.toml"))


def stacks() -> list[str]:
    return sorted(path.parent.name for path in (ROOT / "stacks").glob("*/stack.toml"))


def render(server_name: str, stack_name: str) -> dict[str, bytes]:
    """The files by name."""
    server, stack = load_server(ROOT / "servers", server_name), load_stack(ROOT / "stacks" / stack_name)
    table = load_table(table_path(ROOT, stack.name, stack.engine.name, stack.engine.version))
    try:
        settled = settle(server, stack, table, others=OtherTables(ROOT, table))
    except InputError as error:
        return {"refused.txt": f"{error}\n".encode()}
    spec = render_release(
        server,
        stack,
        f"{stack.name}-{ZEROS}",
        settled=settled,
        overlay=None,
        model_id=built(server.model.build),
        draft_id=built(server.draft.build) if server.draft else None,
        listen_address="127.0.0.1",
    )
    warnings = "".join(f"{finding}\n" for finding in settled.warnings)
    return spec.files | ({"warnings.txt": warnings.encode()} if warnings else {})


def built(name: str | None) -> str | None:
    return f"{name}-{ZEROS}" if name else None


def expected(server_name: str, stack_name: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((EXPECTED / server_name / stack_name).glob("*"))}


def difference(old: dict[str, bytes], new: dict[str, bytes], where: str) -> str:
    lines: list[str] = []
    for name in sorted(old.keys() | new.keys()):
        before, after = (files.get(name, b"").decode().splitlines() for files in (old, new))
        lines += difflib.unified_diff(
            before, after, f"expected {where}/{name}", f"rendered {where}/{name}", lineterm=""
        )
    return "\n".join(lines)


def main() -> None:
    wanted = {(server, stack) for server in servers() for stack in stacks()}
    for directory in EXPECTED.glob("*/*"):
        if (directory.parent.name, directory.name) not in wanted:
            sys.stdout.write(f"removed {directory.relative_to(ROOT)}\n")
            shutil.rmtree(directory)
    changed = 0
    for server, stack in sorted(wanted):
        old, new = expected(server, stack), render(server, stack)
        if old == new:
            continue
        changed += 1
        sys.stdout.write(difference(old, new, f"{server}/{stack}") + "\n")
        directory = EXPECTED / server / stack
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        for name, data in new.items():
            (directory / name).write_bytes(data)
    sys.stdout.write(f"{changed} of {len(wanted)} changed; look at the diff before you commit it\n")


if __name__ == "__main__":
    main()

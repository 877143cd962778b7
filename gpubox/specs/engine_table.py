"""Argument tables of engine versions: which flags an engine takes, as data read from its own source.

`engines/<engine>-<version>.json`, made by `make engine-tables`. A stack whose engine has other arguments, by its
patches or because it comes from a source archive, brings its own: `stacks/<name>/engine.json`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from gpubox.errors import InputError

Kind = Literal["switch", "toggle", "one", "many", "ignored"]
Type = Literal["bool", "int", "float", "str", "json"]


class Argument(BaseModel):
    """One argument. `flags`: every spelling, the one that is rendered first.

    kind: a `switch` is given or not; a `toggle` also has a --no- form; `many` takes a list; `ignored` is accepted and
    does nothing. json is parsed by the engine from one word. `replacement`: the engine calls the flag deprecated.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    flags: tuple[str, ...]
    kind: Kind = "one"
    type: Type = "str"
    choices: tuple[str | int | float | None, ...] | None = None
    default: Any = None
    required: bool = False
    replacement: str = ""

    @property
    def allowed(self) -> str:
        """The values it takes, in words."""
        if self.choices is not None:
            return ("a list of " if self.kind == "many" else "") + ", ".join(map(str, self.choices))
        if self.kind in ("switch", "toggle"):
            return "true or false"
        words = {"int": "a whole number", "float": "a number", "str": "a text", "json": "a table, a list or JSON text"}
        return f"a list, each {words[self.type]}" if self.kind == "many" else words[self.type]


class EngineTable(BaseModel):
    """`arguments` by the name that a server profile uses: the flag without dashes, with underscores.

    `overwritten_environment`: variables that the engine sets at its start whatever they were; None: to its own value.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: str
    version: str
    source: str
    arguments: dict[str, Argument]
    overwritten_environment: dict[str, str | None] = {}

    @property
    def title(self) -> str:
        return f"{self.engine} {self.version}"

    @cached_property
    def keys(self) -> dict[str, str]:
        """The key of each argument by every one of its spellings."""
        return {spelling(flag): key for key, argument in self.arguments.items() for flag in argument.flags}


def spelling(flag: str) -> str:
    """--tp-size as a profile writes it: tp_size."""
    return flag.removeprefix("--").replace("-", "_")


def table_path(root: Path, stack: str, engine: str, version: str) -> Path:
    """A stack's own table if it has one, else that of the engine's release."""
    own = root / "stacks" / stack / "engine.json"
    return own if own.is_file() else root / "engines" / f"{engine}-{version}.json"


def load_table(path: Path) -> EngineTable:
    """Raises InputError when there is none or it does not parse."""
    try:
        return _parsed(path.read_bytes())
    except FileNotFoundError:
        raise InputError(
            f"{path}: no table of this engine version's arguments",
            hint="make engine-tables reads it from the engine's wheel",
        ) from None
    except (OSError, ValidationError) as error:
        raise InputError(f"{path}: not an argument table: {error}", hint="make engine-tables makes it anew") from None


@lru_cache(maxsize=16)
def _parsed(data: bytes) -> EngineTable:
    """By content, so that a changed file is never mistaken for the old one."""
    return EngineTable.model_validate_json(data)


@dataclass(frozen=True)
class OtherTables:
    """Tables of the same engine's other versions, read when somebody wants to know where a flag exists."""

    root: Path
    table: EngineTable

    def __iter__(self) -> Iterator[EngineTable]:
        for path in sorted((self.root / "engines").glob(f"{self.table.engine}-*.json")):
            other = load_table(path)
            if other.version != self.table.version:
                yield other

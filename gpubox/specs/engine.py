"""Engine arguments: named fields of server profiles and overlays, checked against the table of one engine version."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpubox.specs.engine_table import Argument, EngineTable
from gpubox.specs.findings import Finding
from gpubox.toml import nearest

TEXT_LIMIT = 32_768  # characters; Linux refuses a single argument of 128 KiB (MAX_ARG_STRLEN)
INT_LIMIT = 2**63

IN_PROFILE = "it is rendered from another key of the profile"
SECRET = "a command line is readable by every user of the box, and /server_info and the log repeat it"

# Arguments that are decided elsewhere: why, and where.
RESERVED: Mapping[str, tuple[str, str]] = {
    "model_path": (IN_PROFILE, "set [model] path or build"),
    "served_model_name": (IN_PROFILE, "set served_model_name at the top of the profile"),
    "host": ("it is rendered from the box's settings", "set listen_address in group_data"),
    "port": (IN_PROFILE, "set port at the top of the profile"),
    "speculative_draft_model_path": (IN_PROFILE, "set [draft] path or build"),
    "config": ("it would hide arguments in a second file that no rule reads", "write them here"),
    "api_key": (SECRET, "let what stands in front of the server ask for the key"),
    "admin_api_key": (SECRET, "let what stands in front of the server ask for the key"),
    "ssl_keyfile_password": (SECRET, "end TLS in front of the server"),
}


@dataclass(frozen=True)
class Source:
    """Where arguments were written: `values` by name, in the table `section` of `file`."""

    file: str
    section: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class EngineArguments:
    """Arguments by key, of the right types, in the order of their names. `places`: file and dotted key of each."""

    table: EngineTable
    values: Mapping[str, Any]
    places: Mapping[str, tuple[str, str]]

    def get(self, name: str) -> Any:
        """The value under any spelling of its name; None when it is not set, and for a switch that is off."""
        value = self.values.get(self.table.keys.get(name, name))
        return None if value is False else value

    def command_line(self) -> list[str]:
        """Flags in the order of their names, so that equal arguments give equal bytes."""
        words: list[str] = []
        for key, value in self.values.items():
            words += _words(self.table.arguments[key], value)
        return words


def resolve(
    sources: Iterable[Source], table: EngineTable, others: Iterable[EngineTable] = ()
) -> tuple[EngineArguments, list[Finding]]:
    """The arguments of `sources`, a later one over an earlier one, and what is wrong with each.

    What is wrong is left out of the arguments, so that each mistake is told once. `others`: tables of other versions of
    the engine, to say where an unknown argument exists.
    """
    values: dict[str, Any] = {}
    places: dict[str, tuple[str, str]] = {}
    findings: list[Finding] = []
    for source in sources:
        seen: dict[str, str] = {}
        for name, value in source.values.items():
            place = f"{source.section}.{name}"
            wrong = _wrong(name, value, table, others)
            key = table.keys.get(name, name)
            if wrong is None and key in seen:
                wrong = ("given-twice", f"is the same argument as {seen[key]!r}", "keep one of them")
            if wrong is not None:
                rule, problem, fix = wrong
                findings.append(Finding(rule, "error", source.file, place, problem, fix))
                continue
            seen[key] = name
            values[key] = value
            places[key] = (source.file, place)
    return EngineArguments(table, dict(sorted(values.items())), places), findings


def _wrong(name: str, value: Any, table: EngineTable, others: Iterable[EngineTable]) -> tuple[str, str, str] | None:
    """Rule, problem and fix; None when the argument may be rendered."""
    key = table.keys.get(name)
    if (key or name) in RESERVED:
        reason, fix = RESERVED[key or name]
        return "reserved-argument", f"is not for [engine]: {reason}", fix
    if key is None:
        return "unknown-argument", f"{table.title} has no such argument", _where_it_is(name, table, others)
    argument = table.arguments[key]
    if argument.kind == "ignored":
        return "ignored-argument", f"{table.title} takes it and does nothing with it", "remove it"
    problem = _type_problem(argument, value)
    return None if problem is None else ("wrong-value", f"{_shown(value)} {problem}", f"allowed: {argument.allowed}")


def _where_it_is(name: str, table: EngineTable, others: Iterable[EngineTable]) -> str:
    """Under another name here, in another version, or what is nearest."""
    for other in others:
        if key := other.keys.get(name):
            here = [spelling for spelling in other.keys if other.keys[spelling] == key and spelling in table.keys]
            if here:
                return f"{other.title} has it; {here[0]!r} is the name that both take"
            return f"{other.title} has it: remove it here, or serve from a stack with that engine"
    close = nearest(name, list(table.keys))
    return close if close.startswith("did you mean") else f"engines/{table.engine}-{table.version}.json lists them"


def _type_problem(argument: Argument, value: Any) -> str | None:
    if argument.kind in ("switch", "toggle"):
        return None if isinstance(value, bool) else "is not true or false"
    if argument.kind == "many":
        if not isinstance(value, list) or not value:
            return "is not a list of at least one"
        return next((problem for item in value if (problem := _item_problem(argument, item))), None)
    return _item_problem(argument, value)


def _item_problem(argument: Argument, value: Any) -> str | None:
    kinds: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}
    if argument.type == "json":
        return _json_problem(value)
    if isinstance(value, bool) or not isinstance(value, kinds[argument.type]):
        return f"is {_kind(value)}"
    problem: str | None
    if isinstance(value, str):
        problem = text_problem(value)
    elif isinstance(value, int):
        problem = None if abs(value) < INT_LIMIT else "is too large"
    else:
        problem = "is not a finite number" if isinstance(value, float) and not math.isfinite(value) else None
    if problem is None and argument.choices is not None and value not in argument.choices:
        return "is none of the choices"
    return problem


def text_problem(value: str) -> str | None:
    """Why `value` cannot be one word of a command line."""
    if len(value) > TEXT_LIMIT:
        return f"is longer than {TEXT_LIMIT} characters"
    if any(
        ord(character) < 32 or 127 <= ord(character) < 160 or 0xD800 <= ord(character) < 0xE000 for character in value
    ):
        return "holds a control character"
    return "starts with '-' and would be read as a flag" if value.startswith("-") else None


def _json_problem(value: Any) -> str | None:
    try:
        text = value if isinstance(value, str) else _json(value)
        json.loads(text, parse_constant=_no_constant)
    except (TypeError, ValueError, RecursionError):
        return "is not JSON"
    return text_problem(text)


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _json(value: Any) -> str:
    if not isinstance(value, dict | list):
        raise TypeError(type(value))
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _words(argument: Argument, value: Any) -> Iterator[str]:
    flag = argument.flags[0]
    if argument.kind == "toggle":
        yield flag if value else "--no-" + flag.removeprefix("--")
    elif argument.kind == "switch":
        if value:
            yield flag
    else:
        yield flag
        for item in value if argument.kind == "many" else [value]:
            yield _json(item) if isinstance(item, dict | list) else str(item)


def _kind(value: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", list: "a list"}
    return names.get(type(value), "a table" if isinstance(value, dict) else type(value).__name__)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

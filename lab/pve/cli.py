"""How PVE's programs read their command line (PVE::CLIHandler, Getopt::Long), and how they end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .errors import FAILED, PveError, RequestError, verification_failed
from .schema import Parameter, object_errors, parse_boolean

Values = dict[str, str]
REST = "extra-args"  # everything after the other arguments


@dataclass(frozen=True)
class Command:
    """One command of a program. `arguments` are positional and named in `parameters` too."""

    run: Callable[[Values, list[str]], None]
    arguments: Sequence[str] = ()
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    def usage(self, name: str) -> str:
        shown = [name]
        for argument in self.arguments:
            optional = argument == REST or self.parameters[argument].optional
            shown.append(f"[<{argument}>]" if optional else f"<{argument}>")
        options = set(self.parameters) - set(self.arguments)
        return " ".join([*shown, "[OPTIONS]"] if options else shown)


def main(program: str, commands: Mapping[str, Command], arguments: Sequence[str]) -> int:
    """Run `program ARGUMENTS...`; the exit status."""
    try:
        if os.geteuid() != 0:
            raise PveError("please run as root")
        return _run(program, commands, arguments)
    except PveError as error:
        print(error.message, file=sys.stderr)
        return error.status
    except BrokenPipeError:
        return FAILED


def _run(program: str, commands: Mapping[str, Command], arguments: Sequence[str]) -> int:
    """Raises PveError."""
    if not arguments:
        return _abort(program, commands, "no command specified")
    name = _expand(arguments[0], commands)
    if name == "help":
        print(_usage(program, commands), end="")
    elif name not in commands:
        return _abort(program, commands, f"unknown command '{program} {arguments[0]}'")
    else:
        try:
            commands[name].run(*read(commands[name], arguments[1:]))
        except RequestError as error:
            error.message += f"\n{commands[name].usage(f'{program} {name}')}"
            raise
    return 0


def read(command: Command, arguments: Sequence[str]) -> tuple[Values, list[str]]:
    """The values of a command's parameters by name, and what follows. Raises RequestError."""
    options, words = _split(command.parameters, arguments)
    rest: list[str] = []
    for name in command.arguments:
        if name == REST:
            rest, words = words, []
        elif words:
            options[name] = [words.pop(0)]
        elif not command.parameters[name].optional and name not in options:
            raise RequestError("not enough arguments")
    if words:
        raise RequestError("too many arguments")
    values = {name: _joined(command.parameters[name], given) for name, given in options.items()}
    wrong = object_errors(command.parameters, values)
    if wrong:
        raise verification_failed(wrong)
    return values, rest


def _joined(parameter: Parameter, given: list[str]) -> str:
    if parameter.kind == "boolean":
        value = "1" if given[-1] == "" else parse_boolean(given[-1])
        if value is None:
            raise RequestError("unable to parse boolean option")
        return value
    return ",".join(given) if parameter.is_list else given[-1]


def _split(parameters: Mapping[str, Parameter], arguments: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Options and words as Getopt::Long tells them apart: anywhere, `-x` or `--x`, any unambiguous prefix."""
    options: dict[str, list[str]] = {}
    words: list[str] = []
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if word == "--":
            words += waiting
            break
        if not word.startswith("-") or word == "-":
            words.append(word)
            continue
        given, equals, value = word.lstrip("-").partition("=")
        name = _option(given, parameters)
        boolean = parameters[name].kind == "boolean"
        if not equals:
            if boolean:  # the value is optional
                value = waiting.pop(0) if waiting and not waiting[0].startswith("-") else ""
            elif waiting:
                value = waiting.pop(0)
            else:
                _complain(f"Option {name} requires an argument")
        options.setdefault(name, []).append(value)
    return options, words


def _option(given: str, parameters: Mapping[str, Parameter]) -> str:
    wanted = given.lower()
    exact = [name for name in parameters if name.lower() == wanted]
    found = exact or sorted(name for name in parameters if wanted and name.lower().startswith(wanted))
    if not found:
        _complain(f"Unknown option: {wanted}")
    if len(found) > 1:
        _complain(f"Option {given} is ambiguous ({', '.join(found)})")
    return found[0]


def _complain(message: str) -> None:
    print(message, file=sys.stderr)
    raise RequestError("unable to parse option")


def _expand(given: str, commands: Mapping[str, Command]) -> str:
    """PVE takes any unambiguous beginning of a command."""
    found = [name for name in (*commands, "help") if name.startswith(given)]
    return found[0] if len(found) == 1 and given not in commands else given


def _usage(program: str, commands: Mapping[str, Command]) -> str:
    lines = [f"       {command.usage(f'{program} {name}')}" for name, command in sorted(commands.items())]
    return "\n".join([f"USAGE: {program} <COMMAND> [ARGS] [OPTIONS]", "", *lines, f"       {program} help", ""])


def _abort(program: str, commands: Mapping[str, Command], reason: str) -> int:
    print(f"ERROR: {reason}\n{_usage(program, commands)}", file=sys.stderr)
    return FAILED

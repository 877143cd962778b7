"""Read a TOML file into a strict model, or say what is wrong in words a newcomer can act on."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, Tag, ValidationError

from gpubox.errors import InputError

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$", max_length=64)]
_PASSWORD = re.compile(r"(\w://[^/\s:@'\"]*:)[^/\s'\"]*@")
Model = TypeVar("Model", bound=BaseModel)
VARIANT = "variant:"  # begins the tag of each form that a value may have; pydantic puts it among the keys of an error


class Strict(BaseModel):
    """What a person writes: no unknown key, no value of another type, nothing changed after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def as_tuple(value: object) -> object:
    """For BeforeValidator: TOML writes lists, and a single item may be written without brackets."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def read_toml(path: Path) -> dict[str, Any]:
    """Raises InputError when the file is missing, unreadable or not TOML."""
    return _parsed(_text(path), str(path))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


def _parsed(text: str, path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not TOML; a number of thousands of digits; brackets without end
        raise InputError(f"{path}: not valid TOML: {error}", hint="check quotes and brackets near that place") from None


def validate(model: type[Model], data: Mapping[str, Any], origin: str) -> Model:
    """`data` as `model`. Raises InputError whose first line names origin, key and value; all problems follow.

    What is missing comes last: a misspelt key shows as unknown and as missing, and only the first says what was meant.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        items = sorted(error.errors(include_url=False), key=lambda item: item["type"] == "missing")
        problems = [_problem(model, data, dict(item)) for item in items]
        message, hint = problems[0]
        rest = "\n".join(f"{origin}: {text}" for text, _ in problems[1:])
        raise InputError(f"{origin}: {message}", hint=hint, detail=rest) from None


def load(model: type[Model], path: Path) -> Model:
    """The file as `model`, parsed once for each content: a thousand boxes share one profile. Raises InputError."""
    loaded: Model = _loaded(model, _text(path), str(path))
    return loaded


@lru_cache(maxsize=256)
def _loaded(model: type[Model], text: str, path: str) -> Model:
    return validate(model, _parsed(text, path), path)


def nearest(word: str, words: Mapping[str, Any] | set[str] | list[str]) -> str:
    """'did you mean …' or the list of what exists."""
    close = difflib.get_close_matches(word, list(words), n=1)
    return f"did you mean {close[0]!r}?" if close else "known: " + ", ".join(sorted(words))


def _problem(model: type[BaseModel], data: Mapping[str, Any], item: dict[str, Any]) -> tuple[str, str]:
    key = ".".join(str(part) for part in item["loc"] if not str(part).startswith(VARIANT))
    if item["type"] == "extra_forbidden":
        known = _fields_at(model, [str(part) for part in item["loc"][:-1]])
        return f"unknown key {key!r}", nearest(str(item["loc"][-1]), known) if known else "remove it"
    if item["type"] == "missing":
        return f"key {key!r} is missing", "add it; docs/ has a page for each file with an example"
    return without_passwords(f"{key} = {item['input']!r}: {item['msg']}"), f"allowed: {_allowed(item)}"


def without_passwords(text: str) -> str:
    """`text` with the password of every address in it hidden: what is refused is shown, and logs are kept."""
    return _PASSWORD.sub(r"\1***@", text)


def _allowed(item: dict[str, Any]) -> str:
    context = item.get("ctx") or {}
    if "expected" in context:
        return str(context["expected"])
    return str(item["msg"]).removeprefix("Input should be ").removeprefix("Value error, ")


def _fields_at(model: type[BaseModel], path: list[str]) -> set[str]:
    place: Any = model
    for part in path:
        if part.isdigit():
            continue
        if part.startswith(VARIANT):
            place = _variant(place, part)
            continue
        nested = _nested_model(place)
        field = nested.model_fields.get(part) if nested else None
        if field is None:
            return set()
        place = field.annotation
    nested = _nested_model(place)
    return {field.alias or name for name, field in nested.model_fields.items()} if nested else set()


def _variant(annotation: Any, tag: str) -> Any:
    """The part of a union that is marked with `tag`; None when there is none."""
    if any(isinstance(mark, Tag) and mark.tag == tag for mark in getattr(annotation, "__metadata__", ())):
        return get_args(annotation)[0]
    found = (_variant(argument, tag) for argument in get_args(annotation))
    return next((variant for variant in found if variant is not None), None)


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _nested_model(argument)
        if found:
            return found
    return None

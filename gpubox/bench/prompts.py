"""The prompts of a sweep: real text, each one once, so that no prefix cache answers for the model."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import BeforeValidator, Field, model_validator

from gpubox.canonical import sha256_hex
from gpubox.errors import InputError
from gpubox.toml import Strict, as_tuple, load

SHIPPED: Final = Path(__file__).with_name("prompts.toml")
ORDER_SEED: Final = 20260101  # of the one order in which every sweep asks
TEXTS = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(as_tuple), Field(min_length=1)]


class _Recipe(Strict):
    """`forms` times `topics`."""

    forms: TEXTS
    topics: TEXTS

    @model_validator(mode="after")
    def _forms_take_a_topic(self) -> Self:
        for form in self.forms:
            if form.count("{topic}") < 1:
                raise ValueError(f"form {form!r} does not hold {{topic}}")
        return self


def shipped() -> tuple[str, ...]:
    """1,088 prompts in a fixed shuffled order."""
    recipe = load(_Recipe, SHIPPED)
    texts = [form.replace("{topic}", topic) for form in recipe.forms for topic in recipe.topics]
    random.Random(ORDER_SEED).shuffle(texts)
    return tuple(texts)


def from_file(path: Path) -> tuple[str, ...]:
    """One JSON string or {"prompt": TEXT} a line. Raises InputError naming the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    texts = [_text(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if len(set(texts)) != len(texts):
        twice = next(text for text in texts if texts.count(text) > 1)
        raise InputError(f"{path}: holds a prompt twice: {twice[:60]!r}", hint="a prefix cache would answer the second")
    if not texts:
        raise InputError(f"{path}: holds no prompt", hint='one a line: "text" or {"prompt": "text"}')
    return tuple(texts)


def digest(prompts: tuple[str, ...]) -> str:
    return sha256_hex(json.dumps(prompts, ensure_ascii=False).encode())


def _text(path: Path, number: int, line: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        value = value.get("prompt")
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{path}, line {number}: no prompt", hint='one a line: "text" or {"prompt": "text"}')
    return value

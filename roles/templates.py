"""Files from a directory of templates that mirrors the paths on a host."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ops.base import File

ROOT = Path(__file__).resolve().parent.parent


def rendered_below(directory: str, values: Mapping[str, Any]) -> list[File]:
    """Every file below `directory` of this repository; those below an sbin/ may be executed."""
    loader = FileSystemLoader(ROOT / directory)
    environment = Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True)
    return [
        File(
            "/" + name.removesuffix(".j2"),
            environment.get_template(name).render(values),
            mode="755" if "/sbin/" in name else "644",
        )
        for name in sorted(environment.list_templates(extensions=["j2"]))
    ]

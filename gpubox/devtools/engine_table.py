"""Read an engine's argument table from its source: `python -m gpubox.devtools.engine_table [--check] [TREE ...]`.

TREE is a directory that holds the package sglang and its .dist-info: site-packages, an unpacked wheel, a patched tree.
Without one, the wheels of engines/*.json are fetched. Nothing of the engine is imported. Two styles are read: calls of
add_argument (sglang up to 0.5.13) and annotated fields of ServerArgs (0.5.14 to 0.5.19).
"""

from __future__ import annotations

import ast
import difflib
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from gpubox.devtools.static_values import Module, NotStatic, SourceTree, assignments
from gpubox.errors import GpuboxError, InputError
from gpubox.rollout.running import uv_program
from gpubox.specs.engine_table import Argument, EngineTable, Kind, Type, spelling

ENGINE = "sglang"
ENGINES = Path(__file__).parents[2] / "engines"
SCALARS: dict[str, Type] = {
    "int": "int",
    "float": "float",
    "human_readable_int": "int",
    "json.loads": "json",
    "json_list_type": "json",
}
TOGGLE = "argparse.BooleanOptionalAction"


def extract(root: Path, version: str) -> EngineTable:
    """The table of the sglang below `root`. Raises InputError where the source is not of a style that is known."""
    try:
        tree = SourceTree(root)
        module = tree.module("sglang.srt.server_args")
        arguments = _Extraction(module).arguments()
        overwritten = _overwritten(tree.module("sglang.srt.entrypoints.engine"))
    except (NotStatic, LookupError) as error:
        raise InputError(
            f"{root}: its arguments cannot be read: {error}",
            hint="gpubox/devtools/static_values.py says what it understands; teach it what this version writes",
        ) from None
    if not arguments:
        raise InputError(f"{root}: no arguments found in {module.path}", hint="is this version of another style?")
    return EngineTable(
        engine=ENGINE,
        version=version,
        source="sglang/srt/server_args.py",
        arguments=dict(sorted(arguments.items())),
        overwritten_environment=overwritten,
    )


class _Extraction:
    """All arguments of one server_args module, by key."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._class = module.classes["ServerArgs"]
        self._defaults = assignments(self._class.body)
        self._fields = {
            node.target.id: node.annotation
            for node in self._class.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }

    def arguments(self) -> dict[str, Argument]:
        adding = next(
            node for node in self._class.body if isinstance(node, ast.FunctionDef) and node.name == "add_cli_args"
        )
        found: dict[str, Argument] = {}
        if "add_cli_args_from_dataclass(" in ast.unparse(adding):
            for name, annotation in self._fields.items():
                if (words := _annotated(annotation)) is not None:
                    found |= self._field(name, *words)
        scope = assignments(adding.body)
        calls = [node for node in ast.walk(adding) if isinstance(node, ast.Call)]
        for call in sorted(calls, key=lambda call: call.lineno):
            if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
                self._call(found, [str(self._module.value(word)) for word in call.args], _keywords(call), scope)
        return found

    def _call(
        self, found: dict[str, Argument], flags: list[str], keywords: dict[str, ast.expr], scope: dict[str, ast.expr]
    ) -> None:
        action = _text(keywords, "action")
        replacement = str(self._module.value(keywords["new_flag"])) if "new_flag" in keywords else ""
        target = _text(keywords, "dest").strip("'") or spelling(flags[0])
        if action == "DeprecatedAliasStoreAction" and target == spelling(replacement) and target in found:
            known = found[target]  # the same argument under its old name
            found[target] = known.model_copy(update={"flags": (*known.flags, *flags)})
            return
        kind: Kind = "many" if _text(keywords, "nargs") not in ("", "'?'") else "one"
        if action == "DeprecatedAction":
            kind = "ignored"
        elif action in ("'store_true'", "DeprecatedStoreTrueAction", "DeprecatedStoreConstAction"):
            kind = "switch"
        elif action == TOGGLE:
            kind = "toggle"
        bare = kind in ("ignored", "switch", "toggle")
        choices = keywords.get("choices")
        key, ordered = self._named(target, flags)
        found[key] = Argument(
            flags=ordered,
            kind=kind,
            type="bool" if bare else SCALARS.get(_text(keywords, "type"), "str"),
            choices=tuple(self._module.value(choices, scope)) if choices is not None else None,
            default=self._default(
                keywords.get("default"),
                absent=False if kind == "switch" and action != "DeprecatedStoreConstAction" else None,
            ),
            required=_text(keywords, "required") == "True",
            replacement=replacement,
        )

    def _field(self, name: str, type_: ast.expr, extra: dict[str, ast.expr]) -> dict[str, Argument]:
        """One annotated field, by the rules of the engine's own add_cli_args_from_dataclass."""
        if _text(extra, "no_cli") == "True":
            return {}
        first = str(self._module.value(extra["cli_name"])) if "cli_name" in extra else "--" + name.replace("_", "-")
        flags = [first, *(self._module.value(extra["aliases"]) if "aliases" in extra else [])]
        action = _text(extra, "action")
        keywords: dict[str, ast.expr] = {"dest": ast.Constant(name)}
        if name in self._defaults:
            keywords["default"] = self._defaults[name]
        if action:
            keywords |= {"action": extra["action"]} | _dictionary(extra.get("action_kwargs"))
        else:
            keywords |= _typed(_without_none(type_), extra)
            if name not in self._defaults:
                keywords["required"] = ast.Constant(True)
        found: dict[str, Argument] = {}
        self._call(found, flags, keywords, {})
        return found

    def _named(self, target: str, flags: list[str]) -> tuple[str, tuple[str, ...]]:
        """The key and the flags, best first: the spelling that is the field's own name, else the first one given."""
        best = next((flag for flag in flags if spelling(flag) in self._fields), None)
        best = best or next((flag for flag in flags if spelling(flag) == target), flags[0])
        return spelling(best), (best, *(flag for flag in flags if flag != best))

    def _default(self, node: ast.expr | None, *, absent: object) -> Any:
        """None also for argparse.SUPPRESS: the flag leaves its field alone."""
        if node is None:
            return absent
        if ast.unparse(node) == "argparse.SUPPRESS":
            return None
        return self._module.value(node, self._defaults)


def _typed(type_: ast.expr, extra: dict[str, ast.expr]) -> dict[str, ast.expr]:
    """What argparse would be told of a field of this type."""
    keywords = {name: extra[name] for name in ("choices", "nargs", "const") if name in extra}
    word = ast.unparse(type_)
    if isinstance(type_, ast.Subscript) and word.startswith("Literal["):
        items = type_.slice.elts if isinstance(type_.slice, ast.Tuple) else [type_.slice]
        first = items[0].value if isinstance(items[0], ast.Constant) else ""
        return {"choices": ast.List(items), "type": ast.Name(type(first).__name__)} | keywords
    if "type_parser" in extra:
        return keywords | {"type": extra["type_parser"]}
    if isinstance(type_, ast.Subscript) and word.startswith(("List[", "list[")):
        return {"nargs": ast.Constant("+"), "type": type_.slice} | keywords
    return keywords | ({"action": ast.Constant("store_true")} if word == "bool" else {"type": type_})


def _annotated(annotation: ast.expr) -> tuple[ast.expr, dict[str, ast.expr]] | None:
    """The type and the Arg(...) of `A[type, "help" or Arg(...), ...]`; None for a field that has no flag."""
    if not (isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple)):
        return None
    if ast.unparse(annotation.value) not in ("A", "Annotated"):
        return None
    type_, *rest = annotation.slice.elts
    for item in rest:
        if isinstance(item, ast.Call) and ast.unparse(item.func) == "Arg":
            return type_, _keywords(item)
        if isinstance(item, ast.Constant | ast.JoinedStr | ast.BinOp):
            return type_, {}
    return None


def _without_none(type_: ast.expr) -> ast.expr:
    if isinstance(type_, ast.Subscript) and ast.unparse(type_.value) == "Optional":
        return type_.slice
    return type_


def _keywords(call: ast.Call) -> dict[str, ast.expr]:
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def _dictionary(node: ast.expr | None) -> dict[str, ast.expr]:
    if not isinstance(node, ast.Dict):
        return {}
    pairs = zip(node.keys, node.values, strict=True)
    return {str(key.value): value for key, value in pairs if isinstance(key, ast.Constant)}


def _text(keywords: dict[str, ast.expr], name: str) -> str:
    return ast.unparse(keywords[name]) if name in keywords else ""


def _overwritten(module: Module) -> dict[str, str | None]:
    """Variables that the engine sets without looking: `os.environ["X"] = ...` that no condition guards."""
    found: dict[str, str | None] = {}
    for node in module.function("_set_envs_and_config").body:
        if not (isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Subscript)):
            continue
        if ast.unparse(target.value) == "os.environ" and isinstance(target.slice, ast.Constant):
            value = node.value.value if isinstance(node.value, ast.Constant) else None
            found[str(target.slice.value)] = None if value is None else str(value)
    return dict(sorted(found.items()))


def to_text(table: EngineTable) -> str:
    """JSON with one argument on each line, so that a change reads well as a diff."""
    head = table.model_dump(mode="json", exclude={"arguments"})
    lines = [f'  "{name}": {json.dumps(value)},' for name, value in head.items()]
    lines.append('  "arguments": {')
    rows = [
        f"    {json.dumps(key)}: {json.dumps(argument.model_dump(mode='json', exclude_defaults=True))}"
        for key, argument in table.arguments.items()
    ]
    return "\n".join(["{", *lines, ",\n".join(rows), "  }", "}"]) + "\n"


def tree_version(root: Path) -> str:
    """The version of the sglang below `root`, from its .dist-info. Raises InputError when there is none or several."""
    found = sorted(root.glob(f"{ENGINE}-*.dist-info"))
    if len(found) != 1:
        raise InputError(
            f"{root}: {len(found)} directories {ENGINE}-*.dist-info, not one", hint="name site-packages or a wheel"
        )
    return found[0].name.removesuffix(".dist-info").removeprefix(f"{ENGINE}-")


def fetched(version: str, directory: Path) -> Path:
    """The unpacked wheel of `version`, from uv's cache or the package index. Raises GpuboxError."""
    root = directory / version
    command: list[str | Path] = [uv_program(), "pip", "install", "--quiet", "--no-deps", "--python-version", "3.11"]
    command += ["--only-binary", ":all:", "--target", str(root), f"{ENGINE}=={version}"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise GpuboxError(f"{ENGINE} {version} cannot be fetched", detail=run.stderr)
    return root


def committed_versions() -> Iterator[str]:
    for path in sorted(ENGINES.glob(f"{ENGINE}-*.json")):
        yield path.stem.removeprefix(f"{ENGINE}-")


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; fail when a committed table is not what the source says.")
@click.option("--version", "versions", multiple=True, help="Fetch this version; default: those that have a table.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Where the table of one TREE goes (a stack's engine.json)."
)
@click.argument("trees", nargs=-1, type=click.Path(exists=True, path_type=Path))
def main(check: bool, versions: tuple[str, ...], out: Path | None, trees: tuple[Path, ...]) -> None:
    """Read argument tables from engines' sources into engines/."""
    try:
        with tempfile.TemporaryDirectory() as scratch:
            roots = list(trees) or [fetched(version, Path(scratch)) for version in versions or committed_versions()]
            changed = [_renew(root, out, write=not check) for root in roots]
    except GpuboxError as error:
        click.echo(str(error), err=True)
        raise SystemExit(error.exit_code) from None
    if check and any(changed):
        raise SystemExit(1)


def _renew(root: Path, out: Path | None, *, write: bool) -> bool:
    """Whether the table of the engine below `root` was another one; says what changed."""
    version = tree_version(root)
    path = out or ENGINES / f"{ENGINE}-{version}.json"
    text = to_text(extract(root, version))
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text == before:
        click.echo(f"{path}: as the source says")
        return False
    names = (str(path), f"{ENGINE} {version}")
    changes = difflib.unified_diff(before.splitlines(), text.splitlines(), *names, lineterm="", n=0)
    click.echo("\n".join(changes) if before else f"{path}: new")
    if write:
        path.write_text(text, encoding="utf-8")
    return True


if __name__ == "__main__":
    main()

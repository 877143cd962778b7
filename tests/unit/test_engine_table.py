"""Argument tables: equal to the engine's own parser, and to the source wherever the wheel is at hand."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpubox.devtools.engine_table import extract, main, to_text, tree_version
from gpubox.devtools.static_values import NotStatic, SourceTree
from gpubox.errors import InputError
from gpubox.specs.engine_table import Argument, EngineTable, load_table, table_path

ROOT = Path(__file__).resolve().parents[2]
RECORDINGS = ROOT / "tests" / "fixtures" / "engines"
VERSIONS = ["0.5.9", "0.5.17"]
# The alias of an argument with choices, registered without them: the argument's own choices are the ones that hold.
ALIAS_WITHOUT_CHOICES = {"--mamba-scheduler-strategy"}
KINDS = {
    "_StoreTrueAction": "switch",
    "DeprecatedStoreTrueAction": "switch",
    "DeprecatedStoreConstAction": "switch",
    "DeprecatedAction": "ignored",
    "BooleanOptionalAction": "toggle",
}
PARSERS = {"human_readable_int": "int", "loads": "json", "json_list_type": "json", "int": "int", "float": "float"}


def table(version: str) -> EngineTable:
    return load_table(ROOT / "engines" / f"sglang-{version}.json")


def recorded(version: str) -> dict[str, dict[str, Any]]:
    """What the engine's own ArgumentParser said, by flag."""
    actions = json.loads((RECORDINGS / f"sglang-{version}-argparse.json").read_text())
    return {flag: action for action in actions.values() for flag in action["flags"]}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_table_is_what_the_engines_own_parser_says(version: str) -> None:
    real, by_flag = recorded(version), {}
    for argument in table(version).arguments.values():
        by_flag |= dict.fromkeys(argument.flags, argument)
    assert len(by_flag) > 300
    toggled = {flag for flag, action in real.items() if flag.startswith("--no-") and action["nargs"] == 0}
    assert set(real) - toggled - {"-h", "--help"} == set(by_flag)
    for flag, argument in by_flag.items():
        action = real[flag]
        kind = KINDS.get(action["cls"]) or ("many" if action["nargs"] in ("+", "*") else "one")
        assert argument.kind == kind, flag
        assert argument.default == action["default"], flag
        assert argument.required == action["required"], flag
        if flag not in ALIAS_WITHOUT_CHOICES:
            assert (None if argument.choices is None else list(argument.choices)) == action["choices"], flag
        if kind in ("one", "many"):
            assert argument.type == PARSERS.get(action["type"], "str"), flag


@pytest.mark.parametrize("version", VERSIONS)
def test_the_table_is_what_the_source_says(version: str) -> None:
    """Where a wheel lies unpacked in uv's cache: on a machine where the lab ran. In CI tests/lab asks the box."""
    caches = [os.environ.get("UV_CACHE_DIR", ""), "/var/cache/gpubox-lab/uv", str(Path.home() / ".cache" / "uv")]
    found = [
        path.parent
        for cache in caches
        if cache
        for path in Path(cache).glob(f"archive-v0/*/sglang-{version}.dist-info")
    ]
    if not found:
        pytest.skip(f"no unpacked wheel of sglang {version} in any uv cache; tests/lab/test_rebuild.py compares it too")
    assert tree_version(found[0]) == version
    assert to_text(extract(found[0], version)) == (ROOT / "engines" / f"sglang-{version}.json").read_text()


@pytest.mark.parametrize("version", VERSIONS)
def test_every_spelling_leads_to_one_argument_and_the_best_one_is_rendered(version: str) -> None:
    known = table(version)
    assert known.keys["tensor_parallel_size"] == known.keys["tp_size"] == "tp_size"
    assert known.arguments["tp_size"].flags[0] == "--tp-size"
    assert len(known.keys) == sum(len(argument.flags) for argument in known.arguments.values()), "no spelling twice"


def test_a_renamed_argument_is_known_by_both_names() -> None:
    assert table("0.5.9").keys["cuda_graph_max_bs"] == "cuda_graph_max_bs"
    assert table("0.5.17").keys["cuda_graph_max_bs"] == "cuda_graph_max_bs_decode"


def test_what_the_engine_overwrites_is_in_the_table() -> None:
    assert table("0.5.9").overwritten_environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


def test_a_stacks_own_table_wins(tmp_path: Path) -> None:
    (tmp_path / "stacks" / "mine").mkdir(parents=True)
    assert table_path(tmp_path, "mine", "sglang", "0.5.9") == tmp_path / "engines" / "sglang-0.5.9.json"
    (tmp_path / "stacks" / "mine" / "engine.json").write_text(to_text(table("0.5.9")))
    assert table_path(tmp_path, "mine", "sglang", "0.5.9") == tmp_path / "stacks" / "mine" / "engine.json"


@pytest.mark.parametrize("text", [None, "", "{}", "[]", '{"engine": 1}', "\xff"])
def test_a_table_that_is_none(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "sglang-9.json"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match="make engine-tables"):
        load_table(path)


OLD = """
from sglang.srt.choices import BACKENDS, Parsers
SIZES = {3, 1, 2}
@dataclasses.dataclass
class ServerArgs:
    model_path: str
    tp_size: int = 1
    backend: Optional[str] = None
    quiet: bool = False
    @staticmethod
    def add_cli_args(parser):
        names = list(Parsers.BY_NAME.keys())
        parser.add_argument("--model-path", "--model", type=str, required=True)
        parser.add_argument("--tensor-parallel-size", "--tp-size", type=int, default=ServerArgs.tp_size)
        parser.add_argument("--backend", type=str, choices=[*BACKENDS, "last"], default=ServerArgs.backend)
        parser.add_argument("--parser", type=str, choices=names)
        parser.add_argument("--size", type=int, choices=SIZES, nargs="+")
        parser.add_argument("--quiet", action="store_true")
        parser.add_argument("--gone", action=DeprecatedAction)
"""
NEW = '''
from sglang.srt.choices import BACKENDS, Parsers
class ServerArgs:
    """Fields."""
    model_path: A[str, Arg(help="h", aliases=["--model"])]
    tp_size: A[int, Arg(help="h", aliases=["--tensor-parallel-size"]), NS("x")] = 1
    backend: A[Optional[str], Arg(help="h", choices=[*BACKENDS, "last"])] = None
    mode: A[Literal["a", "b"], "help" "more"] = "a"
    sizes: A[Optional[List[int]], "h"] = None
    quiet: A[bool, "h"] = False
    lazy: A[Optional[bool], Arg(help="h", action=argparse.BooleanOptionalAction)] = None
    hidden: A[bool, Arg(help="h", no_cli=True)] = False
    internal: int = 3
    @staticmethod
    def add_cli_args(parser):
        add_cli_args_from_dataclass(parser, ServerArgs)
        parser.add_argument(
            "--old-sizes", type=int, nargs="+", dest="sizes", new_flag="--sizes", action=DeprecatedAliasStoreAction
        )
        parser.add_argument("--parser", type=str, choices=["auto"] + list(Parsers.BY_NAME.keys()))
'''
CHOICES = 'BACKENDS = ["one", "two"]\nclass Parsers:\n    BY_NAME: Dict[str, int] = {"k2": 1, "k3": 2}\n'
ENGINE = """
def _set_envs_and_config(args):
    os.environ["ALWAYS"] = "8"
    if x:
        os.environ["SOMETIMES"] = "1"
"""


def write_tree(root: Path, server_args: str) -> Path:
    for name, text in {"server_args": server_args, "choices": CHOICES, "entrypoints/engine": ENGINE}.items():
        path = root / "sglang" / "srt" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "sglang-9.0.dist-info").mkdir()
    return root


def test_the_style_of_add_argument(tmp_path: Path) -> None:
    found = extract(write_tree(tmp_path, OLD), "9.0")
    assert found.overwritten_environment == {"ALWAYS": "8"}
    assert found.arguments == {
        "model_path": Argument(flags=("--model-path", "--model"), required=True),
        "tp_size": Argument(flags=("--tp-size", "--tensor-parallel-size"), type="int", default=1),
        "backend": Argument(flags=("--backend",), choices=("one", "two", "last")),
        "parser": Argument(flags=("--parser",), choices=("k2", "k3")),
        "size": Argument(flags=("--size",), type="int", kind="many", choices=(1, 2, 3)),
        "quiet": Argument(flags=("--quiet",), type="bool", kind="switch", default=False),
        "gone": Argument(flags=("--gone",), type="bool", kind="ignored"),
    }


def test_the_style_of_annotated_fields(tmp_path: Path) -> None:
    found = extract(write_tree(tmp_path, NEW), "9.0").arguments
    assert found == {
        "model_path": Argument(flags=("--model-path", "--model"), required=True),
        "tp_size": Argument(flags=("--tp-size", "--tensor-parallel-size"), type="int", default=1),
        "backend": Argument(flags=("--backend",), choices=("one", "two", "last")),
        "mode": Argument(flags=("--mode",), choices=("a", "b"), default="a"),
        "sizes": Argument(flags=("--sizes", "--old-sizes"), type="int", kind="many"),
        "quiet": Argument(flags=("--quiet",), type="bool", kind="switch", default=False),
        "lazy": Argument(flags=("--lazy",), type="bool", kind="toggle"),
        "parser": Argument(flags=("--parser",), choices=("auto", "k2", "k3")),
    }


@pytest.mark.parametrize(
    "spoiled",
    [
        OLD.replace("choices=names", "choices=computed()"),
        OLD.replace("class ServerArgs", "class Other"),
        OLD.replace("import BACKENDS, Parsers", "import Parsers"),
        "class ServerArgs:\n    @staticmethod\n    def add_cli_args(parser):\n        pass\n",
    ],
)
def test_a_source_that_is_not_understood_is_an_error_and_never_half_a_table(tmp_path: Path, spoiled: str) -> None:
    with pytest.raises(InputError):
        extract(write_tree(tmp_path, spoiled), "9.0")


def test_the_command_writes_a_patched_trees_table_and_checks_it(tmp_path: Path) -> None:
    tree, out = write_tree(tmp_path, OLD), tmp_path / "engine.json"
    run = CliRunner()
    assert run.invoke(main, [str(tree), "--out", str(out)]).exit_code == 0
    assert load_table(out).version == "9.0"
    assert run.invoke(main, [str(tree), "--out", str(out), "--check"]).exit_code == 0
    module = tree / "sglang" / "srt" / "server_args.py"
    module.write_text(module.read_text().replace('"last"', '"newer"'))
    checked = run.invoke(main, [str(tree), "--out", str(out), "--check"])
    assert checked.exit_code == 1
    assert '"newer"' in checked.output
    assert '"last"' in out.read_text(), "a check writes nothing"
    module.write_text(module.read_text().replace("choices=names", "choices=computed()"))
    refused = run.invoke(main, [str(tree), "--out", str(out)])
    assert refused.exit_code == 2
    assert "not a fixed value: computed()" in refused.output


def test_values_that_only_a_running_program_knows(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("import os\nA = os.getcwd()\nB = [x for x in range(3)]\nC = D\n")
    module = SourceTree(tmp_path).module("m")
    for name in ("A", "B", "C", "nothing"):
        with pytest.raises(NotStatic):
            module.named(name)

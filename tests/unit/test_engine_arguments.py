"""Arguments against a version's table: names, types, choices, and equal command lines for equal arguments."""

from __future__ import annotations

import argparse
import json
import shlex
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubox.errors import InputError
from gpubox.settings import Settings
from gpubox.specs.engine import RESERVED, EngineArguments, Source, resolve
from gpubox.specs.engine_table import EngineTable
from gpubox.specs.findings import Finding
from gpubox.specs.plan import plan_box
from gpubox.specs.server import Server, load_server
from gpubox.specs.settled import settle
from gpubox.toml import validate
from tests.unit.engine_cases import SMALL, SPECULATING, changed, stack, table

ROOT = Path(__file__).resolve().parents[2]
OLD, NEW = table("0.5.9"), table("0.5.17")


def resolved(values: dict[str, Any], known: EngineTable = OLD) -> tuple[EngineArguments, list[Finding]]:
    others = [NEW if known is OLD else OLD]
    return resolve([Source("servers/x.toml", "engine", values)], known, others)


def words(values: dict[str, Any], known: EngineTable = OLD) -> list[str]:
    arguments, findings = resolved(values, known)
    assert findings == []
    return arguments.command_line()


def finding(values: dict[str, Any], known: EngineTable = OLD) -> Finding:
    (only,) = resolved(values, known)[1]
    assert only.file == "servers/x.toml"
    return only


def test_the_order_is_by_name_whatever_was_written_first() -> None:
    one = words({"tp_size": 8, "context_length": 4096, "enable_metrics": True, "disable_cuda_graph": False})
    assert one == ["--context-length", "4096", "--enable-metrics", "--tp-size", "8"]
    assert one == words({"enable_metrics": True, "context_length": 4096, "tensor_parallel_size": 8})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"cuda_graph_bs": [1, 2, 4]}, ["--cuda-graph-bs", "1", "2", "4"]),
        ({"chunked_prefill_size": -1}, ["--chunked-prefill-size", "-1"]),
        ({"mem_fraction_static": 0.9}, ["--mem-fraction-static", "0.9"]),
        ({"schedule_conservativeness": 1}, ["--schedule-conservativeness", "1"]),
        ({"extra_metric_labels": {"b": "2", "a": "1"}}, ["--extra-metric-labels", '{"a":"1","b":"2"}']),
        ({"forward_hooks": '[{"name": "x"}]'}, ["--forward-hooks", '[{"name": "x"}]']),
    ],
)
def test_every_kind_of_value_becomes_words(values: dict[str, Any], expected: list[str]) -> None:
    assert words(values) == expected


def test_a_toggle_has_a_no_form() -> None:
    assert words({"lora_strict_loading": False}, NEW) == ["--no-lora-strict-loading"]
    assert words({"lora_strict_loading": True}, NEW) == ["--lora-strict-loading"]


def test_a_renamed_argument_is_rendered_by_the_name_of_the_version() -> None:
    assert words({"cuda_graph_max_bs": 16}, OLD) == ["--cuda-graph-max-bs", "16"]
    assert words({"cuda_graph_max_bs": 16}, NEW) == ["--cuda-graph-max-bs-decode", "16"]


@pytest.mark.parametrize(
    ("values", "rule", "fix"),
    [
        ({"contxt_length": 1}, "unknown-argument", "did you mean 'context_length'?"),
        ({"zzz": 1}, "unknown-argument", "engines/sglang-0.5.9.json lists them"),
        ({"speculative_adaptive": True}, "unknown-argument", "sglang 0.5.17 has it: remove it here"),
        (
            {"cuda_graph_max_bs_decode": 1},
            "unknown-argument",
            "sglang 0.5.17 has it; 'cuda_graph_max_bs' is the name that both take",
        ),
        ({"context_length": "long"}, "wrong-value", "allowed: a whole number"),
        ({"context_length": True}, "wrong-value", "allowed: a whole number"),
        ({"context_length": 4096.0}, "wrong-value", "allowed: a whole number"),
        ({"context_length": 2**63}, "wrong-value", "allowed: a whole number"),
        ({"enable_metrics": 1}, "wrong-value", "allowed: true or false"),
        ({"mem_fraction_static": float("nan")}, "wrong-value", "allowed: a number"),
        ({"mem_fraction_static": float("inf")}, "wrong-value", "allowed: a number"),
        ({"cuda_graph_bs": 4}, "wrong-value", "allowed: a list, each a whole number"),
        ({"cuda_graph_bs": []}, "wrong-value", "allowed: a list, each a whole number"),
        ({"cuda_graph_bs": [1, "2"]}, "wrong-value", "allowed: a list, each a whole number"),
        ({"sampling_backend": "cuda"}, "wrong-value", "allowed: ascend, flashinfer, pytorch"),
        ({"tokenizer_path": "--host"}, "wrong-value", "allowed: a text"),
        ({"tokenizer_path": "a\0b"}, "wrong-value", "allowed: a text"),
        ({"tokenizer_path": date(2026, 1, 1)}, "wrong-value", "allowed: a text"),
        ({"tokenizer_path": "x" * 40_000}, "wrong-value", "allowed: a text"),
        ({"forward_hooks": "[1"}, "wrong-value", "allowed: a table, a list or JSON text"),
        ({"forward_hooks": [{"a": date(2026, 1, 1)}]}, "wrong-value", "allowed: a table, a list or JSON text"),
        ({"tp_size": 8, "tensor_parallel_size": 8}, "given-twice", "keep one of them"),
    ],
)
def test_what_the_engine_would_not_take(values: dict[str, Any], rule: str, fix: str) -> None:
    only = finding(values)
    assert only.rule == rule
    assert only.place == f"engine.{list(values)[-1]}"
    assert fix in only.fix


def test_what_the_engine_takes_and_ignores() -> None:
    assert finding({"prefill_round_robin_balance": True}).rule == "ignored-argument"


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_what_is_decided_elsewhere(name: str) -> None:
    for known in (OLD, NEW):
        assert finding({name: "x"}, known).rule == "reserved-argument"


def test_an_alias_does_not_open_what_is_reserved() -> None:
    assert finding({"model": "/elsewhere"}).rule == "reserved-argument"
    assert finding({"speculative_draft_model": "/elsewhere"}).rule == "reserved-argument"


def test_a_later_source_wins_under_any_spelling() -> None:
    sources = [Source("a", "engine", {"tp_size": 8}), Source("b", "engine", {"tensor_parallel_size": 1})]
    arguments, findings = resolve(sources, OLD)
    assert findings == []
    assert arguments.command_line() == ["--tp-size", "1"]
    assert arguments.places["tp_size"] == ("b", "engine.tensor_parallel_size")


def values_of(argument: Any) -> st.SearchStrategy[Any]:
    text = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF, exclude_categories=["Cc", "Cs"]), min_size=1)
    kinds = {
        "int": st.integers(-(2**62), 2**62),
        "float": st.floats(0, 1),
        "json": st.dictionaries(text, st.integers()),
    }
    item = st.sampled_from(argument.choices) if argument.choices else kinds.get(argument.type, text)
    if argument.kind in ("switch", "toggle"):
        return st.booleans()
    return st.lists(item, min_size=1, max_size=3) if argument.kind == "many" else item


@given(st.data())
def test_whatever_is_rendered_argparse_reads_back(data: st.DataObject) -> None:
    """A parser made of the table, as the engine makes its own, gets the values that were written."""
    known = data.draw(st.sampled_from([OLD, NEW]))
    names = [name for name, item in known.arguments.items() if name not in RESERVED and item.kind != "ignored"]
    chosen = data.draw(st.lists(st.sampled_from(names), unique=True, max_size=6))
    values = {name: data.draw(values_of(known.arguments[name])) for name in chosen}
    arguments, findings = resolved(values, known)
    refused = {item.place.removeprefix("engine.") for item in findings}
    assert all(isinstance(values[name], str | list | dict) or values[name] is None for name in refused)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    types: dict[str, Any] = {"int": int, "float": float, "json": json.loads}
    for name, item in known.arguments.items():
        if item.kind == "switch":
            parser.add_argument(*item.flags, dest=name, action="store_true")
        elif item.kind == "toggle":
            parser.add_argument(*item.flags, dest=name, action=argparse.BooleanOptionalAction)
        elif item.kind != "ignored":
            many = {"nargs": "+"} if item.kind == "many" else {}
            parser.add_argument(*item.flags, dest=name, type=types.get(item.type, str), **many)
    read = vars(parser.parse_args(shlex.split(shlex.join(arguments.command_line()))))
    for name, value in arguments.values.items():
        assert read[name] == value


HOSTILE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates() | st.times(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from([*sorted(OLD.arguments), *sorted(NEW.keys), "", "--tp-size", "tp-size"]) | st.text(max_size=20)


@given(st.dictionaries(NAMES, HOSTILE, max_size=4), st.sampled_from(["0.5.9", "0.5.17"]))
def test_any_engine_table_is_arguments_or_an_input_error(values: dict[str, Any], version: str) -> None:
    for profile in (SMALL, SPECULATING.profile):
        try:
            server = validate(Server, changed(profile, {}) | {"engine": {**profile["engine"], **values}}, "x.toml")
            settle(server, stack(version), table(version), others=[OLD, NEW])
        except InputError as error:
            assert ".toml: " in str(error)


@given(st.dictionaries(st.sampled_from([*Server.model_fields, "x"]), HOSTILE, max_size=3))
def test_any_profile_is_a_server_or_an_input_error(values: dict[str, Any]) -> None:
    try:
        server = validate(Server, SPECULATING.profile | values, "x.toml")
        settle(server, stack(), OLD)
    except InputError as error:
        assert ".toml: " in str(error)


@given(st.text(max_size=200))
def test_any_file_is_a_server_or_an_input_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz" / "x.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(InputError, match=r"x\.toml"):
        load_server(path.parent, "x")


def test_a_mistake_is_refused_by_the_plan_with_file_and_field(tmp_path: Path) -> None:
    for name in ("stacks", "models", "overlays", "engines"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "servers").mkdir()
    text = (ROOT / "servers" / "smollm2.toml").read_text()
    (tmp_path / "servers" / "smollm2.toml").write_text(text.replace("context_length = 2048", "contxt_length = 2048"))
    with pytest.raises(InputError) as caught:
        plan_box(tmp_path, Settings(stack="cuda128", server="smollm2", python="3.11"))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("servers/smollm2.toml: engine.contxt_length: sglang 0.5.9 has no such argument")
    assert "did you mean 'context_length'?" in lines[1]

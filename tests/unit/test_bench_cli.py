"""`gpubox bench` as a person and a program meet it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gpubox.bench import cells
from gpubox.cli.bench import describe
from gpubox.cli.main import main
from tests.unit.test_compare import arm, cell


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["bench", *words])


@pytest.fixture
def results(tmp_path: Path) -> tuple[str, str]:
    fast, slow = [100.0, 101.0, 99.0], [80.0, 81.0, 79.0]
    arms = {"spec": {1: fast, 10: fast, 70: slow}, "plain": {1: slow, 10: slow, 70: fast}}
    for name, speeds in arms.items():
        for found in arm(name, speeds):
            cells.append(tmp_path / name, found)
    return str(tmp_path / "spec"), str(tmp_path / "plain")


def test_compare_says_where_it_turns(results: tuple[str, str]) -> None:
    done = run("compare", *results)
    assert done.exit_code == 0
    assert "crossover: from concurrency 70 on plain stays better, at 10 not yet" in done.output
    assert "1.250" in done.output


def test_compare_for_programs(results: tuple[str, str]) -> None:
    found = json.loads(run("compare", "--json", *results).output)
    assert (found["crossover"], found["at"], found["above"], found["winner"]) == ("found", 70, 10, "plain")


def test_undecided_is_an_exit_status_of_its_own(tmp_path: Path) -> None:
    for name in ("a", "b"):
        cells.append(tmp_path / name, cell(name, 5, 1, 1.0))
    done = run("compare", str(tmp_path / "a"), str(tmp_path / "b"))
    assert done.exit_code == 1
    assert "undecided, measure more repeats at 5" in done.output


def test_two_arms_in_one_file_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        cells.append(tmp_path / "both", cell(name, 5, 1, 1.0))
    done = run("compare", str(tmp_path / "both"), str(tmp_path / "both"))
    assert done.exit_code == 2
    assert "holds 2 arms: a, b" in done.output


@pytest.mark.parametrize("word", ["0", "1,x", "-3", "", "1,,2"])
def test_a_bad_list_of_concurrencies(word: str) -> None:
    done = run("sweep", f"--concurrency={word}")
    assert done.exit_code == 2
    assert "positive whole numbers" in done.output


def test_a_cell_in_one_line() -> None:
    assert describe(cell("a", 5, 1, 100.0)).startswith("concurrency    5, repeat 1: 100.0 tokens/s, 20.0 a stream")
    assert "INVALID: 2 of 10 requests failed" in describe(cell("a", 5, 1, 100.0, invalid="2 of 10 requests failed"))

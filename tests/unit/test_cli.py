"""The command as a whole: its help is quick, and every group is where the table says."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from gpubox.cli.main import GROUPS, main


@pytest.mark.parametrize("name", GROUPS)
def test_every_group_is_there_with_verbs(name: str) -> None:
    group = main.get_command(click.Context(main), name)
    assert isinstance(group, click.Group)
    assert group.commands
    done = CliRunner().invoke(main, [name, "--help"])
    assert done.exit_code == 0, done.output


def test_the_help_lists_all_verbs_and_hides_the_inner_one() -> None:
    text = CliRunner().invoke(main, ["--help"]).output
    assert all(f"  {name} " in text for name in [*GROUPS, "status", "activate", "rollback"])
    assert "run-activation" not in text


def test_neither_help_nor_status_imports_what_only_measuring_needs() -> None:
    """Importing scipy takes a second; an operator in a hurry asks for the status."""
    code = "import sys; from gpubox.cli.main import main; main(['--help'], standalone_mode=False)"
    heavy = "print('HEAVY', sorted({'scipy', 'huggingface_hub'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{heavy}"], capture_output=True, text=True, check=True)
    assert "HEAVY []" in done.stdout

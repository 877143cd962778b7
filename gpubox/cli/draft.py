"""The verbs of EAGLE-3 drafts: check and convert. No GPU, no torch; docs/drafts.md."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from gpubox.cli.build import locked, timed_report
from gpubox.drafts.capture import default_layers
from gpubox.drafts.case import Serving
from gpubox.drafts.check import check_draft
from gpubox.drafts.config import read_target
from gpubox.drafts.convert import convert_draft
from gpubox.drafts.findings import Capture, Level, Report
from gpubox.drafts.preflight import serving_engine
from gpubox.errors import ExitCode, InputError
from gpubox.layout import Layout

DIRECTORY = click.Path(file_okay=False, path_type=Path)


def common(command: Callable[..., Any]) -> Callable[..., Any]:
    options = [
        click.option("--target", type=DIRECTORY, required=True, help="The model that the draft speeds up."),
        click.option("--engine", default=None, help="SGLang version. Default: that of the current release's stack."),
        click.option("--patches", multiple=True, help="Patches of that stack, with commas or several times."),
        click.option("--trained-layers", default=None,
            help="Layers it was trained on, by what enters them: 2,30,58, or default."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@click.group("draft")
def draft_group() -> None:
    """EAGLE-3 drafts: prove one against target and engine, or make it readable for the engine."""


@draft_group.command("check")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
@common
@click.option("--context-length", type=click.IntRange(1), default=None, help="Tokens served. Default: the target's.")
@click.option("--dtype", default=None, help="As the engine's argument, if it is given.")
@click.option("--tp", "tensor_parallel", type=click.IntRange(1), default=None, help="GPUs that share the model.")
@click.option("--fused-allreduce/--no-fused-allreduce", default=None, help="Whether all-reduce fusion will be on.")
@click.option("--mem-fraction-static", "memory_fraction", type=click.FloatRange(0, 1), default=None)
@click.option("--gpu-gib", type=click.FloatRange(1), default=None, help="Memory of one GPU; with the fraction: room.")
@click.option("--quantized", is_flag=True, help="The draft is quantized on purpose.")
@click.argument("draft", type=DIRECTORY)
def draft_check(
    draft: Path,
    target: Path,
    engine: str | None,
    patches: tuple[str, ...],
    trained_layers: str | None,
    as_json: bool,
    context_length: int | None,
    dtype: str | None,
    tensor_parallel: int | None,
    fused_allreduce: bool | None,
    memory_fraction: float | None,
    gpu_gib: float | None,
    quantized: bool,
) -> None:
    """Does DRAFT fit the target and the engine? Exit status 1 when a check fails."""
    version, known = _engine(engine, patches)
    layers = _layers(trained_layers, target)
    serving = Serving(
        context_length=context_length,
        dtype=dtype,
        tensor_parallel=tensor_parallel,
        fused_allreduce=fused_allreduce,
        trained_layers=None if layers is None else tuple(layers),
        memory_fraction=memory_fraction,
        gpu_bytes=None if gpu_gib is None else int(gpu_gib * 2**30),
        quantized_on_purpose=quantized,
    )
    report = check_draft(draft, target, version, patches=known, serving=serving)
    if as_json:
        click.echo(report.model_dump_json(indent=2))
    else:
        show_report(report)
    if report.failures:
        sys.exit(int(ExitCode.FAILED))


@draft_group.command("convert")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output; progress goes to standard error.")
@click.option("--name", required=True, help="Name in the model store; the directory is NAME-DIGEST.")
@common
@click.option("--job", default=None, help="Who deploys: the lock stays taken until the ssh connection ends.")
@click.argument("source", type=DIRECTORY)
def draft_convert(
    source: Path,
    name: str,
    target: Path,
    engine: str | None,
    patches: tuple[str, ...],
    trained_layers: str | None,
    as_json: bool,
    job: str | None,
) -> None:
    """Rename and flatten SOURCE into a new directory of the model store, and check it. SOURCE is not changed."""
    layout = Layout()
    version, known = _engine(engine, patches)
    layers = _layers(trained_layers, target)
    timed = timed_report(err=as_json)
    with locked(layout, f"converting draft {name}", job):
        done = convert_draft(source, name, target, version, layout, patches=known, trained=layers, say=timed)
    if as_json:
        click.echo(done.report.model_dump_json(indent=2))
    else:
        show_report(done.report)
        click.echo(str(done.directory))


def _engine(engine: str | None, patches: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    named = tuple(word for text in patches for word in text.split(",") if word)
    if engine is not None:
        return engine, named
    version, known = serving_engine(Layout())
    return version, named or known


def _layers(given: str | None, target: Path) -> list[int] | None:
    """The layers entered: numbers, or `default` for those that every trainer takes by itself."""
    if given is None:
        return None
    if given == "default":
        return default_layers(read_target(target).num_hidden_layers)
    numbers = [int(word) for word in given.split(",") if word.isdecimal() and len(word) < 5]
    if len(numbers) != len(given.split(",")) or sorted(set(numbers)) != numbers:
        raise InputError(f"--trained-layers {given}", hint="ascending numbers with commas, as 2,30,58, or default")
    return numbers


def show_report(report: Report) -> None:
    """A line for each check; what is not in order again below, with reason and remedy."""
    table = Table(box=None, pad_edge=False)
    for heading in ("", "check", "finding"):
        table.add_column(heading, overflow="fold")
    for finding in report.findings:
        table.add_row(finding.level.upper() if finding.level is not Level.PASS else "pass", finding.name, finding.what)
    console = Console(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)
    console.print(table)
    if report.capture is not None:
        _show_capture(report.capture, report)
    for finding in (*report.of(Level.WARN), *report.failures):
        if finding.why or finding.fix:
            click.echo(f"\n{finding.level.upper()} {finding.name}: {finding.what}")
            for label, text in (("why", finding.why), ("what to do", finding.fix), ("see", finding.reference)):
                if text:
                    click.echo(f"  {label}: {text}")
    counts = ", ".join(f"{len(report.of(level))} {level}" for level in Level)
    patched = f" with {', '.join(report.patches)}" if report.patches else ""
    click.echo(f"\n{report.draft} for {report.target} on sglang {report.engine_version}{patched}: {counts}")


def _show_capture(capture: Capture, report: Report) -> None:
    def text(layers: list[int] | None, unknown: str) -> str:
        return ", ".join(map(str, layers)) if layers else unknown

    click.echo(f"\nlayers captured as they are entered (i: the output of layer i - 1), sglang {report.engine_version}:")
    click.echo(f"  config.json   {text(capture.configured, 'none, the default ones')}")
    click.echo(f"  eager         {text(capture.eager, '')}")
    click.echo(f"  CUDA graphs   {text(capture.graph, '')}")
    click.echo(f"  trained on    {text(capture.trained, 'not known')}")

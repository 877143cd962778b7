"""What a profile comes to on one stack: arguments and environment of all sources together, judged by the rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from gpubox.specs.engine import EngineArguments, Source, resolve
from gpubox.specs.engine_rules import judge, overrides_in_force
from gpubox.specs.engine_table import EngineTable
from gpubox.specs.findings import Finding, refuse
from gpubox.specs.nccl import Nccl
from gpubox.specs.rule import Case
from gpubox.specs.server import Server
from gpubox.specs.stack import Overlay, Stack


@dataclass(frozen=True)
class Settled:
    """`environment`: of stack, overlay, server and NCCL profile. `overrides`: rules broken knowingly, and why."""

    arguments: EngineArguments
    environment: Mapping[str, str]
    nccl: Nccl | None
    overrides: dict[str, str]
    warnings: list[Finding]


def settle(
    server: Server,
    stack: Stack,
    table: EngineTable,
    *,
    overlay: Overlay | None = None,
    nccl: Nccl | None = None,
    others: Iterable[EngineTable] = (),
) -> Settled:
    """Raises InputError naming file and key of the first mistake, with reason and fix; the others follow.

    nccl: the box's own, over the profile's. others: tables of the engine's other versions.
    """
    case, findings = look_at(server, stack, table, overlay=overlay, nccl=nccl, others=others)
    refuse(findings, f"stack {stack.name} ({table.title})")
    chosen = case.nccl
    return Settled(
        arguments=case.arguments,
        environment=dict(case.environment) | (chosen.environment() if chosen else {}),
        nccl=chosen,
        overrides=overrides_in_force(case),
        warnings=[finding for finding in findings if finding.severity == "warning"],
    )


def look_at(
    server: Server,
    stack: Stack,
    table: EngineTable,
    *,
    overlay: Overlay | None = None,
    nccl: Nccl | None = None,
    others: Iterable[EngineTable] = (),
) -> tuple[Case, list[Finding]]:
    """The case and all findings about it. Rules see only arguments that the engine's table lets pass."""
    file = f"servers/{server.name}.toml"
    sources = [Source(file, "engine", server.engine)]
    environments = [(f"stacks/{stack.name}/stack.toml", stack.environment)]
    if overlay is not None:
        sources.append(Source(f"overlays/{overlay.name}/overlay.toml", "engine", overlay.engine))
        environments.append((f"overlays/{overlay.name}/overlay.toml", overlay.environment))
    environments.append((file, server.environment))
    arguments, findings = resolve(sources, table, others)
    chosen = nccl or server.nccl
    case = Case(
        file=file,
        server=server,
        stack=stack,
        arguments=_with_nccl(arguments, chosen),
        nccl=chosen,
        environment={name: value for _, values in environments for name, value in values.items()},
        set_in={
            f"environment.{name}": (source, f"environment.{name}") for source, values in environments for name in values
        },
    )
    return case, findings or judge(case)


def _with_nccl(arguments: EngineArguments, nccl: Nccl | None) -> EngineArguments:
    """The switches of the profile's verdict, as far as this engine has them."""
    if nccl is None:
        return arguments
    switches = {name: value for name, value in nccl.arguments().items() if name in arguments.table.arguments}
    return replace(arguments, values=dict(sorted({**arguments.values, **switches}.items())))

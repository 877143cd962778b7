"""What a rule about engine arguments is, and the case that it judges: one server profile on one stack."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from packaging.version import InvalidVersion, Version

from gpubox.errors import InputError
from gpubox.specs.engine import EngineArguments
from gpubox.specs.findings import Severity
from gpubox.specs.nccl import Nccl
from gpubox.specs.patch_names import patch_names
from gpubox.specs.server import Draft, Hardware, ModelFacts, Server
from gpubox.specs.stack import Stack

FUSION = ("enable_flashinfer_allreduce_fusion", "flashinfer_allreduce_fusion_backend")  # its old and its new name

# Targets that sglang serves with the code of its DeepSeek model.
DEEPSEEK_FAMILY = frozenset(
    {
        *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"),
        *("KimiK2ForCausalLM", "KimiK25ForConditionalGeneration", "KimiVLForConditionalGeneration"),
    }
)


@dataclass(frozen=True)
class Fault:
    """Where a rule is broken, and by what. `place`: an argument's name, or a dotted key of the profile."""

    place: str
    problem: str


@dataclass(frozen=True)
class Case:
    """One profile on one stack. `file`: the profile. `arguments`: those of the NCCL profile too.

    `environment`: variables written by hand; `set_in`: file and dotted key of each.
    """

    file: str
    server: Server
    stack: Stack
    arguments: EngineArguments
    nccl: Nccl | None
    environment: Mapping[str, str]
    set_in: Mapping[str, tuple[str, str]]

    @property
    def facts(self) -> ModelFacts:
        return self.server.model.facts

    @property
    def draft(self) -> Draft | None:
        return self.server.draft

    @property
    def hardware(self) -> Hardware | None:
        return self.server.hardware

    @property
    def capability(self) -> int | None:
        """12 for SM120; None when the profile names no hardware or the stack has no CUDA."""
        return self.hardware.major if self.hardware and self.stack.cuda and self.get("device") != "cpu" else None

    @property
    def gpus(self) -> int:
        """How many GPUs the arguments ask for."""
        return int(self.get("tp_size") or 1) * int(self.get("pp_size") or 1)

    @property
    def algorithm(self) -> str | None:
        """The speculation algorithm; newer engines take it in any case."""
        value = self.get("speculative_algorithm")
        return str(value).upper() if value else None

    @property
    def deepseek(self) -> bool:
        return self.facts.architecture in DEEPSEEK_FAMILY

    @property
    def attention_backends(self) -> dict[str, str]:
        """The target's backends that are set, by argument."""
        names = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
        return {name: str(value) for name in names if (value := self.get(name))}

    @cached_property
    def _version(self) -> Version:
        try:
            return Version(self.stack.engine.version)
        except InvalidVersion:
            raise InputError(
                f"stacks/{self.stack.name}/stack.toml: engine.version = {self.stack.engine.version!r} is no version",
                hint="write it as the package index does",
            ) from None

    def get(self, name: str) -> Any:
        return self.arguments.get(name)

    def by_hand(self, name: str) -> bool:
        """Whether an argument was written by somebody, and not by the NCCL profile."""
        return self.arguments.table.keys.get(name, name) in self.arguments.places

    def place(self, name: str) -> tuple[str, str]:
        """File and dotted key of what a fault names: where somebody wrote it, else where it would be written."""
        if "." in name or name in type(self.server).model_fields:
            return self.set_in.get(name, (self.file, name))
        return self.arguments.places.get(self.arguments.table.keys.get(name, name), (self.file, f"engine.{name}"))

    def number(self, name: str, default: int) -> int:
        value = self.get(name)
        return default if value is None else int(value)

    def before(self, version: str) -> bool:
        """Whether the stack's engine is older."""
        return self._version < Version(version)

    def patched(self, name: str) -> bool:
        """Whether the stack has the patch `name`: 05-NAME.patch in its list."""
        return name in patch_names(self.stack.patches)

    def switched_on(self, name: str) -> bool:
        """Whether an environment variable is set to what the engine takes for true."""
        return self.environment.get(name, "").lower() in ("1", "true", "yes", "y", "on", "t")


@dataclass(frozen=True)
class Rule:
    """One rule, all about it in one place. `source`: where the fact is from. `fix`: what to do.

    overridable: the operator may break it knowingly, by `[overrides]` in the profile with a reason.
    """

    name: str
    severity: Severity
    reason: str
    source: str
    fix: str
    broken: Callable[[Case], Fault | None]
    overridable: bool = False


def rule(
    name: str, *, reason: str, source: str, fix: str, severity: Severity = "error", overridable: bool = False
) -> Callable[[Callable[[Case], Fault | None]], Rule]:
    """Make a rule of the function that looks for its breach."""

    def made(broken: Callable[[Case], Fault | None]) -> Rule:
        return Rule(name, severity, reason, source, fix, broken, overridable)

    return made

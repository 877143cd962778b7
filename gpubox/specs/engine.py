"""Engine arguments as named fields, rendered to a command line.

Names are the engine's own flag names with underscores. Only flags that both served engine versions accept are listed.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gpubox.toml import Strict

PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]

RESERVED = frozenset({"model_path", "served_model_name", "host", "port"})  # decided by the server profile and the box


class EngineArguments(Strict):
    """What an operator may ask of the engine. Unset fields are not passed: the engine's own default applies."""

    context_length: PositiveInt | None = None
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] | None = None
    trust_remote_code: bool = False
    tp_size: PositiveInt | None = None
    mem_fraction_static: Fraction | None = None
    max_running_requests: PositiveInt | None = None
    max_total_tokens: PositiveInt | None = None
    chunked_prefill_size: int | None = None
    device: Literal["cuda", "cpu"] | None = None
    attention_backend: str | None = None
    sampling_backend: str | None = None
    grammar_backend: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    disable_cuda_graph: bool = False
    disable_overlap_schedule: bool = False
    disable_custom_all_reduce: bool = False
    enable_metrics: bool = False
    watchdog_timeout: PositiveInt | None = None
    random_seed: int | None = None
    log_level: Literal["debug", "info", "warning", "error"] | None = None

    def merged(self, overrides: dict[str, object]) -> EngineArguments:
        """These arguments with `overrides` (an overlay's) on top. Raises pydantic.ValidationError."""
        return EngineArguments.model_validate({**self.model_dump(exclude_unset=True), **overrides})

    def command_line(self) -> list[str]:
        """Flags in the order of the fields above, so that equal arguments give equal bytes."""
        words: list[str] = []
        for name, value in self.model_dump(exclude_none=True).items():
            flag = "--" + name.replace("_", "-")
            if value is True:
                words.append(flag)
            elif value is not False:
                words += [flag, str(value)]
        return words

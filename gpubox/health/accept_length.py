"""The accept length that a draft really reaches in this server, on fixed prompts.

A draft whose captured layers are off by one serves, answers well, and costs about a tenth of its speed; a wrong draft
or a misspelt algorithm falls to 1.0 without a word (sglang#25673). Both were measured on an H200: 2.17 against 1.96 and
1.02. So a floor finds the dead draft, and only the length recorded for the same draft finds the wrong layer.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from gpubox.errors import ProofError
from gpubox.health.endpoint import Endpoint
from gpubox.toml import Strict, as_tuple


class AcceptLength(Strict):
    """The table [probes.accept_length]. Lengths in tokens for each pass of the target, 1.0 when no draft token holds.

    `prompts` go as they are into `template`, which holds the model's own chat markup around {prompt}.
    """

    prompts: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(as_tuple), Field(min_length=3)]
    template: str = "{prompt}"
    max_tokens: Annotated[int, Field(ge=32, le=4096)] = 200
    floor: Annotated[float, Field(ge=1.05, le=32)] = 1.3
    recorded: Annotated[float, Field(ge=1.05, le=32)] | None = None
    tolerance: Annotated[float, Field(gt=0, lt=0.5)] = 0.05  # of `recorded`
    deadline_s: Annotated[float, Field(gt=0, le=24 * 3600)] = 600.0  # for all prompts together

    @model_validator(mode="after")
    def _one_place_for_the_prompt(self) -> Self:
        if self.template.count("{prompt}") != 1:
            raise ValueError("template must hold {prompt} exactly once")
        return self

    @property
    def least(self) -> float:
        """What the measured length must reach."""
        return max(self.floor, self.recorded * (1 - self.tolerance) if self.recorded else 0.0)


class AcceptReport(Strict):
    """`completion_tokens` came out of `verify_passes` passes of the target over `prompts` prompts."""

    prompts: int
    completion_tokens: int
    verify_passes: int

    @property
    def length(self) -> float:
        """As the engine computes it for one request, over all of them: long answers weigh more."""
        return self.completion_tokens / self.verify_passes


def measure(endpoint: Endpoint, wanted: AcceptLength) -> AcceptReport:
    """One prompt after the other, greedy, ended by the model itself. Raises ProofError when the server speculates not.

    Junk after the end of an answer lowers the length (2.03 instead of 2.17), so the end is never ignored.
    """
    tokens = passes = 0
    for prompt in wanted.prompts:
        text = wanted.template.replace("{prompt}", prompt)
        meta = endpoint.generate(text, wanted.max_tokens, wanted.deadline_s / len(wanted.prompts))
        if not meta.get("spec_verify_ct"):
            raise ProofError(
                f"{endpoint.base_url}: probe 'accept length' failed: the server does not speculate",
                hint="its command line lacks the speculation flags, or the engine switched it off: see its log",
            )
        tokens += int(meta["completion_tokens"])
        passes += int(meta["spec_verify_ct"])
    return AcceptReport(prompts=len(wanted.prompts), completion_tokens=tokens, verify_passes=passes)


def prove(endpoint: Endpoint, wanted: AcceptLength) -> AcceptReport:
    """Raises ProofError when the length is below the floor, or below the recorded one by more than the tolerance."""
    seen = measure(endpoint, wanted)
    if seen.length < wanted.least:
        against = f"floor {wanted.floor}"
        if wanted.least > wanted.floor:
            against = f"recorded {wanted.recorded}, less {wanted.tolerance:.0%} is {wanted.least:.2f}"
        raise ProofError(
            f"{endpoint.base_url}: probe 'accept length' failed: {seen.length:.2f} tokens a pass, {against}",
            hint="about 1.0: wrong draft, unloaded weights or algorithm EAGLE; a tenth too low: captured layers off by "
            "one: gpubox draft check",
        )
    return seen

"""One draft, its target and the engine that shall serve both: what every check is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from packaging.version import Version

from gpubox.drafts.capture import HOOKS, eager_layers, graph_layers
from gpubox.drafts.checkpoint import Checkpoint
from gpubox.drafts.config import DraftConfig, TargetConfig
from gpubox.drafts.contract import MLA, SEVERAL_LAYERS
from gpubox.drafts.findings import Capture


@dataclass(frozen=True)
class Serving:
    """How the draft will be served; None where it is not known, then the finding says so.

    context_length in tokens (None: the target's own); dtype as the engine's argument; trained_layers as Capture counts
    them; gpu_bytes of one GPU.
    """

    context_length: int | None = None
    dtype: str | None = None
    tensor_parallel: int | None = None
    fused_allreduce: bool | None = None
    trained_layers: tuple[int, ...] | None = None
    memory_fraction: float | None = None
    gpu_bytes: int | None = None
    quantized_on_purpose: bool = False


class TargetWeights(NamedTuple):
    """`shapes` of the embedding and the head by their last words, of every tensor that ends so."""

    shards: int
    nbytes: int
    shapes: dict[str, set[tuple[int, ...]]]


@dataclass(frozen=True)
class Case:
    """`raw` is the flat config with all its keys, `config` what of it is read; `foreign_format` before flattening."""

    checkpoint: Checkpoint
    raw: dict[str, Any]
    foreign_format: str | None
    config: DraftConfig
    target: TargetConfig
    target_weights: TargetWeights
    version: Version
    patches: frozenset[str]
    serving: Serving

    @property
    def is_llama(self) -> bool:
        """Also for a class that is not known: "architecture" fails it."""
        return self.config.architecture != MLA

    @property
    def serves_several_layers(self) -> bool:
        return self.is_llama and self.version >= SEVERAL_LAYERS

    @property
    def shares_embedding(self) -> bool:
        """Whether the engine puts the target's embedding in place of the draft's (LlamaForCausalLM.set_embed)."""
        return self.config.target_width == self.config.hidden_size

    @property
    def family(self) -> str | None:
        hook = HOOKS.get(self.target.architecture)
        return hook.family if hook else None

    def capture(self) -> Capture | None:
        """None for a target whose hook is not in the tables."""
        if self.family is None:
            return None
        ids, layers = self.config.ids, self.target.num_hidden_layers
        trained = self.serving.trained_layers
        return Capture(
            configured=ids,
            eager=eager_layers(ids, self.family, self.version, layers),
            graph=graph_layers(ids, self.family, self.version, layers, self.patches),
            trained=None if trained is None else list(trained),
            family=self.family,
        )

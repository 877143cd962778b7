"""How GPUs of one box talk to each other: one verdict that drives both NCCL's environment and the engine's own kernels.

Half a verdict hangs: with NCCL_P2P_DISABLE=1 alone NCCL passes and the engine's own all-reduce kernels, which copy from
GPU to GPU themselves, wait for ever (rtx6kpro#15, vllm#51513). So neither is written by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gpubox.toml import Strict

Profile = Literal["pcie-only", "nvlink", "no-p2p"]


@dataclass(frozen=True)
class Verdict:
    """p2p: GPUs reach each other's memory. multicast: NVLink's. custom_all_reduce: the engine's kernels may be used.

    `why` says for which machine the verdict is.
    """

    p2p: bool
    multicast: bool
    custom_all_reduce: bool
    why: str


VERDICTS: Mapping[Profile, Verdict] = {
    "pcie-only": Verdict(
        p2p=True,
        multicast=False,
        custom_all_reduce=False,
        why="P2P over PCIe, no NVLink; the engine's kernels want NVLink between more than two GPUs",
    ),
    "nvlink": Verdict(p2p=True, multicast=True, custom_all_reduce=True, why="every GPU reaches every other by NVLink"),
    "no-p2p": Verdict(
        p2p=False,
        multicast=False,
        custom_all_reduce=False,
        why="P2P hangs or is forbidden (IOMMU, ACS): all traffic through the host's memory",
    ),
}

# Environment and arguments that a profile decides. Written by hand beside it, they would contradict it sooner or later.
OWNED_ENVIRONMENT = frozenset(
    {
        *("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST"),
        *("NCCL_PROTO", "NCCL_ALGO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_BUFFSIZE", "NCCL_NTHREADS"),
        *("NCCL_GRAPH_FILE", "NCCL_CUMEM_ENABLE", "NCCL_CUMEM_HOST_ENABLE", "NCCL_DEBUG"),
    }
)
OWNED_ARGUMENTS = frozenset({"disable_custom_all_reduce", "enable_nccl_nvls"})

# The engine's other ways from GPU to GPU: none works where P2P does not.
NEEDS_P2P_ARGUMENTS = (
    *("enable_flashinfer_allreduce_fusion", "flashinfer_allreduce_fusion_backend", "enable_torch_symm_mem"),
    *("enable_symm_mem", "enable_mscclpp"),
)
NEEDS_P2P_ENVIRONMENT = ("SGLANG_ENABLE_PCIE_IPC_ALLREDUCE",)


class Nccl(Strict):
    """`[nccl]` of a server profile, or `nccl` in a box's settings, which wins. What is unset is left to NCCL.

    multicast: off by default; on hosts that share their GPUs with others it must stay off.
    buffer_mib: MiB per channel. graph_file: absolute, on the box. custom_all_reduce: default by profile.
    """

    profile: Profile
    multicast: bool = False
    custom_all_reduce: bool | None = None
    p2p_level: Literal["LOC", "NVL", "PIX", "PXB", "PHB", "SYS"] | None = None
    protocol: Literal["LL", "LL128", "Simple"] | None = None
    algorithm: Literal["Ring", "Tree"] | None = None
    min_channels: Annotated[int, Field(ge=1, le=64)] | None = None
    max_channels: Annotated[int, Field(ge=1, le=64)] | None = None
    buffer_mib: Annotated[int, Field(ge=1, le=256)] | None = None
    threads: Literal[64, 128, 256, 512] | None = None
    graph_file: Annotated[str, Field(pattern=r"^/[^\x00-\x1f\x7f]*$")] | None = None
    cumem: bool | None = None
    cumem_host: bool | None = None
    debug: Literal["WARN", "INFO"] | None = None

    @property
    def verdict(self) -> Verdict:
        return VERDICTS[self.profile]

    @property
    def uses_custom_all_reduce(self) -> bool:
        return self.verdict.custom_all_reduce if self.custom_all_reduce is None else self.custom_all_reduce

    @model_validator(mode="after")
    def _one_verdict(self) -> Self:
        if self.multicast and not self.verdict.multicast:
            raise ValueError(f"multicast = true does not go with {self.profile!r}: {self.verdict.why}")
        if self.custom_all_reduce and not self.verdict.custom_all_reduce:
            raise ValueError(f"custom_all_reduce = true does not go with {self.profile!r}: {self.verdict.why}")
        if self.p2p_level is not None and not self.verdict.p2p:
            raise ValueError(f"p2p_level does not go with {self.profile!r}: {self.verdict.why}")
        if self.min_channels and self.max_channels and self.min_channels > self.max_channels:
            raise ValueError(f"min_channels = {self.min_channels} is more than max_channels = {self.max_channels}")
        return self

    def environment(self) -> dict[str, str]:
        """Every variable that the verdict and the tuning decide."""
        wanted: dict[str, object] = {
            "NCCL_P2P_DISABLE": None if self.verdict.p2p else 1,
            "NCCL_P2P_LEVEL": self.p2p_level,
            "NCCL_NVLS_ENABLE": int(self.multicast),
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": None if self.multicast else 1,
            "NCCL_PROTO": self.protocol,
            "NCCL_ALGO": self.algorithm,
            "NCCL_MIN_NCHANNELS": self.min_channels,
            "NCCL_MAX_NCHANNELS": self.max_channels,
            "NCCL_BUFFSIZE": self.buffer_mib and self.buffer_mib * 2**20,
            "NCCL_NTHREADS": self.threads,
            "NCCL_GRAPH_FILE": self.graph_file,
            "NCCL_CUMEM_ENABLE": None if self.cumem is None else int(self.cumem),
            "NCCL_CUMEM_HOST_ENABLE": None if self.cumem_host is None else int(self.cumem_host),
            "NCCL_DEBUG": self.debug,
        }
        return {name: str(value) for name, value in wanted.items() if value is not None}

    def arguments(self) -> dict[str, bool]:
        """The engine's switches of the same verdict."""
        wanted = {"disable_custom_all_reduce": not self.uses_custom_all_reduce, "enable_nccl_nvls": self.multicast}
        return {name: True for name, value in wanted.items() if value}

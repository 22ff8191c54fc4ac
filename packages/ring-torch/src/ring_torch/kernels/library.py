"""What a library of fused CUDA kernels gives, and what it is told of a launch."""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ring_core import BlockGeometry, WorkItem
from ring_torch.options import Window
from ring_torch.records import AttentionState

Pass = Literal["forward", "backward"]


def capability(device: int | None = None) -> tuple[int, int]:
    """Compute capability of a CUDA device, of the current one by default.

    Torch looks for devices anew each time, which takes the host longer than many a launch.
    """
    if not torch.cuda.is_initialized():
        return torch.cuda.get_device_capability(device)
    return _capability(torch.cuda.current_device() if device is None else device)


@cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


class Documents(NamedTuple):
    """Packed documents: offsets int32 ``[documents + 1]`` into queries and keys, and lengths."""

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


#: What functions of FlashAttention call them.
DOCUMENT_ARGUMENTS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


class Mods(NamedTuple):
    """What else changes scores, or hides them, for libraries that take it.

    Attributes:
        masked: The item, if more than a window or documents hides some of it: these, then.
        segments: Segment ids of its rows, int32 ``[B, n]``, and of its columns, ``[B, m]``.
        geometry: Of a predicate.
        slopes: ALiBi's, ``[B or 1, H]``.
        positions: Of rows and columns, ``[n]`` and ``[m]``, where there are slopes.
        apart: The first row's position less the first column's, if both count on one by one.
        behind: No row sees keys of later positions than its own.
        sinks: Float32 ``[H]``: the launch is all of a call, and is to add them.
    """

    masked: WorkItem | None
    segments: tuple[Tensor, Tensor] | None
    geometry: BlockGeometry | None
    slopes: Tensor | None
    positions: tuple[Tensor, Tensor] | None
    apart: int | None
    behind: bool
    sinks: Tensor | None


class Options(NamedTuple):
    """What a launch is told beside its tensors."""

    scale: float
    softcap: float | None
    window: Window  # as WorkItem.window
    documents: Documents | None
    deterministic: bool
    mods: Mods | None = None
    needs_lse: bool = True


class HeadDims(NamedTuple):
    """Head dims of Q and K, and of V."""

    qk: int
    v: int


def as_given(_direction: Pass, head_dim: int, v_head_dim: int) -> HeadDims:
    """The head dims of a call, for libraries that are right at all they take."""
    return HeadDims(head_dim, v_head_dim)


def rounded_to_8(_direction: Pass, head_dim: int, v_head_dim: int) -> HeadDims:
    """The next multiples of 8, for libraries that take no others."""
    return HeadDims(padded_to(head_dim, 8), padded_to(v_head_dim, 8))


def padded_to(dim: int, by: int) -> int:
    """The next multiple of a number."""
    return -(-dim // by) * by


class Flash(Protocol):
    """The calls of a library.

    ``q [B, n, H, D]``, ``k [B, m, K, D]``, ``v [B, m, K, Dv]``, ``lse [B, H, n]``, natural log.
    With documents there is no batch: ``q [n, H, D]``, ``lse [H, n]``, and where a row sees nothing
    ``lse`` is either infinity.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, place: AttentionState | None, /
    ) -> tuple[Tensor, Tensor]:
        """``(out, lse)``, in ``place`` if the library can write there.

        What is written there in the place of an ``lse`` that is not needed is anything.
        """

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        options: Options, place: Tensor | None, /,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """``(dq, dk, dv)`` from the global ``out`` and ``lse``; ``dq`` may be in ``place``."""

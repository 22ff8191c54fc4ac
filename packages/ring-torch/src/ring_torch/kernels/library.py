"""Interface to libraries of fused CUDA kernels: their calls, and the options of a launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ring_core import WorkItem
from ring_core.plan.tile_mask import BlockGeometry
from ring_torch.capture import ASSUMED_CAPABILITY
from ring_torch.options import Window
from ring_torch.records import AttentionState

Direction = Literal["forward", "backward"]


def capability(device: int | None = None) -> tuple[int, int]:
    """Return the compute capability of a CUDA device, by default of the current one.

    It is remembered: torch's own function takes the host longer than many launches. Where
    ``explain`` is asked about another GPU, it is that one's.
    """
    if (assumed := ASSUMED_CAPABILITY.get()) is not None:
        return assumed
    if not torch.cuda.is_initialized():
        return torch.cuda.get_device_capability(device)
    return _capability(torch.cuda.current_device() if device is None else device)


@cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


class Documents(NamedTuple):
    """Packed documents of a launch.

    Attributes:
        cu_q: Offsets of the documents' queries, int32 ``[documents + 1]``.
        cu_k: Offsets of the documents' keys, likewise.
        max_q: Most queries of a document, or 2 where it is one.
        max_k: Most keys of a document.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


#: Names of the fields of :class:`Documents` in functions of FlashAttention.
DOCUMENT_ARGUMENTS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


class LaunchOptions(NamedTuple):
    """Options of one launch of a library's kernel.

    Attributes:
        scale, softcap, deterministic, needs_lse: As in :class:`ring_torch.records.KernelParams`.
        window: As :attr:`ring_core.WorkItem.window`.
        documents: Packed documents.
        masked: The work item, if segment ids or a predicate mask it; ``None`` if the window or
            documents say it all.
        segments: Segment ids of the rows, int32 ``[B, n]``, and of the columns, ``[B, m]``.
        geometry: Tiles of a predicate.
        slopes: Slopes of ALiBi, ``[B or 1, H]``.
        positions: Positions of rows ``[n]`` and columns ``[m]``, if there are slopes.
        q_k_offset: The first row's position minus the first column's, if the positions of both are
            consecutive; otherwise ``None``.
        is_causal: True if there are slopes, and no row sees keys at later positions than its own.
        sinks: Float32 ``[H]``, if the launch is a whole call and has to add them.
    """

    scale: float
    softcap: float | None
    window: Window
    documents: Documents | None
    deterministic: bool
    needs_lse: bool = True
    masked: WorkItem | None = None
    segments: tuple[Tensor, Tensor] | None = None
    geometry: BlockGeometry | None = None
    slopes: Tensor | None = None
    positions: tuple[Tensor, Tensor] | None = None
    q_k_offset: int | None = None
    is_causal: bool = False
    sinks: Tensor | None = None


#: A forward for tensors alike, ``(q, k, v, out, lse, sinks)``, that writes ``out`` and ``lse``.
ForwardLaunch = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], None]
#: A backward for tensors alike, ``(dout, q, k, v, out, lse, dq)`` to ``(dq, dk, dv)``; it writes
#: ``dq``.
BackwardLaunch = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]
]


class HeadDims(NamedTuple):
    """Head dims of Q and K, and of V."""

    qk: int
    v: int


def as_given(_direction: Direction, head_dim: int, v_head_dim: int) -> HeadDims:
    """Return the head dims of a call unchanged, for libraries that are right at all of them."""
    return HeadDims(head_dim, v_head_dim)


def rounded_to_8(_direction: Direction, head_dim: int, v_head_dim: int) -> HeadDims:
    """Return the head dims of a call rounded up to multiples of 8, for libraries that need it."""
    return HeadDims(padded_to(head_dim, 8), padded_to(v_head_dim, 8))


def padded_to(dim: int, multiple: int) -> int:
    """Return ``dim`` rounded up to a multiple of ``multiple``."""
    return -(-dim // multiple) * multiple


class FlashLibrary(Protocol):
    """Forward and backward calls of a library.

    Shapes are ``q [B, n, H, D]``, ``k [B, m, K, D]``, ``v [B, m, K, Dv]`` and ``lse [B, H, n]``,
    a natural logarithm. With documents there is no batch dimension: ``q [n, H, D]``, ``lse [H,
    n]``; and in a row that sees nothing ``lse`` may be ``inf`` or ``-inf``.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: LaunchOptions, dst: AttentionState | None, /
    ) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)``, which are in ``dst`` if the library can write there.

        With ``options.needs_lse`` false, ``lse`` may be left uninitialised.
        """

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        options: LaunchOptions,
        dst: Tensor | None,
        /,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(dq, dk, dv)`` from the final ``out`` and ``lse``; ``dq`` may be ``dst``."""

    @property
    def writes(self) -> bool:
        """True if results are written into ``dst``."""
        return False

    def repeated_forward(
        self, _q: Tensor, _k: Tensor, _v: Tensor, _dst: AttentionState, _options: LaunchOptions, /
    ) -> ForwardLaunch | None:
        """Return a shorter way for later calls with tensors like these, of which one has run."""
        return None

    def repeated_backward(
        self,
        _dout: Tensor,
        _q: Tensor,
        _k: Tensor,
        _v: Tensor,
        _out: Tensor,
        _lse: Tensor,
        _options: LaunchOptions,
        _dst: Tensor,
        /,
    ) -> BackwardLaunch | None:
        """Return a shorter way for later calls with tensors like these, of which one has run."""
        return None

"""FlashAttention-4's split backward with compiled functions in plain torch, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

from plain_flash import FLASH, differentiated
from torch import Tensor

from ring_core import Plan, Request, WorkItem
from ring_torch.buffers import KVPayload
from ring_torch.kernels import fa4
from ring_torch.kernels.api import OwnSpans
from ring_torch.kernels.fa4 import library
from ring_torch.kernels.flash import FlashKernel
from ring_torch.kernels.library import Documents, LaunchOptions
from ring_torch.records import Backward, KernelParams

KEYS = 4  # keys of a tile, whose sums lie in reverse order
TILE = 8  # queries that lengths are rounded up to
LOG2_E = 1.4426950408889634
Window = tuple[int | None, int | None]


def options_of(
    scale: float, window: Window, *offsets: Tensor | None, sinks: Tensor | None = None
) -> LaunchOptions:
    """Return options of plain attention by what the library passes."""
    documents = None
    if offsets and offsets[0] is not None and offsets[1] is not None:
        longest = int(offsets[0].diff().max()), int(offsets[1].diff().max())
        documents = Documents(offsets[0], offsets[1], *longest)
    return LaunchOptions(scale, None, window, documents, False, sinks=sinks)


def in_rows(sums: Tensor, dim: int, length: int) -> Tensor:
    """Return sums ``[..., H, tokens * D]`` as ``[..., length, H, D]``."""
    tokens: Tensor = sums.unflatten(-1, (-1, dim))[..., :length, :]
    return tokens.transpose(-2, -3)


def reversed_in_tiles(x: Tensor, keys: int) -> Tensor:
    """Return ``[..., n, H, D]`` with the tokens of each tile of keys in reverse order."""
    tokens: Tensor = x.unflatten(-3, (-1, keys)).flip(-3).flatten(-4, -3)
    return tokens


def prepare(
    out: Tensor, dout: Tensor, delta: Tensor, lse: Tensor, lse_log2: Tensor, dq_sums: Tensor,
    *absent: object,
) -> None:  # fmt: skip
    """Write delta and ``lse`` to base 2, padded to whole tiles, and clear the sums of dQ."""
    _, *none, ones, _, _ = absent
    assert none == [None] * 4 and ones == 1.0
    length = lse.shape[-1]
    delta[..., :length] = (out * dout).sum(-1).mT
    lse_log2[..., :length] = lse * LOG2_E
    dq_sums.zero_()


def main(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse_log2: Tensor, delta: Tensor, dq_sums: Tensor,
    dk: Tensor, dv: Tensor, scale: float, *rest: Any, causal: bool, keys: int = 1,
) -> None:  # fmt: skip
    """Add to the sums of dQ, dK and dV, or write dK and dV where they are gradients."""
    *offsets, _, _, left, right = rest[:6]
    assert not any(order is not None and order.any() for order in rest[6:9]), "semaphores"
    assert all(x.data_ptr() % 16 == 0 for x in (q, k, v, dout)), "misaligned address"
    length, columns = q.shape[-3], k.shape[-3]
    options = options_of(scale, (None, 0) if causal else (left, right), *offsets)
    of_rows = lse_log2[..., :length] / LOG2_E, delta[..., :length]
    dq, k_grad, v_grad = differentiated(q, k, v, dout, *of_rows, options)
    # Sums are multiplied by the scale when they are rounded; gradients in their place are not.
    in_rows(dq_sums, q.shape[-1], length).add_(dq / scale)
    if dk.shape == k.shape:
        dk.copy_(k_grad)
        dv.copy_(v_grad)
    else:
        in_rows(dk, k.shape[-1], columns).add_(reversed_in_tiles(k_grad, keys) / scale)
        in_rows(dv, v.shape[-1], columns).add_(reversed_in_tiles(v_grad, keys))


def rounded(
    sums: Tensor, grad: Tensor, scale: float, _: Tensor | None, *none: None, keys: int = 1
) -> None:
    """Write sums, times the scale, into a gradient."""
    assert none == (None,) * 3
    tokens = in_rows(sums, grad.shape[-1], grad.shape[-3])
    grad.copy_(reversed_in_tiles(tokens, keys) * scale)


def functions(_: Any, dim: int, __: int, is_causal: bool, *___: Any) -> library.SplitFunctions:
    """Return functions that a split backward compiles."""
    of_items = partial(main, causal=is_causal, keys=KEYS)
    return library.SplitFunctions(
        prepare, of_items, (), rounded, partial(rounded, keys=KEYS), TILE, dim
    )


def with_functions(run: Callable[..., Any], used: list[bool]) -> Callable[..., Any]:
    """Return what runs with these functions, and notes that it does."""

    def noted(*args: Any) -> Any:
        used.append(True)
        with patch.object(library, "split_functions", functions):
            return run(*args)

    return noted


class Tiled(fa4.HopperSplitBackward):
    """A split backward of small tiles.

    Attributes:
        used: Answers of ``applies``, and True for each run.
    """

    tile = KEYS

    def __init__(self, used: list[bool]) -> None:
        self.used = used

    def applies(self, plan: Plan, request: Request, *, splits: bool, tile: int) -> bool:
        """Return True if all items and fetches consist of whole tiles."""
        del request
        self.used.append(fa4.in_whole_tiles(plan, splits, tile))
        return self.used[-1]

    def backward(self, items: Sequence[WorkItem], params: KernelParams) -> Backward:
        """Return the launch of items."""
        launch = super().backward(items, params)
        return launch._replace(run=with_functions(launch.run, self.used))

    def rounding(
        self, spans: OwnSpans, keys: KVPayload, params: KernelParams
    ) -> Callable[[Tensor, Tensor, Tensor], None]:
        """Return what rounds spans of own keys."""
        return with_functions(super().rounding(spans, keys, params), self.used)


class TiledKernel(FlashKernel):
    """A kernel whose split backward sums in small tiles."""

    def __init__(self, used: list[bool]) -> None:
        super().__init__(FLASH.flash, FLASH.capabilities, split_backward=Tiled(used))

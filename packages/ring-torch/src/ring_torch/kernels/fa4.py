"""``fa4``: FlashAttention-4 (``pip install flash-attn-4``), for Hopper and Blackwell."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from ring_core import Capabilities
from ring_torch.kernels._api import Result
from ring_torch.kernels._fa4_hopper import Function, HopperParts, recorded
from ring_torch.kernels._flash import FlashKernel, HeadDims, Options, Pass, capability

_WIDE = 128  # head dims above have kernels of their own, on Hopper alone
_MOST_LAUNCHES = 256


class Flash4:
    """The functions of ``flash_attn.cute.interface``, and what they compiled for calls so far."""

    drops_right = False

    def __init__(self) -> None:
        self._launches: dict[object, tuple[Function, tuple[Any, ...]]] = {}

    def missing(self) -> str | None:
        """Not installed, shadowed by another package, or a GPU it has no backward for."""
        return _missing()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, place: Result | None
    ) -> tuple[Tensor, Tensor]:
        """``(out, lse)``."""
        if options.documents is not None and capability()[0] == 9:
            return self._forward(q, k, v, options, place)
        if place is None or options.documents is not None:
            return self._forward(q, k, v, options, None)
        known = (
            q.device, q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, options,
        )  # fmt: skip
        if known in self._launches:
            # The library's own way there takes 0.1 ms of the host.
            launch, rest = self._launches[known]
            launch(q.detach(), k.detach(), v.detach(), place.out, place.lse, *rest)
        elif capability()[0] != 9:
            return self._forward(q, k, v, options, None)
        else:
            with recorded(_interface()._flash_attn_fwd) as (calls,):
                self._forward(q, k, v, options, place)
            ((launch, given),) = calls
            if len(self._launches) >= _MOST_LAUNCHES:
                del self._launches[next(iter(self._launches))]
            self._launches[known] = launch, given[5:]
        return place.out, place.lse

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, place: Result | None
    ) -> tuple[Tensor, Tensor]:
        where = {} if place is None else {"out": place.out, "lse": place.lse}
        out, lse, *_ = _interface()._flash_attn_fwd(
            q, k, v, return_lse=True, score_mod=_capped(options)[0], **where, **_common(options)
        )
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        options: Options, place: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """``(dq, dk, dv)``; of grouped heads and unlike head dims dK and dV are float32.

        For these the library has no backward: each query head gets its keys and values.
        """
        score_mod, score_mod_bwd = _capped(options)
        group = q.shape[-2] // k.shape[-2] if q.shape[-1] != v.shape[-1] else 1
        if group > 1:
            k, v = (x.repeat_interleave(group, dim=-2) for x in (k, v))
        dq, dk, dv = _interface()._flash_attn_bwd(
            q, k, v, out, dout, lse, dq=place, score_mod=score_mod, score_mod_bwd=score_mod_bwd,
            deterministic=options.deterministic, **_common(options),
        )  # fmt: skip
        if group > 1:
            dk, dv = (x.unflatten(-2, (-1, group)).sum(-2, dtype=torch.float32) for x in (dk, dv))
        return dq, dk, dv


def _common(options: Options) -> dict[str, Any]:
    left, right = options.window
    given: dict[str, Any] = {
        "softmax_scale": options.scale, "window_size_left": left, "window_size_right": right,
    }  # fmt: skip
    if (documents := options.documents) is not None:
        given |= {
            "cu_seqlens_q": documents.cu_q, "cu_seqlens_k": documents.cu_k,
            "max_seqlen_q": documents.max_q, "max_seqlen_k": documents.max_k,
        }  # fmt: skip
    return given


def _capped(options: Options) -> tuple[Any, Any]:
    """What a soft cap does to scores and their gradients; nothing without one."""
    if options.softcap is None:
        return None, None
    from ring_torch.kernels._fa4_softcap import capped, slope

    return capped(options.softcap), slope(options.softcap)


def _head_dims(direction: Pass, head_dim: int, v_head_dim: int) -> HeadDims | None:
    """Head dims at which version 4.0.0b36 is right, measured on Hopper.

    The forward is at all multiples of 16. At 48, 80 and 112 dQ is wrong, and dK and dV of grouped
    heads; with V wider than Q and K the backward does not launch, and 64 beside 128 is wrong with
    documents.
    """
    widest = max(head_dim, v_head_dim)
    if widest > _WIDE and capability()[0] != 9:
        return None
    if direction == "forward" and capability()[0] == 9:
        return HeadDims(_rounded(head_dim, 16), _rounded(v_head_dim, 16))
    if v_head_dim <= _WIDE < head_dim <= 192:
        return HeadDims(192, _WIDE)
    dim = _rounded(widest, 32 if widest <= _WIDE else 16)
    return HeadDims(dim, dim)


def _rounded(dim: int, multiple: int) -> int:
    return -(-dim // multiple) * multiple


@cache
def _interface() -> Any:
    return import_module("flash_attn.cute.interface")


@cache
def _missing() -> str | None:
    try:
        installed = version("flash-attn-4")
    except PackageNotFoundError:
        return "flash-attn-4 is not installed; pip install flash-attn-4"
    try:
        interface = _interface()
    except ImportError as error:
        return f"flash-attn-4 {installed} does not load: {error}"
    if not hasattr(interface, "_bwd_postprocess_convert"):
        return (
            f"flash-attn-4 {installed} is installed, but flash-attn 2.8 has put an older "
            f"flash_attn/cute over it; pip install --force-reinstall --no-deps flash-attn-4"
        )
    if capability()[0] not in (9, 10, 11):
        return f"has kernels for compute capability 9.x to 11.x, this is {capability()}"
    return None


FA4 = FlashKernel(
    Flash4(),
    Capabilities(
        name="fa4", devices=("cuda",), dtypes=("bfloat16", "float16"), max_head_dim=256,
        mixed_head_dims=True, bands="any", documents=True, softcap=True, deterministic=True,
        exact_nan=False,
    ),
    parts=HopperParts(),
    head_dims=_head_dims,
)  # fmt: skip

"""``fa4``: FlashAttention-4 (``pip install flash-attn-4``), for Hopper and Blackwell."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from ring_core import Capabilities, Request, RingProgram
from ring_torch.kernels.fa4.hopper import Function, HopperSplitBackward, calls_of
from ring_torch.kernels.fa4.options import Modded
from ring_torch.kernels.flash import FlashKernel, capability
from ring_torch.kernels.flash_library import (
    DOCUMENT_ARGUMENTS,
    HeadDims,
    Options,
    Pass,
    padded_to,
)
from ring_torch.records import AttentionState

_WIDE = 128  # head dims above have kernels of their own, on Hopper alone
_MOST_LAUNCHES = 256
_COUNTS_PACKED = "4.0.0b36"  # the version whose backward does (_fa4_options._packed)


class Flash4:
    """The functions of ``flash_attn.cute.interface``, and what they compiled for calls so far."""

    def __init__(self) -> None:
        self._launches: dict[object, tuple[Function, tuple[Any, ...], tuple[Any, ...]]] = {}

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, place: AttentionState | None
    ) -> tuple[Tensor, Tensor]:
        """``(out, lse)``.

        The library's own way to a launch takes 0.1 ms of the host and more; what it calls in the
        end is kept for calls that are alike.
        """
        modded = Modded.of("forward", q, v, options)
        if place is None or capability()[0] != 9:
            return _forward(q, k, v, options, modded, None)
        known = (
            q.device, q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype,
            options._replace(mods=None), modded.facts,
        )  # fmt: skip
        if known in self._launches:
            launch, before, after = self._launches[known]
            lse = place.lse if _has_lse(q, v, options) else None
            launch(
                q.detach(), k.detach(), v.detach(), place.out, lse, *before, modded.sinks,
                modded.launch_lists(q), modded.launch_numbers(), *after,
            )  # fmt: skip
        else:
            with calls_of(_module()._flash_attn_fwd) as (calls,):
                _forward(q, k, v, options, modded, place)
            ((launch, given),) = calls
            if len(self._launches) >= _MOST_LAUNCHES:
                del self._launches[next(iter(self._launches))]
            self._launches[known] = launch, given[5:13], given[16:]
        return place.out, place.lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        options: Options, place: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """``(dq, dk, dv)``; of grouped heads and unlike head dims dK and dV are float32.

        For these the library has no backward: each query head gets its keys and values.
        """
        group = q.shape[-2] // k.shape[-2] if q.shape[-1] != v.shape[-1] else 1
        if group > 1:
            k, v = (x.repeat_interleave(group, dim=-2) for x in (k, v))
        modded = Modded.of("backward", q, v, options)
        dq, dk, dv = _module()._flash_attn_bwd(
            q, k, v, out, dout, lse, dq=place, score_mod=modded.score_mod,
            score_mod_bwd=modded.score_mod_bwd, mask_mod=modded.mask_mod,
            block_sparse_tensors=modded.lists, aux_scalars=modded.numbers,
            deterministic=options.deterministic, **_arguments(options),
        )  # fmt: skip
        if group > 1:
            dk, dv = (x.unflatten(-2, (-1, group)).sum(-2, dtype=torch.float32) for x in (dk, dv))
        return dq, dk, dv


def _forward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, modded: Modded, place: AttentionState | None
) -> tuple[Tensor, Tensor]:
    """By the library's own way."""
    needs_lse = place is None or _has_lse(q, v, options)
    where = {} if place is None else {"out": place.out, "lse": place.lse if needs_lse else None}
    out, lse, *_ = _module()._flash_attn_fwd(
        q.detach(), k.detach(), v.detach(), return_lse=needs_lse, learnable_sink=modded.sinks,
        score_mod=modded.score_mod, mask_mod=modded.mask_mod, block_sparse_tensors=modded.lists,
        aux_scalars=modded.numbers, **where, **_arguments(options),
    )  # fmt: skip
    return out, lse if place is None else place.lse


def _has_lse(q: Tensor, v: Tensor, options: Options) -> bool:
    """Whether a launch writes an ``lse``, too, that nobody may need.

    Without one it is faster at unlike head dims, and slower at like ones.
    """
    return options.needs_lse or q.shape[-1] == v.shape[-1]


def _arguments(options: Options) -> dict[str, Any]:
    left, right = options.window
    return {
        "softmax_scale": options.scale, "window_size_left": left, "window_size_right": right,
        **dict(zip(DOCUMENT_ARGUMENTS, options.documents or (), strict=False)),
    }  # fmt: skip


def _limits(request: Request, program: RingProgram) -> tuple[str, ...]:
    """What it has on Hopper alone, and not together."""
    with_lists = request.segment_ids or program.plan.mask.predicate is not None
    documents = program.item_counts.several_documents
    found = {
        "has segment_ids, predicates and alibi_slopes on Hopper only": (
            (with_lists or request.alibi) and capability()[0] != 9
        ),
        "has alibi_slopes with version 4.0.0b36 only, which counts rows in a way of its own": (
            request.alibi and request.grad and version("flash-attn-4") != _COUNTS_PACKED
        ),
        "is not deterministic with segment_ids or a predicate": with_lists
        and request.deterministic,
        "has no segment_ids together with documents": request.segment_ids and documents,
        "has no alibi_slopes together with documents": request.alibi and documents,
        "the partial tiles of this predicate take more than 64 MiB": (
            program.plan.blocks is not None and program.plan.blocks.tiles is None
        ),
    }
    return tuple(reason for reason, applies in found.items() if applies)


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
        return HeadDims(padded_to(head_dim, 16), padded_to(v_head_dim, 16))
    if v_head_dim <= _WIDE < head_dim <= 192:
        return HeadDims(192, _WIDE)
    dim = padded_to(widest, 32 if widest <= _WIDE else 16)
    return HeadDims(dim, dim)


@cache
def _module() -> Any:
    return import_module("flash_attn.cute.interface")


@cache
def _missing() -> str | None:
    try:
        found = version("flash-attn-4")
    except PackageNotFoundError:
        return "flash-attn-4 is not installed; pip install flash-attn-4"
    try:
        module = _module()
    except ImportError as error:
        return f"flash-attn-4 {found} does not load: {error}"
    if not hasattr(module, "_bwd_postprocess_convert"):
        return (
            f"flash-attn-4 {found} is installed, but flash-attn 2.8 has put an older "
            f"flash_attn/cute over it; pip install --force-reinstall --no-deps flash-attn-4"
        )
    if capability()[0] not in (9, 10, 11):
        return f"has kernels for compute capability 9.x to 11.x, this is {capability()}"
    return None


FA4 = FlashKernel(
    Flash4(),
    Capabilities(
        name="fa4", devices=("cuda",), dtypes=("bfloat16", "float16"), max_head_dim=256,
        mixed_head_dims=True, bands="any", documents=True, segment_ids=True, predicate=True,
        softcap=True, alibi=True, deterministic=True, exact_nan=False,
    ),
    parts=HopperSplitBackward(),
    head_dims=_head_dims,
    missing=_missing,
    limits=_limits,
    adds_sinks=True,
    predicate_compile_seconds=10,
)  # fmt: skip

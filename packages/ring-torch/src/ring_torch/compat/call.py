"""Shared parts of ring_flash_attn's functions: their arguments, checks and return values."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, Concatenate, NamedTuple, Protocol

import torch
from torch import Tensor

from ring_core import LayoutName, StrategyConfig, checks
from ring_torch.autograd import AttentionFunction
from ring_torch.call import Call
from ring_torch.capture import untraced
from ring_torch.comm.ranks import Group, Ranks, ranks_of
from ring_torch.options import CallOptions, Window
from ring_torch.prepare import check_call
from ring_torch.records import GIVEN, Inputs

_TOKENS = {1: "T_local", 2: "B, T_local"}  # dimensions before the one along which K, V are stacked


class FlashAttnOptions(NamedTuple):
    """Arguments that every function has, with their values in a call."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    alibi_slopes: Tensor | None
    deterministic: bool
    return_attn_probs: bool
    strategy: str | StrategyConfig


@untraced
def attend_batch(
    layout: LayoutName, q: Tensor, k: Tensor, v: Tensor, options: FlashAttnOptions, group: Group
) -> Any:
    """Compute attention of shards ``[B, T_local, H, D]`` in a layout."""
    call, inputs = checked(ranks_of(group), layout, q, k, v, options)
    return as_requested(*run_call(call, inputs), options)


def checked(
    ranks: Ranks,
    layout: LayoutName,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: FlashAttnOptions,
    cu_seqlens: tuple[int, ...] | None = None,
) -> tuple[Call, Inputs]:
    """Check the arguments of a call, and return the call with its inputs. Nothing is sent.

    The call gets the group's next number and, with dropout, a new seed.

    Raises:
        ValueError: An argument is malformed.
        UnsupportedError: No kernel can do the call.
    """
    checks.check_flag("causal", options.causal)
    checks.check_flag("return_attn_probs", options.return_attn_probs)
    # A Mask, as flash-attn allows causal attention with more queries than keys.
    mask = checks.check_mask(
        None,
        causal=options.causal,
        window=window_of(options.window_size),
        chunk_size=None,
        cu_seqlens=cu_seqlens,
    )
    return check_call(
        ranks,
        ranks.next_call(),
        layout,
        q,
        k,
        v,
        CallOptions(
            mask=mask,
            softmax_scale=options.softmax_scale,
            alibi_slopes=options.alibi_slopes,
            dropout_p=options.dropout_p,
            dropout_seed=seed_of(options.dropout_p),
            deterministic=options.deterministic,
            return_lse=options.return_attn_probs,
            strategy=options.strategy,
        ),
    )


def run_call(call: Call, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Run a checked call, and return ``out`` and ``lse``, the latter without a gradient.

    A gradient through ``lse`` would rule out fused kernels, and no caller of ring_flash_attn has
    one.
    """
    out, lse = AttentionFunction.apply(call, *inputs[:GIVEN])
    return out, lse.detach()


def as_requested(out: Tensor, lse: Tensor, options: FlashAttnOptions) -> Any:
    """Return ``out``, or ``(out, lse, None)`` if ``return_attn_probs`` was set."""
    return (out, lse, None) if options.return_attn_probs else out


def window_of(window_size: tuple[int, int]) -> Window | None:
    """Convert flash-attn's ``(left, right)`` to a window, with ``None`` in place of -1.

    Raises:
        ValueError: It is not a pair of such numbers.
    """
    if (
        not isinstance(window_size, tuple | list)
        or len(window_size) != 2
        or not all(type(side) is int and side >= -1 for side in window_size)
    ):
        raise ValueError(
            f"window_size must be a pair (left, right) of numbers of keys besides the query's own, "
            f"-1 where a side has no limit, got {window_size!r}"
        )
    left, right = (None if side == -1 else side for side in window_size)
    return None if left is None and right is None else (left, right)


def seed_of(dropout_p: float) -> int | None:
    """Draw a dropout seed from torch's default CPU generator; ``None`` if nothing is dropped.

    Ranks that are seeded alike draw the same seed. Activation checkpointing restores that
    generator, so recomputation drops the same weights again.
    """
    return None if dropout_p == 0 else int(torch.randint(2**63 - 1, (), device="cpu"))


def split_packed(name: str, packed: Tensor, count: int, *, dim: int) -> tuple[Tensor, ...]:
    """Return the ``count`` tensors that are stacked along a dimension of a packed tensor.

    Raises:
        ValueError: Their number is another, or the tensor has another number of dimensions.
    """
    if not isinstance(packed, Tensor) or packed.ndim != dim + 3 or packed.shape[dim] != count:
        actual = tuple(packed.shape) if isinstance(packed, Tensor) else type(packed).__name__
        raise ValueError(
            f"{name} must be a tensor [{_TOKENS[dim]}, {count}, heads, D], got {actual}"
        )
    return packed.unbind(dim)


class KVPacked[**P](Protocol):
    """Function that takes K and V stacked in one tensor."""

    def __call__(self, q: Tensor, kv: Tensor, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call the function that takes them separately, after splitting ``kv``."""


class QKVPacked[**P](Protocol):
    """Function that takes Q, K and V stacked in one tensor."""

    def __call__(self, qkv: Tensor, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call the function that takes them separately, after splitting ``qkv``."""


def kvpacked[**P](
    function: Callable[Concatenate[Tensor, Tensor, Tensor, P], Any], *, dim: int
) -> KVPacked[P]:
    """Return a version of a function that takes K and V stacked along dimension ``dim``."""

    def packed(q: Tensor, kv: Tensor, *args: P.args, **kwargs: P.kwargs) -> Any:
        k, v = split_packed("kv", kv, 2, dim=dim)
        return function(q, k, v, *args, **kwargs)

    _set_signature(
        packed, function, "kvpacked", f"K and V in one tensor, ``kv [{_TOKENS[dim]}, 2, K, D]``"
    )
    return packed


def qkvpacked[**P](
    function: Callable[Concatenate[Tensor, Tensor, Tensor, P], Any], *, dim: int
) -> QKVPacked[P]:
    """Return a version of a function that takes Q, K and V stacked along dimension ``dim``."""

    def packed(qkv: Tensor, *args: P.args, **kwargs: P.kwargs) -> Any:
        q, k, v = split_packed("qkv", qkv, 3, dim=dim)
        return function(q, k, v, *args, **kwargs)

    _set_signature(
        packed,
        function,
        "qkvpacked",
        f"Q, K and V in one tensor, ``qkv [{_TOKENS[dim]}, 3, H, D]``",
    )
    return packed


def _set_signature(packed: Any, function: Any, variant: str, description: str) -> None:
    """Set the signature, name and docstring of a packed function, for ``help`` and ``inspect``."""
    packed_parameters = [
        x for x in signature(packed).parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD
    ]
    original = signature(function)
    packed.__signature__ = original.replace(
        parameters=[*packed_parameters, *list(original.parameters.values())[3:]]
    )
    packed.__name__ = packed.__qualname__ = function.__name__.replace("_func", f"_{variant}_func")
    packed.__doc__ = f"Call :func:`{function.__name__}` with {description}."
    packed.__module__ = function.__module__

"""What all functions share: foreign arguments in our words, and what comes back."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, Concatenate, NamedTuple, Protocol

import torch
from torch import Tensor

from ring_core import LayoutName, checks
from ring_torch.autograd import RingAttention
from ring_torch.call import Call
from ring_torch.comm.ranks import Group, Ranks, ranks_of
from ring_torch.options import CallOptions, Window
from ring_torch.prepare import check_call
from ring_torch.records import GIVEN, Inputs

_TOKENS = {1: "T_local", 2: "B, T_local"}  # what lies before a dimension along which is stacked


class Options(NamedTuple):
    """The arguments that every function has."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    alibi_slopes: Tensor | None
    deterministic: bool
    return_attn_probs: bool


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend_batch(
    layout: LayoutName, q: Tensor, k: Tensor, v: Tensor, options: Options, group: Group
) -> Any:
    """Attention of shards ``[B, T_local, H, D]`` that lie in this layout."""
    call, inputs = checked(ranks_of(group), layout, q, k, v, options)
    return as_asked(*run(call, inputs), options)


def checked(
    ring: Ranks,
    layout: LayoutName,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    cu_seqlens: tuple[int, ...] | None = None,
) -> tuple[Call, Inputs]:
    """A call whose arguments are all right; nothing is sent.

    Raises:
        ValueError: An argument is malformed.
        UnsupportedError: No kernel can do the call.
    """
    checks.check_flag("causal", options.causal)
    checks.check_flag("return_attn_probs", options.return_attn_probs)
    mask = checks.check_mask(  # a Mask, as flash-attn lets causal queries be more than the keys
        None, causal=options.causal, window=window_of(options.window_size), chunk_size=None,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return check_call(
        ring, ring.next_call(), layout, q, k, v,
        CallOptions(
            mask=mask, softmax_scale=options.softmax_scale, alibi_slopes=options.alibi_slopes,
            dropout_p=options.dropout_p, dropout_seed=seed_of(options.dropout_p),
            deterministic=options.deterministic, return_lse=options.return_attn_probs,
        ),
    )  # fmt: skip


def run(call: Call, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``out`` and ``lse`` of a checked call.

    A gradient through ``lse``, which no caller there can have had, would rule out fused kernels.
    """
    out, lse = RingAttention.apply(call, *inputs[:GIVEN])
    return out, lse.detach()


def as_asked(out: Tensor, lse: Tensor, options: Options) -> Any:
    """``out``, or ``(out, lse, None)`` where more was asked for."""
    return (out, lse, None) if options.return_attn_probs else out


def window_of(window_size: tuple[int, int]) -> Window | None:
    """``(left, right)``, where -1 stands for a side without a limit.

    Raises:
        ValueError: Not two counts of keys.
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
    """A seed drawn from torch's default generator of the CPU, where something is to drop.

    Ranks that are seeded alike draw alike, and checkpointing, which restores that generator,
    drops the same elements again.
    """
    return None if dropout_p == 0 else int(torch.randint(2**63 - 1, (), device="cpu"))


def split_packed(name: str, packed: Tensor, count: int, *, dim: int) -> tuple[Tensor, ...]:
    """The ``count`` tensors stacked along a dimension.

    Raises:
        ValueError: There are others than that many.
    """
    if not isinstance(packed, Tensor) or packed.ndim != dim + 3 or packed.shape[dim] != count:
        got = tuple(packed.shape) if isinstance(packed, Tensor) else type(packed).__name__
        raise ValueError(f"{name} must be a tensor [{_TOKENS[dim]}, {count}, heads, D], got {got}")
    return packed.unbind(dim)


class KVPacked[**P](Protocol):
    """A function of K and V in one tensor."""

    def __call__(self, q: Tensor, kv: Tensor, *args: P.args, **kwargs: P.kwargs) -> Any:
        """As the function that takes them apart."""


class QKVPacked[**P](Protocol):
    """A function of Q, K and V in one tensor."""

    def __call__(self, qkv: Tensor, *args: P.args, **kwargs: P.kwargs) -> Any:
        """As the function that takes them apart."""


def kvpacked[**P](
    function: Callable[Concatenate[Tensor, Tensor, Tensor, P], Any], *, dim: int
) -> KVPacked[P]:
    """The same function of K and V stacked along a dimension."""

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
    """The same function of Q, K and V stacked along a dimension."""

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


def _set_signature(packed: Any, function: Any, kind: str, words: str) -> None:
    """Let ``help`` and ``inspect`` show the arguments of a function, its first three packed."""
    own = [x for x in signature(packed).parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
    whole = signature(function)
    packed.__signature__ = whole.replace(parameters=[*own, *list(whole.parameters.values())[3:]])
    packed.__name__ = packed.__qualname__ = function.__name__.replace("_func", f"_{kind}_func")
    packed.__doc__, packed.__module__ = f"The same of {words}.", function.__module__

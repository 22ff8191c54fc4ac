"""Merging of attention over disjoint keys: the ranks' ``(out, lse)`` become those over all keys."""

from __future__ import annotations

from math import log
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ring_core.base.arguments import numbers_as_python
from ring_core.checks import check_choice
from ring_torch.capture import untraced
from ring_torch.comm.handshake import GuardedPass
from ring_torch.comm.ranks import Ranks, run_collective
from ring_torch.comm.store import CallSignature
from ring_torch.recurrent.arguments import SplitsSequences, check_tensor, sharding_of
from ring_torch.serving.kernels import step_kernels
from ring_torch.sharding import agree_on_call

#: Bytes of a rank's partial results from which ranks merge a part of the heads each.
BY_HEAD = 64 << 10

LseBase = Literal["e", "2"]


@untraced
@numbers_as_python
def merge_partials(
    cp: SplitsSequences, out: Tensor, lse: Tensor, *, lse_base: LseBase = "e"
) -> tuple[Tensor, Tensor]:
    """Merge attention that each rank has computed over its own keys, for all queries.

    It is the exchange of :meth:`ContextParallel.decode` alone, for engines with kernels and caches
    of their own. All ranks call it, and get the same numbers. There is no gradient.

    Args:
        cp: The ``ContextParallel`` whose ranks share the keys.
        out: This rank's output for all queries, ``[B, n, H, Dv]``, normalised.
        lse: Logarithm of the sum of the exponentials of its scores, ``[B, H, n]``, float32 or
            float64; ``-inf`` where the rank has no key that the query sees: ``out`` is not read
            there, whatever it holds.
        lse_base: Base of the logarithm: ``"e"``, as of flash-attn and cuDNN, or ``"2"``, as of
            FlashInfer. Results of one base merged as of the other are wrong without any sign of it.

    Returns:
        ``(out, lse)`` over the keys of all ranks, in the same dtypes and base.

    Raises:
        ValueError: An argument is malformed, or requires a gradient.
        RankMismatchError: Shapes, dtypes or the base differ between ranks.

    Example::

        out, lse = flash_attention(q, own_keys, own_values)  # all queries, this rank's keys
        out, lse = cp.merge_partials(out, lse)
    """
    ranks = sharding_of(cp).ranks
    number = ranks.next_call()
    check_choice("lse_base", lse_base, ("e", "2"))
    for name, x in (("out", out), ("lse", lse)):
        check_tensor(name, x)
    refuse_grad("merge_partials", out=out, lse=lse)
    if out.ndim != 4 or lse.shape != (out.shape[0], out.shape[2], out.shape[1]):
        raise ValueError(
            f"out must be [B, n, H, Dv] and lse [B, H, n], got {list(out.shape)} and {list(lse.shape)}"
        )
    if lse.dtype not in (torch.float32, torch.float64) or lse.device != out.device:
        raise ValueError(
            f"lse must be float32 or float64, on the device of out, got {lse.dtype} on {lse.device}, "
            f"and out on {out.device}"
        )
    signature = CallSignature.of(
        {"out": [*out.shape, str(out.dtype)], "lse": str(lse.dtype), "lse_base": lse_base},
        "merge_partials",
    )
    agree_on_call(ranks, number, signature, out.device)
    with GuardedPass(ranks, number, signature, out.device), torch.no_grad():
        factor = log(2) if lse_base == "2" else 1.0
        # What stands in rows that see none of a rank's keys, maybe NaN, weighs nothing.
        seen = out.to(lse.dtype).masked_fill((lse == -torch.inf).mT.unsqueeze(-1), 0.0)
        merged, merged_lse = merge_over_ranks(ranks, seen, lse * factor)
        return merged.to(out.dtype), merged_lse / factor


def merge_over_ranks(ranks: Ranks, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``out [B, n, H, Dv]`` and ``lse [B, H, n]`` over the keys of all ranks, on each.

    Both are of one dtype, float32 or float64. All ranks get the same bits: either all merge the
    same numbers in the same order, or each head is merged on one rank.
    """
    if ranks.size == 1:
        return out, lse
    packed = pack(out, lse)
    heads = packed.shape[2]
    if packed.nbytes < BY_HEAD:
        merged = combine(_gathered(ranks, packed))
    else:
        # Each rank merges a part of the heads. Heads are filled up to one part for each rank: there
        # may be more ranks than heads.
        part = -(-heads // ranks.size)
        filled = packed.new_zeros(*packed.shape[:2], part * ranks.size, packed.shape[3])
        filled[:, :, :heads] = packed
        by_rank = filled.unflatten(2, (ranks.size, part)).movedim(2, 0).contiguous()
        received = torch.empty_like(by_rank)  # the part of this rank, as each rank has it
        ranks.trade(by_rank, received).wait()
        parts = _gathered(ranks, combine(received))
        merged = parts.movedim(0, 2).flatten(2, 3)[:, :, :heads]
    return merged[..., :-1], merged[..., -1].transpose(1, 2)


def bytes_of_merge(ranks: int, shape: tuple[int, ...], itemsize: int) -> tuple[int, bool]:
    """Return the bytes that a rank sends to merge ``[B, n, H, Dv]``, and whether it is by head."""
    batch, n, heads, dim = shape
    row = batch * n * (dim + 1) * itemsize
    if row * heads < BY_HEAD:
        return (ranks - 1) * row * heads, False
    return 2 * (ranks - 1) * row * -(-heads // ranks), ranks > 1


def pack(out: Tensor, lse: Tensor) -> Tensor:
    """Return ``[B, n, H, Dv + 1]``: outputs, 0 where nothing is seen, and ``lse`` behind them."""
    return torch.cat([out, lse.transpose(1, 2).unsqueeze(-1)], dim=-1)


def refuse_grad(function: str, **tensors: Tensor | None) -> None:
    """Refuse tensors whose gradient would be missing without a sign.

    Raises:
        ValueError: Gradients are enabled, and one of them requires one.
    """
    for name, x in tensors.items():
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{function} has no backward, and {name} requires a gradient: call it under "
                f"torch.no_grad(), or train with cp.attention"
            )


def _gathered(ranks: Ranks, packed: Tensor) -> Tensor:
    """Return the tensors of all ranks, ``[P, ...]``."""
    gathered = packed.new_empty(ranks.size, *packed.shape)
    run_collective(
        ranks,
        lambda: dist.all_gather_into_tensor(
            gathered.view(-1), packed.contiguous().view(-1), group=ranks.group, async_op=True
        ),
    )
    return gathered


def combine(parts: Tensor) -> Tensor:
    """Merge ``[P, ..., Dv + 1]``, outputs with their ``lse`` behind them, over the first dim."""
    if parts.dtype == torch.float32 and (step := step_kernels(parts.device)) is not None:
        merged: Tensor = step.combine(parts)
        return merged
    out, lse = parts[..., :-1], parts[..., -1:]
    top = lse.amax(dim=0)
    safe = top.masked_fill(top == -torch.inf, 0.0)
    weights = (lse - safe).exp_()
    total = weights.sum(dim=0)
    means = (weights * out).sum(dim=0).div_(total.masked_fill(total == 0, 1.0))
    return torch.cat([means, total.log().add_(safe)], dim=-1)

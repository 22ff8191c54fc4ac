"""Looks at calls before they run, and after: what is wrong by the records of their tensors.

A check says nothing where a record is missing. Each is given the call's arguments by name, raises
for a mistake, and may return a function of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Never

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ring_core import RankMismatchError
from ring_core.base.arguments import not_none
from ring_torch.comm.ranks import OneRank, Ranks
from ring_torch.context import ContextParallel, check_context
from ring_torch.debugging.records import (
    BLOCKS,
    Record,
    live_records,
    record_of,
    remember,
    start_in_whole,
    users_line,
)
from ring_torch.sharding import Sharding
from ring_torch.verification.equality import check_equal

After = Callable[[Any], None] | None
Arguments = dict[str, Any]
#: Ranks that have split a sequence, and so have gradients to sum. They stay, in one order, so that
#: all ranks compare for the same groups.
_splitting: dict[Ranks, None] = {}


def _wrong(text: str) -> Never:
    line, _ = users_line()
    raise ValueError(f"ring_torch.debug: {text}\n  at {line}")


def _split(cp: Any) -> Sharding | None:
    """Return the sharding of ranks that hold parts; ``None`` for one rank, or one acting alone."""
    if not isinstance(cp, ContextParallel):  # which the call itself refuses
        return None
    sharding = check_context(cp)
    is_split = sharding.group is not OneRank.WHOLE and sharding.ranks.size > 1
    return sharding if is_split else None


def shard(call: Arguments) -> After:
    """Compare what is sharded between ranks, and remember the shard."""
    x, cp = call["x"], call["self"]
    if (sharding := _split(cp)) is None or not isinstance(x, Tensor) or isinstance(x, DTensor):
        return None
    line, is_ours = users_line()
    _splitting[sharding.ranks] = None
    is_input = not is_ours and not x.requires_grad and x.grad_fn is None
    if is_input and BLOCKS[-1].is_due(sharding.ranks, "shard"):
        try:
            check_equal(cp, x, what="what is sharded")
        except RankMismatchError as error:
            raise RankMismatchError(f"{error}\n  at {line}") from None

    def after(result: Tensor) -> None:
        dim = call["dim"] % x.ndim
        size = sharding.ranks.size
        remember(result, Record(sharding.layout, x.shape[dim], result.shape[dim], dim, size, line))

    return after


def shift(call: Arguments) -> After:
    """Remember that the result is a shard as its argument is."""
    record = record_of(call["x"])
    return None if record is None else lambda result: remember(result, record)


def ring_attention(call: Arguments) -> After:
    """Remember its ranks; check a call of the user's own."""
    try:
        sharding = Sharding(call["group"], call["layout"])
        size = sharding.ranks.size
    except ValueError:  # which the call itself says
        return None
    if size > 1:
        _splitting[sharding.ranks] = None
        if not users_line()[1]:
            _check_lengths(sharding, call["q"], call)
    return None


def attention(call: Arguments) -> After:
    """Check the order of dimensions, and the length."""
    if (sharding := _split(call["self"])) is not None:
        _check_lengths(sharding, call["q"], call["options"])
    return None


def _check_lengths(sharding: Sharding, q: Any, options: Arguments) -> None:
    """Check the order of dimensions of queries, and the length, by shards that live."""
    if not isinstance(q, Tensor) or q.ndim != 4:
        return
    records = live_records(sharding)
    lengths = {x.local_len: x for x in records}
    if q.shape[2] in lengths and q.shape[1] not in lengths:
        record = lengths[q.shape[2]]
        _wrong(
            f"q is {tuple(q.shape)}, and {record.local_len} are the tokens of this rank: give [B, T_local, H, D], "
            f"x.transpose(1, 2). They were sharded at {record.line}"
        )
    own = [x for x in records if x.local_len == q.shape[1]]
    seq_len = options.get("seq_len")
    seq_len = seq_len[0] if isinstance(seq_len, tuple) else seq_len
    if not own or (seq_len is None and not all(x.is_padded for x in own)):
        return
    if seq_len is not None and all(x.seq_len != seq_len for x in own):
        _wrong(
            f"seq_len={seq_len}, and the sequence has {own[0].seq_len} tokens, sharded at {own[0].line}"
        )
    shown = ("causal", "mask", "segment_ids", "bias", "cu_seqlens")
    if seq_len is None and not any(
        options.get(x) is not None and options.get(x) is not False for x in shown
    ):
        _wrong(
            f"the sequence has {own[0].seq_len} tokens, padded to {own[0].local_len * own[0].ranks} at {own[0].line}, "
            f"and without seq_len={own[0].seq_len} every token sees the padding"
        )


def loss(call: Arguments) -> After:
    """Check that labels are in the layout of the ranks."""
    labels, cp = call["labels"], call["cp"]
    if (sharding := _split(cp)) is None or not isinstance(labels, Tensor):
        return None
    record = record_of(labels)
    if (
        record is not None
        and record.ranks == sharding.ranks.size
        and record.layout != sharding.layout
    ):
        _wrong(
            f"labels are in the layout {record.layout!r}, sharded at {record.line}, and the loss is of "
            f"{sharding.layout!r}"
        )
    start = start_in_whole(labels, sharding)
    if start is None or not labels.shape[-1]:
        return None
    at = sharding.positions(labels.shape[-1] * sharding.ranks.size).tolist()
    # Labels of the next token begin one later.
    if at != [*range(at[0], at[0] + len(at))] or start - at[0] not in (0, 1):
        _wrong(
            f"labels are tokens {start} to {start + len(at) - 1} of a sequence in natural order, and this rank holds "
            f"{at[0]}, {at[1] if len(at) > 1 else ''} ... {at[-1]} in the layout {sharding.layout!r}: shift the whole "
            f"labels, then cp.shard(labels)"
        )
    return None


def torchs_loss(call: Arguments) -> After:
    """Refuse a mean over the labels of this rank."""
    record = record_of(call["target"])
    _, is_ours = users_line()
    if record is not None and record.ranks > 1 and call["reduction"] == "mean" and not is_ours:
        _wrong(
            f"torch's cross_entropy divides by the labels of this rank, of labels that were sharded at {record.line}: "
            f"take ring_torch.cross_entropy(cp, logits, labels), or reduction='sum' and a divisor of all ranks"
        )
    return None


def clip(call: Arguments) -> After:
    """Check that gradients are whole before they are clipped."""
    parameters = call["parameters"]
    listed = [parameters] if isinstance(parameters, Tensor) else [*parameters]
    _check_reduced(listed, "clip_grad_norm_ of gradients")
    call["parameters"] = listed  # it may have been a generator
    return None


def step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Check that gradients are whole before an optimizer takes them, and weights are equal."""
    parameters = (x for group in optimizer.param_groups for x in group["params"])
    _check_reduced(parameters, "a step of the optimizer with gradients", has_weights=True)


def _check_reduced(parameters: Iterable[Tensor], what: str, *, has_weights: bool = False) -> None:
    """Check that gradients of equal weights are equal on ranks that have split a sequence.

    With ``has_weights`` weights whose gradients are equal have to be equal, too.
    """
    own = [x for x in parameters if x.grad is not None and not isinstance(x, DTensor)]
    for ranks in [*_splitting]:
        try:
            cp = ContextParallel(ranks.group)
        except (RuntimeError, ValueError):  # the group was destroyed
            del _splitting[ranks]
            continue
        if _split(cp) is None or not own or not BLOCKS[-1].is_due(ranks, what):
            continue
        if (error := _unlike(cp, [x.grad for x in own], "gradients")) is None:
            # Weights that nobody has used, as of experts, have equal gradients of zeros.
            used = [x for x in own if has_weights and not_none(x.grad).any()]
            if error := _unlike(cp, [x.detach() for x in used], "weights"):
                _wrong(f"{what} that are equal for weights that differ: {error}")
        elif not _unlike(cp, [x.detach() for x in own], "weights"):  # else each rank has its own
            _wrong(
                f"{what} that differ between the ranks of a sequence: call cp.reduce_gradients(model) after backward, "
                f"before them. {error}"
            )


def _unlike(cp: ContextParallel, tensors: list[Any], what: str) -> RankMismatchError | None:
    """Return how tensors differ between ranks; ``None`` if they are equal."""
    try:
        check_equal(cp, tensors, what=what)
    except RankMismatchError as error:
        return error
    return None

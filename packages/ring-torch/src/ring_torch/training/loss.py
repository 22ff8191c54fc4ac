"""Cross entropy of this rank's tokens, as its part of the mean over the tokens of all ranks.

The sum over a rank's tokens is divided by the number of labels of all ranks, not of its own: means
of ranks do not add up to the mean, as ranks hold unlike numbers of labels. So the ranks' parts add
up to the mean, and gradients that are summed over ranks are those of the mean.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ring_core import UnsupportedError, checks
from ring_core.base.arguments import check_rate, check_size, numbers_as_python
from ring_torch.context import ContextParallel, check_context
from ring_torch.training.common import (
    check_classes,
    check_ignored,
    check_rows,
    head_of,
    refuse_transforms,
    sum_of_ranks,
    without_padding,
)
from ring_torch.training.part import IGNORED, Count, linear_loss, loss_part, mean_of

Reduction = Literal["mean", "sum"]


@numbers_as_python
def cross_entropy(
    cp: ContextParallel, logits: Tensor, labels: Tensor, *, weight: Tensor | None = None,
    ignore_index: int = IGNORED, reduction: Reduction = "mean", label_smoothing: float = 0.0,
    count: Count = None, seq_len: int | None = None,
) -> Tensor:  # fmt: skip
    """Return this rank's part of the cross entropy of a sequence; the ranks' sum is the whole.

    Options mean what they mean to :func:`torch.nn.functional.cross_entropy`. If all labels of all
    ranks are ignored, the mean is NaN, as torch's is. All ranks must call it, unless ``count`` is
    given or ``reduction="sum"``: then nothing is sent.

    Args:
        cp: The ranks that share the sequence, and its layout.
        logits: ``[..., T_local, V]``, of this rank's tokens.
        labels: Integers ``[..., T_local]``. Shift them before they are sharded, for the next token
            may be on another rank.
        weight: Weight of each class, ``[V]``.
        ignore_index: Label of tokens that do not count.
        reduction: ``"mean"`` or ``"sum"``.
        label_smoothing: Part of a label's probability that all classes share, in ``[0, 1]``.
        count: Divisor of the mean; ``None`` for the number of labels of all ranks, or the sum of
            their weights. Give it where several calls or rings share a step: that of all of them.
        seq_len: ``T``, if there is padding behind it (:meth:`ring_torch.ContextParallel.shard` with
            ``pad=True``), which is ignored whatever its labels.

    Returns:
        A scalar in float32, or float64 if the logits are.

    Raises:
        ValueError: An argument is malformed.
        UnsupportedError: ``reduction="none"``, labels are probabilities, a ``DTensor`` is given, or
            a transform of ``torch.func`` is under way and ``count`` is not given.
        RankMismatchError: The ranks make different calls.

    Example::

        loss = ring_torch.cross_entropy(cp, model(tokens), labels)
        loss.backward()
        cp.reduce_gradients(model)
    """
    classes = check_rows("logits", logits, labels)
    _check_options(cp, weight, classes, ignore_index, reduction, label_smoothing, count)
    labels = without_padding(check_context(cp), "labels", labels, ignore_index, seq_len)
    wide = torch.promote_types(logits.dtype, torch.float32)
    weight = None if weight is None else weight.detach().to(wide)
    divisor = _divisor(cp, labels, weight, ignore_index, reduction, count)
    return loss_part(
        logits, labels, divisor, weight=weight, ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )  # fmt: skip


@numbers_as_python
def linear_cross_entropy(
    cp: ContextParallel, hidden: Tensor, head_weight: Tensor, labels: Tensor, *,
    bias: Tensor | None = None, weight: Tensor | None = None, ignore_index: int = IGNORED,
    reduction: Reduction = "mean", label_smoothing: float = 0.0, count: Count = None,
    seq_len: int | None = None, tokens_at_once: int = 1024,
) -> Tensor:  # fmt: skip
    """Return :func:`cross_entropy` of ``linear(hidden, head_weight, bias)``, never whole in memory.

    Logits of ``tokens_at_once`` tokens exist at a time. Where a gradient is needed, it is computed
    with the loss, of the head added up in float32 or wider; the backward multiplies it by the
    loss's. Inside of ``torch.utils.checkpoint`` that is done twice: keep the loss outside.

    Args:
        cp: The ranks that share the sequence, and its layout.
        hidden: ``[..., T_local, dim]``, what the head is applied to.
        head_weight: Weight of the head, ``[V, dim]``, as of :class:`torch.nn.Linear`.
        labels: Integers ``[..., T_local]``, shifted before they were sharded.
        bias: Bias of the head, ``[V]``.
        weight: As of :func:`cross_entropy`, as all that follow.
        ignore_index: Label of tokens that do not count.
        reduction: ``"mean"`` or ``"sum"``.
        label_smoothing: Part of a label's probability that all classes share.
        count: Divisor of the mean, if not the number of labels of all ranks.
        seq_len: ``T``, if there is padding behind it.
        tokens_at_once: Number of tokens whose logits exist at a time.

    Returns:
        A scalar in float32, or float64 if the logits are.

    Raises:
        ValueError: An argument is malformed.
        UnsupportedError: As of :func:`cross_entropy`; a second derivative is asked for, or any by
            ``torch.func``.
        RankMismatchError: The ranks make different calls.

    Example::

        hidden = model.body(tokens)  # [B, T_local, dim]
        loss = ring_torch.linear_cross_entropy(cp, hidden, model.head.weight, labels)
    """
    head = head_of(
        "linear_cross_entropy", check_context(cp), hidden, head_weight, bias, labels, ignore_index,
        seq_len,
    )  # fmt: skip
    _check_options(
        cp, weight, head_weight.shape[0], ignore_index, reduction, label_smoothing, count
    )
    tokens_at_once = check_size("tokens_at_once", tokens_at_once)
    wide = torch.promote_types(head.hidden.dtype, torch.float32)
    weight = None if weight is None else weight.detach().to(wide)
    divisor = _divisor(cp, head.labels, weight, ignore_index, reduction, count)
    total = linear_loss(
        *head, weight=weight, label_smoothing=float(label_smoothing), ignore_index=ignore_index,
        tokens_at_once=tokens_at_once,
    )  # fmt: skip
    return mean_of(total, divisor)


def _divisor(
    cp: ContextParallel, labels: Tensor, weight: Tensor | None, ignore_index: int,
    reduction: str, count: Count,
) -> Count:  # fmt: skip
    """Return the divisor of a mean, ``None`` of a sum; asks the other ranks if it is not given."""
    if reduction == "sum" or count is not None:
        return count
    refuse_transforms(
        "the labels of all ranks cannot be counted", "count them before, and pass count="
    )
    is_kept = labels != ignore_index
    # A mean with class weights is divided by the weights of the labels, as torch does.
    own = is_kept.sum() if weight is None else weight[labels.where(is_kept, 0)][is_kept].sum()
    return sum_of_ranks(check_context(cp), own.reshape(1), None)[0]


def _check_options(
    cp: object, weight: object, classes: int, ignore_index: object, reduction: object,
    label_smoothing: Any, count: object,
) -> None:  # fmt: skip
    """Check the options that both losses have in common."""
    check_context(cp)
    if reduction == "none":
        raise UnsupportedError(
            "reduction='none' gives a loss for each token, of which no rank has a part: "
            "torch.nn.functional.cross_entropy of this rank's logits and labels is the same, and "
            "sends nothing. For a mean or a sum over ranks pass reduction='mean' or 'sum'"
        )
    checks.check_choice("reduction", reduction, ("mean", "sum"))
    if weight is not None:
        check_classes("weight", weight, classes)
    check_ignored(ignore_index)
    check_rate("label_smoothing", label_smoothing, zero=True)
    if label_smoothing > 1:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing!r}")
    if count is None:
        return
    if reduction == "sum":
        raise ValueError("count divides a mean; leave it out with reduction='sum'")
    if isinstance(count, Tensor):
        if count.ndim or count.dtype == torch.bool or count.dtype.is_complex or count.is_meta:
            raise ValueError("count must be a real number, or a tensor of one without dimensions")
    else:
        check_rate("count", count, zero=True)

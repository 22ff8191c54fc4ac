"""Cross entropy of this rank's tokens, as its part of the mean over the tokens of all ranks.

The sum over a rank's tokens is divided by the number of labels of all ranks, not of its own: means
of ranks do not add up to the mean, as ranks hold unlike numbers of labels. So the ranks' parts add
up to the mean, and gradients that are summed over ranks are those of the mean.
"""

from __future__ import annotations

from operator import index
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack  # torch has no public name for it
from torch.distributed.tensor import DTensor

from ring_core import UnsupportedError, checks
from ring_core.base.arguments import check_rate, check_size, is_integer, numbers_as_python
from ring_torch.capture import constant_in_graphs
from ring_torch.comm.ranks import ranks_of
from ring_torch.compiled.static import from_json, size_of, to_json
from ring_torch.compiled.unshard import unshard_in_graph
from ring_torch.context import ContextParallel, check_context
from ring_torch.sharding import Sharding, length_of
from ring_torch.tensor_specs import check_local
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
        seq_len: ``T``, if there is padding behind it (:meth:`ContextParallel.shard` with
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
    classes = _check_rows("logits", logits, labels)
    _check_options(cp, weight, classes, ignore_index, reduction, label_smoothing, count)
    labels = _without_padding(cp, labels, ignore_index, seq_len)
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

    Logits of ``tokens_at_once`` tokens exist at a time. The backward computes them once more, and
    adds up gradients of the head in float32 or wider.

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
    _refuse_transforms(
        "linear_cross_entropy cannot run", "compute the logits, and cross_entropy with count="
    )
    _check_rows("hidden", hidden, labels)
    classes = _check_head(hidden, head_weight, bias)
    _check_options(cp, weight, classes, ignore_index, reduction, label_smoothing, count)
    tokens_at_once = check_size("tokens_at_once", tokens_at_once)
    labels = _without_padding(cp, labels, ignore_index, seq_len)
    # The operation below is one kernel to autocast, so it would not cast inside.
    hidden, head_weight = _as_in_autocast(hidden), _as_in_autocast(head_weight)
    bias = None if bias is None else _as_in_autocast(bias)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    weight = None if weight is None else weight.detach().to(wide)
    divisor = _divisor(cp, labels, weight, ignore_index, reduction, count)
    total: Tensor = linear_loss(
        hidden.flatten(0, -2), head_weight, bias, labels.flatten(), weight, ignore_index,
        float(label_smoothing), tokens_at_once,
    )  # fmt: skip
    return mean_of(total, divisor)


def _divisor(
    cp: ContextParallel, labels: Tensor, weight: Tensor | None, ignore_index: int,
    reduction: str, count: Count,
) -> Count:  # fmt: skip
    """Return the divisor of a mean, ``None`` of a sum; asks the other ranks if it is not given."""
    if reduction == "sum" or count is not None:
        return count
    _refuse_transforms(
        "the labels of all ranks cannot be counted", "count them before, and pass count="
    )
    is_kept = labels != ignore_index
    # A mean with class weights is divided by the weights of the labels, as torch does.
    own = is_kept.sum() if weight is None else weight[labels.where(is_kept, 0)][is_kept].sum()
    # Every rank gathers all counts and adds them up in the same order: all get the same divisor.
    counts = own.reshape(1)
    check_context(cp).check_group()
    if torch.compiler.is_compiling():
        return unshard_in_graph(cp.group, "contiguous", counts, 0, None, None).sum()
    return Sharding(cp.group, "contiguous").unshard(counts, dim=0).sum()


def _refuse_transforms(what: str, instead: str) -> None:
    """Refuse a call inside a transform of ``torch.func``.

    Raises:
        UnsupportedError: One is under way.
    """
    if torch.compiler.is_compiling():
        return
    if peek_interpreter_stack() is not None:
        raise UnsupportedError(
            f"{what} inside vmap, grad and the other transforms of torch.func. Instead: {instead}; "
            f"or use torch.autograd (backward())"
        )


def _without_padding(
    cp: ContextParallel, labels: Tensor, ignore_index: int, seq_len: int | None
) -> Tensor:
    """Return labels in which those of padding, behind a rank's tokens, are ignored.

    They are int64, as another dtype may not hold ``ignore_index``: in uint8 -100 is class 156.
    """
    seq_len, labels = length_of(labels, -1, seq_len, size_of(cp.group)), labels.long()
    if seq_len is None:
        return labels
    if torch.compiler.is_compiling():
        seq_len = index(seq_len)
    # Padding lies behind a rank's tokens: everything from there on is ignored.
    tokens = _own_tokens(cp.group, to_json(cp.layout), seq_len, index(labels.shape[-1]))
    is_padding = torch.arange(labels.shape[-1], device=labels.device) >= tokens
    return labels.masked_fill(is_padding, ignore_index)


@constant_in_graphs
def _own_tokens(group: Any, layout: Any, seq_len: Any, local_len: int) -> int:
    """Return how many of this rank's rows are tokens, not padding; a constant to the compiler."""
    ranks = ranks_of(group)
    padded = checks.padded_layout(seq_len, local_len, from_json(layout), ranks.size, "labels")
    return int((padded.positions(ranks.rank) < seq_len).sum())


def _as_in_autocast(x: Tensor) -> Tensor:
    """Return an input of the head in the dtype that autocast gives inputs of ``linear``."""
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def _checked_tensor(name: str, x: object) -> Tensor:
    """Return an argument that is a dense tensor of this rank's own, and refuse any other."""
    if isinstance(x, DTensor):
        raise UnsupportedError(
            f"{name} is a DTensor, whose parts other ranks hold. Of FSDP: call this inside the "
            f"forward of the module that has the weight, where FSDP has joined it. Of tensor "
            f"parallelism: pass {name}.full_tensor(), or use loss_parallel() of torch"
        )
    return check_local(name, x, has_numbers=True)


def _check_rows(name: str, rows: object, row_labels: object) -> int:
    """Check rows and their labels; return the size of a row."""
    x, labels = _checked_tensor(name, rows), _checked_tensor("labels", row_labels)
    if not x.dtype.is_floating_point or x.dtype.itemsize < 2:
        raise ValueError(f"{name} must be real, of 16 bits or more, got {x.dtype}")
    if labels.dtype.is_floating_point:
        raise UnsupportedError(
            "labels must be integers, the class of each token; probabilities of classes are not "
            "supported: compute that loss from the logits, and divide its sum by the number of "
            "tokens of all ranks"
        )
    if labels.dtype == torch.bool or labels.dtype.is_complex:
        raise ValueError(f"labels must be integers, got {labels.dtype}")
    if x.ndim < 2 or x.shape[:-1] != labels.shape:
        raise ValueError(
            f"{name} must be [..., T_local, n] and labels [..., T_local], got {tuple(x.shape)} and "
            f"labels {tuple(labels.shape)}: a label for each row"
        )
    if x.device != labels.device:
        raise ValueError(f"{name} is on {x.device} and labels on {labels.device}: move one")
    return x.shape[-1]


def _check_head(hidden: Tensor, weight: object, bias: object) -> int:
    """Check the weights of a head; return its number of classes."""
    head_weight = _checked_tensor("head_weight", weight)
    if head_weight.ndim != 2 or head_weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"head_weight must be [V, dim], as of torch.nn.Linear, with dim={hidden.shape[-1]} of "
            f"hidden, got {tuple(head_weight.shape)}"
        )
    classes = head_weight.shape[0]
    if bias is not None:
        _check_classes("bias", bias, classes)
    autocast = torch.is_autocast_enabled(hidden.device.type)
    for name, x in (("head_weight", head_weight), ("bias", bias)):
        if isinstance(x, Tensor) and not (
            x.device == hidden.device and (autocast or x.dtype == hidden.dtype)
        ):
            raise ValueError(
                f"{name} is {x.dtype} on {x.device}, and hidden {hidden.dtype} on {hidden.device}: "
                f"they must be alike"
            )
    return classes


def _check_classes(name: str, numbers: object, classes: int) -> None:
    """Check a tensor with a real number for each class."""
    x = _checked_tensor(name, numbers)
    if not x.dtype.is_floating_point or x.shape != (classes,):
        raise ValueError(
            f"{name} must be real, [{classes}]: a number for each class, got {x.dtype} "
            f"{tuple(x.shape)}"
        )


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
        _check_classes("weight", weight, classes)
    if not is_integer(ignore_index):
        raise ValueError(f"ignore_index must be an integer, got {ignore_index!r}")
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

"""Cross entropy of a rank's tokens, given the number of labels of all ranks; nothing is sent."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from ring_core import UnsupportedError

IGNORED = -100  # torch's default label of a token that has nothing to predict
Count = Tensor | float | None


def loss_part(
    logits: Tensor, labels: Tensor, divisor: Count, *, weight: Tensor | None = None,
    ignore_index: int = IGNORED, label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return the sum of cross entropy over tokens, divided by the labels of all ranks.

    Args:
        logits: ``[..., V]``; widened to float32 if they are narrower.
        labels: Integers, a label for each row of the logits.
        divisor: Number of labels of all ranks, or sum of their weights; ``None`` for the sum alone.
        weight: Weight of each class, ``[V]``.
        ignore_index: Label of rows that do not count.
        label_smoothing: Part of a label's probability that all classes share.
    """
    total = functional.cross_entropy(
        logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32)),
        # The sum, not the mean: only the ranks together know the divisor.
        labels.flatten().long(), weight, ignore_index=ignore_index, reduction="sum",
        label_smoothing=label_smoothing,
    )  # fmt: skip
    return mean_of(total, divisor)


def mean_of(total: Tensor, divisor: Count) -> Tensor:
    """Return a sum over a divisor, of any real dtype, in the dtype of the sum."""
    return total if divisor is None else (total / divisor).to(total.dtype)


@torch.library.custom_op("ring_torch::linear_loss", mutates_args=())
def linear_loss(
    hidden: Tensor, head_weight: Tensor, bias: Tensor | None, labels: Tensor,
    weight: Tensor | None, ignore_index: int, label_smoothing: float, tokens_at_once: int,
) -> Tensor:  # fmt: skip
    """Return the sum of cross entropy over tokens, whose logits exist for a few tokens at a time.

    Args:
        hidden: ``[N, dim]``.
        head_weight: ``[V, dim]``.
        bias: ``[V]``.
        labels: int64 ``[N]``.
        weight: Weight of each class, ``[V]``.
        ignore_index: Label of tokens that do not count.
        label_smoothing: Part of a label's probability that all classes share.
        tokens_at_once: Number of tokens whose logits exist at a time.
    """
    total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    # Logits of a piece are freed before those of the next are made: [tokens_at_once, V] at a time.
    for h, y in zip(hidden.split(tokens_at_once), labels.split(tokens_at_once), strict=True):
        logits = functional.linear(h, head_weight, bias)
        total += loss_part(
            logits, y, None, weight=weight, ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        )  # fmt: skip
    return total


@linear_loss.register_fake
def _linear_loss_like(hidden: Tensor, *_: Any) -> Tensor:
    """Return a tensor like the loss, while a graph is traced."""
    return hidden.new_empty((), dtype=torch.promote_types(hidden.dtype, torch.float32))


@torch.library.custom_op("ring_torch::linear_loss_backward", mutates_args=())
def linear_loss_backward(
    grad: Tensor, hidden: Tensor, head_weight: Tensor, bias: Tensor | None, labels: Tensor,
    weight: Tensor | None, ignore_index: int, label_smoothing: float, tokens_at_once: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of ``hidden``, ``head_weight`` and a bias."""
    classes, wide = head_weight.shape[0], grad.dtype
    grad_hidden = torch.empty_like(hidden)
    # Every piece adds to the head: in 16 bits the sum would lose digits with the number of pieces.
    grad_head = torch.zeros_like(head_weight, dtype=wide)
    grad_bias = grad_head.new_zeros(classes)
    # Weights of 1 make both cases one formula.
    class_weight = grad_bias + 1 if weight is None else weight
    pieces = (x.split(tokens_at_once) for x in (hidden, labels, grad_hidden))
    for h, y, grad_h in zip(*pieces, strict=True):
        # The logits of a piece are computed again, and become their own gradients in place.
        logits = functional.linear(h, head_weight, bias).to(wide)
        is_kept = y != ignore_index
        target = y.where(is_kept, 0)
        # A token's loss is -sum(share * log(p)) over classes: `own` of its label, `rest` of each.
        # Where all labels of all ranks are ignored, `grad` is infinite.
        own = (class_weight[target] * (1 - label_smoothing) * grad).where(is_kept, 0)
        rest = (label_smoothing / classes * grad).where(is_kept, 0)
        d_logits = logits.softmax(-1).mul_((own + rest * class_weight.sum())[:, None])
        d_logits.scatter_add_(1, target[:, None], -own[:, None])
        if label_smoothing:
            d_logits.addr_(rest, class_weight, alpha=-1)
        grad_bias += d_logits.sum(0)
        d_logits = d_logits.to(hidden.dtype)
        # Rows of `grad_hidden`, each of one piece, written in place.
        grad_h.copy_(d_logits @ head_weight)
        grad_head += d_logits.T @ h
    return grad_hidden, grad_head.to(head_weight.dtype), grad_bias.to(head_weight.dtype)


@linear_loss_backward.register_fake
def _linear_loss_backward_like(
    _grad: Tensor, hidden: Tensor, head_weight: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors like the gradients, while a graph is traced."""
    bias = head_weight.new_empty(head_weight.shape[0])
    return torch.empty_like(hidden), torch.empty_like(head_weight), bias


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save what the backward needs: no logits."""
    del output
    *tensors, ctx.ignore_index, ctx.label_smoothing, ctx.tokens_at_once = inputs
    ctx.save_for_backward(*tensors)


def _backward_of_linear_loss(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Run the backward operation."""
    tensors = ctx.saved_tensors  # unpacked once, as checkpointing asks for
    grads = linear_loss_backward(
        grad, *tensors, ctx.ignore_index, ctx.label_smoothing, ctx.tokens_at_once
    )
    return (*grads[:2], None if tensors[2] is None else grads[2], *(None,) * 5)


def _refuse_second_derivative(*_: Any) -> NoReturn:
    """Refuse a backward of the backward, which no operation computes.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(
        "linear_cross_entropy has no second derivative. Instead: compute the logits, and their "
        "ring_torch.cross_entropy, which has"
    )


linear_loss.register_autograd(_backward_of_linear_loss, setup_context=_keep_inputs)
linear_loss_backward.register_autograd(_refuse_second_derivative)

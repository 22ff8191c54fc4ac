"""Cross entropy and log-probabilities of a rank's tokens, for which nothing is sent."""

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


def as_in_autocast(x: Tensor) -> Tensor:
    """Return an input of the head in the dtype that autocast gives inputs of ``linear``."""
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


@torch.library.custom_op("ring_torch::linear_log_probs", mutates_args=())
def linear_log_probs(
    hidden: Tensor, head_weight: Tensor, bias: Tensor | None, labels: Tensor,
    shares: Tensor | None, temperature: float, softcap: float | None, ignore_index: int,
    entropy: bool, tokens_at_once: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the log-probability of each token's label, and a sum over all classes for each token.

    Logits exist for a few tokens at a time. Results are in float32 or wider, 0 where the label is
    ignored.

    Args:
        hidden: ``[N, dim]``.
        head_weight: ``[V, dim]``.
        bias: ``[V]``.
        labels: int64 ``[N]``.
        shares: ``[V]``; with it the second result is ``sum(shares * log(p))``, ``[N]``.
        temperature: Divisor of the logits.
        softcap: Bound of the logits, before they are divided.
        ignore_index: Label of tokens that do not count.
        entropy: True for the entropy as the second result, ``[N]``; without ``shares``. The second
            result is ``[0]`` if neither is asked for.
        tokens_at_once: Number of tokens whose logits exist at a time.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    log_probs = hidden.new_empty(len(hidden), dtype=wide)
    of_all = log_probs.new_empty(len(hidden) if entropy or shares is not None else 0)
    pieces = (x.split(tokens_at_once) for x in (hidden, labels, log_probs))
    # Logits of a piece are freed before those of the next are made: [tokens_at_once, V] at a time.
    for i, (h, y, own) in enumerate(zip(*pieces, strict=True)):
        log_p = _scaled_logits(h, head_weight, bias, temperature, softcap)[0].log_softmax(-1, wide)
        is_kept = y != ignore_index
        target = y.where(is_kept, 0)
        # Rows of the results, each of one piece, are written in place.
        own.copy_(log_p.gather(1, target[:, None])[:, 0].where(is_kept, 0))
        if len(of_all):
            each = torch.special.entr(log_p.exp_()) if shares is None else log_p.mul_(shares)
            of_all[i * tokens_at_once :][: len(y)] = each.sum(-1).where(is_kept, 0)
    return log_probs, of_all


@linear_log_probs.register_fake
def _linear_log_probs_like(
    hidden: Tensor, head_weight: Tensor, bias: Tensor | None, labels: Tensor,
    shares: Tensor | None, temperature: float, softcap: float | None, ignore_index: int,
    entropy: bool, tokens_at_once: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return tensors like the results, while a graph is traced."""
    del head_weight, bias, labels, temperature, softcap, ignore_index, tokens_at_once
    log_probs = hidden.new_empty(
        hidden.shape[0], dtype=torch.promote_types(hidden.dtype, torch.float32)
    )
    has_second = entropy or shares is not None
    return log_probs, log_probs.new_empty(hidden.shape[0] if has_second else 0)


def _scaled_logits(
    hidden: Tensor, head_weight: Tensor, bias: Tensor | None, temperature: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return logits, capped and divided, and the derivative of the cap; ``None`` without one."""
    logits, slope = functional.linear(hidden, head_weight, bias), None
    if softcap is not None or temperature != 1:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        tanh = logits.div_(softcap).tanh_()
        slope = 1 - tanh.square()
        logits = tanh.mul_(softcap)
    return logits if temperature == 1 else logits.div_(temperature), slope


@torch.library.custom_op("ring_torch::linear_log_probs_backward", mutates_args=())
def linear_log_probs_backward(
    grad: Tensor, grad_of_all: Tensor, hidden: Tensor, head_weight: Tensor, bias: Tensor | None,
    labels: Tensor, shares: Tensor | None, temperature: float, softcap: float | None,
    ignore_index: int, entropy: bool, tokens_at_once: int, trains_head: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of ``hidden``, ``head_weight`` and a bias; of a frozen head ``[0]``."""
    wide = grad.dtype
    grad_hidden = torch.empty_like(hidden)
    # Every piece adds to the head: in 16 bits the sum would lose digits with the number of pieces.
    grad_head = torch.zeros_like(head_weight[: None if trains_head else 0], dtype=wide)
    grad_bias = grad_head.new_zeros(len(grad_head))
    # Where all labels of all ranks are ignored, a mean's gradient is infinite.
    grad = grad.where(labels != ignore_index, 0).div(temperature)
    if len(grad_of_all):
        grad_of_all = grad_of_all.where(labels != ignore_index, 0).div(temperature)
    tensors = (hidden, labels, grad, grad_hidden)
    for i, (h, y, own, grad_h) in enumerate(
        zip(*(x.split(tokens_at_once) for x in tensors), strict=True)
    ):
        # The logits of a piece are computed again, and become their own gradients in place.
        logits, slope = _scaled_logits(h, head_weight, bias, temperature, softcap)
        p, target = logits.softmax(-1, wide), y.where(y != ignore_index, 0)[:, None]
        of_all = grad_of_all[i * tokens_at_once :][: len(y), None]
        if shares is not None:
            d_logits = p.mul_(-own[:, None] - of_all * shares.sum()).addr_(of_all[:, 0], shares)
        elif entropy:
            # An entropy's gradient is -p * (log(p) + entropy).
            each = torch.special.entr(p)
            d_logits = p.mul_(-own[:, None] - of_all * each.sum(-1, keepdim=True))
            d_logits.addcmul_(each, of_all)
        else:
            d_logits = p.mul_(-own[:, None])
        d_logits.scatter_add_(1, target, own[:, None])
        if slope is not None:
            d_logits.mul_(slope)
        # Rows of `grad_hidden`, each of one piece, written in place.
        in_dtype = d_logits.to(hidden.dtype)
        grad_h.copy_(in_dtype @ head_weight)
        if trains_head:
            grad_bias += d_logits.sum(0)
            grad_head += in_dtype.T @ h
    return grad_hidden, grad_head.to(head_weight.dtype), grad_bias.to(head_weight.dtype)


@linear_log_probs_backward.register_fake
def _linear_log_probs_backward_like(
    grad: Tensor, grad_of_all: Tensor, hidden: Tensor, head_weight: Tensor, bias: Tensor | None,
    labels: Tensor, shares: Tensor | None, temperature: float, softcap: float | None,
    ignore_index: int, entropy: bool, tokens_at_once: int, trains_head: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return tensors like the gradients, while a graph is traced."""
    del grad, grad_of_all, bias, labels, shares, temperature, softcap, ignore_index, entropy
    del tokens_at_once
    grad_head = torch.empty_like(head_weight[: None if trains_head else 0])
    return torch.empty_like(hidden), grad_head, head_weight.new_empty(grad_head.shape[0])


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what the backward needs: no logits."""
    del output
    ctx.save_for_backward(*inputs[:5])
    ctx.options = inputs[5:]


def _backward_of_log_probs(ctx: Any, grad: Tensor, grad_of_all: Tensor) -> tuple[Any, ...]:
    """Run the backward operation."""
    tensors = ctx.saved_tensors  # unpacked once, as checkpointing asks for
    trains_head = any(ctx.needs_input_grad[1:3])
    grads = linear_log_probs_backward(grad, grad_of_all, *tensors, *ctx.options, trains_head)
    needed = (
        x if is_needed else None for x, is_needed in zip(grads, ctx.needs_input_grad, strict=False)
    )
    return (*needed, *(None,) * 7)


def _refuse_second_derivative(*_: Any) -> NoReturn:
    """Refuse a backward of the backward, which no operation computes.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(
        "linear_cross_entropy and token_log_probs have no second derivative. Instead: compute the "
        "logits, and their ring_torch.cross_entropy or log_softmax, which have"
    )


linear_log_probs.register_autograd(_backward_of_log_probs, setup_context=_keep_inputs)
linear_log_probs_backward.register_autograd(_refuse_second_derivative)

"""Cross entropy and log-probabilities of a rank's tokens, for which nothing is sent.

Both apply a head to a few tokens at a time, a *piece*. A loss is one number, so the gradients of a
piece follow while its logits exist, and the backward multiplies them by the loss's. Gradients of
log-probabilities come for each token, so their backward computes the logits once more.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from ring_core import UnsupportedError
from ring_torch.optional import has_triton

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


class _Gradients:
    """Gradients of ``hidden``, of the head's weight and of its bias, which pieces are added to.

    Args:
        hidden: ``[N, dim]``.
        head_weight: ``[V, dim]``.
        wide: Dtype of sums over pieces: in 16 bits they would lose digits with their number.
        trains_hidden: False for a gradient of ``hidden`` that is ``[0, dim]``.
        trains_head: False for gradients of the head that are ``[0, dim]`` and ``[0]``.
        has_bias: False for a gradient of the bias that is 0.
    """

    def __init__(
        self, hidden: Tensor, head_weight: Tensor, wide: torch.dtype, *, trains_hidden: bool,
        trains_head: bool, has_bias: bool = False,
    ) -> None:  # fmt: skip
        self.hidden = torch.empty_like(hidden[: None if trains_hidden else 0])
        self.head = torch.zeros_like(head_weight[: None if trains_head else 0], dtype=wide)
        self.bias = self.head.new_zeros(len(self.head))
        self._head_weight, self._has_bias = head_weight, has_bias

    def add(self, d_logits: Tensor, slope: Tensor | None, hidden: Tensor, rows: slice) -> None:
        """Add what follows from gradients of a piece's logits, ``[n, V]``, changed in place."""
        if slope is not None:
            d_logits.mul_(slope)
        in_dtype = d_logits.to(hidden.dtype)
        if len(self.hidden):
            self.hidden[rows] = in_dtype @ self._head_weight
        if not len(self.head):
            return
        if self._has_bias:
            self.bias += d_logits.sum(0, dtype=self.bias.dtype)
        if in_dtype.is_cuda and not torch.version.hip and self.head.dtype != in_dtype.dtype:
            # The product is added before it is rounded, while it is written; ROCm cannot.
            dtype = self.head.dtype
            torch.addmm(self.head, in_dtype.T, hidden, out_dtype=dtype, out=self.head)
        else:
            self.head += in_dtype.T @ hidden


def _rows_of_pieces(tokens: int, tokens_at_once: int) -> list[slice]:
    """Return the rows of each piece."""
    return [slice(n, min(n + tokens_at_once, tokens)) for n in range(0, tokens, tokens_at_once)]


def _fused_log_probs(hidden: Tensor) -> Any:
    """Return Triton's kernel for logits of ``hidden``; ``None`` where torch's operations do it."""
    if not hidden.is_cuda or hidden.dtype == torch.float64 or not has_triton():
        return None
    return import_module("ring_torch.training.softmax_kernel").log_probs_


def linear_loss(
    hidden: Tensor, head_weight: Tensor, bias: Tensor | None, labels: Tensor, *,
    weight: Tensor | None = None, label_smoothing: float = 0.0, temperature: float = 1.0,
    softcap: float | None = None, ignore_index: int = IGNORED, tokens_at_once: int,
) -> Tensor:  # fmt: skip
    """Return the sum of cross entropy over tokens, in float32 or wider.

    Args:
        hidden: ``[N, dim]``.
        head_weight: ``[V, dim]``.
        bias: ``[V]``.
        labels: int64 ``[N]``.
        weight: Weight of each class, ``[V]``.
        label_smoothing: Part of a label's probability that all classes share.
        temperature: Divisor of the logits.
        softcap: Bound of the logits, before they are divided.
        ignore_index: Label of tokens that do not count.
        tokens_at_once: Number of tokens whose logits exist at a time.
    """
    records = torch.is_grad_enabled()
    trains_head = head_weight.requires_grad or (bias is not None and bias.requires_grad)
    loss: Tensor = linear_loss_and_gradients(
        hidden, head_weight, bias, labels, weight, label_smoothing, temperature, softcap,
        ignore_index, tokens_at_once, records and hidden.requires_grad, records and trains_head,
    )[0]  # fmt: skip
    return loss


@torch.library.custom_op("ring_torch::linear_loss", mutates_args=())
def linear_loss_and_gradients(
    hidden: Tensor, head_weight: Tensor, bias: Tensor | None, labels: Tensor,
    weight: Tensor | None, label_smoothing: float, temperature: float, softcap: float | None,
    ignore_index: int, tokens_at_once: int, trains_hidden: bool, trains_head: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return :func:`linear_loss`, and the gradients of ``hidden``, ``head_weight`` and a bias."""
    wide, classes = torch.promote_types(hidden.dtype, torch.float32), len(head_weight)
    grads = _Gradients(
        hidden, head_weight, wide, trains_hidden=trains_hidden, trains_head=trains_head,
        has_bias=bias is not None,
    )  # fmt: skip
    fused = None if label_smoothing else _fused_log_probs(hidden)
    weight = hidden.new_ones(classes, dtype=wide) if weight is None else weight
    # A token's loss is -sum(share * log(p)) over classes: `own` of its label, `rest` of each.
    rest = label_smoothing / classes
    losses = hidden.new_empty(len(hidden), dtype=wide)
    # Logits of a piece are freed before those of the next are made: [tokens_at_once, V] at a time.
    for rows in _rows_of_pieces(len(hidden), tokens_at_once):
        h, y = hidden[rows], labels[rows]
        is_kept = y != ignore_index
        target = y.where(is_kept, 0)
        own = (weight[target] * (1 - label_smoothing)).where(is_kept, 0)
        if fused is not None:
            logits = functional.linear(h, head_weight, bias)
            differentiates = trains_hidden or trains_head
            log_p = fused(
                logits, target, own.neg() if differentiates else None, temperature, softcap
            )
            losses[rows] = (own * log_p).where(is_kept, 0).neg()
            if differentiates:
                grads.add(logits, None, h, rows)
            continue
        logits, slope = _scaled_logits(h, head_weight, bias, temperature, softcap)
        log_p = logits.log_softmax(-1, wide)
        del logits
        each = own * log_p.gather(1, target[:, None])[:, 0]
        if label_smoothing:
            each += rest * (log_p * weight).sum(-1)
        losses[rows] = each.where(is_kept, 0).neg()
        if not (trains_hidden or trains_head):
            continue
        others = is_kept.to(wide) * rest
        # The log-probabilities become gradients of the logits in place.
        d_logits = log_p.exp_().mul_((own + others * weight.sum())[:, None])
        d_logits.scatter_add_(1, target[:, None], -own[:, None])
        if label_smoothing:
            d_logits.addr_(others, weight, alpha=-1)
        grads.add(d_logits if temperature == 1 else d_logits.div_(temperature), slope, h, rows)
    return losses.sum(), grads.hidden, grads.head, grads.bias


@linear_loss_and_gradients.register_fake
def _linear_loss_like(
    hidden: Tensor, head_weight: Tensor, bias: Tensor | None, labels: Tensor,
    weight: Tensor | None, label_smoothing: float, temperature: float, softcap: float | None,
    ignore_index: int, tokens_at_once: int, trains_hidden: bool, trains_head: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return tensors like the results, while a graph is traced."""
    del bias, labels, weight, label_smoothing, temperature, softcap, ignore_index, tokens_at_once
    wide = torch.promote_types(hidden.dtype, torch.float32)
    grads = _Gradients(
        hidden, head_weight, wide, trains_hidden=trains_hidden, trains_head=trains_head
    )
    return hidden.new_empty((), dtype=wide), grads.hidden, grads.head, grads.bias


@torch.library.custom_op("ring_torch::linear_loss_backward", mutates_args=())
def linear_loss_backward(
    grad: Tensor, labels: Tensor, grad_hidden: Tensor, grad_head: Tensor, grad_bias: Tensor,
    ignore_index: int, head_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of a loss times that of what follows it, rounded to their dtypes."""
    # Where all labels of all ranks are ignored, a mean's gradient is infinite.
    factor = grad.where((labels != ignore_index).any(), 0).reshape(1)
    dtypes = (grad_hidden.dtype, head_dtype, head_dtype)
    # In the wider of both dtypes, and rounded as it is written.
    hidden, head, bias = (
        torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype))
        for x, dtype in zip((grad_hidden, grad_head, grad_bias), dtypes, strict=True)
    )
    return hidden, head, bias


@linear_loss_backward.register_fake
def _linear_loss_backward_like(
    grad: Tensor, labels: Tensor, grad_hidden: Tensor, grad_head: Tensor, grad_bias: Tensor,
    ignore_index: int, head_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return tensors like the gradients, while a graph is traced."""
    del grad, labels, ignore_index
    head, bias = (torch.empty_like(x, dtype=head_dtype) for x in (grad_head, grad_bias))
    return torch.empty_like(grad_hidden), head, bias


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save the gradients, as outputs: a backward of the backward then comes to this operation."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[3], *output[1:])
    ctx.ignore_index, ctx.head_dtype, ctx.inputs = inputs[8], inputs[1].dtype, len(inputs)


def _backward_of_loss(ctx: Any, grad: Tensor | None, *others: Tensor | None) -> tuple[Any, ...]:
    """Run the backward operation."""
    if any(x is not None for x in others):
        _refuse_second_derivative()
    tensors = ctx.saved_tensors  # unpacked once, as checkpointing asks for
    grads: tuple[Tensor, ...] = ()
    if grad is not None:
        grads = linear_loss_backward(grad, *tensors, ctx.ignore_index, ctx.head_dtype)
    needed = (
        x if is_needed else None for x, is_needed in zip(grads, ctx.needs_input_grad, strict=False)
    )
    return (*needed, *(None,) * (ctx.inputs - len(grads)))


@torch.library.custom_op("ring_torch::linear_log_probs", mutates_args=())
def linear_log_probs(
    hidden: Tensor, head_weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float,
    softcap: float | None, ignore_index: int, entropy: bool, tokens_at_once: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the log-probability of each token's label, and the entropy of its distribution.

    Results are in float32 or wider, 0 where the label is ignored. Arguments are those of
    :func:`linear_loss`; without ``entropy`` the second result is ``[0]``.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    log_probs = hidden.new_empty(len(hidden), dtype=wide)
    entropies = log_probs.new_empty(len(hidden) if entropy else 0)
    fused = None if entropy else _fused_log_probs(hidden)
    for rows in _rows_of_pieces(len(hidden), tokens_at_once):
        h, y = hidden[rows], labels[rows]
        is_kept = y != ignore_index
        target = y.where(is_kept, 0)
        if fused is not None:
            logits = functional.linear(h, head_weight, bias)
            log_probs[rows] = fused(logits, target, None, temperature, softcap).where(is_kept, 0)
            continue
        log_p = _scaled_logits(h, head_weight, bias, temperature, softcap)[0].log_softmax(-1, wide)
        log_probs[rows] = log_p.gather(1, target[:, None])[:, 0].where(is_kept, 0)
        if entropy:
            entropies[rows] = torch.special.entr(log_p.exp_()).sum(-1).where(is_kept, 0)
    return log_probs, entropies


@linear_log_probs.register_fake
def _linear_log_probs_like(
    hidden: Tensor, head_weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float,
    softcap: float | None, ignore_index: int, entropy: bool, tokens_at_once: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return tensors like the results, while a graph is traced."""
    del head_weight, bias, labels, temperature, softcap, ignore_index, tokens_at_once
    log_probs = hidden.new_empty(
        hidden.shape[0], dtype=torch.promote_types(hidden.dtype, torch.float32)
    )
    return log_probs, log_probs.new_empty(hidden.shape[0] if entropy else 0)


@torch.library.custom_op("ring_torch::linear_log_probs_backward", mutates_args=())
def linear_log_probs_backward(
    grad: Tensor, grad_of_entropy: Tensor, hidden: Tensor, head_weight: Tensor,
    bias: Tensor | None, labels: Tensor, temperature: float, softcap: float | None,
    ignore_index: int, entropy: bool, tokens_at_once: int, trains_head: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of ``hidden``, ``head_weight`` and a bias; of a frozen head ``[0]``."""
    grads = _Gradients(
        hidden, head_weight, grad.dtype, trains_hidden=True, trains_head=trains_head,
        has_bias=bias is not None,
    )  # fmt: skip
    fused = None if entropy else _fused_log_probs(hidden)
    is_kept = labels != ignore_index
    grad, grad_of_entropy = (x.where(is_kept, 0) if len(x) else x for x in (grad, grad_of_entropy))
    for rows in _rows_of_pieces(len(hidden), tokens_at_once):
        h, y = hidden[rows], labels[rows]
        if fused is not None:
            logits = functional.linear(h, head_weight, bias)
            fused(logits, y.where(is_kept[rows], 0), grad[rows], temperature, softcap)
            grads.add(logits, None, h, rows)
            continue
        own = grad[rows, None].div(temperature)
        # The logits of a piece are computed again, and become their own gradients in place.
        logits, slope = _scaled_logits(h, head_weight, bias, temperature, softcap)
        p, target = logits.softmax(-1, grad.dtype), y.where(y != ignore_index, 0)[:, None]
        del logits
        if entropy:
            # An entropy's gradient is -p * (log(p) + entropy).
            each, of_entropy = torch.special.entr(p), grad_of_entropy[rows, None].div(temperature)
            d_logits = p.mul_(-own - of_entropy * each.sum(-1, keepdim=True))
            d_logits.addcmul_(each, of_entropy)
        else:
            d_logits = p.mul_(-own)
        grads.add(d_logits.scatter_add_(1, target, own), slope, h, rows)
    return grads.hidden, grads.head.to(head_weight.dtype), grads.bias.to(head_weight.dtype)


@linear_log_probs_backward.register_fake
def _linear_log_probs_backward_like(
    grad: Tensor, grad_of_entropy: Tensor, hidden: Tensor, head_weight: Tensor,
    bias: Tensor | None, labels: Tensor, temperature: float, softcap: float | None,
    ignore_index: int, entropy: bool, tokens_at_once: int, trains_head: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return tensors like the gradients, while a graph is traced."""
    del grad, grad_of_entropy, bias, labels, temperature, softcap, ignore_index, entropy
    del tokens_at_once
    grad_head = torch.empty_like(head_weight[: None if trains_head else 0])
    return torch.empty_like(hidden), grad_head, head_weight.new_empty(grad_head.shape[0])


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what the backward needs: no logits."""
    del output
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _backward_of_log_probs(ctx: Any, grad: Tensor, grad_of_entropy: Tensor) -> tuple[Any, ...]:
    """Run the backward operation."""
    tensors = ctx.saved_tensors  # unpacked once, as checkpointing asks for
    trains_head = any(ctx.needs_input_grad[1:3])
    grads = linear_log_probs_backward(grad, grad_of_entropy, *tensors, *ctx.options, trains_head)
    needed = (
        x if is_needed else None for x, is_needed in zip(grads, ctx.needs_input_grad, strict=False)
    )
    return (*needed, *(None,) * (1 + len(ctx.options)))


def _refuse_second_derivative(*_: Any) -> NoReturn:
    """Refuse a backward of the backward, which no operation computes.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(
        "linear_cross_entropy and token_log_probs have no second derivative. Instead: compute the "
        "logits, and their ring_torch.cross_entropy or log_softmax, which have"
    )


linear_loss_and_gradients.register_autograd(_backward_of_loss, setup_context=_keep_gradients)
linear_loss_backward.register_autograd(_refuse_second_derivative)
linear_log_probs.register_autograd(_backward_of_log_probs, setup_context=_keep_inputs)
linear_log_probs_backward.register_autograd(_refuse_second_derivative)

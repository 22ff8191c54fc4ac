"""Unsharding as an operation in the graphs of ``torch.compile``, which does not trace into it."""

from __future__ import annotations

import json
from operator import index
from typing import Any

import torch
from torch import Tensor

from ring_core import LayoutSpec, divisor_of
from ring_torch.capture import constant_in_graphs
from ring_torch.comm.ranks import ranks_of
from ring_torch.compiled.static import from_json, group_fields, ranks_named, to_json
from ring_torch.derivatives import refuse_batches
from ring_torch.sharding import UnshardGrad, Unsharding, check_grad, check_slice


def unshard_in_graph(
    group: Any,
    layout: LayoutSpec,
    x: Tensor,
    dim: int,
    grad: UnshardGrad | None,
    seq_len: int | None,
) -> Tensor:
    """Add the operation that joins all ranks' slices to the graph that is being traced.

    Raises:
        ValueError: ``x`` has no such dimension, ``grad`` is malformed or missing, or ``seq_len`` is
            no integer.
    """
    check_slice(x, dim)
    if seq_len is not None and (not isinstance(seq_len, int) or isinstance(seq_len, bool)):
        raise ValueError("seq_len must be an integer, the number of tokens of the whole sequence")
    text = _unshard_text(group, to_json(layout), index(dim % x.ndim), grad, check_grad(x, grad))
    whole: Tensor = unshard(x, seq_len, text)
    return whole


@constant_in_graphs
def _unshard_text(
    group: Any, layout: Any, dim: int, grad: UnshardGrad | None, needs_grad: bool
) -> str:
    """Return the constant part of an ``unshard`` as JSON; the compiler takes it for a constant."""
    ranks = ranks_of(group)
    return json.dumps(
        {
            **group_fields(ranks),
            "layout": layout,
            "dim": dim,
            "grad": grad,
            "needs_grad": needs_grad,
        }
    )


def _unsharding(text: str, seq_len: int | None, *, is_forward: bool = False) -> Unsharding:
    """Return the ``unshard`` that a text describes, as a new call of its group."""
    facts: dict[str, Any] = json.loads(text)
    ranks = ranks_named(facts, is_forward=is_forward)
    return Unsharding(
        ranks,
        from_json(facts["layout"]),
        facts["dim"],
        facts["grad"],
        facts["needs_grad"],
        ranks.next_call(),
        seq_len,
    )


@torch.library.custom_op("ring_torch::unshard", mutates_args=())
def unshard(x: Tensor, seq_len: int | None, text: str) -> Tensor:
    """Return the whole tensor, joined from the slices of all ranks."""
    return _unsharding(text, seq_len, is_forward=True).join(x)


@unshard.register_fake
def _unshard_like(x: Tensor, seq_len: int | None, text: str) -> Tensor:
    """Return a tensor of the whole tensor's shape, while a graph is traced."""
    facts = json.loads(text)
    shape = list(x.shape)
    shape[facts["dim"]] = shape[facts["dim"]] * facts["ranks"][1] if seq_len is None else seq_len
    return x.new_empty(shape)


@torch.library.custom_op("ring_torch::unshard_backward", mutates_args=())
def unshard_backward(grad: Tensor, seq_len: int | None, text: str) -> Tensor:
    """Return the gradient of this rank's slice from the gradient of the whole tensor."""
    return _unsharding(text, seq_len).grad_of_slice(grad)


@unshard_backward.register_fake
def _unshard_backward_like(grad: Tensor, _seq_len: int | None, text: str) -> Tensor:
    """Return a tensor of the slice's shape, while a graph is traced."""
    facts = json.loads(text)
    size, shape = facts["ranks"][1], list(grad.shape)
    divisor = divisor_of(from_json(facts["layout"]), size)
    # Padding comes back here: the slices had it, and the whole tensor has not.
    shape[facts["dim"]] = -(-shape[facts["dim"]] // divisor) * (divisor // size)
    return grad.new_empty(shape)


def _keep_text(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the constant part and ``seq_len`` for the backward."""
    del output
    _, ctx.seq_len, ctx.text = inputs


unshard.register_autograd(
    lambda ctx, grad: (unshard_backward(grad, ctx.seq_len, ctx.text), None, None),
    setup_context=_keep_text,
)
refuse_batches("unshard_backward", unshard_backward)

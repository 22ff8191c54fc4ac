"""Shift, halo and relayout as operations in the graphs of ``torch.compile``.

Numbers that may change from call to call (``n``, the sides of a halo, documents) are arguments of
the operation, so that a graph is compiled once for all; all else is one JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ring_core import LayoutSpec
from ring_torch.comm.ranks import Ranks, ranks_of
from ring_torch.compiled.static import (
    as_documents,
    from_json,
    group_fields,
    ranks_named,
    to_json,
)
from ring_torch.derivatives import refuse_batch
from ring_torch.movement.methods import (
    Halo,
    check_halo,
    check_shift,
    check_target,
    halo_ids_of,
    offsets_of,
    rows_of_runs,
    runs_a_rank,
)
from ring_torch.movement.rows import HaloMove, MoveCall, MoveKind, RelayoutMove, ShiftMove
from ring_torch.sharding import check_dim

_KIND_OF: dict[str, type[MoveKind]] = {
    kind.name: kind for kind in (ShiftMove, HaloMove, RelayoutMove)
}


def shift_in_graph(
    group: Any, layout: LayoutSpec, x: Tensor, n: int, *, dim: int, fill: float, cu_seqlens: Any
) -> Tensor:
    """Add a shift to the graph that is being traced.

    Raises:
        ValueError: An argument is malformed, as far as the trace can see.
    """
    check_dim(x, dim)
    check_shift(x, n, fill)
    tensors: list[Tensor] = []
    numbers: list[int] = []
    documents = None if cu_seqlens is None else as_documents(cu_seqlens)
    fields = [
        to_json(layout), to_json(n, tensors, numbers), to_json(fill),
        to_json(documents, tensors, numbers),
    ]  # fmt: skip
    text = _text(group, "shift", fields, dim % x.ndim, x.requires_grad and torch.is_grad_enabled())
    moved: Tensor = move(x, tensors, numbers, text)
    return moved


def halo_in_graph(
    group: Any, layout: LayoutSpec, x: Tensor, left: int, right: int, *, dim: int, cu_seqlens: Any
) -> Halo:
    """Add a halo to the graph that is being traced.

    Raises:
        ValueError: An argument is malformed, as far as the trace can see.
        UnsupportedError: The layout is striped.
    """
    check_dim(x, dim)
    size = size_of(group)
    check_halo(left, right, layout, size)
    tensors: list[Tensor] = []
    numbers: list[int] = []
    documents = None if cu_seqlens is None else as_documents(cu_seqlens)
    fields = [
        to_json(layout), to_json(left, tensors, numbers), to_json(right, tensors, numbers),
        to_json(documents, tensors, numbers),
    ]  # fmt: skip
    dim %= x.ndim
    text = _text(group, "halo", fields, dim, x.requires_grad and torch.is_grad_enabled())
    rows = rows_of_runs(move(x, tensors, numbers, text), dim, runs_a_rank(layout, size))
    return Halo(rows, *halo_ids(x, tensors, numbers, text))


def relayout_in_graph(
    group: Any, layout: LayoutSpec, x: Tensor, to: LayoutSpec, *, group_of_to: Any, dim: int
) -> Tensor:
    """Add a relayout to the graph that is being traced.

    Args:
        group: Process group that holds the rows.
        layout: Their layout.
        x: The rows of this rank.
        to: The layout that they get.
        group_of_to: Process group that ``to`` was given for.
        dim: Dimension of the sequence.

    Raises:
        ValueError: An argument is malformed.
    """
    check_dim(x, dim)
    _check_target(group, to_json(to), group_of_to)
    fields = [to_json(layout), to_json(to)]
    needs_grad = x.requires_grad and torch.is_grad_enabled()
    moved: Tensor = move(x, [], [], _text(group, "relayout", fields, dim % x.ndim, needs_grad))
    return moved


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]  # noqa: SLF001
def size_of(group: Any) -> int:
    """Return the number of ranks of a group; the compiler takes it for a constant."""
    return ranks_of(group).size


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]  # noqa: SLF001
def _check_target(group: Any, to: Any, group_of_to: Any) -> None:
    """Check the target of a relayout while a graph is traced."""
    check_target(ranks_of(group), from_json(to), ranks_of(group_of_to))


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]  # noqa: SLF001
def _text(group: Any, kind: str, fields: list[Any], dim: int, needs_grad: bool) -> str:
    """Return the constant part of a movement as JSON; the compiler takes it for a constant."""
    return json.dumps({
        **group_fields(ranks_of(group)),
        "kind": kind,
        "fields": fields,
        "dim": dim,
        "needs_grad": needs_grad,
    })  # fmt: skip


def _call(text: str, tensors: Sequence[Tensor], numbers: Sequence[int], *, new: bool) -> MoveCall:
    """Return the movement that a text describes, as a ``new`` call of its group or as none."""
    facts: dict[str, Any] = json.loads(text)
    ranks: Ranks = ranks_named(facts["group"], tuple(facts["ranks"]))
    number = ranks.next_call() if new else 0
    fields = [from_json(x, tensors, numbers) for x in facts["fields"]]
    if facts["kind"] != "relayout":
        fields[-1] = offsets_of(fields[-1])
    kind: MoveKind = _KIND_OF[facts["kind"]](*fields)
    return MoveCall(ranks, kind, facts["dim"], facts["needs_grad"], number)


@torch.library.custom_op("ring_torch::move", mutates_args=())
def move(x: Tensor, tensors: Sequence[Tensor], numbers: Sequence[int], text: str) -> Tensor:
    """Return the rows of this rank after a movement."""
    return _call(text, tensors, numbers, new=True).forward(x)


@move.register_fake
def _move_like(x: Tensor, tensors: Sequence[Tensor], numbers: Sequence[int], text: str) -> Tensor:
    """Return a tensor of the result's shape, while a graph is traced."""
    facts, shape = json.loads(text), list(x.shape)
    if facts["kind"] == "halo":
        layout, left, right, _ = (from_json(field, tensors, numbers) for field in facts["fields"])
        shape[facts["dim"]] += runs_a_rank(layout, facts["ranks"][1]) * (left + right)
    return x.new_empty(shape)


@torch.library.custom_op("ring_torch::move_backward", mutates_args=())
def move_backward(
    grad: Tensor, rows: int, tensors: Sequence[Tensor], numbers: Sequence[int], text: str
) -> Tensor:
    """Return the gradient of this rank's ``rows`` from that of its result."""
    return _call(text, tensors, numbers, new=True).backward(grad, rows)


@move_backward.register_fake
def _move_backward_like(
    grad: Tensor, rows: int, tensors: Sequence[Tensor], numbers: Sequence[int], text: str
) -> Tensor:
    """Return a tensor of the operand's shape, while a graph is traced."""
    del tensors, numbers
    shape = list(grad.shape)
    shape[json.loads(text)["dim"]] = rows
    return grad.new_empty(shape)


@torch.library.custom_op("ring_torch::halo_ids", mutates_args=())
def halo_ids(x: Tensor, tensors: Sequence[Tensor], numbers: Sequence[int], text: str) -> Tensor:
    """Return positions and documents of a halo of ``x``, ``[2, B * R, left + L + right]``."""
    call = _call(text, tensors, numbers, new=False)
    assert isinstance(call.kind, HaloMove)
    return halo_ids_of(call.kind, x, call.dim, call.ranks)


@halo_ids.register_fake
def _halo_ids_like(
    x: Tensor, tensors: Sequence[Tensor], numbers: Sequence[int], text: str
) -> Tensor:
    """Return a tensor of the result's shape, while a graph is traced."""
    facts = json.loads(text)
    layout, left, right, _ = (from_json(field, tensors, numbers) for field in facts["fields"])
    dim, runs = facts["dim"], runs_a_rank(layout, facts["ranks"][1])
    shape = (2, runs * (1 if dim == 0 else x.shape[0]), x.shape[dim] // runs + left + right)
    return x.new_empty(shape, dtype=torch.int64)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save what the backward needs: no rows, only how many there were."""
    del output
    x, tensors, ctx.numbers, ctx.text = inputs
    ctx.rows = x.shape[json.loads(ctx.text)["dim"]]
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Run the backward operation."""
    moved = move_backward(grad, ctx.rows, ctx.saved_tensors, ctx.numbers, ctx.text)
    # To torch a list of no numbers is a list of no tensors, and wants as many gradients.
    return moved, [None] * len(ctx.saved_tensors), None if ctx.numbers else [], None


move.register_autograd(_backward, setup_context=_keep)
move_backward.register_vmap(refuse_batch)
# is_grads_batched=True uses an older vmap, which has a dispatch key of its own.
_LIBRARY = torch.library.Library("ring_torch", "FRAGMENT")
_LIBRARY.impl("move_backward", refuse_batch, "Batched")

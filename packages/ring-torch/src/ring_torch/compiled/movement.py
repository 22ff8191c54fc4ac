"""Shift, halo and relayout as operations in the graphs of ``torch.compile``.

Numbers that may change from call to call (``n``, the sides of a halo, documents) are arguments of
the operation, so that a graph is compiled once for all; all else is one JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from ring_core import LayoutSpec, divisor_of
from ring_core.layouts.layout import check_layout
from ring_core.row_checks import check_halo, check_steps, offsets_of
from ring_torch.capture import constant_in_graphs
from ring_torch.checking.settings import check_of
from ring_torch.comm.groups import members_of
from ring_torch.compiled.static import (
    as_documents,
    from_json,
    group_fields,
    ranks_named,
    size_of,
    to_json,
)
from ring_torch.derivatives import refuse_batches
from ring_torch.movement.methods import (
    Halo,
    halo_ids_of,
    ranks_of_relayout,
    rows_of_runs,
    runs_a_rank,
    seq_len_of,
)
from ring_torch.movement.rows import HaloMove, MoveCall, MoveKind, RelayoutMove, ShiftMove
from ring_torch.sharding import Sharding, check_fill, check_slice, length_of

_KIND_OF: dict[str, type[MoveKind]] = {
    kind.name: kind for kind in (ShiftMove, HaloMove, RelayoutMove)
}


def shift_in_graph(
    sharding: Sharding,
    x: Tensor,
    n: int,
    *,
    dim: int,
    fill: float,
    cu_seqlens: Sequence[int] | None,
    seq_len: int | None,
) -> Tensor:
    """Add a shift to the graph that is being traced.

    Raises:
        ValueError: An argument is malformed, as far as the trace can see.
    """
    sharding.check_group()
    check_slice(x, dim)
    check_steps(n)
    fill, seq_len = check_fill(x, fill), length_of(x, dim, seq_len, size_of(sharding.group))
    tensors: list[Tensor] = []
    numbers: list[int] = []
    documents = None if cu_seqlens is None else as_documents(cu_seqlens)
    fields = [
        to_json(sharding.layout), to_json(n, tensors, numbers), to_json(fill),
        to_json(seq_len, tensors, numbers), to_json(documents, tensors, numbers),
    ]  # fmt: skip
    text = _text((sharding.group,), "shift", fields, index(dim % x.ndim), _needs_grad(x))
    tokens = x.shape[dim] * size_of(sharding.group)
    moved: Tensor = move(x, tensors, numbers, text, tokens, 0, None)[0]
    return moved


def halo_in_graph(
    sharding: Sharding,
    x: Tensor,
    left: int,
    right: int,
    *,
    dim: int,
    cu_seqlens: Sequence[int] | None,
    seq_len: int | None,
) -> Halo:
    """Add a halo to the graph that is being traced.

    Raises:
        ValueError: An argument is malformed, as far as the trace can see.
        UnsupportedError: The layout is striped.
    """
    sharding.check_group()
    check_slice(x, dim)
    layout, size = sharding.layout, size_of(sharding.group)
    check_halo(left, right, layout, size)
    seq_len = length_of(x, dim, seq_len, size)
    tensors: list[Tensor] = []
    numbers: list[int] = []
    documents = None if cu_seqlens is None else as_documents(cu_seqlens)
    fields = [
        to_json(layout), to_json(left, tensors, numbers), to_json(right, tensors, numbers),
        to_json(seq_len, tensors, numbers), to_json(documents, tensors, numbers),
    ]  # fmt: skip
    dim %= x.ndim
    text = _text((sharding.group,), "halo", fields, index(dim), _needs_grad(x))
    moved, _ = move(x, tensors, numbers, text, x.shape[dim] * size, 0, None)
    # The movement alone is an operation of its own; the rest is traced as torch's.
    rows = rows_of_runs(moved, dim, runs_a_rank(layout, size))
    return Halo(rows, *halo_ids(x, tensors, numbers, text))


def relayout_in_graph(
    sharding: Sharding, x: Tensor, to: LayoutSpec | Sharding, *, dim: int, seq_len: int | None
) -> Tensor:
    """Add a relayout to the graph that is being traced.

    Raises:
        ValueError: An argument is malformed.
        UnsupportedError: Neither group has all ranks of the other.
    """
    sharding.check_group()
    # A layout alone is not made a sharding: that would look at the group while it is traced.
    layout, groups = to, (sharding.group, sharding.group)
    if isinstance(to, Sharding):
        to.check_group()
        layout, groups = to.layout, (sharding.group, to.group)
    check_slice(x, dim)
    numbers: list[int] = []
    size, ranks = _ranks_of_relayout(*groups, to_json(layout))
    tokens = seq_len_of(x.shape[dim], size, ranks[0], seq_len)
    states_tokens = seq_len is not None or ranks[0] is not None
    fields = [
        to_json(sharding.layout), to_json(layout), *ranks,
        to_json(tokens if states_tokens else None, [], numbers), seq_len is not None,
    ]  # fmt: skip
    text = _text(groups, "relayout", fields, index(dim % x.ndim), _needs_grad(x))
    moved: Tensor = move(x, [], numbers, text, tokens, 0, None)[0]
    return moved


def _needs_grad(x: Tensor) -> bool:
    """Return True if there will be a backward."""
    return x.requires_grad and torch.is_grad_enabled()


@constant_in_graphs
def _ranks_of_relayout(
    source: Any, target: Any, to: Any
) -> tuple[int, tuple[tuple[int, ...] | None, ...]]:
    """Check a relayout, and return how many ranks exchange its rows and who holds which part.

    The second is a pair: the source's ranks by their numbers among these, and the target's, as
    :func:`ring_torch.movement.methods.ranks_of_relayout` returns them.
    """
    members = members_of(target)
    divisor_of(check_layout(from_json(to)), len(members.ranks))
    ranks, *numbers = ranks_of_relayout(members_of(source), members)
    return ranks.size, tuple(numbers)


@constant_in_graphs
def _text(groups: tuple[Any, ...], kind: str, fields: list[Any], dim: int, needs_grad: bool) -> str:
    """Return the constant part of a movement as JSON; the compiler takes it for a constant.

    Args:
        groups: The process group, or the two of a relayout.
        kind: Name of the movement.
        fields: Its arguments, ready for JSON.
        dim: Dimension of the sequence, not negative.
        needs_grad: True if there will be a backward.
    """
    ranks, *_ = ranks_of_relayout(members_of(groups[0]), members_of(groups[-1]))
    return json.dumps(
        {
            **group_fields(ranks),
            "kind": kind,
            "fields": fields,
            "dim": dim,
            "needs_grad": needs_grad,
        }
    )


def _kind(text: str, tensors: Sequence[Tensor], numbers: Sequence[int]) -> MoveKind:
    """Return the movement that a text describes."""
    facts: dict[str, Any] = json.loads(text)
    fields = [from_json(x, tensors, numbers) for x in facts["fields"]]
    if facts["kind"] != "relayout":
        fields[-1] = offsets_of(fields[-1])
    kind: MoveKind = _KIND_OF[facts["kind"]](*fields)
    return kind


@torch.library.custom_op("ring_torch::move", mutates_args=())
def move(
    x: Tensor,
    tensors: Sequence[Tensor],
    numbers: Sequence[int],
    text: str,
    tokens: int,
    order: int,
    check: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the rows of this rank after a movement, or after its backward.

    The second result is ``check`` of its backward, which may run in another thread, or later.

    Args:
        x: The rows.
        tensors: Tensors that the text names by their indices.
        numbers: Numbers that it names likewise.
        text: The constant part of the movement.
        tokens: Length of the whole sequence; of a shift or a halo with padding.
        order: 0 of the movement, 1 of its backward, 2 of the backward of that, and so on.
        check: Of a backward the interval of checked calls, and whether its movement was checked.
    """
    facts: dict[str, Any] = json.loads(text)
    ranks = ranks_named(facts, is_forward=order == 0)
    # Counted when it runs, not when it is traced: one trace serves many calls.
    number = ranks.next_call()
    kind = _kind(text, tensors, numbers)
    needs_grad = facts["needs_grad"] and order == 0
    check_every, checked = check_of(number) if check is None else check.tolist()
    call = MoveCall(ranks, kind, facts["dim"], needs_grad, number, order, check_every, checked)
    return call.run(x, tokens), torch.tensor(
        (check_every, checked), dtype=torch.int64, device="cpu"
    )


@move.register_fake
def _move_like(
    x: Tensor,
    tensors: Sequence[Tensor],
    numbers: Sequence[int],
    text: str,
    tokens: int,
    order: int,
    _check: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return tensors of the results' shapes, while a graph is traced."""
    facts, shape = json.loads(text), list(x.shape)
    rank, size = facts["ranks"]
    fields = [from_json(field, tensors, numbers) for field in facts["fields"]]
    rows = tokens // size
    if facts["kind"] == "relayout":
        side = 0 if order % 2 else 1
        layout, holders = fields[side], fields[2 + side] or range(size)
        unit = divisor_of(layout, len(holders))
        # With the least padding that the layout needs, which is what the operation allocates.
        rows = -(-tokens // unit) * unit // len(holders) if rank in holders else 0
    elif facts["kind"] == "halo" and order % 2 == 0:
        layout, left, right, *_ = fields
        rows += runs_a_rank(layout, size) * (left + right)
    shape[facts["dim"]] = rows
    return x.new_empty(shape), torch.empty(2, dtype=torch.int64, device="cpu")


@torch.library.custom_op("ring_torch::halo_ids", mutates_args=())
def halo_ids(x: Tensor, tensors: Sequence[Tensor], numbers: Sequence[int], text: str) -> Tensor:
    """Return positions and documents of a halo of ``x``, ``[2, B * R, left + L + right]``."""
    facts, kind = json.loads(text), _kind(text, tensors, numbers)
    assert isinstance(kind, HaloMove)
    return halo_ids_of(kind, x, facts["dim"], ranks_named(facts))


@halo_ids.register_fake
def _halo_ids_like(
    x: Tensor, tensors: Sequence[Tensor], numbers: Sequence[int], text: str
) -> Tensor:
    """Return a tensor of the result's shape, while a graph is traced."""
    facts = json.loads(text)
    layout, left, right, *_ = (from_json(field, tensors, numbers) for field in facts["fields"])
    dim, runs = facts["dim"], runs_a_rank(layout, facts["ranks"][1])
    shape = (2, runs * (1 if dim == 0 else x.shape[0]), x.shape[dim] // runs + left + right)
    return x.new_empty(shape, dtype=torch.int64)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what the backward needs: no rows."""
    _, tensors, ctx.numbers, ctx.text, ctx.tokens, ctx.order, _ = inputs
    ctx.save_for_backward(*tensors, output[1])


def _backward_of_move(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    """Run the backward operation."""
    *tensors, check = ctx.saved_tensors
    moved, _ = move(grad, tensors, ctx.numbers, ctx.text, ctx.tokens, ctx.order + 1, check)
    # To torch a list of no numbers is a list of no tensors, and wants as many gradients.
    return moved, [None] * len(tensors), None if ctx.numbers else [], None, None, None, None


move.register_autograd(_backward_of_move, setup_context=_keep)
refuse_batches("move", move)

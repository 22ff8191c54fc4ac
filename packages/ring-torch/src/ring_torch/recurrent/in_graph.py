"""Recurrent layers as operations in the graphs of ``torch.compile``.

Nothing of what depends on documents has a shape in the graph, so that a graph is compiled once for
all documents: what the backward needs of the forward has the size of the most that it may be.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor

from ring_core import divisor_of
from ring_core.row_checks import offsets_of
from ring_torch.capture import constant_in_graphs
from ring_torch.checking.settings import check_of
from ring_torch.comm.ranks import ranks_of
from ring_torch.compiled.static import (
    as_documents,
    from_json,
    group_fields,
    ranks_named,
    to_json,
)
from ring_torch.derivatives import refuse_batches
from ring_torch.recurrent.calls import RecurrentCall, second_derivative_of
from ring_torch.recurrent.kernels import (
    AnyKernel,
    Kernel,
    LinearAttention,
    LinearRecurrence,
    SelectiveScan,
)
from ring_torch.sharding import Sharding

_KERNELS: dict[str, type[AnyKernel]] = {
    kind.__name__: kind for kind in (LinearAttention, LinearRecurrence, SelectiveScan)
}


def run_in_graph(
    sharding: Sharding, kernel: AnyKernel,
    documents: Sequence[int] | None, seq_len: int | None, dtype: torch.dtype,
    initial: Tensor | None, inputs: Sequence[Tensor], *, wants_final: bool, needs_grad: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Add a recurrent layer to the graph that is being traced; return outputs and final states."""
    tensors: list[Tensor] = []
    numbers: list[int] = []
    offsets = None if documents is None else as_documents(documents)
    options = [to_json(getattr(kernel, field.name)) for field in fields(kernel)]
    text = _text(
        sharding.group, to_json(sharding.layout), type(kernel).__name__, options,
        [to_json(seq_len, tensors, numbers), to_json(offsets, tensors, numbers)],
        str(dtype).removeprefix("torch."), (initial is not None, wants_final, needs_grad),
    )  # fmt: skip
    out, final, *_ = recurrent(initial, list(inputs), tensors, numbers, text)
    return out, final


@constant_in_graphs
def _text(
    group: Any, layout: Any, kernel: str, options: list[Any], fields: list[Any], dtype: str,
    flags: tuple[bool, bool, bool],
) -> str:  # fmt: skip
    """Return the constant part of a layer as JSON; the compiler takes it for a constant."""
    return json.dumps({
        **group_fields(ranks_of(group)), "layout": layout, "kernel": kernel,
        "options": options, "fields": fields, "dtype": dtype,
        "flags": flags,
    })  # fmt: skip


def _kernel(facts: dict[str, Any]) -> Kernel:
    """Return the kernel that a text describes."""
    return _KERNELS[facts["kernel"]](*map(from_json, facts["options"]))


def _call(
    text: str, tensors: Sequence[Tensor], numbers: Sequence[int], check: Tensor | None = None
) -> RecurrentCall:
    """Return the layer that a text describes, as a new call of its group.

    A backward's is checked if its forward was, as ``check`` says.
    """
    facts: dict[str, Any] = json.loads(text)
    ranks = ranks_named(facts, is_forward=check is None)
    seq_len, documents = (from_json(x, tensors, numbers) for x in facts["fields"])
    has_initial, wants_final, needs_grad = facts["flags"]
    # Counted when it runs, not when it is traced: one trace serves many calls.
    number = ranks.next_call()
    return RecurrentCall(
        ranks, from_json(facts["layout"]), _kernel(facts), offsets_of(documents), seq_len,
        getattr(torch, facts["dtype"]), has_initial, wants_final, needs_grad, number, "eager",
        *(check_of(number) if check is None else check.tolist()),
    )  # fmt: skip


def _shapes(
    text: str, inputs: Sequence[Tensor], tensors: Sequence[Tensor]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of final states, and of the most entry states and transitions.

    A run that follows another begins where a run of the layout does, so a rank has at most as many
    as the layout has runs.
    """
    facts = json.loads(text)
    kernel, size = _kernel(facts), facts["ranks"][1]
    documents = from_json(facts["fields"][1], tensors)
    count = 1
    if documents is not None:
        # All numbers of a list are in `numbers`, so it has one entry for each.
        count = (documents.shape[0] if isinstance(documents, Tensor) else len(documents)) - 1
    rows, state = inputs[0].shape[0], kernel.state_shape(*inputs)
    # With documents there are states for each, and one row; without, one document of all rows.
    runs = divisor_of(from_json(facts["layout"]), size)
    transition = prod(kernel.transition_shape(*inputs))
    return (
        (count if facts["flags"][1] else 0, rows, *state), (runs // size, rows, *state),
        (runs, rows * transition),
    )  # fmt: skip


@torch.library.custom_op("ring_torch::recurrent", mutates_args=())
def recurrent(
    initial: Tensor | None, inputs: Sequence[Tensor], tensors: Sequence[Tensor],
    numbers: Sequence[int], text: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return outputs and final states, and what the backward needs beside the inputs.

    Last of that is the interval of checked calls, and whether this one is.

    Args:
        initial: States before each document.
        inputs: The kernel's inputs.
        tensors: Tensors that the text names by their indices.
        numbers: Numbers that it names likewise.
        text: The constant part of the call.
    """
    call = _call(text, tensors, numbers)
    results = call.forward(initial, inputs)
    *_, entries, transitions = _shapes(text, inputs, tensors)
    return (
        results.out, results.final, _filled(results.entries, entries),
        _filled(results.transitions, transitions),
        torch.tensor((call.check_every, call.checked), dtype=torch.int64, device="cpu"),
    )  # fmt: skip


def _filled(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return rows with others behind them that nothing reads."""
    filled = x.new_empty(shape)
    filled[: len(x)] = x
    return filled


@recurrent.register_fake
def _recurrent_like(
    _initial: Tensor | None, inputs: Sequence[Tensor], tensors: Sequence[Tensor],
    _numbers: Sequence[int], text: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return tensors of the results' shapes, while a graph is traced."""
    facts = json.loads(text)
    kernel, dtype = _kernel(facts), getattr(torch, facts["dtype"])
    like = inputs[kernel.values]
    states = [like.new_empty(shape, dtype=dtype) for shape in _shapes(text, inputs, tensors)]
    check = torch.empty(2, dtype=torch.int64, device="cpu")
    return (like.new_empty(like.shape), *states, check)  # type: ignore[return-value]  # three states


@torch.library.custom_op("ring_torch::recurrent_backward", mutates_args=())
def recurrent_backward(
    initial: Tensor | None, inputs: Sequence[Tensor], entries: Tensor, transitions: Tensor,
    check: Tensor, out_grad: Tensor, final_grad: Tensor, tensors: Sequence[Tensor],
    numbers: Sequence[int], text: str,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of the inputs, and last that of the initial states, if there are any."""
    initial_grad, grads = _call(text, tensors, numbers, check).backward(
        initial, inputs, entries, transitions, out_grad, final_grad
    )
    return [*grads, *([] if initial_grad is None else [initial_grad])]


@recurrent_backward.register_fake
def _recurrent_backward_like(
    initial: Tensor | None, inputs: Sequence[Tensor], *_: Any
) -> list[Tensor]:
    """Return tensors like the gradients, while a graph is traced."""
    return [torch.empty_like(x) for x in (*inputs, *([] if initial is None else [initial]))]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save what the backward needs."""
    initial, rows, tensors, ctx.numbers, ctx.text = inputs
    ctx.rows, ctx.tensors = len(rows), len(tensors)
    ctx.save_for_backward(initial, *output[2:], *rows, *tensors)


def _backward_of_recurrent(ctx: Any, out_grad: Tensor, final_grad: Tensor, *_: Any) -> Any:
    """Run the backward operation."""
    initial, entries, transitions, check, *rest = ctx.saved_tensors
    rows, tensors = rest[: ctx.rows], rest[ctx.rows :]
    grads = recurrent_backward(
        initial, rows, entries, transitions, check, out_grad, final_grad, tensors, ctx.numbers,
        ctx.text,
    )  # fmt: skip
    # To torch a list of no numbers is a list of no tensors, and wants as many gradients.
    return (
        None if initial is None else grads[-1], grads[: ctx.rows], [None] * ctx.tensors,
        None if ctx.numbers else [], None,
    )  # fmt: skip


def _refuse(ctx: Any, *_: Any) -> NoReturn:
    """Refuse a backward of the backward.

    Raises:
        UnsupportedError: Always.
    """
    raise second_derivative_of(ctx.name)


def _keep_name(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save the layer's name."""
    del output
    ctx.name = _kernel(json.loads(inputs[-1])).name


recurrent.register_autograd(_backward_of_recurrent, setup_context=_keep)
recurrent_backward.register_autograd(_refuse, setup_context=_keep_name)
refuse_batches("recurrent_backward", recurrent_backward)

"""The call that all recurrent layers share: checks of their common options, then the layer."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import get_args

import torch
from torch import Tensor

from ring_core import UnsupportedError
from ring_core.base.arguments import check_size
from ring_core.checks import check_choice
from ring_core.row_checks import offsets_of
from ring_torch.capture import is_traced
from ring_torch.checking.settings import check_of
from ring_torch.compiled.static import size_of
from ring_torch.recurrent.arguments import (
    Explained,
    KernelName,
    check_tensor,
    checked_flag,
    explains,
)
from ring_torch.recurrent.calls import RecurrentCall, run, state_dtype
from ring_torch.recurrent.in_graph import run_in_graph
from ring_torch.recurrent.kernels import AnyKernel
from ring_torch.recurrent.libraries import chosen
from ring_torch.sharding import Sharding, length_of

_KERNELS: tuple[str, ...] = get_args(KernelName)


def run_layer(
    sharding: Sharding, number: int, kernel: AnyKernel, inputs: tuple[Tensor, ...],
    initial: Tensor | None, wants_final: bool, cu_seqlens: Sequence[int] | None,
    seq_len: int | None, kernel_name: str, state_name: str = "initial_state",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Check the options that all layers have, and run one as one autograd function."""
    check_choice("kernel", kernel_name, _KERNELS)
    wants_final = checked_flag("output_final_state", wants_final)
    size, layout, x = size_of(sharding.group), sharding.layout, inputs[0]
    if layout == "striped" and size > 1:
        raise UnsupportedError(
            f"{kernel.name} takes a state through runs of consecutive tokens, and in the striped "
            f"layout over {size} ranks no two neighbours are on one rank. Instead: relayout to "
            f"'zigzag' around the layer, as in cp.relayout(x, to='zigzag')"
        )
    length = length_of(x, 1, seq_len, size)
    traced, rows = is_traced(x) and not explains(), x.shape[0]
    # While a graph is traced nobody looks at the numbers of documents.
    offsets = cu_seqlens if traced else offsets_of(cu_seqlens)
    if offsets is not None and rows > 1 and (initial is not None or wants_final):
        raise ValueError(
            f"with cu_seqlens there is one state a document, so B must be 1, got {rows} rows"
        )
    dtype = state_dtype(inputs)
    if initial is not None:
        check_tensor(state_name, initial)
        count = rows if offsets is None else len(offsets) - 1
        shape = (count, *kernel.state_shape(*inputs))
        if initial.shape != shape or initial.device != x.device:
            raise ValueError(
                f"{state_name} must be {list(shape)} on {x.device}, a state for each "
                f"{'row' if offsets is None else 'document'}, got {list(initial.shape)} on "
                f"{initial.device}"
            )
        dtype = torch.promote_types(dtype, initial.dtype)
        initial = initial.to(dtype)
        # Documents first: without cu_seqlens each row is one, and all rows are alike.
        initial = initial.unsqueeze(0 if offsets is None else 1)
    needs_grad = torch.is_grad_enabled() and any(
        y is not None and y.requires_grad for y in (initial, *inputs)
    )
    library, reason = chosen(kernel_name, kernel, inputs, dtype, needs_grad=needs_grad)
    if kernel_name not in ("auto", library):
        raise UnsupportedError(
            f"kernel={kernel_name!r}: {reason}. Instead: kernel='auto', or 'eager', which takes any call"
        )
    if traced:
        out, final = run_in_graph(
            sharding, kernel, offsets, length, dtype, initial, inputs, wants_final=wants_final,
            needs_grad=needs_grad,
        )  # fmt: skip
    else:
        call = RecurrentCall(
            sharding.ranks, layout, kernel, offsets_of(offsets),
            None if length is None else check_size("seq_len", length), dtype,
            initial is not None, wants_final, needs_grad, number, library,
            *((0, 0) if explains() else check_of(number)),
        )  # fmt: skip
        if explains():
            raise Explained(_described(call, inputs, reason), call.traffic(inputs)[1])
        out, final = run(call, initial, *inputs)
    return (out, final.squeeze(0 if offsets is None else 1)) if wants_final else out


def number_of_call(sharding: Sharding, x: object) -> int:
    """Return the number of a new call; 0 in a graph, where it is counted when the graph runs."""
    if is_traced(x):
        sharding.check_group()
        return 0
    return 0 if explains() else sharding.ranks.next_call()


def _described(call: RecurrentCall, inputs: Sequence[Tensor], reason: str) -> str:
    """Return what a call would do, in words, for ``explain_recurrent``."""
    kernel, size = call.kernel, call.ranks.size
    slots, forward, backward = call.traffic(inputs)
    state, transition = (
        [*shape(*inputs)] for shape in (kernel.state_shape, kernel.transition_shape)
    )
    rows, item = inputs[0].shape[0], call.dtype.itemsize
    shapes = ", ".join(
        f"{name} {[*x.shape]}" for name, x in zip(kernel.inputs, inputs, strict=True)
    )
    gathered = sum(
        x.nbytes for x, fill in zip(inputs, kernel.fills, strict=True) if fill is not None
    )
    states = str(call.dtype).removeprefix("torch.")
    library = "Ring's own" if call.library == "triton" else "flash-linear-attention's"
    if call.library == "eager":
        library = f"torch's operations, in chunks of at most {call.most_tokens} tokens, as {reason}"
    return (
        f"{kernel.name} over {size} ranks, {call.layout}: {shapes}\n"
        f"kernel {call.library}: {library}, states in {states}\n"
        f"a state is {state}, a run's transition {transition}; at most {slots} runs of a rank travel\n"
        f"forward: one all-gather, a rank sends {slots} runs x {rows} rows x ({prod(transition)} + "
        f"{prod(state)}) numbers x {item} bytes = {forward:,} bytes\n"
        f"backward: one all-gather, a rank sends gradients of states, {backward:,} bytes\n"
        f"its own rows of the inputs, which it keeps, are {gathered:,} bytes"
    )

"""The end of a forward: sinks, which take softmax mass and yield no value."""

from __future__ import annotations

import torch
from torch import Tensor

from ring_torch.call import Call, Saved
from ring_torch.records import AttentionState, Inputs, folded


def attend(call: Call, inputs: Inputs) -> tuple[AttentionState, Saved]:
    """A call's forward by its strategy, sinks included."""
    state, saved = call.strategy.forward(call, inputs)
    if inputs.sinks is not None and not call.strategy.adds_sinks:
        state = add_sinks(state.out.to(call.acc_dtype), state.lse, inputs.sinks)
    return state, saved


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> AttentionState:
    """:func:`ring_core.finalize`, ``out`` in place."""
    with_sinks = torch.logaddexp(lse, folded(sinks, lse.dtype)[:, None])
    weight = (lse - with_sinks.masked_fill(with_sinks == -torch.inf, 0.0)).exp_()
    out.mul_(weight.transpose(1, 2).unsqueeze(-1))
    return AttentionState(out, with_sinks)

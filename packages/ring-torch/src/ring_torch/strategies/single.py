"""Strategy of one rank whose plan is one launch: it adds nothing to the cost of the kernel."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from ring_core import WorkItem
from ring_torch.call import Call, Resolution, Saved, Strategy
from ring_torch.capture import is_capturing
from ring_torch.launches.cache import keep, tensors_key
from ring_torch.records import AttentionState, BackwardInputs, Grads, Inputs, folded, unseen_state
from ring_torch.strategies.prepared import PreparedLaunches, prepare_forward
from ring_torch.transports.api import Traffic


@dataclass(frozen=True)
class Single(Strategy):
    """Strategy of a call of one rank that is a single kernel launch in each pass.

    The kernel itself adds the sinks: ``out`` comes back rounded to the inputs' dtype, and adding
    them afterwards would round twice.
    """

    item: WorkItem
    name: str
    prepares: bool = False  # True if the launch may be prepared: it needs q, k and v alone
    launches: PreparedLaunches = field(default_factory=PreparedLaunches, compare=False)
    adds_sinks = True

    def forward(self, call: Call, inputs: Inputs) -> tuple[AttentionState, Saved]:
        """Return ``(out, lse)``, ``out`` in the inputs' dtype or wider; nothing is saved."""
        q, k, v = inputs[:3]
        item, params, sinks = self.item, call.params, None
        fully_written = item.q_stop - item.q_start == q.shape[1]
        # Rows outside of the item see nothing; where the launch writes every row, their initial
        # values are left out.
        state = unseen_state(q, v.shape[3], fully_written=fully_written)
        if inputs.sinks is not None:
            sinks = folded(inputs.sinks, torch.float32)
        key = tensors_key(q, k, v, sinks) if self.prepares else None
        if (launches := self.launches.forward.get(key)) is not None:
            launches.run(
                q, lambda *span: (k.narrow(1, *span), v.narrow(1, *span)), state, sinks, lambda _: None
            )  # fmt: skip
            if params.needs_lse:
                lse = state.lse if fully_written else state.lse.narrow(2, 0, item.q_stop)
                call.kernel.mark_nonfinite(lse)
            return state, []
        rows, columns = call.rows(inputs), call.columns(0, inputs.key_tensors())
        if sinks is not None:
            params = replace(params, sinks=sinks)
        dst, rows_in_item = state.take(item.q_slice), rows.take(item.q_slice)
        # The kernel may write into `dst`, a part of `state`, or return tensors of its own, possibly
        # wider.
        result = call.kernel.attend(rows_in_item, columns.take(item.k_slice), item, params, dst)
        can_prepare = self.prepares and result.out.data_ptr() == dst.out.data_ptr()
        if can_prepare and key not in self.launches.forward and not is_capturing():
            launches = prepare_forward(call.kernel, rows, columns, state, [(item, 0)], params)
            keep(self.launches.forward, key, launches)
        if fully_written:
            return result, []
        # Rows that the item has not are as they were made: they see nothing.
        state = AttentionState(state.out.to(result.out.dtype), state.lse.to(result.lse.dtype))
        for target, source in zip(state.take(item.q_slice), result, strict=True):
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)
        return state, []

    def backward(
        self, call: Call, inputs: Inputs, upstream: BackwardInputs, _saved: Saved
    ) -> Grads:
        """Return the gradients in the inputs' dtype or wider."""
        item = self.item
        rows, columns = call.rows(inputs), call.columns(0, inputs.key_tensors())
        operands = rows.take(item.q_slice), columns.take(item.k_slice), upstream.take(item.q_slice)
        # One launch has all keys of its rows, so its gradients are final: there is nothing to add
        # to.
        grads = call.kernel.grads(*operands, item, call.params)
        dbias = grads.dbias
        if dbias is not None and rows.bias is not None:
            dbias = _padded(dbias, rows.bias, item.q_slice, dim=2)
        return Grads(
            _padded(grads.dq, inputs.q, item.q_slice, dim=1),
            _padded(grads.dk, inputs.k, item.k_slice, dim=1),
            _padded(grads.dv, inputs.v, item.k_slice, dim=1),
            dbias,
        )

    def traffic(self, call: Call, inputs: Inputs, *, forward: bool, saved: bool) -> Traffic:
        """Return zeros: one rank sends nothing."""
        del call, inputs, forward, saved
        return Traffic(0, 0)


def only_item(resolution: Resolution, *, sinks: bool) -> WorkItem | None:
    """Return the single launch of a one-rank plan; ``None`` if a call needs more than that.

    A call needs more with several ranks or items, an empty batch, a kernel that can mask only some
    bands, or sinks that the launch cannot add.
    """
    plan, kernel = resolution.program.plan, resolution.kernel
    has_bands, is_empty = kernel.capabilities.bands == "any", resolution.sizes.batch == 0
    if plan.cp_size > 1 or not has_bands or is_empty or len(plan.items(0, 0)) != 1:
        return None
    # Kernels add sinks only where every row is in the launch, and the mask is a band alone.
    (item,) = plan.items(0, 0)
    banded = not resolution.request.segment_ids and item.cu_q is None and item.tiles is None
    covers_all = item.q_stop - item.q_start == plan.q_layout.local_len
    return None if sinks and not (kernel.adds_sinks and banded and covers_all) else item


def _padded(grad: torch.Tensor, like: torch.Tensor, span: slice, *, dim: int) -> torch.Tensor:
    """Return a gradient of a span of rows or keys, padded with zeros to the size of ``like``."""
    if grad.shape[dim] == like.shape[dim]:
        return grad
    padded = torch.zeros_like(like, dtype=grad.dtype, memory_format=torch.contiguous_format)
    padded.narrow(dim, span.start, span.stop - span.start).copy_(grad)
    return padded

"""Strategy of one rank whose plan is one launch: it adds nothing to the cost of the kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from ring_core import WorkItem
from ring_torch.accumulate import Accumulator, Joins, OneItem, Work, joins_of
from ring_torch.call import Call, Saved, Strategy, Traffic
from ring_torch.records import AttentionState, Backward, BackwardInputs, Grads, Inputs


@dataclass(frozen=True)
class Single(Strategy):
    """Strategy of a call of one rank that is a single kernel launch in each pass.

    The kernel itself adds the sinks: ``out`` comes back rounded to the inputs' dtype, and adding
    them afterwards would round twice.
    """

    name: str
    item: WorkItem
    work: Work
    joins: Joins
    backward_launch: Backward
    adds_sinks = True

    @classmethod
    def of(cls, name: str, item: WorkItem, call: Call) -> Self:
        """Make the launches of an item that is all of a call."""
        launch = call.kernel.forward(item, call.params)
        length = call.plan.q_layout.local_len
        joins = joins_of([launch], call.dtype, length, is_final=True)
        backward = call.kernel.backward([item], call.params, adds=False)
        return cls(name, item, Work.of([launch], length, call.keys.length), joins, backward)

    def forward(self, call: Call, inputs: Inputs) -> tuple[AttentionState, Saved]:
        """Return ``(out, lse)``, ``out`` in the inputs' dtype or wider; nothing is saved."""
        results = Accumulator(self.joins, inputs.q, inputs.v.shape[3])
        rows, columns = call.rows(inputs, adds_sinks=True), call.columns(0, inputs.key_tensors())
        results.attend(self.work, rows, columns)
        return results.finish(), []

    def backward(
        self, call: Call, inputs: Inputs, upstream: BackwardInputs, _saved: Saved
    ) -> Grads:
        """Return the gradients in the inputs' dtype or wider."""
        rows, columns = call.rows(inputs), call.columns(0, inputs.key_tensors())
        # One launch has all keys of its rows, so its gradients are final: there is nothing to add
        # to.
        has_all = self.item.q_slice == slice(0, inputs.q.shape[1])
        # Kernels that do not write where they are told return dQ in memory of their own, and so do
        # all with the bias's gradient. Where that is of all rows it is taken as it is.
        waits = has_all and self.joins.mode != "write"
        how: Literal["write", "wait"] = "wait" if waits else "write"
        row_sums = call.row_sums(rows, how, fully_written=has_all, by_one=has_all)
        column_sums = OneItem(columns)
        self.backward_launch.run(rows, [columns], upstream, row_sums, column_sums)
        dk, dv = column_sums.grads
        return Grads(row_sums.whole(), dk, dv, row_sums.dbias)

    def traffic(self, call: Call, inputs: Inputs, *, forward: bool, saved: bool) -> Traffic:
        """Return zeros: one rank sends nothing."""
        del call, inputs, forward, saved
        return Traffic(0, 0)


def only_item(call: Call) -> WorkItem | None:
    """Return the single launch of a one-rank plan; ``None`` if a call needs more than that.

    A call needs more with several ranks or items, an empty batch, a kernel that can mask only some
    bands, or sinks that the launch cannot add.
    """
    plan, kernel = call.plan, call.kernel
    has_bands, is_empty = kernel.capabilities.bands == "any", call.keys.batch == 0
    if plan.cp_size > 1 or not has_bands or is_empty or len(plan.items(0, 0)) != 1:
        return None
    # Kernels add sinks only where every row is in the launch, and the mask is a band alone.
    (item,) = plan.items(0, 0)
    banded = not call.request.segment_ids and item.cu_q is None and item.tiles is None
    covers_all = item.q_stop - item.q_start == plan.q_layout.local_len
    return None if call.has_sinks and not (kernel.adds_sinks and banded and covers_all) else item

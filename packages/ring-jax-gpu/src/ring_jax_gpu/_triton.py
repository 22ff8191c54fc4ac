"""``triton``: flash attention kernels for NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ring_core import Capabilities, Stage
from ring_jax._types import Columns, Grads, Result, Rows, Static, Upstream, Work
from ring_jax_gpu._launch import Call


@dataclass(frozen=True)
class TritonKernel:
    """Visits the blocks that are not empty, whatever the mask.

    A backward in one kernel (``fused_backward=True``; on Hopper also by default, where the mask is
    of bands and there is no option) adds to dQ in an order that differs from run to run.

    Attributes:
        repeats: The backward is to repeat bit for bit.
        rounds: What a call of one step yields may have the inputs' dtype: nothing is added to it.
    """

    repeats: bool = False
    rounds: bool = False

    capabilities: ClassVar[Capabilities] = Capabilities(
        name="triton",
        devices=("cuda",),
        dtypes=("float32", "bfloat16", "float16"),
        max_head_dim=256,
        mixed_head_dims=True,
        bands="any",
        documents=True,
        segment_ids=True,
        predicate=True,
        softcap=True,
        bias=True,
        alibi=True,
        dropout=True,
        any_scale=True,
        deterministic=True,
        lse_grad=True,
        block_sizes=True,
        fused_backward=True,
    )

    def forward(
        self, static: Static, rows: Rows, columns: Columns, work: Work, into: Result
    ) -> Result:
        """Attend and merge into ``into``."""
        if into.lse.size == 0:
            return into
        wide = into.out.dtype
        if self.rounds and _is_one(static.plan.forward):
            into = into._replace(out=into.out.astype(rows.q.dtype))
        out, lse = Call(static, rows, columns, work).attend(into)
        return Result(out.astype(wide), lse)

    def backward(
        self, static: Static, rows: Rows, columns: Columns, upstream: Upstream, work: Work,
        into: Grads,
    ) -> Grads:  # fmt: skip
        """Add the items' gradients to ``into``."""
        if into.dq.size == 0:
            return into
        call = Call(static, rows, columns, work)
        (dq, dkv, dbias), wide = into, into.dkv.dtype
        fused = static.config.fused_backward
        if _is_one(static.plan.backward):
            dkv = dkv.astype(rows.q.dtype)
        on_hopper = fused is None and not self.repeats and call.suits_hopper
        if fused or on_hopper:
            dq, dkv = call.add_to_all(upstream, dq, dkv, only_on_hopper=on_hopper)
        else:
            dq = call.add_to_queries(upstream, dq)
            dkv = call.add_to_keys(upstream, dkv)
        if dbias is not None:
            dbias = call.add_to_bias(upstream, dbias)
        return Grads(dq, dkv.astype(wide), dbias)


def _is_one(stages: Sequence[Stage]) -> bool:
    """Whether there is one step, and none of it is another rank's."""
    return len(stages) == 1 and not stages[0].helps

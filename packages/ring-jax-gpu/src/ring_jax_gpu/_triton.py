"""``triton``: flash attention kernels for NVIDIA GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from ring_core import Capabilities
from ring_jax._types import Columns, Grads, Result, Rows, Static, Upstream, Work
from ring_jax_gpu._launch import Call


@dataclass(frozen=True)
class TritonKernel:
    """Visits the blocks that are not empty, whatever the mask.

    A backward in one kernel (``fused_backward=True``) adds to dQ in an order that differs from run
    to run; without that choice the backward repeats bit for bit.
    """

    capabilities = Capabilities(
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
        return Call(static, rows, columns, work).attend(into)

    def backward(
        self, static: Static, rows: Rows, columns: Columns, upstream: Upstream, work: Work,
        into: Grads,
    ) -> Grads:  # fmt: skip
        """Add the items' gradients to ``into``."""
        if into.dq.size == 0:
            return into
        call = Call(static, rows, columns, work)
        dq, dkv, dbias = into
        if static.config.fused_backward:
            dq, dkv = call.add_to_all(upstream, dq, dkv)
        else:
            dq = call.add_to_queries(upstream, dq)
            dkv = call.add_to_keys(upstream, dkv)
        if dbias is not None:
            dbias = call.add_to_bias(upstream, dbias)
        return Grads(dq, dkv, dbias)

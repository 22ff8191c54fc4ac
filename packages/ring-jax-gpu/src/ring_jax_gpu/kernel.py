"""``triton``: flash attention kernels for NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import jax.numpy as jnp

from ring_core import Capabilities, Stage
from ring_core.base.config import EVERYTHING
from ring_core.triton.tile_configs import Table
from ring_jax.records import (
    AttentionState,
    BackwardInputs,
    Grads,
    ItemTable,
    Kernel,
    KeyBlock,
    QueryBlock,
    Static,
)
from ring_jax_gpu.head_dims import (
    HeadDims,
    narrow_grads,
    wide,
    wide_grads,
    wide_step,
)
from ring_jax_gpu.operands import Call


@dataclass(frozen=True)
class TritonKernel(Kernel):
    """Visits the blocks that are not empty, whatever the mask.

    A backward in one kernel (``fused_backward=True``; on Hopper also by default, where the mask is
    of bands and there is no option) adds to dQ in an order that differs from run to run.

    Attributes:
        repeats: The backward is to repeat bit for bit.
        rounds: What the last step of a call yields may have the inputs' dtype.
        blocks: How large blocks are, a table as ``python -m ring_jax_gpu tune`` writes it; ``None``
            for the package's, or that of ``RING_TRITON_BLOCKS``.
        roles: On Hopper, warp-specialised kernels do what they can do.
    """

    repeats: bool = False
    rounds: bool = False
    blocks: Table | None = None
    roles: bool = True

    capabilities: ClassVar[Capabilities] = replace(
        EVERYTHING, name="triton", devices=("cuda",), dtypes=("float32", "bfloat16", "float16"),
        max_head_dim=256,
    )  # fmt: skip

    def attend_into(
        self,
        static: Static,
        rows: QueryBlock,
        columns: KeyBlock,
        work: ItemTable,
        into: AttentionState,
    ) -> AttentionState:
        """Attend and merge into ``into``."""
        dims = HeadDims.of(static, columns)
        if (fast := dims.fast) != dims:
            into = into._replace(out=wide(into.out, fast.v))
            found = self.attend_into(*wide_step(dims, fast, static, rows, columns), work, into)
            return found._replace(out=found.out[..., : dims.v])
        dtype, before = into.out.dtype, None
        if self.rounds and static.last and rows.q.dtype != dtype:
            before = None if static.fresh else into.out
            into = into._replace(out=into.out.astype(rows.q.dtype))
        out, lse = self._call(static, rows, columns, work).fwd(into, before)
        return AttentionState(out.astype(dtype), lse)

    def grads_into(
        self, static: Static, rows: QueryBlock, columns: KeyBlock, upstream: BackwardInputs, work: ItemTable,
        into: Grads,
    ) -> Grads:  # fmt: skip
        """Add the items' gradients to ``into``."""
        dims = HeadDims.of(static, columns)
        if (fast := dims.fast) != dims:
            upstream, into = wide_grads(dims, fast, upstream, into)
            given = wide_step(dims, fast, static, rows, columns)
            return narrow_grads(dims, fast, self.grads_into(*given, upstream, work, into))
        call = self._call(static, rows, columns, work)
        (dq, dkv, dbias), fused = into, static.config.fused_backward
        dtype = rows.q.dtype if _is_one(static.program.backward) else dkv.dtype
        keys = call.parts_of(dkv.astype(dtype), "dk", "dv")
        on_hopper = fused is None and not self.repeats and call.on_hopper
        if fused or on_hopper:
            dq, keys = call.bwd_fused(upstream, dq, keys, only_on_hopper=on_hopper)
        else:
            dq, keys = call.bwd_dq(upstream, dq), call.bwd_dkv(upstream, keys)
        dkv = jnp.concatenate([x.astype(dkv.dtype) for x in keys.values()], axis=-1)
        return Grads(dq, dkv, None if dbias is None else call.bwd_dbias(upstream, dbias))

    def _call(self, static: Static, rows: QueryBlock, columns: KeyBlock, work: ItemTable) -> Call:
        return Call(
            static, rows, columns, work, _is_one(static.program.forward), self.blocks, self.roles
        )


def _is_one(stages: Sequence[Stage]) -> bool:
    """Whether there is one step, and none of it is another rank's."""
    return len(stages) == 1 and not stages[0].helps

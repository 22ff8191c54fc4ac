"""Kernel ``triton``: flash attention for NVIDIA GPUs, with tensors padded to fast head dims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import jax.numpy as jnp

from ring_core import Capabilities, KernelConfig, Request, RingProgram, refusals
from ring_core.base.config import EVERYTHING
from ring_core.programs.ring import Stage
from ring_core.triton.tile_configs import Table
from ring_jax.kernels.rules import predicate_refusal
from ring_jax.records import (
    AttentionState,
    BackwardInputs,
    Direction,
    Grads,
    ItemTable,
    Kernel,
    KeyBlock,
    LaunchSpec,
    LocalShape,
    QueryBlock,
)
from ring_jax_gpu.head_dims import (
    HeadDims,
    crop_grads,
    pad_dim,
    pad_grads,
    pad_operands,
)
from ring_jax_gpu.operands import HOPPER_DIMS, StepWork
from ring_jax_gpu.primitive import GLUON

#: The calls that kernels for Hopper can do, but for their head dims. ``StepWork.suits_hopper`` says
#: the same of a launch.
ON_HOPPER = Capabilities(
    "hopper", dtypes=("bfloat16", "float16"), mixed_head_dims=True, bands="any", documents=True,
    segment_ids=True, softcap=True, alibi=True, dropout=True, deterministic=True, lse_grad=True, fused_backward=True,
)  # fmt: skip


@dataclass(frozen=True)
class TritonKernel(Kernel):
    """Flash attention in Triton, which computes only the blocks that a mask does not hide.

    A backward in one kernel (``fused_backward=True``; by default on Hopper, where
    ``StepWork.suits_hopper`` says so) adds to dQ in an order that differs from run to
    run.

    Attributes:
        blocks: A table of block sizes, as ``python -m ring_jax_gpu tune`` writes it; ``None`` is
            the package's table, or that of ``RING_TRITON_BLOCKS``.
        roles: On Hopper, use the warp-specialised kernels for calls that they can do.
    """

    blocks: Table | None = None
    roles: bool = True

    capabilities: ClassVar[Capabilities] = replace(
        EVERYTHING, name="triton", devices=("cuda",), dtypes=("float32", "bfloat16", "float16"),
        max_head_dim=256,
    )  # fmt: skip

    def refusals(
        self, direction: Direction, local: LocalShape, config: KernelConfig, program: RingProgram, /
    ) -> tuple[str, ...]:
        """Refuse a fused backward that must repeat bit for bit, and predicates of many tiles."""
        del direction
        if refusal := predicate_refusal(program.plan, evaluates=False, reads_tiles=True):
            return (refusal,)
        if local.deterministic and config.fused_backward:
            reason = (
                "fused_backward=True adds to dQ in an order that differs from run to run, which "
                "deterministic=True rules out. Instead: leave out fused_backward"
            )
            return (reason,)
        return ()

    def notes(
        self, request: Request, config: KernelConfig, program: RingProgram, /
    ) -> tuple[str, ...]:
        """Say which passes of a call have kernels for Hopper; which GPU it is, lowering finds."""
        dims = HeadDims(request.head_dim, request.v_head_dim).fast
        has_dims = dims.qk == dims.v and dims.qk in HOPPER_DIMS
        if not (self.roles and has_dims) or refusals(ON_HOPPER, request, program):
            return ()
        is_split = request.deterministic or config.fused_backward is False
        passes = [*["the forward"] * (not request.dropout), *["the backward"] * (not is_split)]
        note = (
            f"triton on Hopper, with Triton {'.'.join(map(str, GLUON))} or newer: {' and '.join(passes)} "
            f"by kernels for Hopper, in Gluon; on other GPUs plain Triton"
        )
        return (note,) if passes else ()

    def constant_bytes(self, program: RingProgram, /) -> int:
        """Return the bytes of a predicate's partial tiles, and of their numbers."""
        tiles = None if program.plan.blocks is None else program.plan.blocks.tiles
        return 0 if tiles is None else sum(x.nbytes for x in tiles)

    def attend_into(
        self,
        spec: LaunchSpec,
        rows: QueryBlock,
        columns: KeyBlock,
        work: ItemTable,
        into: AttentionState,
    ) -> AttentionState:
        """Return ``into`` merged with the attention of the work items."""
        dims = HeadDims.of(spec.call, columns)
        if (fast := dims.fast) != dims:
            into = into._replace(out=pad_dim(into.out, fast.v))
            padded = pad_operands(dims, fast, spec, rows, columns)
            state = self.attend_into(*padded, work, into)
            return state._replace(out=state.out[..., : dims.v])
        dtype, before = into.out.dtype, None
        # The last launch of a call may write its result in the inputs' dtype. It then reads what
        # earlier launches accumulated from `before`, in the wider dtype. Sinks rescale the result
        # later, so with them it is rounded only after that.
        if spec.is_final and not spec.call.has_sinks and rows.q.dtype != dtype:
            before = None if spec.overwrite else into.out
            into = into._replace(out=into.out.astype(rows.q.dtype))
        out, lse = self._step_work(spec, rows, columns, work).fwd(into, before)
        return AttentionState(out.astype(dtype), lse)

    def grads_into(
        self, spec: LaunchSpec, rows: QueryBlock, columns: KeyBlock, upstream: BackwardInputs, work: ItemTable,
        into: Grads,
    ) -> Grads:  # fmt: skip
        """Return ``into`` plus the gradients of the work items."""
        call = spec.call
        dims = HeadDims.of(call, columns)
        if (fast := dims.fast) != dims:
            upstream, into = pad_grads(dims, fast, upstream, into)
            padded = pad_operands(dims, fast, spec, rows, columns)
            return crop_grads(dims, fast, self.grads_into(*padded, upstream, work, into))
        step = self._step_work(spec, rows, columns, work)
        (dq, dkv, dbias), fused = into, call.config.fused_backward
        # If there is one step, nothing is added to its dK/dV: they may have the inputs' dtype.
        dtype = rows.q.dtype if _is_single_step(call.program.backward) else dkv.dtype
        key_grads = step.split_kv(dkv.astype(dtype), "dk", "dv")
        # By default one kernel on Hopper, two elsewhere: which GPU it is, is known when the program
        # is lowered, so the launch has both forms.
        only_on_hopper = fused is None and not call.deterministic and step.suits_hopper("bwd_fused")
        if fused or only_on_hopper:
            dq, key_grads = step.bwd_fused(upstream, dq, key_grads, only_on_hopper=only_on_hopper)
        else:
            dq, key_grads = step.bwd_dq(upstream, dq), step.bwd_dkv(upstream, key_grads)
        dkv = jnp.concatenate([x.astype(dkv.dtype) for x in key_grads.values()], axis=-1)
        return Grads(dq, dkv, None if dbias is None else step.bwd_dbias(upstream, dbias))

    def _step_work(
        self, spec: LaunchSpec, rows: QueryBlock, columns: KeyBlock, work: ItemTable
    ) -> StepWork:
        """Return the launcher of a step's Triton kernels over these rows, columns and items."""
        separate_kv = _is_single_step(spec.call.program.forward)
        return StepWork(spec, rows, columns, work, separate_kv, self.blocks, self.roles)


def _is_single_step(stages: Sequence[Stage]) -> bool:
    """Return True if there is one step, in which no rank computes for another one."""
    return len(stages) == 1 and not stages[0].offloads

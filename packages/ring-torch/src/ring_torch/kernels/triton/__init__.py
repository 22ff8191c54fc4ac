"""Kernel ``triton``: the Triton kernels of ring_core, for every mask and option on NVIDIA GPUs.

Only blocks that are not empty are visited, and full ones skip their mask. Triton comes with torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ring_core import KernelConfig, Request, RingProgram, UnsupportedError, WorkItem
from ring_core.base.arguments import not_none
from ring_core.base.config import EVERYTHING
from ring_core.triton.tile_configs import KernelPass, choose_blocks, stages_that_fit
from ring_torch.accumulate import one_by_one
from ring_torch.kernels.api import Kernel
from ring_torch.kernels.flash import old_gpu_reason
from ring_torch.kernels.library import capability
from ring_torch.kernels.triton.launch import ItemLaunch
from ring_torch.optional import has_triton
from ring_torch.records import (
    AttentionState,
    Backward,
    BackwardInputs,
    Forward,
    Grads,
    KernelParams,
    KeyBlock,
    KeyGrads,
    Mode,
    QueryBlock,
    QueryGrads,
    zero_bias_grad,
)


class TritonKernel(Kernel):
    """Kernel ``triton``, by :mod:`ring_core.triton`, which merges and adds in its launches.

    The backward is a launch for dQ and one for dK/dV. With ``fused_backward=True`` it is one launch
    that adds to dQ by atomics, in an order that differs from run to run.
    """

    capabilities = replace(
        EVERYTHING,
        name="triton",
        devices=("cuda",),
        dtypes=("float32", "bfloat16", "float16"),
        max_head_dim=256,
    )

    def unavailable_reason(self) -> str | None:
        """Return why it cannot run on this machine: no Triton, or no NVIDIA GPU from Ampere on."""
        if not has_triton():
            return "triton is not installed (torch for Linux brings it)"
        return "is for NVIDIA GPUs" if torch.version.cuda is None else old_gpu_reason()

    def config_refusals(
        self, config: KernelConfig, request: Request, program: RingProgram, /
    ) -> tuple[str, ...]:
        """Return why it cannot run a call with these settings, or its predicate, on this GPU."""
        blocks = program.plan.blocks
        reasons = {
            (
                "fused_backward=True adds to dQ in an order that differs from run to run, which "
                "deterministic=True rules out"
            ): config.fused_backward and request.deterministic,
            "the partial tiles of this predicate take more than 64 MiB": (
                blocks is not None and blocks.tiles is None
            ),
        }
        refused = [reason for reason, applies in reasons.items() if applies]
        return (*refused, *_size_refusals(config, request))

    def forward(self, item: WorkItem, params: KernelParams) -> Forward:
        """Return the launch of an item's forward, which merges, or writes."""

        def run(
            rows: QueryBlock, columns: KeyBlock, into: AttentionState | None, mode: Mode, _: object
        ) -> AttentionState:
            assert into is not None
            launch = ItemLaunch(rows, columns, item, params)
            launch.run("fwd", into._asdict(), overwrite=mode == "write")
            return into

        return Forward(item, run, ("merge", "write"))

    def backward(self, items: Sequence[WorkItem], params: KernelParams, *, adds: bool) -> Backward:
        """Return the launch of the backward of items, which adds in its kernels."""
        if adds:
            launches = [partial(_launch_backward, item, params) for item in items]
            return one_by_one(items, launches, adds=True)
        return one_by_one(items, [partial(_grads, item, params) for item in items])


def _grads(
    item: WorkItem,
    params: KernelParams,
    rows: QueryBlock,
    columns: KeyBlock,
    upstream: BackwardInputs,
    dst: Tensor | None,
    _key: object,
) -> Grads:
    """Return an item's gradients in float32; ``dq`` is in ``dst`` if it is given."""
    dq, dk, dv = (
        torch.empty(x.shape, dtype=torch.float32, device=x.device)
        for x in (rows.q if dst is None else rows.q[:, :0], columns.k, columns.v)
    )
    dq = dq if dst is None else dst
    dbias = zero_bias_grad(rows, params, torch.float32)
    sums = QueryGrads(dq, dbias), KeyGrads(dk, dv)
    _launch_backward(item, params, rows, columns, upstream, *sums, overwrite=True)
    return Grads(dq, dk, dv, dbias)


def _launch_backward(
    item: WorkItem,
    params: KernelParams,
    rows: QueryBlock,
    columns: KeyBlock,
    upstream: BackwardInputs,
    row_grads: QueryGrads,
    column_grads: KeyGrads,
    *,
    overwrite: bool = False,
) -> None:
    """Add an item's gradients to the accumulators or, if ``overwrite``, overwrite them.

    The bias's gradient is always added.
    """
    launch = ItemLaunch(rows, columns, item, params)
    # `lse` and `delta` share strides.
    lse, delta = upstream.lse.contiguous(), not_none(upstream.delta).contiguous()
    tensors, dq = {"dout": upstream.dout, "lse": lse, "delta": delta}, row_grads.dq
    if params.fused_backward:
        dq = dq.zero_() if overwrite else dq
        launch.run(
            "bwd_fused", {**tensors, "dq": dq, **column_grads._asdict()}, overwrite=overwrite
        )
    else:
        launch.run("bwd_dq", {**tensors, "dq": dq}, overwrite=overwrite)
        launch.run("bwd_dkv", {**tensors, **column_grads._asdict()}, overwrite=overwrite)
    if row_grads.dbias is not None:
        launch.run("bwd_dbias", {**tensors, "dbias": row_grads.dbias})


def _size_refusals(config: KernelConfig, request: Request) -> tuple[str, ...]:
    """Return why blocks of the sizes that a call asks for do not fit on this GPU."""
    passes: tuple[KernelPass, ...] = ("fwd",)
    if request.grad:
        passes += ("bwd_fused",) if config.fused_backward else ("bwd_dq", "bwd_dkv")
        passes += ("bwd_dbias",) if request.bias else ()
    dims = request.head_dim, request.v_head_dim
    itemsize = getattr(torch, request.dtype).itemsize
    major, minor = capability()
    try:
        for name in passes:
            blocks = choose_blocks(config, name, max(dims), itemsize, per_score_inputs=False)
            stages_that_fit(name, blocks, dims, itemsize, 10 * major + minor)
    except UnsupportedError as error:
        return (str(error).removeprefix("kernel 'triton': ").partition(". Instead")[0],)
    return ()

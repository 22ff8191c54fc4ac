"""``pallas``: Mosaic kernels for TPUs."""

from __future__ import annotations

from dataclasses import dataclass

from ring_core import Capabilities, UnsupportedError
from ring_jax._types import Columns, Grads, Result, Rows, Static, Upstream, Work
from ring_jax._xla import XlaKernel
from ring_jax_tpu._backward import backward
from ring_jax_tpu._blocks import Pass, prefers_fused
from ring_jax_tpu._forward import forward
from ring_jax_tpu._launch import Launch


@dataclass(frozen=True)
class PallasKernel:
    """Visits the blocks that are not empty, whatever the mask; see :mod:`ring_jax_tpu._visits`.

    Whether blocks fit on chip depends on the generation, which is known no earlier than here: under
    ``kernel="auto"`` those that do not are left to ``xla``.
    """

    capabilities = Capabilities(
        name="pallas",
        devices=("tpu",),
        dtypes=("float32", "bfloat16"),
        mixed_head_dims=True,
        bands="any",
        documents=True,
        segment_ids=True,
        predicate=True,
        softcap=True,
        bias=True,
        alibi=True,
        dropout=True,
        deterministic=True,
        any_scale=True,
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
        launch = _launch("forward", static, rows, columns, work)
        if launch is None:
            return XlaKernel().forward(static, rows, columns, work, into)
        return forward(launch, into)

    def backward(
        self, static: Static, rows: Rows, columns: Columns, upstream: Upstream, work: Work,
        into: Grads,
    ) -> Grads:  # fmt: skip
        """Add the items' gradients to ``into``."""
        if into.dq.size == 0:
            return into
        launch = _launch("backward", static, rows, columns, work)
        if launch is None:
            return XlaKernel().backward(static, rows, columns, upstream, work, into)
        fused = static.config.fused_backward
        if fused is None:
            fused = prefers_fused(launch.shape, launch.blocks)
        return backward(launch, upstream, into, fused=fused)


def _launch(
    direction: Pass, static: Static, rows: Rows, columns: Columns, work: Work
) -> Launch | None:
    """``None`` where it does not fit and the call left the choice of a kernel open."""
    try:
        return Launch.of(direction, static, rows, columns, work)
    except UnsupportedError:
        if static.config.name != "auto":
            raise
        return None

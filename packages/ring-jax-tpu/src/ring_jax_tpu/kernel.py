"""``pallas``: Mosaic kernels for TPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ring_core import KernelConfig, RingProgram, UnsupportedError
from ring_core.base.config import EVERYTHING
from ring_jax.records import (
    AttentionState,
    BackwardInputs,
    Grads,
    ItemTable,
    KeyBlock,
    LocalShape,
    Pass,
    QueryBlock,
    Static,
)
from ring_jax_tpu.backward import backward
from ring_jax_tpu.block_sizes import GENERATIONS, UNKNOWN, Shape, use_fused
from ring_jax_tpu.forward import forward
from ring_jax_tpu.operands import Launch, fitting_blocks


@dataclass(frozen=True)
class PallasKernel:
    """Visits the blocks that are not empty, whatever the mask; see ``block_index``.

    Whether blocks fit on chip depends on the generation: those that do not are refused before
    anything is traced.
    """

    capabilities = replace(
        EVERYTHING, name="pallas", devices=("tpu",), dtypes=("float32", "bfloat16")
    )

    def refusals(
        self, direction: Pass, local: LocalShape, config: KernelConfig, program: RingProgram, /
    ) -> tuple[str, ...]:
        """What a launch would refuse."""
        shape = Shape(
            local.head_dim, local.v_head_dim, local.itemsize, local.has_bias, local.has_dropout
        )
        try:
            for k_len in local.k_lengths:
                fitting_blocks(
                    direction, config, program.plan.mask, shape, (local.q_len, k_len), local.lists,
                    GENERATIONS.get(local.device_kind, UNKNOWN),
                )  # fmt: skip
        except UnsupportedError as error:
            return (str(error).removeprefix("kernel 'pallas': "),)
        return ()

    def attend_into(
        self,
        static: Static,
        rows: QueryBlock,
        columns: KeyBlock,
        work: ItemTable,
        into: AttentionState,
    ) -> AttentionState:
        """Attend and merge into ``into``."""
        return forward(Launch.of("forward", static, rows, columns, work), into)

    def grads_into(
        self, static: Static, rows: QueryBlock, columns: KeyBlock, upstream: BackwardInputs, work: ItemTable,
        into: Grads,
    ) -> Grads:  # fmt: skip
        """Add the items' gradients to ``into``."""
        launch = Launch.of("backward", static, rows, columns, work)
        fused = static.config.fused_backward
        is_fused = use_fused(launch.shape, launch.blocks) if fused is None else fused
        return backward(launch, upstream, into, fused=is_fused)

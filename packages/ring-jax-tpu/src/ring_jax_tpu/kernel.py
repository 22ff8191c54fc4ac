"""``pallas``: Mosaic kernels for TPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ring_core import KernelConfig, RingProgram, UnsupportedError
from ring_core.base.config import EVERYTHING
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
from ring_jax_tpu.backward import backward
from ring_jax_tpu.block_sizes import (
    GENERATIONS,
    UNKNOWN,
    Shape,
    choose_blocks,
    span_of,
    use_fused,
)
from ring_jax_tpu.forward import forward
from ring_jax_tpu.operands import Launch


@dataclass(frozen=True)
class PallasKernel(Kernel):
    """Flash attention in Pallas, which computes only the blocks that a mask does not hide.

    Blocks that do not fit on chip, which depends on the TPU's generation, are refused before
    anything is traced.
    """

    capabilities = replace(
        EVERYTHING, name="pallas", devices=("tpu",), dtypes=("float32", "bfloat16")
    )

    def refusals(
        self, direction: Direction, local: LocalShape, config: KernelConfig, program: RingProgram, /
    ) -> tuple[str, ...]:
        """Return why a launch would be refused: its predicate, or its blocks on this TPU."""
        if refusal := predicate_refusal(program.plan, evaluates=True, reads_tiles=False):
            return (refusal,)
        shape = Shape(
            local.head_dim, local.v_head_dim, local.itemsize, local.has_bias, local.has_dropout
        )
        try:
            for k_len in local.k_lengths:
                choose_blocks(
                    config, direction, shape, local.q_len, k_len, span_of(program.plan.mask),
                    GENERATIONS.get(local.device_kind, UNKNOWN), local.lists,
                )  # fmt: skip
        except UnsupportedError as error:
            return (str(error).removeprefix("kernel 'pallas': "),)
        return ()

    def attend_into(
        self,
        spec: LaunchSpec,
        rows: QueryBlock,
        columns: KeyBlock,
        work: ItemTable,
        into: AttentionState,
    ) -> AttentionState:
        """Return ``into`` merged with the attention of the work items."""
        return forward(Launch.of("forward", spec.call, rows, columns, work), into)

    def grads_into(
        self, spec: LaunchSpec, rows: QueryBlock, columns: KeyBlock, upstream: BackwardInputs, work: ItemTable,
        into: Grads,
    ) -> Grads:  # fmt: skip
        """Return ``into`` plus the gradients of the work items."""
        launch = Launch.of("backward", spec.call, rows, columns, work)
        fused = spec.call.config.fused_backward
        is_fused = use_fused(launch.shape, launch.blocks) if fused is None else fused
        return backward(launch, upstream, into, fused=is_fused)

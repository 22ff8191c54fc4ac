"""Of ring_jax_tpu."""

from ring_jax_tpu import (
    backward as backward,
    block_index as block_index,
    forward as forward,
    operands as operands,
)
from ring_jax_tpu.block_index import (
    NONFINITE as NONFINITE,
    Walk as Walk,
    block_kinds as block_kinds,
    k_major as k_major,
    q_major as q_major,
    unpack as unpack,
    with_nonfinite as with_nonfinite,
)
from ring_jax_tpu.block_sizes import (
    GENERATIONS as GENERATIONS,
    UNKNOWN as UNKNOWN,
    Blocks as Blocks,
    Generation as Generation,
    Shape as Shape,
    choose_blocks as choose_blocks,
    default_sizes as default_sizes,
    generation_of as generation_of,
    vmem_mib as vmem_mib,
)

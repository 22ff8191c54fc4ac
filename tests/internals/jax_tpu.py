"""Of ring_jax_tpu."""

from ring_jax_tpu import backward as backward
from ring_jax_tpu import block_index as block_index
from ring_jax_tpu import forward as forward
from ring_jax_tpu import operands as operands
from ring_jax_tpu.block_index import NONFINITE as NONFINITE
from ring_jax_tpu.block_index import Walk as Walk
from ring_jax_tpu.block_index import block_kinds as block_kinds
from ring_jax_tpu.block_index import k_major as k_major
from ring_jax_tpu.block_index import q_major as q_major
from ring_jax_tpu.block_index import unpack as unpack
from ring_jax_tpu.block_index import with_nonfinite as with_nonfinite
from ring_jax_tpu.block_sizes import Blocks as Blocks
from ring_jax_tpu.block_sizes import Shape as Shape
from ring_jax_tpu.block_sizes import choose_blocks as choose_blocks
from ring_jax_tpu.block_sizes import default_sizes as default_sizes
from ring_jax_tpu.block_sizes import vmem_mib as vmem_mib
from ring_jax_tpu.generations import GENERATIONS as GENERATIONS
from ring_jax_tpu.generations import UNKNOWN as UNKNOWN
from ring_jax_tpu.generations import Generation as Generation
from ring_jax_tpu.generations import generation_of as generation_of

"""Of ring_jax_gpu."""

from ring_jax_gpu import (
    cudnn as cudnn,
    fmha as fmha,
    kernel as kernel,
    operands as operands,
    tune as tune,
)
from ring_jax_gpu.fmha import Pattern as Pattern
from ring_jax_gpu.hopper import ffi as hopper_ffi, run as hopper_run
from ring_jax_gpu.hopper.ffi import InArray as InArray
from ring_jax_gpu.hopper.stream_k import (
    of_keys as of_keys,
    of_queries as of_queries,
    split_tiles as split_tiles,
    split_tiles_backward as split_tiles_backward,
)
from ring_jax_gpu.launch import (
    KernelName as KernelName,
    Launch as Launch,
    arguments_of as arguments_of,
    arrays_of as arrays_of,
    kernel_of as kernel_of,
    launches_of as launches_of,
    stages_of as stages_of,
)
from ring_jax_gpu.operands import block_index as block_index
from ring_jax_gpu.primitive import triton_launch_p as triton_launch_p
from ring_jax_gpu.tune import main as main
from ring_jax_gpu.xla_flags import XLA_FLAGS as XLA_FLAGS

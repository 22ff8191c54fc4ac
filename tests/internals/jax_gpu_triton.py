"""Of ring_jax_gpu, what needs Triton."""

from ring_jax_gpu.hopper import backward as hopper_backward
from ring_jax_gpu.hopper import forward as hopper_forward

"""Of ring_jax_gpu, what needs Triton."""

from ring_jax_gpu.hopper import backward as hopper_backward, forward as hopper_forward

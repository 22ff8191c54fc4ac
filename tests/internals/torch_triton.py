"""Of ring_torch, what needs Triton."""

from ring_torch import memory_ops as memory_ops, triton_launch as triton_launch
from ring_torch.kernels.fa4 import block_lists as fa4_block_lists
from ring_torch.kernels.fa4.block_lists import BlockLists as BlockLists, block_lists as block_lists
from ring_torch.transports import exchange_kernel as exchange_kernel, one_kernel as one_kernel
from ring_torch.triton_launch import DirectKernel as DirectKernel

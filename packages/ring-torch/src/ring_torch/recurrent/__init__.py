"""Recurrent layers over sharded sequences: linear attention, the delta rule, Mamba-2.

Each function is a method of :class:`ring_torch.ContextParallel`, too, with ``cp`` left out. Below
it a layer is a kernel (``kernels``), which sees chunks of tokens and makes affine maps of a state
(``maps``); ``chunks`` cuts this rank's runs of tokens into them, and ``calls`` takes states from
rank to rank. A new layer is a kernel and a function in ``operations``.
"""

from ring_torch.recurrent.convolution import causal_conv1d as causal_conv1d
from ring_torch.recurrent.operations import (
    gated_delta_rule as gated_delta_rule,
    kda as kda,
    linear_recurrence as linear_recurrence,
    simple_gla as simple_gla,
    ssd as ssd,
)

"""Recurrent layers over sharded sequences: linear attention, delta rules, state space models.

Each function is a method of :class:`ring_torch.ContextParallel`, too, with ``cp`` left out. Below
it a layer is a kernel (``kernels``), which sees chunks of tokens and makes affine maps of a state
(``maps``); ``chunks`` cuts this rank's runs of tokens into them, and ``calls`` takes states from
rank to rank. A new layer is a kernel and a function beside these.
"""

from ring_torch.recurrent.convolution import causal_conv1d as causal_conv1d
from ring_torch.recurrent.linear_attention import (
    gated_delta_rule as gated_delta_rule,
    kda as kda,
    simple_gla as simple_gla,
)
from ring_torch.recurrent.state_spaces import (
    linear_recurrence as linear_recurrence,
    selective_scan as selective_scan,
    ssd as ssd,
)

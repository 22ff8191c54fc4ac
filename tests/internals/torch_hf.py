"""Of ring_torch, what needs transformers."""

from ring_torch.hf.register import _layer_seed as _layer_seed

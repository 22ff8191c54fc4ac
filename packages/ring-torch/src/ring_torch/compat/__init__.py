"""Drop-in replacements for ring_flash_attn 0.1.8, based on :func:`ring_torch.ring_attention`.

``import ring_torch.compat as ring_flash_attn`` is the whole migration: names, order of arguments,
defaults and return values are equal. Each argument is honoured, or it raises
:class:`ring_core.UnsupportedError` before anything is sent. Differences are:

* Results are those of dense attention for every argument: windows and slopes count positions in the
  whole sequence or document, forward and backward drop the same weights, gradients have the dtype
  of the inputs, and the softmax is accumulated in float32.
* ``causal=False`` works in every layout.
* Dropout draws its seed from torch's default CPU generator, which must be in the same state on all
  ranks.
* ``lse`` has no gradient; that of :func:`ring_torch.ring_attention` has one.
* Functions that attend also take ``strategy=``, by name, as :func:`ring_torch.ring_attention` does.

Example::

    import ring_torch.compat as ring_flash_attn

    out = ring_flash_attn.zigzag_ring_flash_attn_func(q, k, v, causal=True, group=group)
"""

from ring_torch.compat.batch import (
    ring_flash_attn_func as ring_flash_attn_func,
    ring_flash_attn_kvpacked_func as ring_flash_attn_kvpacked_func,
    ring_flash_attn_qkvpacked_func as ring_flash_attn_qkvpacked_func,
    stripe_flash_attn_func as stripe_flash_attn_func,
    stripe_flash_attn_kvpacked_func as stripe_flash_attn_kvpacked_func,
    stripe_flash_attn_qkvpacked_func as stripe_flash_attn_qkvpacked_func,
    zigzag_ring_flash_attn_func as zigzag_ring_flash_attn_func,
    zigzag_ring_flash_attn_kvpacked_func as zigzag_ring_flash_attn_kvpacked_func,
    zigzag_ring_flash_attn_qkvpacked_func as zigzag_ring_flash_attn_qkvpacked_func,
)
from ring_torch.compat.documents import (
    ring_flash_attn_varlen_func as ring_flash_attn_varlen_func,
    ring_flash_attn_varlen_kvpacked_func as ring_flash_attn_varlen_kvpacked_func,
    ring_flash_attn_varlen_qkvpacked_func as ring_flash_attn_varlen_qkvpacked_func,
    zigzag_ring_flash_attn_varlen_func as zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func as zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func as zigzag_ring_flash_attn_varlen_qkvpacked_func,
)
from ring_torch.compat.hf import (
    substitute_hf_flash_attn as substitute_hf_flash_attn,
    update_ring_flash_attn_params as update_ring_flash_attn_params,
)
from ring_torch.compat.llama3 import (
    llama3_flash_attn_prepare_cu_seqlens as llama3_flash_attn_prepare_cu_seqlens,
    llama3_flash_attn_varlen_func as llama3_flash_attn_varlen_func,
    llama3_flash_attn_varlen_kvpacked_func as llama3_flash_attn_varlen_kvpacked_func,
    llama3_flash_attn_varlen_qkvpacked_func as llama3_flash_attn_varlen_qkvpacked_func,
)

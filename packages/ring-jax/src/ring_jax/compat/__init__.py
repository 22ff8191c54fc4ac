"""Drop-in replacements for ejkernel's and EasyDeL's attention by :func:`ring_jax.ring_attention`.

:func:`ring_attention` and :func:`flash_attention` take the arguments of ejkernel's functions of
these names (0.0.31 to 0.0.80.3), :class:`RingAttn` those of EasyDeL's operation (0.3.0), under the
names and with the defaults they have there. Each argument is honoured, or it raises
:class:`ring_core.UnsupportedError`, which names it and what to do instead; a keyword that does not
exist is a ``TypeError``. These things differ:

* Results are those of dense attention on every ring size, backward too, and never depend on which
  kernel ran: ``chunk_size`` always is Llama 4's chunked attention and never the size of a tile.
* ``softmax_aux`` is ``[H, n]``, a row per head, or ``[1, n]``, which all heads share, and has a
  gradient. ``[H]`` could be either, and is refused where there are several heads.
* Where keys are longer or shorter than queries, ``causal`` and ``sliding_window`` align the last
  query with the last key; with ``cum_seqlens_q`` they align the first ones.
* A fully masked query gets zeros.
* Dropout drops the same elements on every device count and kernel, but not those that ejkernel
  drops.
"""

from ring_jax.compat.calls import (
    AttentionOutput as AttentionOutput,
    OperationMetadata as OperationMetadata,
    RingAttn as RingAttn,
    flash_attention as flash_attention,
    ring_attention as ring_attention,
)

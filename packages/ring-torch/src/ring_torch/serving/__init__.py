"""Prefill and decode over a K/V cache that is sharded over ranks.

Each function is a method of :class:`ring_torch.ContextParallel`, too, with ``cp`` left out. The
tables of pages are :mod:`ring_core.pages`'; ``state`` has them on the device beside the pages,
``paged`` attends to the pages of one rank, ``merging`` exchanges and merges what ranks have found.
``paged_kernel`` is the same in Triton.
"""

from ring_torch.serving.cache import KVCache as KVCache
from ring_torch.serving.decoding import decode as decode
from ring_torch.serving.explaining import explain_serving as explain_serving
from ring_torch.serving.merging import merge_partials as merge_partials
from ring_torch.serving.prefilling import prefill as prefill

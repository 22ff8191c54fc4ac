"""Arguments of all-to-alls that many messages share; torch changes none of them."""

from __future__ import annotations

from functools import cache, lru_cache

import torch.distributed as dist


@lru_cache(maxsize=1024)
def sizes_of_one_part(world: int, rank: int, numel: int) -> list[int]:
    """Return the sizes of the parts of an all-to-all in which only the part of a rank has numbers.

    Whoever asks again gets the same list, and must not change it.
    """
    return [numel if n == rank else 0 for n in range(world)]


@cache
def all_to_all_options(*, beside: bool) -> dist.AllToAllOptions:
    """Return options of an all-to-all that runs beside the kernels that follow, or before them."""
    options = dist.AllToAllOptions()
    # Without it NCCL runs on the current stream, and no event is needed.
    options.asyncOp = beside
    return options

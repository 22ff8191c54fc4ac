"""Attention of many queries to a rank's pages by flash-attn-4.

It reads pages by their table; where they lie in a row, they are a sequence like any other. It takes
bands that end at the last key, and keys that all queries see; other masks are of
:mod:`ring_torch.serving.paged_kernel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from inspect import signature
from operator import eq
from typing import Any

import torch
from torch import Tensor

from ring_torch.kernels.fa4 import FA4, library
from ring_torch.kernels.library import capability
from ring_torch.serving.paged import PagedKeys, Rules

#: Head dims of keys and values at which version 4.0.0b36 was found right over pages, on Hopper. At
#: 80 and 96 it is wrong there.
_DIMS = ((64, 64), (64, 128), (128, 128), (192, 128), (256, 256))
#: Tiles of queries and heads from which on it is faster than split-KV, on an H200.
_LEAST_TILES = 96
_TILE = 128


def reason_against(q: Tensor, v_dim: int, rules: Rules) -> str:
    """Return why flash-attn-4 does not take queries ``[1, n, H, D]`` of a rank, or nothing."""
    if not q.is_cuda:
        return f"flash-attn-4 needs CUDA, and tensors are on {q.device.type}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"flash-attn-4 takes bfloat16 and float16, got {q.dtype}"
    if (q.shape[3], v_dim) not in _DIMS:
        dims = ", ".join(f"{k}/{v}" for k, v in _DIMS)
        return f"flash-attn-4 over pages takes head dims {dims}, got {q.shape[3]}/{v_dim}"
    if (missing := FA4.unavailable_reason()) is not None:
        return missing
    if capability()[0] != 9 or "page_table" not in _parameters():
        return "flash-attn-4 over pages needs Hopper, and a version that takes tables of pages"
    return reason_against_rules(rules) or reason_against_few(q)


@cache
def _parameters() -> frozenset[str]:
    return frozenset(signature(library.public_module().flash_attn_varlen_func).parameters)


def reason_against_rules(rules: Rules) -> str:
    """Return which option it does not take over pages; nothing if there is none."""
    options = {
        "alibi_slopes": rules.slopes, "chunk_size": rules.mask.chunk_size,
        "softcap": rules.softcap,  # its own is an approximate hyperbolic tangent
    }  # fmt: skip
    given = [name for name, x in options.items() if x is not None]
    return f"flash-attn-4 over pages takes no exact {', '.join(given)}" if given else ""


def reason_against_few(q: Tensor) -> str:
    """Return why split-KV serves so few queries better; nothing if it does not."""
    least = -(-_LEAST_TILES * _TILE // q.shape[2])
    if q.shape[1] >= least:
        return ""
    return (
        f"flash-attn-4 has no split-KV on Hopper, and these are fewer than {least} queries a rank"
    )


def attend(
    q: Tensor, keys: PagedKeys, columns: range, numbers: Sequence[int], stop: int, rules: Rules, *,
    is_band: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return attention over one request's keys on some pages.

    Args:
        q: Queries ``[1, n, H, D]``.
        keys: The pages, one row of a table.
        columns: Columns of the table, whose pages have all these keys.
        numbers: The pages' numbers, as the table has them.
        stop: Number of the keys, counted from the first page's first.
        rules: Options.
        is_band: True if query ``i`` is the one of key ``stop - n + i``, and sees what the mask
            says; otherwise all queries see all keys.

    Returns:
        ``out [1, n, H, Dv]`` in the dtype of ``q``, and ``lse [1, H, n]``, float32.
    """
    left, _ = rules.mask.band
    options: dict[str, Any] = {
        "softmax_scale": rules.scale, "return_lse": True,
        "causal": is_band and left is None,
        "window_size": (left, 0) if is_band and left is not None else (None, None),
    }  # fmt: skip
    first, count = numbers[0], len(numbers)
    in_a_row = range(first, first + count)
    if numbers[-1] == in_a_row[-1] and all(map(eq, numbers, in_a_row)):
        k, v = (x[first : first + count].flatten(0, 1)[None, :stop] for x in (keys.k, keys.v))
        out, lse = library.public_module().flash_attn_func(q, k, v, **options)[:2]
        return out, lse
    table, page_size = keys.table[:, columns.start : columns.stop], keys.k.shape[1]
    if (rest := stop % page_size) != 0:
        # The library multiplies what is behind the last key by 0, so it must be finite: the last
        # page is read where there is room for one, behind all pages, with zeros there.
        spare = len(keys.k) - 1
        for pool in (keys.k, keys.v):
            pool[spare, :rest] = pool[numbers[-1], :rest]
            pool[spare, rest:] = 0
        table = table.clone()
        table[0, -1] = spare
    used = torch.full((1,), stop, dtype=torch.int32, device=q.device)
    out, lse = library.public_module().flash_attn_varlen_func(
        q, keys.k, keys.v, page_table=table, seqused_k=used, **options
    )[:2]
    return out, lse

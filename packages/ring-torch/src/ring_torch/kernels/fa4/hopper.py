"""FlashAttention-4's backward on Hopper by its parts: what launches share is done once.

A call of the library sums dK/dV in float32, in an order of its own (tiles of keys, a head at a
time), and rounds them at the end. A ring adds up several launches' sums, on several GPUs, and
rounds once. The parts are the library's compiled functions, taken from a call on small tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_core import Plan, WorkItem, gather_program
from ring_torch.kernels.flash import aligned, capability
from ring_torch.kernels.flash_library import Window
from ring_torch.records import BackwardInputs, KernelParams, KeyBlock, QueryBlock

KEYS = 128  # a tile of keys: sums of other slices are no slices of sums
Function = Callable[..., None]


class Compiled(NamedTuple):
    """The compiled functions of one configuration."""

    prepare: Function
    main: Function
    rest: tuple[Any, ...]  # what ``main`` is given after the windows
    round_dq: Function
    round_dkv: Function
    tile: int  # queries
    dim: int  # padded head dim of the sum of dQ


class HopperSplitBackward:
    """See :class:`ring_torch.kernels.api.SplitBackward`."""

    def applies(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, params: KernelParams) -> bool:
        """Grouped heads (only then the library sums dK/dV) of dims it does not pad, whole tiles."""
        fits = q.shape[3] == v.shape[3] and q.shape[3] in (64, 128) and q.shape[2] > k.shape[2]
        plain = params.softcap is None and not params.deterministic
        return fits and plain and _is_hopper(q.device) and _in_whole_tiles(plan)

    def accumulate(
        self, rows: QueryBlock, columns: KeyBlock, upstream: BackwardInputs, item: WorkItem, params: KernelParams,
        dq: Tensor, sums: tuple[Tensor, Tensor],
    ) -> None:  # fmt: skip
        """One launch."""
        q, k, v, dout = map(aligned, (rows.q, columns.k, columns.v, upstream.dout))
        batch, length, heads, dim = q.shape
        is_causal = item.window == (None, 0)  # which the compiled function takes beside a window
        sides: Window = (None, None) if is_causal else item.window
        given = tuple(side is not None for side in sides)
        compiled = _compiled(q.dtype, dim, heads // k.shape[2], is_causal, given)
        padded = -(-length // compiled.tile) * compiled.tile
        new = partial(torch.empty, dtype=torch.float32, device=q.device)
        dq_sums = new(batch, heads, padded * compiled.dim)
        delta, lse_log2 = new(2, batch, heads, padded).unbind()
        compiled.prepare(
            upstream.out, dout, delta, upstream.lse.contiguous(), lse_log2, dq_sums,
            None, None, None, None, None, 1.0, None, None,
        )  # fmt: skip
        compiled.main(
            q, k, v, dout, lse_log2, delta, dq_sums,
            *(x.flatten(2) for x in sums), params.scale, None, None, None, None, *sides,
            *compiled.rest,
        )  # fmt: skip
        compiled.round_dq(dq_sums, dq, params.scale, None, None, None, None)

    def round(
        self, sums: tuple[Tensor, Tensor], places: tuple[Tensor, Tensor], params: KernelParams
    ) -> None:
        """The library's own rounding; the number of query heads is nothing to it."""
        compiled = _compiled(places[0].dtype, sums[0].shape[3], 2, True, (False, False))
        for x, place, scale in zip(sums, places, (params.scale, 1.0), strict=True):
            compiled.round_dkv(x.flatten(2), place, scale, None, None, None, None)


@lru_cache(maxsize=64)
def _is_hopper(device: torch.device) -> bool:
    return capability(device.index)[0] == 9


@lru_cache(maxsize=64)
def _in_whole_tiles(plan: Plan) -> bool:
    """Whether all items begin and end at tiles of keys, and all that is fetched, on all ranks."""
    programs = [gather_program(plan, rank) for rank in range(plan.cp_size)]
    items = [item for gather in programs for item in (*gather.items, *gather.in_place)]
    fetches = [one for gather in programs for one in gather.fetches]
    spans = [item.k_slice for item in items]
    spans += [span for one in fetches for span in (one.source, one.target)]
    return all(span.start % KEYS == span.stop % KEYS == 0 for span in spans) and all(
        item.cu_q is None and min(item.k_stop - item.k_start, item.q_stop - item.q_start) > KEYS
        for item in items
    )


@lru_cache(maxsize=32)
def _compiled(
    dtype: torch.dtype, dim: int, group: int, causal: bool, given: tuple[bool, ...]
) -> Compiled:
    """Run the library once on small tensors, and keep what it compiled."""
    module = import_module("flash_attn.cute.interface")
    left, right = (64 if side else None for side in given)
    q, out, dout = (
        torch.zeros(2, 512, 2 * group, dim, dtype=dtype, device="cuda") for _ in range(3)
    )
    k, v = (torch.zeros(2, 512, 2, dim, dtype=dtype, device="cuda") for _ in range(2))
    lse = torch.zeros(2, 2 * group, 512, device="cuda")
    with calls_of(
        module._bwd_preprocess, module._flash_attn_bwd, module._bwd_postprocess_convert
    ) as (before, main, after):
        module._flash_attn_bwd(
            q, k, v, out, dout, lse, softmax_scale=1.0, causal=causal, window_size_left=left,
            window_size_right=right,
        )  # fmt: skip
    ((prepare, _),), ((launch, arguments),) = before, main
    (round_dq, _), (round_dkv, _), _ = after
    tile = module._tile_size_bwd_sm90(dim, dim, causal, not causal and any(given)).m_block_size
    padded = arguments[6].shape[2] // (-(-512 // tile) * tile)
    return Compiled(prepare, launch, tuple(arguments[16:]), round_dq, round_dkv, tile, padded)


Calls = list[tuple[Function, tuple[Any, ...]]]


@contextmanager
def calls_of(*functions: Any) -> Iterator[tuple[Calls, ...]]:
    """What each of some functions of the library calls of what it has compiled, and with what."""
    kept = [function.compile_cache for function in functions]
    calls: tuple[Calls, ...] = tuple([] for _ in functions)
    for function, cache, into in zip(functions, kept, calls, strict=True):
        function.compile_cache = _CallCache(cache, into)
    try:
        yield calls
    finally:
        for function, cache in zip(functions, kept, strict=True):
            function.compile_cache = cache


@dataclass(frozen=True)
class _CallCache:
    """A cache of compiled functions that notes which are called."""

    cache: Any
    calls: Calls

    def __contains__(self, key: Any) -> bool:
        return key in self.cache

    def __setitem__(self, key: Any, function: Any) -> None:
        self.cache[key] = function

    def __getitem__(self, key: Any) -> Function:
        function = self.cache[key]

        def call(*given: Any) -> None:
            self.calls.append((function, given))
            function(*given)

        return call

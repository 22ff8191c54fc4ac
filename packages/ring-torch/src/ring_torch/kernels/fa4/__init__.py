"""``fa4``: FlashAttention-4 (``pip install flash-attn-4``), for Hopper and Blackwell.

On Hopper also its backward by parts, so that what launches share is done once. A call of the
library sums dK/dV in float32, in an order of its own (tiles of keys, a head at a time), and rounds
them at the end. A ring adds up several launches' sums, on several GPUs, and rounds once. The parts
are the library's compiled functions, taken from a call on small tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_core import Capabilities, Plan, Request, RingProgram, WorkItem, gather_program
from ring_torch.kernels.api import Pass, Window
from ring_torch.kernels.fa4.options import Modded
from ring_torch.kernels.flash import FlashKernel, aligned, capability
from ring_torch.kernels.library import DOCUMENT_ARGUMENTS, HeadDims, Options, padded_to
from ring_torch.records import AttentionState, BackwardInputs, KernelParams, KeyBlock, QueryBlock

KEYS = 128  # a tile of keys: sums of other slices are no slices of sums
Function = Callable[..., None]
Calls = list[tuple[Function, tuple[Any, ...]]]
_WIDE = 128  # head dims above have kernels of their own, on Hopper alone
_MOST_LAUNCHES = 256
_COUNTS_PACKED = "4.0.0b36"  # the version whose backward does (`options._packed`)


class Flash4:
    """The functions of ``flash_attn.cute.interface``, and what they compiled for calls so far."""

    def __init__(self) -> None:
        self._launches: dict[object, tuple[Function, tuple[Any, ...], tuple[Any, ...]]] = {}

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, place: AttentionState | None
    ) -> tuple[Tensor, Tensor]:
        """``(out, lse)``.

        The library's own way to a launch takes 0.1 ms of the host and more; what it calls in the
        end is kept for calls that are alike.
        """
        modded = Modded.of("forward", q, v, options)
        if place is None or capability()[0] != 9:
            return _forward(q, k, v, options, modded, None)
        known = (
            q.device, q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype,
            options._replace(mods=None), modded.facts,
        )  # fmt: skip
        if known in self._launches:
            launch, before, after = self._launches[known]
            lse = place.lse if _has_lse(q, v, options) else None
            launch(
                q.detach(), k.detach(), v.detach(), place.out, lse, *before, modded.sinks,
                modded.launch_lists(q), modded.launch_numbers(), *after,
            )  # fmt: skip
        else:
            with calls_of(_module()._flash_attn_fwd) as (calls,):
                _forward(q, k, v, options, modded, place)
            ((launch, given),) = calls
            if len(self._launches) >= _MOST_LAUNCHES:
                del self._launches[next(iter(self._launches))]
            self._launches[known] = launch, given[5:13], given[16:]
        return place.out, place.lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        options: Options, place: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """``(dq, dk, dv)``; of grouped heads and unlike head dims dK and dV are float32.

        For these the library has no backward: each query head gets its keys and values.
        """
        group = q.shape[-2] // k.shape[-2] if q.shape[-1] != v.shape[-1] else 1
        if group > 1:
            k, v = (x.repeat_interleave(group, dim=-2) for x in (k, v))
        modded = Modded.of("backward", q, v, options)
        dq, dk, dv = _module()._flash_attn_bwd(
            q, k, v, out, dout, lse, dq=place, score_mod=modded.score_mod,
            score_mod_bwd=modded.score_mod_bwd, mask_mod=modded.mask_mod,
            block_sparse_tensors=modded.lists, aux_scalars=modded.numbers,
            deterministic=options.deterministic, **_arguments(options),
        )  # fmt: skip
        if group > 1:
            dk, dv = (x.unflatten(-2, (-1, group)).sum(-2, dtype=torch.float32) for x in (dk, dv))
        return dq, dk, dv


def _forward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, modded: Modded, place: AttentionState | None
) -> tuple[Tensor, Tensor]:
    needs_lse = place is None or _has_lse(q, v, options)
    where = {} if place is None else {"out": place.out, "lse": place.lse if needs_lse else None}
    out, lse, *_ = _module()._flash_attn_fwd(
        q.detach(), k.detach(), v.detach(), return_lse=needs_lse, learnable_sink=modded.sinks,
        score_mod=modded.score_mod, mask_mod=modded.mask_mod, block_sparse_tensors=modded.lists,
        aux_scalars=modded.numbers, **where, **_arguments(options),
    )  # fmt: skip
    return out, lse if place is None else place.lse


def _has_lse(q: Tensor, v: Tensor, options: Options) -> bool:
    """Whether a launch writes an ``lse``, too, that nobody may need.

    Without one it is faster at unlike head dims, and slower at like ones.
    """
    return options.needs_lse or q.shape[-1] == v.shape[-1]


def _arguments(options: Options) -> dict[str, Any]:
    left, right = options.window
    return {
        "softmax_scale": options.scale, "window_size_left": left, "window_size_right": right,
        **dict(zip(DOCUMENT_ARGUMENTS, options.documents or (), strict=False)),
    }  # fmt: skip


def _limits(request: Request, program: RingProgram) -> tuple[str, ...]:
    """What it has on Hopper alone, and not together."""
    with_lists = request.segment_ids or program.plan.mask.predicate is not None
    documents = program.item_counts.several_documents
    found = {
        "has segment_ids, predicates and alibi_slopes on Hopper only": (
            (with_lists or request.alibi) and capability()[0] != 9
        ),
        "has alibi_slopes with version 4.0.0b36 only, which counts rows in a way of its own": (
            request.alibi and request.grad and version("flash-attn-4") != _COUNTS_PACKED
        ),
        "is not deterministic with segment_ids or a predicate": with_lists
        and request.deterministic,
        "has no segment_ids together with documents": request.segment_ids and documents,
        "has no alibi_slopes together with documents": request.alibi and documents,
        "the partial tiles of this predicate take more than 64 MiB": (
            program.plan.blocks is not None and program.plan.blocks.tiles is None
        ),
    }
    return tuple(reason for reason, applies in found.items() if applies)


def _head_dims(direction: Pass, head_dim: int, v_head_dim: int) -> HeadDims | None:
    """Head dims at which version 4.0.0b36 is right, measured on Hopper.

    The forward is at all multiples of 16. At 48, 80 and 112 dQ is wrong, and dK and dV of grouped
    heads; with V wider than Q and K the backward does not launch, and 64 beside 128 is wrong with
    documents.
    """
    widest = max(head_dim, v_head_dim)
    if widest > _WIDE and capability()[0] != 9:
        return None
    if direction == "forward" and capability()[0] == 9:
        return HeadDims(padded_to(head_dim, 16), padded_to(v_head_dim, 16))
    if v_head_dim <= _WIDE < head_dim <= 192:
        return HeadDims(192, _WIDE)
    dim = padded_to(widest, 32 if widest <= _WIDE else 16)
    return HeadDims(dim, dim)


@cache
def _module() -> Any:
    return import_module("flash_attn.cute.interface")


@cache
def _missing() -> str | None:
    try:
        found = version("flash-attn-4")
    except PackageNotFoundError:
        return "flash-attn-4 is not installed; pip install flash-attn-4"
    try:
        module = _module()
    except ImportError as error:
        return f"flash-attn-4 {found} does not load: {error}"
    if not hasattr(module, "_bwd_postprocess_convert"):
        return (
            f"flash-attn-4 {found} is installed, but flash-attn 2.8 has put an older "
            f"flash_attn/cute over it; pip install --force-reinstall --no-deps flash-attn-4"
        )
    if capability()[0] not in (9, 10, 11):
        return f"has kernels for compute capability 9.x to 11.x, this is {capability()}"
    return None


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


@contextmanager
def calls_of(*functions: Any) -> Iterator[tuple[Calls, ...]]:
    """What each of some functions of the library calls of what it has compiled, and with what."""
    kept = [function.compile_cache for function in functions]
    calls: tuple[Calls, ...] = tuple([] for _ in functions)
    for function, compiled, into in zip(functions, kept, calls, strict=True):
        function.compile_cache = _CallCache(compiled, into)
    try:
        yield calls
    finally:
        for function, compiled in zip(functions, kept, strict=True):
            function.compile_cache = compiled


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


FA4 = FlashKernel(
    Flash4(),
    Capabilities(
        name="fa4", devices=("cuda",), dtypes=("bfloat16", "float16"), max_head_dim=256,
        mixed_head_dims=True, bands="any", documents=True, segment_ids=True, predicate=True,
        softcap=True, alibi=True, deterministic=True, exact_nan=False,
    ),
    parts=HopperSplitBackward(),
    head_dims=_head_dims,
    unavailable=_missing,
    limits=_limits,
    adds_sinks=True,
    predicate_compile_seconds=10,
)  # fmt: skip

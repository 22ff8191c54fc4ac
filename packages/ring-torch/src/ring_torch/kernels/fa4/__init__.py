"""Kernel ``fa4``: FlashAttention-4 (``pip install flash-attn-4``), for Hopper and Blackwell.

On Hopper it also has a split backward. A backward of the library adds dK/dV up in float32, in an
order of its own (tiles of keys, one head at a time), and rounds them at the end. Split, the sums of
several launches, on several GPUs, are added up first and rounded once. Its two parts call compiled
functions of the library (:mod:`ring_torch.kernels.fa4.split`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from ring_core import Capabilities, Plan, Request, RingProgram, WorkItem, gather_program
from ring_torch.buffers import KVPayload
from ring_torch.kernels.api import BackwardLaunch, OwnSpans
from ring_torch.kernels.fa4 import compiled, private, public, split
from ring_torch.kernels.fa4.options import modded_of
from ring_torch.kernels.flash import FlashKernel
from ring_torch.kernels.library import (
    Direction,
    FlashLibrary,
    ForwardLaunch,
    HeadDims,
    ItemBackward,
    LaunchOptions,
    capability,
    padded_to,
)
from ring_torch.options import Window
from ring_torch.records import (
    AttentionState,
    BackwardInputs,
    KernelParams,
    KeyBlock,
    QueryBlock,
    aligned,
    is_aligned,
)

KEYS = 128  # keys of a tile; inside one the sums have an order of their own and cannot be cut
_WIDEST_COMMON = 128  # wider head dims have kernels of their own, on Hopper alone
_VERSIONS = " or ".join(private.VERSIONS)


class Flash4(FlashLibrary):
    """Calls of the library: by private functions if this version's are known, or else public."""

    def __init__(self) -> None:
        self._compiled = compiled.CompiledFlash4()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: LaunchOptions, dst: AttentionState | None
    ) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)``, in ``dst`` if private functions are called, else in new tensors.

        Private functions may leave ``lse`` unwritten if ``options.needs_lse`` is false.
        """
        if not private.is_known():
            return public.forward(q, k, v, options)
        if dst is None:
            out = q.new_empty((*q.shape[:-1], v.shape[-1]))
            lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
            dst = AttentionState(out, lse)
        # Without lse a launch is faster if the head dims of QK and V differ, and slower if not.
        has_lse = options.needs_lse or q.shape[-1] == v.shape[-1]
        modded = modded_of("forward", q, v, options)
        self._compiled.forward(q, k, v, dst.out, dst.lse if has_lse else None, options, modded)
        return dst.out, dst.lse

    def prepare_forward(
        self, q: Tensor, k: Tensor, v: Tensor, dst: AttentionState, options: LaunchOptions
    ) -> ForwardLaunch | None:
        """Return the compiled function of an earlier forward like this one, if there is any."""
        if not private.is_known() or options.softcap is not None:
            return None
        has_lse = options.needs_lse or q.shape[-1] == v.shape[-1]
        modded = modded_of("forward", q, v, options)
        return self._compiled.prepared_forward(
            q, k, v, dst.out, dst.lse if has_lse else None, options, modded
        )

    def prepare_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        options: LaunchOptions, dst: Tensor,
    ) -> ItemBackward | None:  # fmt: skip
        """Return the compiled functions of an earlier backward like this one, if there are any."""
        if not private.is_known() or q.shape[-1] != v.shape[-1]:
            return None
        if modded_of("backward", q, v, options) != private.PLAIN:
            return None  # compiled functions with mods or lists are not repeated here
        return self._compiled.prepared_backward(dout, q, k, v, out, lse, options, dst)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        options: LaunchOptions, dst: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return ``(dq, dk, dv)``.

        The library has no backward for grouped heads whose head dims of QK and V differ. Then K/V
        are repeated for each query head, and dK/dV, their sums, are float32.
        """
        group = q.shape[-2] // k.shape[-2] if q.shape[-1] != v.shape[-1] else 1
        if group > 1:
            k, v = (x.repeat_interleave(group, dim=-2) for x in (k, v))
        if private.is_known():
            modded = modded_of("backward", q, v, options)
            grads = self._compiled.backward(dout, q, k, v, out, lse, options, modded, dst)
        else:
            grads = public.backward(dout, q, k, v, out, lse, options)
        if group == 1:
            return grads
        dq, *sums = grads
        dk, dv = (x.unflatten(-2, (-1, group)).sum(-2, dtype=torch.float32) for x in sums)
        return dq, dk, dv


def _limits(request: Request, program: RingProgram) -> tuple[str, ...]:
    """Return reasons against a call: options that need Hopper or a version, or do not combine."""
    with_lists = request.segment_ids or program.plan.mask.predicate is not None
    documents = program.item_counts.several_documents
    reasons = {
        "has segment_ids, predicates and alibi_slopes on Hopper only": (
            (with_lists or request.alibi) and capability()[0] != 9
        ),
        f"has segment_ids, predicates and alibi_slopes with flash-attn-4 {_VERSIONS} only": (
            (with_lists or request.alibi) and not private.is_known()
        ),
        "is not deterministic with segment_ids or a predicate": with_lists
        and request.deterministic,
        "has no segment_ids together with documents": request.segment_ids and documents,
        "has no alibi_slopes together with documents": request.alibi and documents,
        "the partial tiles of this predicate take more than 64 MiB": (
            program.plan.blocks is not None and program.plan.blocks.tiles is None
        ),
    }
    return tuple(reason for reason, applies in reasons.items() if applies)


def _head_dims(direction: Direction, head_dim: int, v_head_dim: int) -> HeadDims | None:
    """Return the head dims to pad to, at which version 4.0.0b36 was found right on Hopper.

    It is ``None`` if there are none on this GPU.

    The forward is right at all multiples of 16. In the backward dQ is wrong at 48, 80 and 112, and
    so are dK and dV of grouped heads; V wider than Q and K does not launch; and 64 beside 128 is
    wrong with documents.
    """
    widest = max(head_dim, v_head_dim)
    if widest > _WIDEST_COMMON and capability()[0] != 9:
        return None
    if direction == "forward" and capability()[0] == 9:
        return HeadDims(padded_to(head_dim, 16), padded_to(v_head_dim, 16))
    if v_head_dim <= _WIDEST_COMMON < head_dim <= 192:
        return HeadDims(192, _WIDEST_COMMON)
    dim = padded_to(widest, 32 if widest <= _WIDEST_COMMON else 16)
    return HeadDims(dim, dim)


@cache
def _missing() -> str | None:
    """Return why flash-attn-4 cannot be called on this machine, or ``None``."""
    try:
        installed = version("flash-attn-4")
    except PackageNotFoundError:
        return "flash-attn-4 is not installed; pip install flash-attn-4"
    try:
        is_overwritten = public.is_overwritten()
    except ImportError as error:
        return f"flash-attn-4 {installed} does not load: {error}"
    if is_overwritten:
        return (
            f"flash-attn-4 {installed} is installed, but flash-attn 2.8 has put an older "
            f"flash_attn/cute over it; pip install --force-reinstall --no-deps flash-attn-4"
        )
    return None


def _wrong_gpu() -> str | None:
    if capability()[0] in (9, 10, 11):
        return None
    return f"has kernels for compute capability 9.x to 11.x, this is {capability()}"


class HopperSplitBackward:
    """Split backward on Hopper: a :class:`ring_torch.kernels.api.SplitBackward`."""

    tile = KEYS

    def applies(self, plan: Plan, request: Request, *, splits: bool, tile: int) -> bool:
        """Return True if every launch of a call can use the split backward, the same on all ranks.

        Heads have to be grouped, as only then the library keeps sums of dK/dV; head dims have to be
        some that it does not pad; and items and fetches have to consist of whole tiles of keys. It
        is False with a softcap or ``deterministic``, on other GPUs, and for other versions of the
        library than :mod:`ring_torch.kernels.fa4.private` knows.
        """
        dim, is_plain = request.head_dim, not (request.softcap or request.deterministic)
        fits = dim == request.v_head_dim and dim in (64, 128) and request.q_heads > request.kv_heads
        is_supported = private.is_known() and capability()[0] == 9
        return is_supported and fits and is_plain and in_whole_tiles(plan, splits, tile)

    def accumulate(
        self, rows: QueryBlock, columns: KeyBlock, upstream: BackwardInputs, item: WorkItem, params: KernelParams,
        dq: Tensor, sums: tuple[Tensor, Tensor],
    ) -> None:  # fmt: skip
        """Run an item's backward: write ``dq``, and add to the sums of dK and dV."""
        tensors = rows.q, columns.k, columns.v, upstream.dout, upstream.out
        q, k, v, dout, out = map(aligned, tensors)
        functions, sides = _split_functions(q, k, item)
        lse = upstream.lse.contiguous()
        functions.accumulate(q, k, v, dout, out, lse, dq, sums, params.scale, sides)

    def prepare(
        self, rows: QueryBlock, columns: KeyBlock, upstream: BackwardInputs,
        items: Sequence[WorkItem], params: KernelParams,
    ) -> BackwardLaunch | None:  # fmt: skip
        """Return one function that runs the backward of all items.

        Items have to have equally many rows, one item's behind the other's, and all rows together.
        It is ``None`` otherwise, and for tensors that are not aligned, items whose functions have
        unlike tiles, and several items of several sequences.
        """
        q, k = rows.q, columns.k
        count = q.shape[1] // max(len(items), 1)
        in_turn = all(
            (item.q_start, item.q_stop) == (n * count, (n + 1) * count)
            for n, item in enumerate(items)
        )
        whole_rows = in_turn and count * len(items) == q.shape[1]
        tensors = q, k, columns.v, upstream.dout, upstream.out
        if not (whole_rows and all(map(is_aligned, tensors))) or (
            q.shape[0] > 1 and len(items) > 1
        ):
            return None
        functions = [_split_functions(q, k, item) for item in items]
        first = functions[0][0]
        if any((x.tile, x.dim) != (first.tile, first.dim) for x, _ in functions):
            return None
        launches = [
            split.SplitLaunch(
                item.k_start, item.k_stop - item.k_start, params.scale, sides, compiled
            )
            for item, (compiled, sides) in zip(items, functions, strict=True)
        ]  # fmt: skip
        return split.AllLaunches(launches, tuple(columns.k.shape))

    def prepare_round(
        self, spans: OwnSpans, keys: KVPayload, params: KernelParams
    ) -> Callable[[Tensor, Tensor, Tensor], None]:
        """Return a function that rounds all spans into whole ``dk`` and ``dv``.

        For one sequence that takes one launch each for dK and dV, with the spans as its batch; for
        several, two launches a span.
        """
        return split.RoundAll(spans, params.scale, keys)

    def round(
        self, sums: tuple[Tensor, Tensor], dsts: tuple[Tensor, Tensor], params: KernelParams
    ) -> None:
        """Round sums into ``dsts`` by the library's own function.

        It is the same for any number of query heads, and taken from a compilation for two.
        """
        dtype, dim = dsts[0].dtype, sums[0].shape[3]
        functions = split.rounding_functions(dtype, dim)
        for x, dst, scale in zip(sums, dsts, (params.scale, 1.0), strict=True):
            functions.round(x, dst, scale)


def _split_functions(q: Tensor, k: Tensor, item: WorkItem) -> tuple[split.SplitFunctions, Window]:
    """Return the compiled functions of an item, and its window in the form that they take."""
    is_causal = item.window == (None, 0)  # compiled functions have a flag for it
    sides: Window = (None, None) if is_causal else item.window
    bounded = tuple(side is not None for side in sides)
    group = q.shape[2] // k.shape[2]
    return split.split_functions(q.dtype, q.shape[3], group, is_causal, bounded), sides


def in_whole_tiles(plan: Plan, splits: bool, tile: int) -> bool:
    """Return True if all items and fetches of all ranks begin and end at edges of tiles of keys.

    Items must also have more than a tile of queries and of keys, and be of one document. ``splits``
    and ``tile`` are those of the gather programs; edges are checked by the library's tiles.
    """
    programs = [
        gather_program(plan, rank, splits=splits, tile=tile) for rank in range(plan.cp_size)
    ]
    items = [item for gather in programs for item in (*gather.items, *gather.in_place)]
    fetches = [fetch for gather in programs for fetch in gather.fetches]
    spans = [item.k_slice for item in items]
    spans += [span for fetch in fetches for span in (fetch.source, fetch.target)]
    return all(span.start % KEYS == span.stop % KEYS == 0 for span in spans) and all(
        item.cu_q is None and min(item.k_stop - item.k_start, item.q_stop - item.q_start) > KEYS
        for item in items
    )


FA4 = FlashKernel(
    Flash4(),
    Capabilities(
        name="fa4", devices=("cuda",), dtypes=("bfloat16", "float16"), max_head_dim=256,
        mixed_head_dims=True, bands="any", documents=True, segment_ids=True, predicate=True,
        softcap=True, alibi=True, deterministic=True, exact_nan=False,
    ),
    split_backward=HopperSplitBackward(),
    head_dims=_head_dims,
    unavailable=_missing,
    wrong_gpu=_wrong_gpu,
    limits=_limits,
    adds_sinks=True,
    predicate_compile_seconds=10,
)  # fmt: skip

"""Kernel ``fa4``: FlashAttention-4 (``pip install flash-attn-4``), for Hopper and Blackwell.

On Hopper it also has a split backward. A backward of the library adds dK/dV up in float32, in an
order of its own (tiles of keys, one head at a time), and rounds them at the end. Split, the sums of
several launches, on several GPUs, are added up first and rounded once. Its two parts call compiled
functions of the library (:mod:`ring_torch.kernels.fa4.library`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise

import torch
from torch import Tensor

from ring_core import Capabilities, Plan, Request, RingProgram, WorkItem, gather_program
from ring_torch.accumulate import Columns, ColumnSums, Rows
from ring_torch.buffers import KVPayload
from ring_torch.kernels.api import OwnSpans
from ring_torch.kernels.fa4 import library
from ring_torch.kernels.fa4.options import modded_of
from ring_torch.kernels.flash import FlashKernel, gpu_reason
from ring_torch.kernels.library import (
    BackwardLaunch,
    Direction,
    FlashLibrary,
    ForwardLaunch,
    HeadDims,
    LaunchOptions,
    capability,
    padded_to,
)
from ring_torch.launches.cache import keep, tensors_key
from ring_torch.options import Window
from ring_torch.records import (
    AttentionState,
    Backward,
    BackwardInputs,
    KernelParams,
    KeyBlock,
    QueryBlock,
    aligned,
    is_aligned,
)

KEYS = 128  # keys of a tile; inside one the sums have an order of their own and cannot be cut
_WIDEST_COMMON = 128  # wider head dims have kernels of their own, on Hopper alone
_VERSIONS = " or ".join(library.VERSIONS)


class Flash4(FlashLibrary):
    """Calls of the library: by private functions if this version's are known, or else public.

    Compiled functions that a call has used are remembered, for all later calls like it; ``None`` is
    kept of a call that cannot be repeated directly: it is not recorded again.
    """

    def __init__(self) -> None:
        self._forwards: dict[object, library.CompiledForward | None] = {}
        self._backwards: dict[object, library.CompiledBackward | None] = {}

    @property
    def writes(self) -> bool:
        """True for versions whose private functions are known."""
        return library.is_known()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: LaunchOptions, dst: AttentionState | None
    ) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)``, in ``dst`` if private functions are called, else in new tensors.

        Private functions may leave ``lse`` unwritten if ``options.needs_lse`` is false.
        """
        if not library.is_known():
            return library.public_forward(q, k, v, options)
        if dst is None:
            out = q.new_empty((*q.shape[:-1], v.shape[-1]))
            lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
            dst = AttentionState(out, lse)
        arguments, key = _of_forward(q, k, v, dst, options)
        compiled = self._forwards.get(key)
        if compiled is not None:
            compiled.function(*library.forward_arguments(*arguments, compiled.window))
        elif key is None or key in self._forwards:
            library.library_forward(*arguments)
        else:
            keep(self._forwards, key, library.recorded_forward(*arguments))
        return dst

    def repeated_forward(
        self, q: Tensor, k: Tensor, v: Tensor, dst: AttentionState, options: LaunchOptions
    ) -> ForwardLaunch | None:
        """Return the compiled function of an earlier forward like this one, if there is any.

        There is none of calls with documents, lists or functions.
        """
        arguments, key = _of_forward(q, k, v, dst, options)
        compiled, modded = self._forwards.get(key), arguments[-1]
        is_plain = options.documents is None and modded._replace(sinks=None) == library.PLAIN
        if compiled is None or not is_plain:
            return None
        return library.repeated_forward(compiled.function, *arguments[:6], compiled.window)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        options: LaunchOptions,
        dst: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(dq, dk, dv)``.

        The library has no backward for grouped heads whose head dims of QK and V differ. Then K/V
        are repeated for each query head, and dK/dV, their sums, are float32.
        """
        group = q.shape[-2] // k.shape[-2]
        if group > 1 and q.shape[-1] != v.shape[-1]:
            k, v = (x.repeat_interleave(group, dim=-2) for x in (k, v))
            dq, *sums = self.backward(dout, q, k, v, out, lse, options, dst)
            dk, dv = (x.unflatten(-2, (-1, group)).sum(-2, dtype=torch.float32) for x in sums)
            return dq, dk, dv
        tensors = dout, q, k, v, out, lse
        if not library.is_known():
            return library.public_backward(*tensors, options)
        arguments, key = _of_backward(*tensors, options, dst)
        compiled = self._backwards.get(key)
        if compiled is not None:
            return library.launched_backward(compiled, options, arguments[7], *tensors, dst)
        if key is None or key in self._backwards:
            return library.library_backward(*arguments)
        grads, compiled = library.recorded_backward(*arguments)
        keep(self._backwards, key, compiled)
        return grads

    def repeated_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        options: LaunchOptions,
        dst: Tensor,
    ) -> BackwardLaunch | None:
        """Return the compiled functions of an earlier backward like this one, if there are any.

        There are none of calls with documents, lists or functions.
        """
        if q.shape[-1] != v.shape[-1] or options.documents is not None:
            return None
        arguments, key = _of_backward(dout, q, k, v, out, lse, options, dst)
        compiled, modded = self._backwards.get(key), arguments[7]
        if compiled is None or modded != library.PLAIN:
            return None
        return partial(library.launched_backward, compiled, options, modded)


def _of_forward(
    q: Tensor, k: Tensor, v: Tensor, dst: AttentionState, options: LaunchOptions
) -> tuple[library.ForwardArguments, object]:
    """Return the arguments of a forward, and its key; ``None`` if it cannot be repeated."""
    # Without lse a launch is faster if the head dims of QK and V differ, and slower if not.
    lse = dst.lse if options.needs_lse or q.shape[-1] == v.shape[-1] else None
    modded = modded_of("forward", q, v, options)
    arguments = q, k, v, dst.out, lse, options, modded
    can_record = library.can_record(q, k, v, dst.out, modded.sinks)
    key = library.launch_key(options, modded, q, k, v, dst.out, lse) if can_record else None
    return arguments, key


def _of_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: LaunchOptions,
    dst: Tensor | None,
) -> tuple[library.BackwardArguments, object]:
    """Return the arguments of a backward, and its key; ``None`` if it cannot be repeated."""
    modded = modded_of("backward", q, v, options)
    key = None
    if library.can_record(dout, q, k, v, out, lse, dst):
        key = library.launch_key(options, modded, q, k, v, dout, out, lse, dst)
    return (dout, q, k, v, out, lse, options, modded, dst), key


def _limits(request: Request, program: RingProgram) -> tuple[str, ...]:
    """Return reasons against a call: options that need Hopper or a version, or do not combine."""
    with_lists = request.segment_ids or program.plan.mask.predicate is not None
    documents = program.item_counts.several_documents
    reasons = {
        "has segment_ids, predicates and alibi_slopes on Hopper only": (
            (with_lists or request.alibi) and capability()[0] != 9
        ),
        f"has segment_ids, predicates and alibi_slopes with flash-attn-4 {_VERSIONS} only": (
            (with_lists or request.alibi) and not library.is_known()
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
        is_overwritten = library.is_overwritten()
    except ImportError as error:
        return f"flash-attn-4 {installed} does not load: {error}"
    if is_overwritten:
        return (
            f"flash-attn-4 {installed} is installed, but flash-attn 2.8 has put an older "
            f"flash_attn/cute over it; pip install --force-reinstall --no-deps flash-attn-4"
        )
    return None


class HopperSplitBackward:
    """Split backward on Hopper: a :class:`ring_torch.kernels.api.SplitBackward`."""

    tile = KEYS

    def applies(self, plan: Plan, request: Request, *, splits: bool, tile: int) -> bool:
        """Return True if every launch of a call can use the split backward, the same on all ranks.

        Heads have to be grouped, as only then the library keeps sums of dK/dV; head dims have to be
        some that it does not pad; and items and fetches have to consist of whole tiles of keys. It
        is False with a softcap or ``deterministic``, on other GPUs, and for other versions of the
        library than :mod:`ring_torch.kernels.fa4.library` knows.
        """
        dim, is_plain = request.head_dim, not (request.softcap or request.deterministic)
        fits = dim == request.v_head_dim and dim in (64, 128) and request.q_heads > request.kv_heads
        is_supported = library.is_known() and capability()[0] == 9
        return is_supported and fits and is_plain and in_whole_tiles(plan, splits, tile)

    def backward(self, items: Sequence[WorkItem], params: KernelParams) -> Backward:
        """Return the launch of items: what does not depend on keys runs once for all rows.

        Items that do not have equally many rows, one item's behind the other's, are launched one by
        one; so are several items of several sequences, and those whose functions have unlike tiles.
        """
        known: dict[object, tuple[bool, list[library.AllLaunches]]] = {}

        def run(
            rows: QueryBlock,
            held: list[KeyBlock],
            upstream: BackwardInputs,
            row_sums: Rows,
            column_sums: ColumnSums,
        ) -> tuple[Tensor, Tensor] | None:
            assert isinstance(column_sums, Columns)
            q, k, v, dout, out = rows.q, held[0].k, held[0].v, upstream.dout, upstream.out
            key = tensors_key(q, k, v, dout, out)
            if (kept := known.get(key)) is None:
                are_ready = all(map(is_aligned, (q, k, v, dout, out)))
                kept = are_ready, _split_launches(items, params, q, k)
                keep(known, key, kept)
            are_ready, launches = kept
            if not are_ready:
                rows = rows._replace(q=aligned(q))
                held[0] = held[0]._replace(k=aligned(k), v=aligned(v))
                upstream = upstream._replace(dout=aligned(dout), out=aligned(out))
            q, length = rows.q, q.shape[1]
            del k, v, dout, out  # `held` alone holds the keys
            # The last launches go first, as in the forward in reverse.
            for launch in launches[::-1]:
                row_stats, some, tokens = None, upstream, launch.rows  # frees those of the last
                if tokens.stop - tokens.start < length:
                    q, some = rows.take(tokens).q, upstream.take(tokens)
                row_stats = launch(
                    q,
                    held,
                    some,
                    column_sums.flat,
                    partial(row_sums.memory, tokens),
                    is_last=launch is launches[0],
                )
            return row_stats if len(launches) == 1 else None

        return Backward(run, adds=False)

    def rounding(
        self, spans: OwnSpans, keys: KVPayload, params: KernelParams
    ) -> Callable[[Tensor, Tensor, Tensor], None]:
        """Return a function that rounds all spans into whole ``dk`` and ``dv``.

        For one sequence that takes one launch each for dK and dV, with the spans as its batch; for
        several, two launches a span.
        """
        return library.RoundAll(spans, params.scale, keys)


def _split_launches(
    items: Sequence[WorkItem], params: KernelParams, q: Tensor, k: Tensor
) -> list[library.AllLaunches]:
    """Return the launches of items, together if they can be, in the order of the items."""
    launches = []
    for item in items:
        is_causal = item.window == (None, 0)  # compiled functions have a flag for it
        sides: Window = (None, None) if is_causal else item.window
        bounded = tuple(side is not None for side in sides)
        functions = library.split_functions(
            q.dtype, q.shape[3], q.shape[2] // k.shape[2], is_causal, bounded
        )
        keys = item.k_stop - item.k_start
        launches.append(library.SplitLaunch(item.k_start, keys, params.scale, sides, functions))
    rows, shape = [item.q_slice for item in items], tuple(k.shape)
    sizes = {x.stop - x.start for x in rows}
    in_turn = len(sizes) < 2 and all(a.stop == b.start for a, b in pairwise(rows))
    alike = len({(x.functions.tile, x.functions.dim) for x in launches}) == 1
    if in_turn and alike and (q.shape[0] == 1 or len(items) == 1):
        return [library.AllLaunches(slice(rows[0].start, rows[-1].stop), launches, shape)]
    return [library.AllLaunches(x, [y], shape) for x, y in zip(rows, launches, strict=True)]


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
        name="fa4",
        devices=("cuda",),
        dtypes=("bfloat16", "float16"),
        max_head_dim=256,
        mixed_head_dims=True,
        bands="any",
        documents=True,
        segment_ids=True,
        predicate=True,
        softcap=True,
        alibi=True,
        deterministic=True,
        exact_nan=False,
    ),
    split_backward=HopperSplitBackward(),
    head_dims=_head_dims,
    unavailable=_missing,
    wrong_gpu=partial(gpu_reason, 9, 10, 11),
    limits=_limits,
    adds_sinks=True,
)

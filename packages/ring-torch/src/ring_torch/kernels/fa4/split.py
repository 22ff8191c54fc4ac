"""Backward of flash-attn-4 whose dK/dV are summed over several launches, and rounded once.

It calls the library's compiled functions (:mod:`ring_torch.kernels.fa4.compiled`) one by one, with
sums in place of gradients. Keys and values have one head dim, ``D``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_core.base.arguments import not_none
from ring_torch.buffers import KVPayload
from ring_torch.kernels.api import OwnSpans
from ring_torch.kernels.fa4.private import (
    PLAIN,
    Function,
    backward_tile_queries,
    plain_main_arguments,
    prepare_arguments,
    recorded_backward,
    round_arguments,
)
from ring_torch.kernels.library import LaunchOptions
from ring_torch.launches.cache import KeptViews
from ring_torch.options import Window
from ring_torch.records import BackwardInputs, KeyBlock


class SplitLaunch(NamedTuple):
    """A launch of a split backward over some columns of the gathered keys.

    Attributes:
        k_start: First column.
        keys: Number of columns.
        scale: Factor of the scores; ``round_dq`` applies it to dQ, :class:`RoundAll` to dK.
        window: ``(left, right)`` in the form that ``main`` takes.
        functions: Compiled functions of the launch; those of all launches have one tile.
    """

    k_start: int
    keys: int
    scale: float
    window: Window
    functions: SplitFunctions


class SplitFunctions(NamedTuple):
    """Compiled functions of a split backward, which sums dK/dV over several launches.

    ``prepare`` computes delta and clears the sum of dQ; ``main`` adds to the sums of dQ, dK and dV;
    the other two scale a float32 sum and round it into a gradient.
    """

    prepare: Function
    main: Function
    after_window: tuple[Any, ...]  # arguments of ``main`` after the window
    round_dq: Function
    round_dkv: Function
    tile: int  # queries of a tile
    dim: int  # padded head dim of the sum of dQ


class AllLaunches:
    """Runs several launches over their rows together.

    Of R launches the n-th has rows ``n * L / R`` to ``(n + 1) * L / R`` of ``q [B, L, H, D]``, with
    B = 1 if there are several. What does not depend on keys runs once for all rows, as a batch of
    R: ``main`` alone is launched for each.

    Attributes:
        rows: The rows of all launches.
    """

    def __init__(
        self, rows: slice, launches: Sequence[SplitLaunch], k_shape: tuple[int, ...]
    ) -> None:
        """Take the rows, the launches, and the shape of k of all gathered columns."""
        self.rows, self._launches, self._k_shape = rows, launches, k_shape
        self._sums = KeptViews(self._sums_of_launches)

    def _sums_of_launches(self, sums: Tensor) -> list[Tensor]:
        """Return the sums of dK and dV of each launch's columns, as the library lays them out.

        ``sums`` is one flat buffer: dK of all sequences ``[B, K, columns, D]``, then dV.
        """
        batch, columns, kv_heads, dim = self._k_shape
        head_stride, start = columns * dim, sums.storage_offset()
        sequence_stride = kv_heads * head_stride
        return [
            sums.as_strided(
                (batch, kv_heads, launch.keys * dim), (sequence_stride, head_stride, 1),
                start + launch.k_start * dim + first,
            )
            for launch in self._launches
            for first in (0, batch * sequence_stride)
        ]  # fmt: skip

    def __call__(
        self, q: Tensor, held: list[KeyBlock], upstream: BackwardInputs, sums: Tensor,
        new_dq: Callable[[], Tensor | None], *, is_last: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Add to the sums of dK and dV, write dQ, and return ``(lse, delta)``.

        The latter are ``[B * R, H, L / R]``. With ``is_last`` the columns that are held are dropped
        when all launches are queued.
        """
        (dout, out, lse, _), columns = upstream, held[0]
        batch, length, heads, dim = q.shape
        runs, functions = len(self._launches), self._launches[0].functions
        rows = length // runs
        run_batch, shape = batch * runs, (batch * runs, rows, heads, dim)
        padded = -(-rows // functions.tile) * functions.tile
        # In float32, as lse is. `new_empty(*sizes)` takes the host half the time of `torch.empty`.
        dq_sums = lse.new_empty(run_batch, heads, padded * functions.dim)
        delta, lse_log2 = lse.new_empty(2, run_batch, heads, padded).unbind()
        lse = lse.contiguous()
        if runs > 1:
            # Rows of a launch become a batch row of their own, as in the views of q and dout.
            # `prepare` takes any strides of lse but the last, which is 1.
            lse = lse.as_strided((runs, heads, rows), (rows, length, 1))
        functions.prepare(
            *prepare_arguments(
                out.view(shape), dout.view(shape), delta, lse, lse_log2, dq_sums, None
            )
        )
        tensors = [x.split_with_sizes([rows] * runs, 1) for x in (q, dout)]
        tensors += [x.split_with_sizes([batch] * runs) for x in (lse_log2, delta, dq_sums)]
        kv_sums = self._sums(sums)
        # `main` adds to whatever is in `sums`: they are not cleared between launches. The last
        # launch goes first, as in the forward in reverse.
        for launch, q_n, dout_n, *rest in reversed(
            [*zip(self._launches, *tensors, kv_sums[::2], kv_sums[1::2], strict=True)]
        ):
            launch.functions.main(
                *plain_main_arguments(
                    q_n, columns.spanned(launch.k_start, launch.keys), dout_n, rest, launch.scale,
                    launch.window, launch.functions.after_window,
                )
            )  # fmt: skip
        # dQ is complete when all launches have run: one rounding for all rows, into what may be
        # memory of the K/V. Launches on one stream keep their order.
        del columns
        if is_last:
            held.clear()
        dq = not_none(new_dq()).view(shape)
        functions.round_dq(*round_arguments(dq_sums, dq, self._launches[0].scale, None))
        return lse, delta if padded == rows else delta.narrow(2, 0, rows)


class RoundAll:
    """Rounds the sums of own keys, head-major in a flat buffer, into ``dk`` and ``dv``.

    The spans become the batch of one launch; with several sequences each span has its own.
    """

    def __init__(self, spans: OwnSpans, scale: float, keys: KVPayload) -> None:
        """Take the spans, the factor of the scores, which dK gets, and the shape of own K/V."""
        self._spans, self._scale, self._keys = spans, scale, keys
        self._sums = KeptViews(self._sums_of_spans)
        # Sums and gradients do not overlap, so the launches may run in any order.
        self._launches = 1 if keys.batch == 1 else spans.number

    @cached_property
    def _functions(self) -> SplitFunctions:
        # Not before the first launch: a call may be prepared, or traced, without its GPU.
        return rounding_functions(self._keys.dtype, self._keys.dim)

    def _sums_of_spans(self, sums: Tensor) -> list[Tensor]:
        """Return the sums of dK and of dV of each launch's spans."""
        batch, heads, dim = self._keys.batch, self._keys.heads, self._keys.dim
        spans = self._spans
        head = spans.length * dim
        first, whole = sums.storage_offset() + spans.target * dim, batch * heads * head
        # With one sequence spans are the batch; otherwise the sequences, which lie that far apart.
        count, step = batch, heads * head
        if batch == 1:
            count, step = spans.number, spans.target_step * dim
        return [
            sums.as_strided(
                (count, heads, spans.keys * dim), (step, head, 1),
                first + n * spans.target_step * dim + start,
            )
            for n in range(self._launches)
            for start in (0, whole)
        ]  # fmt: skip

    def __call__(self, sums: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Write the spans of ``dk`` and ``dv``, gradients of all own keys."""
        batch, heads, dim, spans = self._keys.batch, self._keys.heads, self._keys.dim, self._spans
        count = spans.number if batch == 1 else batch
        scaled = [(dk, self._scale), (dv, 1.0)] * self._launches
        for n, (own_sums, (grad, scale)) in enumerate(zip(self._sums(sums), scaled, strict=True)):
            sequence, token, head, _ = grad.stride()
            first = spans.source + n // 2 * spans.source_step
            target = grad.as_strided(
                (count, spans.keys, heads, dim),
                (spans.source_step * token if batch == 1 else sequence, token, head, 1),
                grad.storage_offset() + first * token,
            )
            self._functions.round_dkv(*round_arguments(own_sums, target, scale, None))


def rounding_functions(dtype: torch.dtype, dim: int) -> SplitFunctions:
    """Return compiled functions whose ``round_dkv`` rounds sums of a head dim.

    It is the same for any number of query heads, and taken from a compilation for two.
    """
    return split_functions(dtype, dim, 2, True, (False, False))


@lru_cache(maxsize=32)
def split_functions(
    dtype: torch.dtype, dim: int, group: int, is_causal: bool, bounded: tuple[bool, ...]
) -> SplitFunctions:
    """Run the library's backward once on small tensors, and return the functions that it compiled.

    It is only for versions of the library that :mod:`ring_torch.kernels.fa4.private` allows: of
    others the calls would be taken apart wrongly.

    Args:
        dtype: The dtype of q, k and v.
        dim: The head dim.
        group: Query heads of a K/V head.
        is_causal: True if the band is causal, which compiled functions are told besides a window.
        bounded: True for each side of the window, left and right, that is bounded.
    """
    left, right = (64 if side else None for side in bounded)
    options = LaunchOptions(1.0, None, (None, 0) if is_causal else (left, right), None, False)
    # Any numbers will do: only the functions are kept, which depend on dtypes, dims and the band.
    q, out, dout = (
        torch.zeros(2, 512, 2 * group, dim, dtype=dtype, device="cuda") for _ in range(3)
    )
    k, v = (torch.zeros(2, 512, 2, dim, dtype=dtype, device="cuda") for _ in range(2))
    lse = torch.zeros(2, 2 * group, 512, dtype=torch.float32, device="cuda")
    compiled = not_none(recorded_backward(dout, q, k, v, out, lse, options, PLAIN, None)[1])
    rows = backward_tile_queries(dim, is_causal=is_causal, is_local=not is_causal and any(bounded))
    # Read off the library's own sums of dQ: it pads head dims by rules of its own.
    padded = compiled.dq_sums[2] // (-(-512 // rows) * rows)
    return SplitFunctions(
        compiled.prepare, compiled.main, compiled.after_window, compiled.round_dq,
        not_none(compiled.round_dkv)[0], rows, padded,
    )  # fmt: skip

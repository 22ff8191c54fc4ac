"""Backward of flash-attn-4 whose dK/dV are summed over several launches, and rounded once.

It calls the library's compiled functions (:mod:`ring_torch.kernels.fa4.compiled`) one by one, with
sums in place of gradients. Keys and values have one head dim, ``D``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_core.base.arguments import not_none
from ring_torch.kernels.api import Columns, OwnSpans
from ring_torch.kernels.fa4.private import (
    Function,
    MainArguments,
    calls_of,
    interface,
    plain_main_arguments,
    prepare_arguments,
    round_arguments,
)
from ring_torch.options import Window


class SplitLaunch(NamedTuple):
    """A launch of a split backward over some columns of the gathered keys.

    Attributes:
        k_start: First column.
        keys: Number of columns.
        scale: Factor of the scores; ``round_dq`` applies it to dQ, :func:`round_all` to dK.
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

    def accumulate(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor, dq: Tensor,
        sums: tuple[Tensor, Tensor], scale: float, window: Window,
    ) -> None:  # fmt: skip
        """Write ``dq``, and add to the sums of dK and dV, ``[B, K, m, D]`` each."""
        # `main` adds to whatever is in `sums`: they are not cleared between launches.
        batch, length, heads, _ = q.shape
        padded = -(-length // self.tile) * self.tile
        floats: Any = {"dtype": torch.float32, "device": q.device}
        dq_sums = torch.empty((batch, heads, padded * self.dim), **floats)
        delta, lse_log2 = torch.empty((2, batch, heads, padded), **floats).unbind()
        self.prepare(*prepare_arguments(out, dout, delta, lse, lse_log2, dq_sums, None))
        buffers = lse_log2, delta, dq_sums, *(x.flatten(2) for x in sums)
        self.main(*plain_main_arguments(q, (k, v), dout, buffers, scale, window, self.after_window))
        self.round_dq(*round_arguments(dq_sums, dq, scale, None))

    def round(self, x: Tensor, grad: Tensor, scale: float) -> None:
        """Round a sum ``[B, K, m, D]``, times ``scale``, into a gradient ``[B, m, K, D]``."""
        self.round_dkv(*round_arguments(x.flatten(2), grad, scale, None))


def accumulate_all(
    launches: Sequence[SplitLaunch], k_shape: tuple[int, ...], q: Tensor, columns: Columns,
    dout: Tensor, out: Tensor, lse: Tensor, dq: Tensor, sums: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run all launches of a rank: write ``dq``, add to the sums of dK and dV.

    Return ``(lse, delta)``, ``[B * R, H, L / R]`` for R launches. ``k_shape`` is that of k of all
    gathered columns, and ``sums`` one flat buffer, dK of all sequences ``[B, K, columns, D]`` and
    then dV in the same shape.

    Each launch has the next ``L / R`` rows of ``q [B, L, H, D]``, with B = 1 if there are
    several. What does not depend on keys runs once for all rows, as a batch of R: ``main``
    alone is launched for each.
    """
    batch, length, heads, dim = q.shape
    runs, functions = len(launches), launches[0].functions
    rows = length // runs
    run_batch, shape = batch * runs, (batch * runs, rows, heads, dim)
    padded = -(-rows // functions.tile) * functions.tile
    # In float32, as lse is. `new_empty(*sizes)` takes the host half the time of `torch.empty`.
    dq_sums = lse.new_empty(run_batch, heads, padded * functions.dim)
    delta, lse_log2 = lse.new_empty(2, run_batch, heads, padded).unbind()
    # Libraries misread lse if it is not contiguous.
    lse = lse.contiguous()
    if runs > 1:
        # Rows of a launch become a batch row of their own, as in the views of q and dout.
        lse = lse.as_strided((runs, heads, rows), (rows, length, 1)).contiguous()
    dq = dq.view(shape)
    functions.prepare(
        *prepare_arguments(out.view(shape), dout.view(shape), delta, lse, lse_log2, dq_sums, None)
    )
    kv_heads, start = k_shape[2], sums.storage_offset()
    head_stride, sequence_stride = k_shape[1] * dim, kv_heads * k_shape[1] * dim
    strides = sequence_stride, head_stride, 1
    tensors = [x.split_with_sizes([rows] * runs, 1) for x in (q, dout)]
    tensors += [x.split_with_sizes([batch] * runs) for x in (lse_log2, delta, dq_sums)]
    # `main` adds to whatever is in `sums`: they are not cleared between launches. The last
    # launch goes first, as in the forward in reverse.
    for launch, q_n, dout_n, *rows_and_sums in reversed([*zip(launches, *tensors, strict=True)]):
        # Columns of the sums that this launch sees, as the library lays its own buffer out.
        size = batch, kv_heads, launch.keys * dim
        first = start + launch.k_start * dim
        buffers = (
            *rows_and_sums, sums.as_strided(size, strides, first),
            sums.as_strided(size, strides, first + batch * sequence_stride),
        )  # fmt: skip
        launch.functions.main(
            *plain_main_arguments(
                q_n, columns(launch.k_start, launch.keys), dout_n, buffers, launch.scale,
                launch.window, launch.functions.after_window,
            )
        )  # fmt: skip
    # dQ is complete when all launches have run: one rounding for all rows.
    functions.round_dq(*round_arguments(dq_sums, dq, launches[0].scale, None))
    return lse, delta if padded == rows else delta.narrow(2, 0, rows)


def round_all(spans: OwnSpans, scale: float, sums: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Round the sums of own keys, head-major in a flat buffer, into ``dk`` and ``dv``.

    ``scale`` is the factor of the scores, and so of dK. The spans become the batch of one launch;
    with several sequences each span has its own.
    """
    batch, length, heads, dim = dk.shape
    functions = rounding_functions(dk.dtype, dim)
    head, first = spans.length * dim, sums.storage_offset() + spans.target * dim
    row, whole = heads * dim, batch * heads * spans.length * dim
    sum_shape, grad_shape = (heads, spans.keys * dim), (spans.keys, heads, dim)
    # Sums and gradients do not overlap, so the launches may run in any order.
    in_one_launch = batch == 1
    for n in range(1 if in_one_launch else spans.number):
        count = spans.number if in_one_launch else batch
        steps = (spans.target_step * dim, spans.source_step * row)
        if not in_one_launch:
            # Sequences of the batch lie that far apart, in sums and in gradients.
            steps = heads * head, length * row
        sum_start = first + n * spans.target_step * dim
        grad_start = (spans.source + n * spans.source_step) * row
        for first_sum, grad, scale_n in ((sum_start, dk, scale), (sum_start + whole, dv, 1.0)):
            target = grad.as_strided(
                (count, *grad_shape), (steps[1], row, dim, 1), grad.storage_offset() + grad_start
            )
            own_sums = sums.as_strided((count, *sum_shape), (steps[0], head, 1), first_sum)
            functions.round_dkv(*round_arguments(own_sums, target, scale_n, None))


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
    module = interface()
    left, right = (64 if side else None for side in bounded)
    # Any numbers will do: only the functions are kept, which depend on dtypes, dims and the band.
    q, out, dout = (
        torch.zeros(2, 512, 2 * group, dim, dtype=dtype, device="cuda") for _ in range(3)
    )
    k, v = (torch.zeros(2, 512, 2, dim, dtype=dtype, device="cuda") for _ in range(2))
    lse = torch.zeros(2, 2 * group, 512, device="cuda")
    with calls_of(
        module._bwd_preprocess, module._flash_attn_bwd, module._bwd_postprocess_convert
    ) as (prepare_calls, main_calls, round_calls):
        module._flash_attn_bwd(
            q, k, v, out, dout, lse, softmax_scale=1.0, causal=is_causal, window_size_left=left,
            window_size_right=right,
        )  # fmt: skip
    ((prepare, _),), ((launch, arguments),) = prepare_calls, main_calls
    (round_dq, _), (round_dkv, _), _ = round_calls
    rows = module._tile_size_bwd_sm90(
        dim, dim, is_causal, not is_causal and any(bounded)
    ).m_block_size
    recorded = not_none(MainArguments.of(arguments))
    # Read off the library's own sums of dQ: it pads head dims by rules of its own.
    padded = recorded.buffers[2].shape[2] // (-(-512 // rows) * rows)
    return SplitFunctions(prepare, launch, recorded.after_window, round_dq, round_dkv, rows, padded)

"""Backwards that sum dK/dV in tiles, in a memory order of their own, over launches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch
from weakref import ref

import pytest
import torch
from torch import Tensor
from views import offset

from ring_core import Mask, Plan, Request, WorkItem, make_plan
from ring_core.programs import gather, gather_work
from ring_torch import ContextParallel, prepare, ring_attention
from ring_torch.buffers import ONE_GROUP, HeadGroups, KVPayload
from ring_torch.kernels import fa4
from ring_torch.kernels.api import (
    BackwardLaunch,
    Columns,
    Kernel,
    OwnSpans,
    Selection,
    SplitBackward,
)
from ring_torch.kernels.eager import EagerKernel
from ring_torch.kernels.fa4 import split
from ring_torch.launches.cache import KeptViews
from ring_torch.records import BackwardInputs, Grads, KernelParams, KeyBlock, QueryBlock
from ring_torch.strategies import gather as gather_strategy
from ring_torch.strategies.prepared import own_spans

KEYS, LENGTH, HEADS, DIM = 4, 128, (4, 2, 2), 8


@dataclass(frozen=True)
class Tiled(SplitBackward):
    """A split backward that stores each tile's elements in reverse order."""

    used: list[bool]
    tile = KEYS

    def applies(self, plan: Plan, request: Request, *, splits: bool, tile: int) -> bool:
        del request
        self.used.append(fa4.in_whole_tiles(plan, splits, tile))
        return self.used[-1]

    def accumulate(
        self, rows: QueryBlock, columns: KeyBlock, upstream: BackwardInputs, item: WorkItem, params: KernelParams,
        dq: Tensor, sums: tuple[Tensor, Tensor],
    ) -> None:  # fmt: skip
        grads = TiledKernel([]).grads(rows, columns, upstream, item, params)
        dq.copy_(grads.dq)
        for total, x in zip(sums, (grads.dk, grads.dv), strict=True):
            total.add_(_reversed(x.transpose(1, 2)))

    def prepare(
        self, rows: QueryBlock, columns: KeyBlock, upstream: BackwardInputs,
        items: Sequence[WorkItem], params: KernelParams,
    ) -> BackwardLaunch:  # fmt: skip
        del rows, upstream

        def launch(
            q: Tensor, kv: Columns, dout: Tensor, out: Tensor, lse: Tensor, sums: Tensor,
            new_dq: Callable[[], Tensor], drop_keys: Callable[[], None],
        ) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
            self.used.append(True)
            dq = new_dq()
            block = QueryBlock(q, None, None, None, None, None)
            batch, length, heads, dim = columns.k.shape
            k, v = kv(0, length)
            totals = sums.view(2, batch, heads, length, dim)
            for item in reversed(items):
                self.accumulate(
                    block.take(item.q_slice), columns._replace(k=k, v=v).take(item.k_slice),
                    BackwardInputs(dout, out, lse, None).take(item.q_slice), item, params,
                    dq[:, item.q_slice], (totals[0, :, :, item.k_slice], totals[1, :, :, item.k_slice]),
                )  # fmt: skip
            # As libraries have it: the items' rows as a batch, padded at the end.
            delta = (dout * out).sum(dim=-1).transpose(1, 2)
            if len({item.q_stop - item.q_start for item in items}) == batch == 1:
                lse, delta = (
                    x[0].unflatten(1, (len(items), -1)).transpose(0, 1) for x in (lse, delta)
                )
            drop_keys()
            return dq, (lse, torch.nn.functional.pad(delta, (0, 3), value=torch.nan)[..., :-3])

        return launch

    def prepare_round(
        self, spans: OwnSpans, keys: KVPayload, params: KernelParams
    ) -> Callable[[Tensor, Tensor, Tensor], None]:
        def round_all(sums: Tensor, dk: Tensor, dv: Tensor) -> None:
            # A library's rounding kernel takes token offsets, not strides.
            assert dk.is_contiguous() and dv.is_contiguous()
            assert dk.shape == (keys.batch, keys.length, keys.heads, keys.dim)
            batch, _, heads, dim = dk.shape
            totals = sums.view(2, batch, heads, spans.length, dim)
            for n in range(spans.number):
                start = spans.target + n * spans.target_step
                first = spans.source + n * spans.source_step
                columns, rows = slice(start, start + spans.keys), slice(first, first + spans.keys)
                parts = totals[0, :, :, columns], totals[1, :, :, columns]
                self.round(parts, (dk[:, rows], dv[:, rows]), params)

        return round_all

    def round(
        self, sums: tuple[Tensor, Tensor], dsts: tuple[Tensor, Tensor], params: KernelParams
    ) -> None:
        del params
        for x, dst in zip(sums, dsts, strict=True):
            dst.copy_(_reversed(x).transpose(1, 2))


class TiledKernel(EagerKernel):
    """An eager kernel with a split backward that sums in tiles."""

    needs_delta = False
    prepares = True

    def __init__(self, used: list[bool]) -> None:
        self.split_backward: SplitBackward = Tiled(used)

    def grads(
        self, rows: QueryBlock, columns: KeyBlock, upstream: BackwardInputs, item: WorkItem, params: KernelParams,
        out: Tensor | None = None,
    ) -> Grads:  # fmt: skip
        delta = (upstream.dout * upstream.out).sum(dim=-1).transpose(1, 2)
        return super().grads(rows, columns, upstream._replace(delta=delta), item, params, out)


def _reversed(x: Tensor) -> Tensor:
    """Return ``[B, K, n, D]`` with each tile's elements in reverse order."""
    tiles = x.unflatten(2, (-1, KEYS)).flatten(3)
    reversed_keys: Tensor = tiles.flip(3).unflatten(3, (KEYS, -1)).flatten(2, 3)
    return reversed_keys


def on_a_rank(
    rank: int, layout: Any, mask: Mask, groups: HeadGroups
) -> tuple[list[bool], float, list[Tensor]]:
    """Return which passes summed in tiles, the largest gradient error, and errors of dsinks."""
    del rank
    torch.manual_seed(0)
    whole = [torch.randn(1, LENGTH, heads, DIM).requires_grad_() for heads in HEADS]
    sinks = torch.randn(HEADS[0]).requires_grad_()
    dout = torch.randn(1, LENGTH, HEADS[0], DIM)
    k, v = (x.repeat_interleave(HEADS[0] // HEADS[1], dim=2) for x in whole[1:])
    scores = torch.einsum("bqhd,bkhd->bhqk", whole[0], k) * DIM**-0.5
    position = torch.arange(LENGTH).numpy()
    hidden = ~torch.from_numpy(mask.dense(position, position))
    scores = scores.masked_fill(hidden, -torch.inf)
    logits = torch.cat([scores, sinks[:, None, None].expand(1, -1, LENGTH, 1)], dim=3)
    weights = logits.softmax(-1)[..., :-1]
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    *expected, dsinks = torch.autograd.grad(out, (*whole, sinks), dout)
    cp = ContextParallel(layout=layout)
    local = [cp.shard(x.detach()).requires_grad_() for x in whole]
    used: list[bool] = []
    kernel: Kernel = TiledKernel(used)
    prepare._prepare.cache_clear()
    with (
        patch.object(prepare, "choose", lambda *_: Selection(kernel, ())),
        patch.object(gather_strategy, "head_groups_of", lambda *_: groups),
        patch.object(fa4, "KEYS", KEYS),
        patch.object(gather_work, "TILE", KEYS),
    ):
        out = cp.attention(*local, mask=mask, strategy="gather", sinks=sinks)
        *grads, part = torch.autograd.grad(out, (*local, sinks), cp.shard(dout))
        # The second call reuses the prepared launches of the first, to the same bits, although the
        # tokens of each K/V head are contiguous now.
        q, *kv = local
        local = [q, *(x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in kv)]
        local = [x.requires_grad_() for x in local]
        out = cp.attention(*local, mask=mask, strategy="gather", sinks=sinks)
        *again, part_again = torch.autograd.grad(out, (*local, sinks), cp.shard(dout))
        assert all(map(torch.equal, grads, again))
    prepare._prepare.cache_clear()
    errors = [(a - cp.shard(b)).abs().max() for a, b in zip(grads, expected, strict=True)]
    return used, float(torch.stack(errors).max()), [part - dsinks / 2, part_again - dsinks / 2]


@pytest.mark.parametrize(
    ("mask", "tiled"),
    [
        (Mask(causal=True), True),
        (Mask(causal=True, window=(8, 0)), True),  # most rows see own keys only
        (Mask(window=(12, 8)), True),
        (Mask(causal=True, window=(24, 0)), True),  # no row sees own keys only
        (Mask(window=(9, 7)), False),  # a whole number of tiles, cut elsewhere
        (Mask(causal=True, window=(10, 0)), True),  # items begin inside tiles of the sequence
        (Mask(causal=True, window=(26, 0)), True),
    ],
)
@pytest.mark.parametrize(
    ("layout", "groups"),
    [
        ("contiguous", ONE_GROUP),
        ("zigzag", ONE_GROUP),
        ("contiguous", HeadGroups(1, 2, before_last_item=True)),
        ("zigzag", HeadGroups(2, 2, before_last_item=True)),
    ],
)
def test_tiles_of_all_launches_are_the_same(
    layout: Any, groups: HeadGroups, mask: Mask, tiled: bool, backend: Any
) -> None:
    plan = make_plan(mask, seq_len=LENGTH, cp_size=2, layout=layout)
    results = backend.pool(2).run(on_a_rank, layout, mask, groups)
    for a, b in zip(results[0][2], results[1][2], strict=True):
        assert (a + b).abs().max() < 1e-4
    for rank, (used, error, _) in enumerate(results):
        with patch.object(gather_work, "TILE", KEYS):
            program = gather._gather_program.__wrapped__(plan, rank, True, True, KEYS)
        spans = own_spans(program, rank, LENGTH // 2)
        prepared = tiled and groups == ONE_GROUP and not program.in_place and len(spans) == 1
        assert used == [tiled, *([True] if prepared else [])]
        assert error < 1e-5


def _saved_elsewhere(_: int, name: str) -> tuple[list[bool], bool]:
    """Return which backwards summed in tiles, and True if all have the same gradients.

    In the third of four calls a saved tensor, the gathered K/V or ``lse``, is restored at an
    address that is no multiple of 16 bytes.
    """
    torch.manual_seed(0)
    used: list[bool] = []
    kernel: Kernel = TiledKernel(used)
    q, k, v = (torch.randn(1, LENGTH // 2, heads, DIM).requires_grad_() for heads in HEADS)
    last = {"keys": HEADS[1] * 2 * DIM, "lse": LENGTH // 2}[name]

    def elsewhere(x: Tensor) -> Tensor:
        if x.ndim != 3 or x.shape[-1] != last:
            return x
        return offset(x)

    results: list[tuple[Tensor, ...]] = []
    prepare._prepare.cache_clear()
    with (
        patch.object(prepare, "choose", lambda *_: Selection(kernel, ())),
        patch.object(fa4, "KEYS", KEYS),
        patch.object(gather_work, "TILE", KEYS),
    ):
        for unpack in (torch.clone, torch.clone, elsewhere, torch.clone):
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, unpack):
                out = ring_attention(q, k, v, causal=True, layout="zigzag", strategy="gather")
            results.append(torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))
    prepare._prepare.cache_clear()
    return used, all(
        torch.equal(*pair) for x in results for pair in zip(x, results[0], strict=True)
    )


@pytest.mark.parametrize("name", ["keys", "lse"])
def test_prepared_launches_are_of_the_alignment_of_what_is_saved(name: str, backend: Any) -> None:
    for used, are_equal in backend.pool(2).run(_saved_elsewhere, name):
        assert used == [
            True,
            True,
            True,
        ]  # asked for once; the second and fourth call reuse what the first prepared
        assert are_equal


@pytest.mark.parametrize("batch", [1, 2])
def test_sums_are_passed_to_compiled_functions_as_they_lie(batch: int) -> None:
    """Launches over different columns get views of the sums; own keys are rounded in two spans."""
    heads, columns, dim, tile = 2, 12, 4, 8
    spans = OwnSpans(2, 3, 1, 4, 2, 5, columns)  # keys 1-3 and 5-7 in columns 2-4 and 7-9
    sums = torch.randn(5 + 2 * batch * heads * columns * dim)[5:]  # not at the start of the storage
    totals = sums.view(2, batch, heads, columns, dim)
    seen: list[tuple[Tensor, Tensor]] = []

    def nothing(*_: object) -> None:
        pass

    def prepare(
        _out: Tensor, _dout: Tensor, _delta: Tensor, lse_of_launches: Tensor, *_: object
    ) -> None:
        runs = len(used)
        for n in range(runs):
            expected = lse[..., n * 16 // runs : (n + 1) * 16 // runs]
            assert torch.equal(lse_of_launches[n * batch : (n + 1) * batch], expected)

    def main(*arguments: Any) -> None:
        seen.append(arguments[7:9])  # after q, k, v, dout, lse, delta and the sums of dQ

    def round_dkv(x: Tensor, grad: Tensor, scale: float, *_: object) -> None:
        grad.copy_(scale * x.unflatten(2, (-1, dim)).transpose(1, 2))

    functions = split.SplitFunctions(prepare, main, (), nothing, round_dkv, tile, dim)
    launches = [split.SplitLaunch(a, n, 0.5, (None, None), functions) for a, n in ((0, 4), (3, 9))]
    used = launches if batch == 1 else launches[1:]
    run = split.AllLaunches(used, (batch, columns, heads, dim))
    rows, lse = torch.randn(batch, 16, 4, dim), torch.randn(batch, 4, 16)
    for _ in range(2):
        seen.clear()
        run(rows, lambda *_: (rows, rows), rows, rows, lse, sums, rows.clone, nothing)
        for launch, pair in zip(reversed(used), seen, strict=True):
            span = slice(launch.k_start, launch.k_start + launch.keys)
            for x, expected in zip(pair, totals, strict=True):
                assert torch.equal(x, expected[:, :, span].flatten(2))
    shape = batch, 9, heads, dim
    with patch.object(split, "rounding_functions", lambda *_: functions):
        keys = KVPayload.of(batch, 9, heads, dim, dim, torch.float32, False)
        rounding = split.RoundAll(spans, 0.5, keys)
    for _ in range(2):
        dk, dv = torch.zeros(shape), torch.zeros(shape)
        rounding(sums, dk, dv)
        for grad, total, scale in ((dk, totals[0], 0.5), (dv, totals[1], 1.0)):
            expected = torch.zeros(shape)
            for own, gathered in ((1, 2), (5, 7)):
                part = total[:, :, gathered : gathered + 3].transpose(1, 2)
                expected[:, own : own + 3] = scale * part
            assert torch.equal(grad, expected)


@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "out"])
def test_a_split_backward_gets_aligned_tensors(name: str) -> None:
    """Compiled functions read 16 bytes at once; hooks may return ``out`` at any address."""
    tensors = {x: torch.randn(1, 16, 2, DIM) for x in ("q", "k", "v", "dout", "out")}
    q, k, v, dout, out = (tensors | {name: offset(tensors[name])}).values()
    passed: list[Tensor] = []
    functions = SimpleNamespace(accumulate=lambda *given: passed.extend(given[:5]))
    rows = QueryBlock(q, None, None, None, None, None)
    columns = KeyBlock(k, v, None, None)
    upstream = BackwardInputs(dout, out, torch.zeros(1, 2, 16), None)
    split_backward = fa4.FA4.split_backward
    assert split_backward is not None
    with patch.object(fa4, "_split_functions", lambda *_: (functions, (None, None))):
        item, params = cast("WorkItem", None), cast("KernelParams", SimpleNamespace(scale=1.0))
        split_backward.accumulate(rows, columns, upstream, item, params, q, (k, v))
    assert all(x.data_ptr() % 16 == 0 for x in passed)
    in_order = [tensors[x] for x in ("q", "k", "v", "dout", "out")]
    assert all(map(torch.equal, passed, in_order))


def test_kept_views_end_with_their_buffer() -> None:
    made: list[int] = []

    def halves(x: Tensor) -> list[Tensor]:
        made.append(x.data_ptr())
        return list(x.split(2))

    views, buffer = KeptViews(halves), torch.zeros(4)
    assert views(buffer) is views(buffer)
    assert len(made) == 1
    view = ref(views(buffer)[0])
    other = torch.ones(4)
    assert bool((views(other)[1] == 1).all()) and len(made) == 2
    assert view() is None
    view = ref(views(other)[0])
    del other
    assert view() is None

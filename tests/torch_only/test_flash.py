"""The adapter for fused attention libraries, on a CPU, with a library written in plain torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, patch
from weakref import ref

import numpy as np
import pytest
import torch
from backends.torch_ranks import Arrays, gather as put_together, run_rank
from cases import CASES, Case
from hypothesis import given, settings, strategies as st
from patched import chosen
from plain_flash import PlainFlash
from plans import programs, shown
from tiled import KEYS, TiledKernel
from tolerances import assert_close
from torch import Tensor
from views import offset

from benchmarks.common.cases import SHORT_SETTINGS, Setting, mask_of
from ring_core import (
    Capabilities,
    KernelConfig,
    Mask,
    Request,
    WorkItem,
    gather_program,
    gather_refusals,
    make_plan,
    ring_program,
)
from ring_core.programs import gather_work
from ring_torch import ContextParallel
from ring_torch.accumulate import (
    Columns,
    OneItem,
    Rows,
    mark_infinities,
    merge_in_torch,
    unseen_state,
)
from ring_torch.buffers import ONE_GROUP, HeadGroups, KeyGradBuffer, KVPayload
from ring_torch.call import UNRESOLVED, Call, Transport
from ring_torch.comm.ranks import Ranks
from ring_torch.kernels import fa4
from ring_torch.kernels.api import Kernel, OwnSpans, Selection
from ring_torch.kernels.eager import EagerKernel
from ring_torch.kernels.fa4 import library
from ring_torch.kernels.flash import FlashKernel
from ring_torch.kernels.library import Direction, HeadDims, LaunchOptions
from ring_torch.launches.cache import KeptViews
from ring_torch.records import (
    AttentionState,
    BackwardInputs,
    KernelParams,
    KeyBlock,
    QueryBlock,
    aligned,
)
from ring_torch.strategies import gather, gather as gather_strategy
from ring_torch.strategies.gather import GATHER, Gather


@dataclass(frozen=True)
class Plain(PlainFlash):
    """The library, where a destination is written to, and rows may begin anywhere."""

    takes_any_rows: bool = True

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: LaunchOptions, destination: AttentionState | None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        result = super().forward(q, k, v, options, None)
        if destination is None:
            return result
        for x, into in zip(result, destination, strict=True):
            into.copy_(x)
        return destination

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        options: LaunchOptions, destination: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        assert lse.is_contiguous()
        dq, dk, dv = super().backward(dout, q, k, v, out, lse, options, None)
        return dq if destination is None else destination.copy_(dq), dk, dv

    @property
    def writes(self) -> bool:
        return True


CAN = Capabilities(
    "plain", dtypes=("float32",), bands="any", documents=True, softcap=True, mixed_head_dims=True
)
PLAIN, FORGETFUL = (
    FlashKernel(Plain(drops), CAN, clips_right_window=drops) for drops in (False, True)
)


@dataclass(frozen=True)
class Narrow(Plain):
    """A library that supports two pairs of head dims, and is wrong at others."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: LaunchOptions, destination: AttentionState | None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert (q.shape[-1], k.shape[-1], v.shape[-1]) in {(8, 8, 8), (12, 12, 8)}
        return super().forward(q, k, v, options, destination)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        options: LaunchOptions, destination: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        assert (q.shape[-1], v.shape[-1]) in {(8, 8), (12, 8)}
        assert dout.shape[-1] == out.shape[-1] == v.shape[-1]
        return super().backward(dout, q, k, v, out, lse, options, destination)


def _padded_back(direction: Direction, head_dim: int, v_head_dim: int) -> HeadDims | None:
    if direction == "forward":
        return HeadDims(head_dim, v_head_dim)
    return HeadDims(12, 8) if max(head_dim, v_head_dim) <= 8 else None


NARROW = FlashKernel(
    Narrow(), CAN, head_dims=lambda _, *dims: HeadDims(8, 8) if max(dims) <= 8 else None
)
BACK = FlashKernel(Plain(), CAN, head_dims=_padded_back)
UNLIKE = FlashKernel(Narrow(), CAN, head_dims=lambda *_: HeadDims(12, 8))


@st.composite
def items(draw: st.DrawFn) -> list[tuple[WorkItem, Any]]:
    """Draw a rank's items, in a ring and over gathered keys, and the pairs that each shows."""
    program = draw(programs())
    plan = program.plan
    rank = draw(st.integers(0, plan.cp_size - 1))
    items_of_rank = [
        item for step in range(program.num_steps) for item in program.items(rank, step)
    ]
    if not gather_refusals(plan):
        items_of_rank += [*gather_program(plan, rank).items, *gather_program(plan, rank).in_place]
    return [(item, shown(plan, item)) for item in items_of_rank if item.tiles is None]


@settings(max_examples=60)
@given(
    items(), st.integers(1, 2), st.sampled_from([None, 1.5]),
    st.sampled_from([PLAIN, FORGETFUL, NARROW, UNLIKE, BACK]),
)  # fmt: skip
def test_any_item_is_its_dense_mask(
    item_and_inputs: list[tuple[WorkItem, Any]],
    batch: int,
    softcap: float | None,
    kernel: FlashKernel,
) -> None:
    params = KernelParams(Mask(), 0.3, softcap)
    for item, cells in item_and_inputs:
        rows, columns = cells.shape
        shapes = ((batch, rows, 4, 3), (batch, columns, 2, 3), (batch, columns, 2, 5))
        generator = torch.Generator().manual_seed(rows * columns)
        q, k, v, dout = (
            torch.randn(*shape, generator=generator) for shape in (*shapes, (batch, rows, 4, 5))
        )
        q, k, v = leaves = [x.requires_grad_() for x in (q, k, v)]
        out, lse = _dense(q, k, v, torch.tensor(cells), params)
        expected = torch.autograd.grad(out, leaves, dout)
        q, k, v, out, lse = (x.detach() for x in (q, k, v, out, lse))
        queries, keys = QueryBlock(q), KeyBlock(k, v)
        into = unseen_state(q, 5, q.dtype)
        merge_in_torch(into, *_attended(kernel, queries, keys, item, params))
        _same(into.out, out)
        _same(into.lse, lse)
        upstream, backward = BackwardInputs(dout, out, lse, None), kernel.backward
        alone = Rows(partial(torch.empty_like, q), "write"), OneItem(keys)
        backward([item], params, adds=False).run(queries, [keys], upstream, *alone)
        layout = KeyGradBuffer(
            KVPayload.of(batch, columns, 2, 3, 5, torch.float32, False), head_major=False
        )
        flat, spans = torch.ones(layout.numel(columns)), {item: [(0, columns, True)]}
        sums = (Rows(partial(torch.ones_like, q), "add"), Columns(layout, flat, columns, spans))
        backward([item], params, adds=True).run(queries, [keys], upstream, *sums)
        totals = sums[0].whole(), *layout.views(flat, columns)
        grads = alone[0].whole(), *alone[1].grads
        for actual, total, want in zip(grads, totals, expected, strict=True):
            _same(actual, want)
            _same(total, want + 1)


@dataclass(frozen=True)
class Silent(Plain):
    """A library whose ``lse`` of rows with NaN scores is minus infinity, as FlashAttention-3's."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: LaunchOptions, destination: AttentionState | None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse = super().forward(q, k, v, options, destination)
        return out, lse.masked_fill_(lse.isnan(), -torch.inf)


SILENT = FlashKernel(Silent(), CAN)


def test_documents_keep_their_right_side() -> None:
    item = WorkItem(0, 0, 0, 0, 7, 0, 5, -1, None, np.array([0, 5, 7]), np.array([0, 3, 5]))
    params = KernelParams(Mask(), 1.0)
    q, k = torch.randn(1, 7, 1, 4), torch.randn(1, 5, 1, 4)
    rows, columns = QueryBlock(q), KeyBlock(k, k)
    a, b = (_attended(x, rows, columns, item, params).lse for x in (PLAIN, FORGETFUL))
    _same(a, b)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("cu_k", [(0, 3, 6), (0, 0, 3), (0, 2, 5)], ids=["all", "none", "fewer"])
def test_nan_in_documents_stays(cu_k: tuple[int, ...], batch: int) -> None:
    """A row with NaN scores stays NaN, also beside rows that see nothing."""
    cu_q = np.array([0, 3, 6])
    hi = None if cu_k == (0, 3, 6) else 0
    item = WorkItem(0, 0, 0, 0, 6, 0, cu_k[-1], None, hi, cu_q, np.array(cu_k))
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, n, 2, 4) for n in (6, cu_k[-1], cu_k[-1]))
    q[-1, 4, 1] = torch.nan
    first, stop = item.seen
    unseen, dst = (
        torch.tensor(stop <= first),
        AttentionState(torch.empty_like(q), torch.empty(batch, 2, 6)),
    )
    arguments = (
        QueryBlock(q),
        KeyBlock(k, v),
        item,
        KernelParams(Mask(), 1.0),
    )
    for result in (_attended(SILENT, *arguments), _attended(SILENT, *arguments, dst)):
        expected = torch.zeros(batch, 2, 6, dtype=torch.bool)
        expected[-1, 1, 4] = not unseen[4]
        assert torch.equal(result.lse.isnan(), expected)
        assert torch.equal(result.lse.isneginf(), unseen.expand(batch, 2, 6))
        assert torch.equal(result.out.isnan().all(dim=-1), expected.transpose(1, 2))
        assert result.out[:, unseen].eq(0).all()


@pytest.mark.parametrize("kernel", [PLAIN, NARROW, UNLIKE])
@pytest.mark.parametrize("documents", [None, np.array([0, 2, 6])])
def test_results_are_written_in_place_where_they_fit(
    kernel: FlashKernel, documents: np.ndarray[Any, Any] | None
) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 6, 2, dim) for dim in (5, 5, 8))
    item = WorkItem(0, 0, 0, 0, 6, 0, 6, None, None, documents, documents)
    arguments = (
        QueryBlock(q), KeyBlock(k, v), item, KernelParams(Mask(), 1.0),
    )  # fmt: skip
    dst = AttentionState(torch.empty(1, 6, 2, 8), torch.empty(1, 2, 6))
    result = kernel._attend(arguments[0], arguments[1], item, arguments[3], dst)
    _same(result.out, _attended(kernel, *arguments).out)
    assert result.out.data_ptr() == dst.out.data_ptr()  # V's head dim is as it was
    upstream, dq = (
        BackwardInputs(torch.randn_like(v), result.out, result.lse, None),
        torch.empty_like(q),
    )
    rows, columns, _, params = arguments
    grads = kernel._backward_of(item, params)(rows, columns, upstream, dq, None)
    assert grads.dq.is_contiguous()
    assert (grads.dq.data_ptr() == dq.data_ptr()) == (kernel is PLAIN)


def test_head_dims_that_a_library_lacks_are_refused() -> None:
    program = ring_program(make_plan(Mask(), seq_len=8, cp_size=1, layout="contiguous"))
    for dim, grad, kernel, reasons in (
        (7, True, NARROW, 0), (9, True, NARROW, 1), (9, True, BACK, 1), (9, False, BACK, 0),
    ):  # fmt: skip
        request = Request("cpu", "float32", dim, dim, grad=grad)
        refusals = kernel.config_refusals(KernelConfig(), request, program)
        assert len(refusals) == reasons
        assert all(f"head dims {dim} and {dim}" in text for text in refusals)


def test_rows_begin_at_multiples_of_16_bytes() -> None:
    whole = torch.randn(2, 5, 3, 68).bfloat16()
    narrow = whole[..., :64]
    assert torch.equal(aligned(narrow), narrow)
    assert all(stride % 8 == 0 for stride in aligned(narrow).stride()[:-1])
    shifted = whole.view(-1)[4 : 4 + 128].view(1, 2, 1, 64)
    assert torch.equal(aligned(shifted), shifted)
    assert aligned(shifted).data_ptr() % 16 == 0
    fitting = torch.randn(2, 5, 4, 64).bfloat16()[:, 1:, :2]
    assert aligned(fitting) is fitting


def _dense(
    q: Tensor, k: Tensor, v: Tensor, cells: Tensor, params: KernelParams
) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)`` by definition; 0 and ``-inf`` where a row sees nothing."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, dim=2)) * params.scale
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    lse = torch.where(cells, scores, -torch.inf).logsumexp(dim=-1)
    safe = lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)
    weights = torch.where(cells, (scores - safe).exp(), 0.0)
    return torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(2, dim=2)), lse


def _attended(
    kernel: FlashKernel, rows: QueryBlock, columns: KeyBlock, item: WorkItem, params: KernelParams,
    dst: AttentionState | None = None,
) -> AttentionState:  # fmt: skip
    """Return what a pass of one launch makes of it."""
    launch = kernel.forward(item, params)
    result = launch.run(rows, columns, dst, "return" if dst is None else "write", None)
    if launch.marks:
        mark_infinities(result.lse)
    return result


def _same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_batch_of_documents_is_one_launch() -> None:
    item = WorkItem(0, 0, 0, 0, 6, 0, 6, 0, None, np.array([0, 2, 2, 6]), np.array([0, 2, 2, 6]))
    params = KernelParams(Mask(), 1.0)
    x = torch.zeros(3, 6, 1, 4)
    rows, columns = QueryBlock(x), KeyBlock(x, x)
    calls: list[LaunchOptions] = []
    forward = Plain.forward

    def watched(*args: Any) -> tuple[Tensor, Tensor]:
        calls.append(args[4])
        return forward(*args)

    with patch.object(Plain, "forward", watched):
        _attended(PLAIN, rows, columns, item, params)
        (options,) = calls
        assert options.window == (None, 0) and options.documents is not None
        assert options.documents.cu_q.tolist() == [0, 2, 2, 6, 8, 8, 12, 14, 14, 18]
        _attended(PLAIN, rows, columns, replace(item, cu_k=np.array([0, 1, 1, 6])), params)
        assert len(calls) == 3  # no window suits both: one launch each


def can_do(case: Case) -> bool:
    """Return True if the kernel supports the case."""
    options = (
        case.segments or case.bias or case.shown or case.alibi or case.dropout_p or case.lse_grad
        or case.views
    )  # fmt: skip
    return not (options or case.mask.predicate or case.poison) and case.dtype == "float32"


#: Rings of two and four, and gathered keys, where the plan can be gathered.
RING = [
    (case, strategy)
    for case in CASES.values()
    for strategy in ("ring", "gather")
    if case.cp_size in (2, 4) and can_do(case) and case.ring not in ("striped", "balanced")
]


@pytest.mark.nightly(only=[f"{c.name}-{t}" for c, t in RING if "again" in c.nightly])
@pytest.mark.parametrize(("case", "strategy"), RING, ids=[f"{c.name}-{t}" for c, t in RING])
def test_in_the_ring(case: Case, strategy: str, backend: Any) -> None:
    parts = backend.pool(case.cp_size).run(_on_a_rank, replace(case), strategy)
    assert_close(case, put_together(case, case.plan, parts))


def _on_a_rank(rank: int, case: Case, strategy: str) -> Arrays:
    """Return a rank's part of a case, computed with this kernel."""
    with chosen(PLAIN):
        return run_rank(rank, case, ("auto", case.moved(strategy), "auto"), None, cuda=False)


LENGTH, HEADS, DIM = 128, (4, 2, 2), 8


def on_a_rank(
    _: int, layout: Any, mask: Mask, groups: HeadGroups
) -> tuple[list[bool], float, Tensor]:
    """Return which passes summed in tiles, the largest gradient error, and the error of dsinks."""
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
    with chosen(
        kernel,
        patch.object(gather_strategy, "head_groups_of", lambda *_: groups),
        patch.object(fa4, "KEYS", KEYS),
        patch.object(gather_work, "TILE", KEYS),
    ):
        out = cp.attention(*local, mask=mask, strategy="gather", sinks=sinks)
        *grads, part = torch.autograd.grad(out, (*local, sinks), cp.shard(dout))
    errors = [(a - cp.shard(b)).abs().max() for a, b in zip(grads, expected, strict=True)]
    return used, float(torch.stack(errors).max()), part - dsinks / 2


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
    results = backend.pool(2).run(on_a_rank, layout, mask, groups)
    assert (results[0][2] + results[1][2]).abs().max() < 1e-4
    for used, error, _ in results:
        assert used[0] == tiled
        assert (len(used) > 1) == tiled and all(used[1:])
        assert error < 1e-5


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

    functions = library.SplitFunctions(prepare, main, (), nothing, round_dkv, tile, dim)
    launches = [
        library.SplitLaunch(a, n, 0.5, (None, None), functions) for a, n in ((0, 4), (3, 9))
    ]
    used = launches if batch == 1 else launches[1:]
    run = library.AllLaunches(slice(0, 16), used, (batch, columns, heads, dim))
    rows, lse = torch.randn(batch, 16, 4, dim), torch.randn(batch, 4, 16)
    keys, upstream = KeyBlock(rows, rows), BackwardInputs(rows, rows, lse, None)
    for _ in range(2):
        seen.clear()
        run(rows, [keys], upstream, sums, rows.clone, is_last=True)
        for launch, pair in zip(reversed(used), seen, strict=True):
            span = slice(launch.k_start, launch.k_start + launch.keys)
            for x, expected in zip(pair, totals, strict=True):
                assert torch.equal(x, expected[:, :, span].flatten(2))
    shape = batch, 9, heads, dim
    payload = KVPayload.of(batch, 9, heads, dim, dim, torch.float32, False)
    rounding = library.RoundAll(spans, 0.5, payload)
    for _ in range(2):
        dk, dv = torch.zeros(shape), torch.zeros(shape)
        with patch.object(library, "split_functions", lambda *_: functions):
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

    def launched(
        q: Tensor, held: list[KeyBlock], upstream: BackwardInputs, *_: Any, **__: Any
    ) -> None:
        passed.extend((q, held[0].k, held[0].v, upstream.dout, upstream.out))

    split_backward = fa4.FA4.split_backward
    assert split_backward is not None
    item, layout = (
        WorkItem(0, 0, 0, 0, 16, 0, 16, None, None),
        KeyGradBuffer(KVPayload.of(1, 16, 2, DIM, DIM, torch.float32, False), head_major=True),
    )
    backward = split_backward.backward([item], KernelParams(Mask(), 1.0))
    launch = Mock(rows=slice(0, 16), side_effect=launched)
    with patch.object(fa4, "_split_launches", lambda *_: [launch]):
        for _ in range(2):
            passed.clear()
            held, sums = [KeyBlock(k, v)], Columns(layout, torch.zeros(0), 16, {})
            backward.run(
                QueryBlock(q), held,
                BackwardInputs(dout, out, torch.zeros(1, 2, 16), None), Rows(q.clone, "write"), sums,
            )  # fmt: skip
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


OSS = SHORT_SETTINGS[1]  # a layer of gpt-oss with a window


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "is_known", lambda: True)
    monkeypatch.setattr(fa4, "capability", lambda: (9, 0))


def resolved(
    setting: Setting, rank: int = 0, *, mask: Mask | None = None, layout: Any = "zigzag",
    kernel: Kernel = fa4.FA4, returns_lse: bool = False, **options: Any,
) -> Gather:  # fmt: skip
    """Return the strategy of a setting over four ranks, with few K/V heads.

    There is no GPU and no flash-attn-4: that must not matter until something is launched.
    """
    mask = mask or mask_of(setting.mask, setting.seq_len)
    plan = make_plan(mask, seq_len=setting.seq_len, cp_size=4, layout=layout)
    tokens, dim = setting.seq_len // 4, setting.dim
    heads = setting.heads, setting.kv_heads
    request = Request(
        "cuda",
        "bfloat16",
        dim,
        dim,
        q_heads=heads[0],
        kv_heads=heads[1],
        **{"grad": True} | options,
    )
    transport: Any = SimpleNamespace(is_short=lambda *_: True)
    signature: Any = None
    half, device = torch.bfloat16, torch.device("cuda")
    keys = KVPayload.of(setting.batch, tokens, heads[1], dim, dim, half, False)
    params = KernelParams(mask, dim**-0.5, needs_lse=True)
    call = Call(
        Ranks(None, rank, 4), plan, ring_program(plan), keys, request, params, kernel, Selection(kernel, ()),
        half, torch.float32, device, False, request.grad, UNRESOLVED, cast("Transport", transport),
        signature, signature, 0, False, returns_lse,
    )  # fmt: skip
    strategy = GATHER.resolve(call, None, None)
    assert isinstance(strategy, Gather)
    return strategy


def _by_head(strategy: Gather) -> bool:
    """Return True if backwards are split: sums of dK/dV are in the kernel's order."""
    return strategy.backward_spec.sums.head_major


def _tile(strategy: Gather) -> int:
    assert strategy.forward_spec.gather == strategy.backward_spec.gather
    return strategy.forward_spec.gather.tile


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("rank", range(4))
def test_a_layer_of_gpt_oss_has_one(rank: int, layout: Any) -> None:
    strategy = resolved(OSS, rank, layout=layout)
    assert _by_head(strategy) and not strategy.own_work.launches and _tile(strategy) == fa4.KEYS
    assert strategy.rounding is not None
    assert len(gather._own_spans(strategy.own_fetches, strategy.forward_spec.gather.length)) == 1
    assert len({item.q_stop - item.q_start for item in strategy.forward_spec.gather.items}) == 1


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("keys", [130, 200, 513, 1000])
def test_so_have_other_causal_windows(keys: int) -> None:
    mask = Mask(causal=True, window=(keys - 1, 0))
    assert all(_by_head(resolved(OSS, rank, mask=mask)) for rank in range(4))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "options",
    [
        {"returns_lse": True},  # another kernel may compute lse's gradient, by what was saved
        {"grad": False},
        {"softcap": True},
        {"deterministic": True},
        {"kernel": EagerKernel()},
        {"mask": Mask(causal=True, window=(127, 0), cu_seqlens=(0, 1000, OSS.seq_len))},
        {"mask": Mask(window=(127, 100))},  # it would end inside a tile that the next rows need
    ],
    ids=["returns_lse", "grad", "softcap", "deterministic", "kernel", "documents", "right"],
)
def test_others_fetch_what_they_see(options: dict[str, Any]) -> None:
    strategy = resolved(OSS, 1, **options)
    assert not _by_head(strategy) and _tile(strategy) == 1


@pytest.mark.usefixtures("hopper")
def test_calls_that_return_lse_keep_that_of_whole_tiles() -> None:
    strategy = resolved(OSS, 1, mask=Mask(causal=True), returns_lse=True)
    assert _by_head(strategy) and _tile(strategy) == 1

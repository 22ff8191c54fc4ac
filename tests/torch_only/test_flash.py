"""The adapter for fused attention libraries, on a CPU, with a library written in plain torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch
from weakref import ref

import numpy as np
import pytest
import torch
from backends.torch_ranks import Arrays, gather as put_together, run_rank
from cases import CASES, Case
from dense import dense
from hypothesis import given, settings, strategies as st
from patched import chosen
from plain_flash import Returning, Writing
from plans import programs, shown
from tiled import KEYS, TiledKernel
from tolerances import assert_close
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from views import strided

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
from ring_torch.capture import ASSUMED_CAPABILITY
from ring_torch.comm.ranks import Ranks
from ring_torch.kernels import fa4
from ring_torch.kernels.api import Kernel
from ring_torch.kernels.eager import EagerKernel
from ring_torch.kernels.fa4 import library
from ring_torch.kernels.flash import FlashKernel
from ring_torch.kernels.library import Direction, HeadDims, LaunchOptions
from ring_torch.launches.cache import KeptViews
from ring_torch.options import CallOptions
from ring_torch.prepare import check_call
from ring_torch.records import (
    AttentionState,
    BackwardInputs,
    KernelParams,
    KeyBlock,
    QueryBlock,
    aligned,
)
from ring_torch.strategies import gather as gather_strategy
from ring_torch.strategies.gather import Gather
from ring_torch.transports import peer_copies

LENGTH = 128
CAN = Capabilities(
    "plain", dtypes=("float32",), bands="any", documents=True, softcap=True, mixed_head_dims=True
)
PLAIN, FORGETFUL = (
    FlashKernel(Writing(drops, takes_any_rows=True), CAN, clips_right_window=drops)
    for drops in (False, True)
)
RETURNING = FlashKernel(Returning(takes_any_rows=True), CAN)


@dataclass(frozen=True)
class Narrow(Writing):
    """A library that supports two pairs of head dims, and is wrong at others."""

    def forward(self, *args: Any, **options: Any) -> Any:
        assert tuple(x.shape[-1] for x in args[:3]) in {(8, 8, 8), (12, 12, 8)}
        return super().forward(*args, **options)

    def backward(self, *args: Any, **options: Any) -> Any:
        dout, q, _, v, out, *_ = (x.shape[-1] for x in args[:5])
        assert (q, v) in {(8, 8), (12, 8)} and dout == out == v
        return super().backward(*args, **options)


def _padded_back(direction: Direction, head_dim: int, v_head_dim: int) -> HeadDims | None:
    if direction == "forward":
        return HeadDims(head_dim, v_head_dim)
    return HeadDims(12, 8) if max(head_dim, v_head_dim) <= 8 else None


NARROW = FlashKernel(
    Narrow(takes_any_rows=True),
    CAN,
    head_dims=lambda _, *dims: HeadDims(8, 8) if max(dims) <= 8 else None,
)
BACK = FlashKernel(Writing(takes_any_rows=True), CAN, head_dims=_padded_back)
UNLIKE = FlashKernel(Narrow(takes_any_rows=True), CAN, head_dims=lambda *_: HeadDims(12, 8))


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
class Silent(Writing):
    """A library whose ``lse`` of rows with NaN scores is minus infinity, as FlashAttention-3's."""

    def forward(self, *args: Any, **options: Any) -> Any:
        out, lse = super().forward(*args, **options)
        return out, lse.masked_fill_(lse.isnan(), -torch.inf)


SILENT = FlashKernel(Silent(takes_any_rows=True), CAN)


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
    unseen = torch.tensor(stop <= first)
    dst = AttentionState(torch.empty_like(q), torch.empty(batch, 2, 6))
    arguments = QueryBlock(q), KeyBlock(k, v), item, KernelParams(Mask(), 1.0)
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
    rows, columns, params = QueryBlock(q), KeyBlock(k, v), KernelParams(Mask(), 1.0)
    dst = AttentionState(torch.empty(1, 6, 2, 8), torch.empty(1, 2, 6))
    result = kernel._attend(rows, columns, item, params, dst)
    _same(result.out, _attended(kernel, rows, columns, item, params).out)
    assert result.out.data_ptr() == dst.out.data_ptr()  # V's head dim is as it was
    upstream = BackwardInputs(torch.randn_like(v), result.out, result.lse, None)
    dq = torch.empty_like(q)
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
    with pytest.raises(AssertionError):
        aligned(strided(fitting))


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
    with patch.object(Writing, "forward", autospec=True, side_effect=Writing.forward) as forward:
        _attended(PLAIN, rows, columns, item, params)
        options: LaunchOptions = forward.call_args.args[4]
        assert options.window == (None, 0) and options.documents is not None
        assert options.documents.cu_q.tolist() == [0, 2, 2, 6, 8, 8, 12, 14, 14, 18]
        _attended(PLAIN, rows, columns, replace(item, cu_k=np.array([0, 1, 1, 6])), params)
    assert forward.call_count == 3  # no window suits both: one launch each


def can_do(case: Case) -> bool:
    """Return True if the kernel supports the case."""
    options = (
        case.segments or case.bias or case.shown or case.alibi or case.dropout_p or case.lse_grad
        or case.views
    )  # fmt: skip
    return not (options or case.mask.predicate or case.poison) and case.dtype == "float32"


#: One rank, rings of two and four, and gathered keys, where the plan can be gathered; and keys that
#: are fewer or that nothing sees, on one rank, where a kernel without documents may return results.
RING = {
    f"{case.name}-{strategy}": (case, strategy)
    for strategy in ("ring", "gather")
    for case in (
        *CASES.values(), Case("few-keys", Mask(causal=True), kv_seq_len=20),
        Case("unseen-keys", Mask(window=(4, 0)), kv_seq_len=78),
    )
    if can_do(case) and case.ring not in ("striped", "balanced")
    if case.cp_size in (2, 4) or (case.cp_size == 1 and strategy == "ring")
}  # fmt: skip


@pytest.mark.nightly(only=[name for name, (case, _) in RING.items() if "again" in case.nightly])
@pytest.mark.parametrize("name", RING)
def test_in_the_ring(name: str, backend: Any) -> None:
    case, strategy = RING[name]
    returns = case.cp_size == 1 and not (case.mask.cu_seqlens or case.mask.chunk_size)
    parts = backend.pool(case.cp_size).run(_on_a_rank, replace(case), strategy, returns)
    assert_close(case, put_together(case, case.plan, parts))


def _on_a_rank(rank: int, case: Case, strategy: str, returns: bool) -> Arrays:
    """Return a rank's part of a case, by a kernel that returns its results or writes them."""
    with chosen(RETURNING if returns else PLAIN):
        return run_rank(rank, case, ("auto", case.moved(strategy), "auto"), None, cuda=False)


def on_a_rank(
    _: int, layout: Any, mask: Mask, groups: HeadGroups
) -> tuple[list[bool], float, Tensor]:
    """Return which passes summed in tiles, the largest gradient error, and the error of dsinks."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, LENGTH, heads, 8) for heads in (4, 2, 2, 4))
    sinks, position = torch.randn(4).requires_grad_(), np.arange(LENGTH)
    visible = torch.from_numpy(mask.dense(position, position))
    _out, *expected, dsinks = dense(q, k, v, dout, sinks=sinks, visible=visible)
    cp, used = ContextParallel(layout=layout), list[bool]()
    local = [cp.shard(x).requires_grad_() for x in (q, k, v)]
    with chosen(
        TiledKernel(used),
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
        ("contiguous", ONE_GROUP), ("zigzag", ONE_GROUP),
        ("contiguous", HeadGroups(1, 2, before_last_item=True)),
        ("zigzag", HeadGroups(2, 2, before_last_item=True)),
    ],
)  # fmt: skip
def test_tiles_of_all_launches_are_the_same(
    layout: Any, groups: HeadGroups, mask: Mask, tiled: bool, backend: Any
) -> None:
    results = backend.pool(2).run(on_a_rank, layout, mask, groups)
    assert (results[0][2] + results[1][2]).abs().max() < 1e-4
    for used, error, _ in results:
        assert used[0] == tiled
        assert (len(used) > 1) == tiled and all(used[1:])
        assert error < 1e-5


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


TOKENS = 32768


def resolved(rank: int, mask: Mask, layout: Any = "zigzag", **options: Any) -> Gather:
    """Return the strategy of a layer of gpt-oss over four ranks.

    There is no GPU and no flash-attn-4: that must not matter until something is launched.
    """
    kernel: Kernel = options.pop("kernel", fa4.FA4)
    grad, hopper = options.pop("grad", True), ASSUMED_CAPABILITY.set((9, 0))
    patches = (
        patch.object(library, "is_known", lambda: True),
        patch.object(peer_copies, "fits_one_kernel", lambda *_: True),
    )
    try:
        with FakeTensorMode(), chosen(kernel, *patches):
            shapes = ((1, TOKENS // 4, heads, 64) for heads in (64, 8))
            q, k = (torch.empty(x, device="cuda", dtype=torch.bfloat16) for x in shapes)
            asked = CallOptions(mask=mask, strategy="gather", transport="symm_mem", **options)
            call, _ = check_call(Ranks(None, rank, 4), 0, layout, q, k, k, asked, grad=grad)
    finally:
        ASSUMED_CAPABILITY.reset(hopper)
    assert isinstance(call.strategy, Gather)
    return call.strategy


def _split(strategy: Gather) -> tuple[bool, int]:
    """Return True if sums of dK/dV are in the kernel's order, and the tile of fetches."""
    assert strategy.forward_spec.gather == strategy.backward_spec.gather
    return strategy.backward_spec.sums.head_major, strategy.forward_spec.gather.tile


def _windowed(keys: int, **rules: Any) -> Mask:
    return Mask(causal=True, window=(keys - 1, 0), **rules)


@pytest.mark.parametrize(
    ("keys", "layout"),
    [(128, "contiguous"), *((keys, "zigzag") for keys in (128, 130, 200, 513, 1000))],
)
def test_a_layer_with_a_causal_window_has_one(keys: int, layout: Any) -> None:
    for rank in range(4):
        strategy = resolved(rank, _windowed(keys), layout)
        assert _split(strategy) == (True, fa4.KEYS)
        if keys == 128:
            gathered = strategy.forward_spec.gather
            assert not strategy.own_work.launches and strategy.rounding is not None
            assert len(gather_strategy._own_spans(strategy.own_fetches, gathered.length)) == 1
            assert len({item.q_stop - item.q_start for item in gathered.items}) == 1


#: Masks and options, and True where the backward is split, though no tile of fetches is.
OTHERS: dict[str, tuple[Mask, dict[str, Any], bool]] = {
    # Another kernel may compute the gradient of lse, by what was saved.
    "return_lse": (_windowed(128), {"return_lse": True}, False),
    "grad": (_windowed(128), {"grad": False}, False),
    "softcap": (_windowed(128), {"softcap": 5.0}, False),
    "deterministic": (_windowed(128), {"deterministic": True}, False),
    "kernel": (_windowed(128), {"kernel": EagerKernel()}, False),
    "documents": (_windowed(128, cu_seqlens=(0, 1000, TOKENS)), {}, False),
    # The window would end inside a tile that the next rows need.
    "right": (Mask(window=(127, 100)), {}, False),
    "lse of whole tiles": (Mask(causal=True), {"return_lse": True}, True),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_fetch_what_they_see(name: str) -> None:
    mask, options, splits = OTHERS[name]
    assert _split(resolved(1, mask, **options)) == (splits, 1)

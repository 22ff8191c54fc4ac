"""The adapter for fused attention libraries, on a CPU, with a library written in plain torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from backends.torch_ranks import Arrays, gather as put_together, run_rank
from cases import CASES, Case
from dense import dense
from patched import chosen
from plain_flash import Returning, Writing
from tiled import KEYS, TiledKernel
from tolerances import assert_close
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ring_core import Capabilities, KernelConfig, Mask, Request, WorkItem, make_plan, ring_program
from ring_core.programs import gather_work
from ring_torch import ContextParallel
from ring_torch.accumulate import mark_infinities
from ring_torch.buffers import ONE_GROUP, HeadGroups
from ring_torch.capture import ASSUMED_CAPABILITY
from ring_torch.comm.ranks import Ranks
from ring_torch.kernels import fa4, sdpa
from ring_torch.kernels.api import Kernel
from ring_torch.kernels.eager import EagerKernel
from ring_torch.kernels.fa4 import library
from ring_torch.kernels.flash import FlashKernel
from ring_torch.kernels.library import Direction, HeadDims, LaunchOptions
from ring_torch.options import CallOptions
from ring_torch.prepare import check_call
from ring_torch.records import AttentionState, KernelParams, KeyBlock, QueryBlock
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


def _narrow(_: Direction, *dims: int) -> HeadDims | None:
    return HeadDims(8, 8) if max(dims) <= 8 else None


NARROW = FlashKernel(Narrow(takes_any_rows=True), CAN, head_dims=_narrow)
BACK = FlashKernel(Writing(takes_any_rows=True), CAN, head_dims=_padded_back)
UNLIKE = FlashKernel(Narrow(takes_any_rows=True), CAN, head_dims=lambda *_: HeadDims(12, 8))


#: Libraries of which each case of the ring runs one, if it has its head dims.
LIBRARIES = {
    "plain": PLAIN, "forgetful": FORGETFUL, "narrow": NARROW, "unlike": UNLIKE, "padded back": BACK,
    "returning": FlashKernel(Returning(takes_any_rows=True), CAN),
}  # fmt: skip


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


def test_head_dims_that_a_library_lacks_are_refused() -> None:
    program = ring_program(make_plan(Mask(), seq_len=8, cp_size=1, layout="contiguous"))
    for dim, grad, kernel, reasons in (
        (7, True, NARROW, 0), (9, True, NARROW, 1), (9, True, BACK, 1), (9, False, BACK, 0),
    ):  # fmt: skip
        request = Request("cpu", "float32", dim, dim, grad=grad)
        refusals = kernel.config_refusals(KernelConfig(), request, program)
        assert len(refusals) == reasons
        assert all(f"head dims {dim} and {dim}" in text for text in refusals)


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


def test_documents_of_one_query_may_be_empty() -> None:
    item = WorkItem(0, 0, 0, 0, 1, 0, 6, None, None, np.array([0, 0, 1]), np.array([0, 3, 6]))
    q, k = torch.randn(1, 1, 1, 4), torch.randn(1, 6, 1, 4)
    arguments = QueryBlock(q), KeyBlock(k, k), item, KernelParams(Mask(), 1.0)
    weights = (q[0, :, 0] @ k[0, 3:, 0].T).softmax(-1)
    _same(_attended(PLAIN, *arguments).out[0, :, 0], weights @ k[0, 3:, 0])


def test_cudnn_gets_upstream_tensors_of_the_same_strides() -> None:
    """Their strides are no key of the graphs of cuDNN that torch keeps."""
    strides: list[list[tuple[int, ...]]] = []

    def backward(*tensors: Any, **_: object) -> Any:
        strides.append([x.stride() for x in (tensors[0], tensors[4])])
        return tensors[1:4]

    operators = {"_scaled_dot_product_cudnn_attention_backward": SimpleNamespace(default=backward)}
    q, lse = torch.randn(2, 8, 2, 4), torch.zeros(2, 2, 8)
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    options = LaunchOptions(1.0, None, (None, None), None, deterministic=False)
    with patch.object(sdpa, "aten", SimpleNamespace(**operators)):
        for dout, out in ((q, q), (turned, q), (q, turned)):
            sdpa.Cudnn().backward(dout, q, q, q, out, lse, options, None)
    assert strides[1:] == [strides[0]] * 2


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
    library = [*LIBRARIES][[*RING].index(name) % 5] if max(case.dims) <= 8 else "plain"
    if case.cp_size == 1 and not (case.mask.cu_seqlens or case.mask.chunk_size):
        library = "returning"
    parts = backend.pool(case.cp_size).run(_on_a_rank, replace(case), strategy, library)
    assert_close(case, put_together(case, case.plan, parts))


def _on_a_rank(rank: int, case: Case, strategy: str, library: str) -> Arrays:
    with chosen(LIBRARIES[library]):
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


TOKENS = 32768


def resolved(rank: int, mask: Mask, layout: Any = "zigzag", **options: Any) -> Gather:
    """Return the strategy of a layer of gpt-oss over four ranks.

    There is no GPU and no flash-attn-4: that must not matter until something is launched.
    """
    kernel: Kernel = options.pop("kernel", fa4.FA4)
    grad, hopper = options.pop("grad", True), ASSUMED_CAPABILITY.set((9, 0))
    is_known = patch.object(library, "is_known", lambda: True)
    is_short = patch.object(peer_copies, "fits_one_kernel", lambda *_: True)
    try:
        with FakeTensorMode(), chosen(kernel, is_known, is_short):
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


#: Masks and options; True where the backward is split, and where fetches are in its tiles, too.
LAYERS: dict[str, tuple[Mask, dict[str, Any], bool, bool]] = {
    "128 contiguous": (_windowed(128), {"layout": "contiguous"}, True, True),
    **{str(keys): (_windowed(keys), {}, True, True) for keys in (128, 130, 200, 513, 1000)},
    # Another kernel may compute the gradient of lse, by what was saved.
    "return_lse": (_windowed(128), {"return_lse": True}, False, False),
    "grad": (_windowed(128), {"grad": False}, False, False),
    "softcap": (_windowed(128), {"softcap": 5.0}, False, False),
    "deterministic": (_windowed(128), {"deterministic": True}, False, False),
    "kernel": (_windowed(128), {"kernel": EagerKernel()}, False, False),
    "documents": (_windowed(128, cu_seqlens=(0, 1000, TOKENS)), {}, False, False),
    # The window would end inside a tile that the next rows need.
    "right": (Mask(window=(127, 100)), {}, False, False),
    "lse of whole tiles": (Mask(causal=True), {"return_lse": True}, True, False),
}


@pytest.mark.parametrize("name", LAYERS)
def test_which_layers_have_a_split_backward(name: str) -> None:
    mask, options, splits, in_tiles = LAYERS[name]
    for rank in range(4):
        strategy = resolved(rank, mask, **options)
        assert _split(strategy) == (splits, fa4.KEYS if in_tiles else 1)
        if name.startswith("128"):
            gathered = strategy.forward_spec.gather
            assert not strategy.own_work.launches and strategy.rounding is not None
            assert len(gather_strategy._own_spans(strategy.own_fetches, gathered.length)) == 1
            assert len({item.q_stop - item.q_start for item in gathered.items}) == 1

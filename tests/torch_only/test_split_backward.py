"""Backwards that sum dK/dV in tiles, in a memory order of their own, over launches and ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, patch
from weakref import ref

import pytest
import torch
from patched import chosen
from tiled import KEYS, TiledKernel
from torch import Tensor
from views import offset

from benchmarks.common.cases import SHORT_SETTINGS, Setting, mask_of
from ring_core import Mask, Request, WorkItem, make_plan, ring_program
from ring_core.programs import gather_work
from ring_torch import ContextParallel
from ring_torch.accumulate import Columns, Rows
from ring_torch.buffers import ONE_GROUP, HeadGroups, KeyGradBuffer, KVPayload
from ring_torch.call import UNRESOLVED, Call, Transport
from ring_torch.comm.ranks import Ranks
from ring_torch.kernels import fa4
from ring_torch.kernels.api import Kernel, OwnSpans, Selection
from ring_torch.kernels.eager import EagerKernel
from ring_torch.kernels.fa4 import library
from ring_torch.launches.cache import KeptViews
from ring_torch.records import BackwardInputs, KernelParams, KeyBlock, QueryBlock
from ring_torch.strategies import gather, gather as gather_strategy
from ring_torch.strategies.gather import GATHER, Gather

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
    """A layer of gpt-oss has a split backward of one launch: equal spans, items of equal rows."""
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

"""Memory of a call beyond its inputs and results: a formula for each strategy's passes, no cycles.

Memory peaks at a launch or an exchange. Temporaries within one operator are not counted. On a GPU
kernels and exchanges have other temporaries, but a strategy keeps the same.
"""

from __future__ import annotations

import gc
import math
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch
from weakref import ReferenceType, ref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from patched import replaced
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.development.host_stubs import as_rank
from ring_core import LayoutSpec, Mask, StrategyConfig, UnsupportedError, make_plan, merge
from ring_torch import capture, prepare, ring_attention
from ring_torch.accumulate import Rows, merge_in_torch, one_by_one
from ring_torch.buffers import BufferSpec, HeadGroups, KVPayload
from ring_torch.call import Call
from ring_torch.comm import handshake
from ring_torch.comm.ranks import ALONE, Ranks, ranks_of
from ring_torch.comm.store import CallSignature
from ring_torch.kernels.eager import EagerKernel
from ring_torch.local import LocalRanks
from ring_torch.options import CallOptions
from ring_torch.records import AttentionState, BackwardInputs, Grads, KeyBlock, KeyGrads, QueryBlock
from ring_torch.strategies import gather, ring
from ring_torch.transports import p2p

RANKS, LENGTH, HEADS, KV_HEADS, DIM = 4, 128, 16, 4, 64


class Peak(NamedTuple):
    """The peak memory of a strategy beyond inputs and results, on the rank that holds most.

    Attributes:
        strategy: As a call takes it.
        forward: Multiples of the bytes of this rank's q, and of its k and v together.
        backward: Likewise; what the forward has saved counts.
        launches: False if launches do nothing, as those of ``eager`` have blocks of scores.
    """

    strategy: str | StrategyConfig
    forward: tuple[float, float]
    backward: tuple[float, float]
    launches: bool = True


# At a launch, the check for NaN in q takes 7/4 of q's bytes: absolute values and three masks.
PEAKS = {
    # Two buffers of K/V. Backward: K/V held and received; sums of dK/dV held and received.
    "ring": Peak("ring", (1.75, 2), (1.75, 4)),
    # Also a helper's rows and results, as large as q each, and half of q in transfer. Backward:
    # K/V held, sums held and received; a helper's q, dout, out and dQ, while there is no dQ of own
    # rows yet, which is a result.
    "balanced": Peak("balanced", (4.25, 2), (4.75, 3)),
    # Own K/V as a message, and the K/V of three peers. Backward: these, their sums, and dK/dV of
    # two launches, with dQ of one query head of four for half of the rows; sums of own keys only
    # once the peers' K/V are freed.
    "gather": Peak("gather", (1.75, 4), (0.25, 11)),
    # K/V of all ranks, and a launch's results for half of the rows. Backward: K/V, sums, and
    # accumulators of one launch, which sees all keys; dK and dV come later.
    "gather, one launch a row": Peak("gather", (0.5, 4), (0.5, 11), launches=False),
    # Saved q, k, v and out by heads; out as a message, in order and packed. Backward: saved
    # tensors, dout and gradients by heads; once these are messages, the saved ones are freed.
    "ulysses": Peak("ulysses", (4, 1), (4, 2)),
    # Also the K/V that the call between groups has saved, and its sums.
    "hybrid": Peak(StrategyConfig("hybrid", ulysses_size=2), (4, 2), (4, 5)),
    "hybrid of a gather": Peak(
        StrategyConfig("hybrid", ulysses_size=2, outer="gather"), (4, 2), (4, 3.5)
    ),
}


class LiveBytes(TorchDispatchMode):
    """A dispatch mode that records the peak of live bytes, of tensors made under it.

    Temporaries within one operator are not seen.
    """

    def __init__(self, before: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self._before = {x.untyped_storage()._cdata for x in before}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                key = storage._cdata
                if key not in self._before and key not in self._live:
                    self._live[key] = StorageWeakRef(storage), storage.nbytes()
        # The weak reference keeps the storage's address from being reused, so the key is unique.
        self._live = {key: x for key, x in self._live.items() if not x[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return results


def held(rank: int, peak: Peak) -> dict[str, int]:
    """Return the bytes that each pass holds on this rank beyond inputs and results.

    The minimum over some calls counts: the first makes tables, and gloo's thread releases a message
    some time after its wait has returned.
    """
    torch.manual_seed(rank)
    q, k, v, dout = (
        torch.randn(1, LENGTH, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    layout = "contiguous" if peak.strategy == "balanced" else "zigzag"
    kernel = "sdpa" if peak.launches else "eager"
    attend = partial(
        ring_attention, layout=layout, causal=True, strategy=peak.strategy, kernel=kernel
    )
    without_launches = (
        nullcontext() if peak.launches
        else replaced(EagerKernel, attend=untouched, differentiate=nothing)
    )  # fmt: skip
    least = {"forward": 1 << 62, "backward": 1 << 62}
    with without_launches:
        for _ in range(4):
            with LiveBytes([*leaves, dout]) as forward:
                out = attend(*leaves)
            with LiveBytes([*leaves, dout, out]) as backward:
                grads = torch.autograd.grad(out, leaves, dout)
            for name, live, results in (
                ("forward", forward, [out]), ("backward", backward, grads),
            ):  # fmt: skip
                least[name] = min(least[name], live.peak - sum(x.nbytes for x in results))
    return least


def nothing(*_: object) -> None:
    """Do nothing, in place of a launch."""


def untouched(*arguments: Any) -> Any:
    """Return what a forward is to merge into, in place of its launch."""
    *_, into, _mode, _key = arguments
    return into


@pytest.mark.parametrize("name", PEAKS)
def test_memory(name: str, backend: Any) -> None:
    """The peak is within a quarter of K/V's bytes, so one more tensor as large as k fails."""
    peak, size = PEAKS[name], LENGTH * DIM * torch.float32.itemsize
    q_bytes, kv_bytes = HEADS * size, 2 * KV_HEADS * size
    by_rank = backend.pool(RANKS).run(held, peak)
    for which, (q_times, kv_times) in (("forward", peak.forward), ("backward", peak.backward)):
        most, formula = max(x[which] for x in by_rank), q_times * q_bytes + kv_times * kv_bytes
        assert abs(most - formula) < kv_bytes / 4, (which, most / kv_bytes, formula / kv_bytes)


@pytest.mark.parametrize("how", ["write", "add", "wait"])
def test_gradients_of_a_launch_are_gone_before_the_next(how: Any) -> None:
    """Only dQ that waits to be added is left of an earlier launch."""
    x = torch.randn(1, 8, 2, 4)
    items = [replace(make_plan(Mask(), seq_len=8, cp_size=1).items(0, 0)[0]) for _ in range(3)]
    alive: list[ReferenceType[Tensor]] = []
    left: list[int] = []

    def launch(*_: Any) -> Grads:
        left.append(sum(made() is not None for made in alive))
        grads = [torch.ones_like(x) for _ in range(3)]
        alive.extend(map(ref, grads))
        return Grads(grads[0], grads[1], grads[2], None)

    backward = one_by_one(items, [launch] * len(items))
    rows, keys = QueryBlock(x), KeyBlock(x, x)
    row_sums = Rows(partial(torch.zeros_like, x), how)
    column_sums = KeyGrads(torch.zeros_like(x), torch.zeros_like(x))
    upstream = BackwardInputs(x, x, x[..., 0].transpose(1, 2), None)
    backward.run(rows, [keys], upstream, row_sums, column_sums)
    assert left == ([0, 1, 2] if how == "wait" else [0, 0, 0])
    assert torch.equal(column_sums.dk, torch.full_like(x, 3))


def test_a_failed_pass_lets_its_tensors_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "fail", lambda *_: None)
    state = SimpleNamespace(before_passes={})
    ranks: Any = SimpleNamespace(size=2, rank=0, check_open=lambda: None, state=state)
    signature: Any = SimpleNamespace(fields={"pass": "forward"})
    held: list[ReferenceType[Tensor]] = []

    def failing_pass() -> None:
        x = torch.ones(3)
        held.append(ref(x))
        with handshake.GuardedPass(ranks, 1, signature, torch.device("cpu")):
            raise MemoryError(x.shape)

    gc.disable()
    with suppress(MemoryError):
        failing_pass()
    gc.enable()
    assert held[0]() is None


@on_ranks
def test_a_call_leaves_no_reference_cycles(rank: int) -> None:
    """The tensors of a call are freed with its results, not at the next garbage collection."""
    torch.manual_seed(rank)
    q, k, v = (
        torch.randn(1, LENGTH, heads, DIM, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    found = 0
    for _ in range(2):  # the first calls make tables
        gc.collect()
        gc.disable()
        for peak in PEAKS.values():
            layout: LayoutSpec = "contiguous" if peak.strategy == "balanced" else "zigzag"
            out, lse = ring_attention(
                q, k, v, layout=layout, causal=True, strategy=peak.strategy, return_lse=True
            )
            torch.autograd.grad((out.sum(), lse.sum()), (q, k, v))
        found = gc.collect()
        gc.enable()
    assert found == 0


@pytest.mark.parametrize("has_bias", [False, True])
def test_what_a_ring_has_saved_lives_for_one_step(
    has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saved K/V is freed after the backward's first step; played on one rank of four."""
    forward, differentiate = ring.Ring.forward, EagerKernel.differentiate
    saved: list[StorageWeakRef] = []
    alive: list[bool] = []

    def noted_forward(self: Any, call: Any, inputs: Any) -> Any:
        state, tensors = forward(self, call, inputs)
        saved.extend(StorageWeakRef(x.untyped_storage()) for x in tensors)
        return state, tensors

    def noted_launch(*arguments: Any) -> None:  # of a step
        alive.append(not saved[0].expired())
        differentiate(*arguments)

    monkeypatch.setattr(Call, "agree", nothing)
    monkeypatch.setattr(ring.Ring, "forward", noted_forward)

    def run() -> None:
        q, k, v = (torch.randn(1, 32, 2, 16, requires_grad=True) for _ in range(3))
        bias = torch.randn(1, 2, 32, 128) if has_bias else None
        out = ring_attention(q, k, v, bias=bias, strategy="ring", kernel="eager", transport="p2p")
        torch.autograd.grad(out.sum(), (q, k, v))

    with replaced(EagerKernel, differentiate=noted_launch):
        as_rank(2, RANKS, run)
    assert alive == [True, False, False, False]


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_gathered_keys_are_gone_before_launches_in_place(
    groups: int, saves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K/V of the last head group are freed before launches on own keys, saved or fetched again."""
    fetch, own_sums = p2p.Messages._fetch, gather.Gather._own_sums
    gathered: list[StorageWeakRef] = []
    alive: list[bool] = []

    def noted_fetch(self: Any, inputs: Any) -> Any:
        pending = fetch(self, inputs)
        gathered.append(StorageWeakRef(pending.tensors[0].untyped_storage()))
        return pending

    def noted_launches(strategy: Any, *arguments: Any) -> Any:
        assert strategy.own_work.launches, "no row sees own keys only"
        alive.append(not gathered[-1].expired())
        return own_sums(strategy, *arguments)

    monkeypatch.setattr(Call, "agree", nothing)
    monkeypatch.setattr(p2p.Messages, "_fetch", noted_fetch)
    monkeypatch.setattr(gather.Gather, "_own_sums", noted_launches)
    monkeypatch.setattr(gather, "MAX_SAVED_BYTES", (1 << 30) * saves)
    cut = HeadGroups(1, groups, before_last_item=True)
    monkeypatch.setattr(gather, "head_groups_of", lambda *_: cut)

    def run() -> None:
        q, k, v = (torch.randn(1, 2048, 4, 16, requires_grad=True) for _ in range(3))
        out = ring_attention(
            q, k, v, mask=Mask(causal=True, window=(31, 0)), layout="zigzag", strategy="gather",
            kernel="eager", transport="p2p",
        )  # fmt: skip
        torch.autograd.grad(out.sum(), (q, k, v))

    prepare._prepare.cache_clear()
    as_rank(2, RANKS, run)
    assert len(alive) == groups
    assert not alive[-1]


def test_what_a_graph_has_captured_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    @capture.capture_safe_cache(maxsize=1)
    def make(n: int) -> Tensor:
        return torch.full((1,), n)

    passing = ref(make(1))
    assert passing() is make(1)
    make(2)
    gc.collect()
    assert passing() is None
    with monkeypatch.context() as patch:
        patch.setattr(capture, "is_capturing", lambda: True)
        captured = ref(make(2))
    make(3)
    gc.collect()
    assert captured() is not None


@pytest.mark.parametrize(
    "options",
    [
        {"alibi_slopes": torch.ones(2)},
        {"bias": torch.zeros(1, 1, 8, 8)},
        {"dropout_p": 0.5, "dropout_seed": 1},
        {"mask": Mask(predicate=lambda q, k: q >= k)},
        {"kernel": "eager"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_a_graph_cannot_hold_are_refused(options: dict[str, Any]) -> None:
    x = torch.zeros(1, 8, 2, 4)

    def call(**options: Any) -> Call:
        return prepare.check_call(ALONE, 0, "contiguous", x, x, x, CallOptions(**options))[0]

    plain = call(kernel="sdpa")
    with patch.object(type(plain.kernel), "reads_on_host", new=False):
        plain.check_capture()
    with pytest.raises(UnsupportedError, match="cannot be captured into a CUDA graph"):
        call(**options).check_capture()


def test_a_capture_over_gloo_is_told_what_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "is_capturing", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda _: "gloo")
    with pytest.raises(ValueError, match="backend 'nccl'"):
        handshake.check_graph(Ranks(None, 0, 2), CallSignature.of({}, "forward"))


@pytest.mark.parametrize("captures", [True, False])
def test_a_graph_keeps_the_strategy_of_a_pass(
    captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured pass keeps its strategy alive, as the graph reads its index tables."""
    monkeypatch.setattr(handshake, "is_capturing", lambda: captures)
    monkeypatch.setattr(handshake, "has_agreed", lambda *_: True)
    monkeypatch.setattr(dist, "get_backend", lambda _: "nccl")
    ranks, strategy = Ranks(None, 0, 2), {1}
    handshake.check_graph(ranks, CallSignature.of({}, "forward"), strategy)
    alive = ref(strategy)
    del strategy
    assert (alive() is not None) == captures


def test_nothing_is_captured_without_cuda() -> None:
    assert torch.cuda.is_initialized() or not capture.is_capturing()


def _forgets(_: int) -> None:
    group = dist.new_group([0])
    ranks, shared = ranks_of(group), torch.zeros(1)
    ranks.state.captured[1], ranks.state.exchanges = shared, shared
    held = ref(shared)
    del shared
    assert held() is not None
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert held() is None and not ranks.state.captured  # though the ranks are still there


def test_memory_of_a_group_goes_with_it() -> None:
    with LocalRanks(1) as pool:
        pool.run(_forgets)


#: Shapes and dtypes of the tensors of a message.
MESSAGES: tuple[tuple[tuple[tuple[int, ...], torch.dtype], ...], ...] = (
    (((2, 5, 3, 8), torch.bfloat16), ((2, 5, 3, 4), torch.bfloat16), ((2, 5), torch.int32)),
    (((1, 7, 1), torch.float64), ((7,), torch.float32), ((3, 1, 5), torch.uint8)),
    (((3, 3), torch.bool), ((1, 1, 1, 1), torch.complex128), ((13,), torch.int8)),
    (((2, 0, 3), torch.float32), ((4,), torch.float32), ((0,), torch.int64)),
    (((), torch.float16), ((), torch.int64)),
    (((0, 2, 5), torch.bfloat16),),
)


def _sliced(spec: BufferSpec, buffer: Tensor) -> list[Tensor]:
    """Return each tensor's bytes in its dtype and shape, by the definition."""
    return [
        buffer[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for shape, dtype, offset in zip(spec.shapes, spec.dtypes, spec.offsets, strict=True)
    ]


@pytest.mark.parametrize("start", [0, 48])
@pytest.mark.parametrize("message", MESSAGES)
def test_views_are_slices_of_the_bytes(
    message: tuple[tuple[tuple[int, ...], torch.dtype], ...], start: int
) -> None:
    spec = BufferSpec.of(*message)
    # The buffer may be part of a larger tensor.
    memory = torch.arange(start + spec.size + 16, dtype=torch.int64).to(torch.uint8)
    buffer = memory[start : start + spec.size]
    for view, expected in zip(spec.views(buffer), _sliced(spec, buffer), strict=True):
        assert view.dtype == expected.dtype
        assert view.shape == expected.shape
        assert view.stride() == expected.stride()
        assert view.data_ptr() == expected.data_ptr()
        assert view.storage_offset() == expected.storage_offset()
        assert view.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
        assert view.is_contiguous()
        assert torch.equal(*(x.flatten().view(torch.uint8) for x in (view, expected)))


@pytest.mark.parametrize(("dim", "v_dim"), [(8, 8), (12, 4)])
def test_columns_are_slices_of_the_whole(dim: int, v_dim: int) -> None:
    keys = KVPayload(2, 16, 3, dim, v_dim, torch.float32, segments=False)
    # The buffer may begin at any offset, and its rows may be strided.
    kv = torch.randn(2, 20, keys.width + 5)[:, 3:19, 2 : keys.width + 2]
    for start, length in ((0, 16), (5, 7), (16, 0)):
        cut = [x.narrow(1, start, length) for x in keys.split(kv)]
        for view, expected in zip(keys.columns([kv[:, start:]], length), cut, strict=True):
            assert torch.equal(view, expected)
            assert view.stride() == expected.stride()
            assert view.storage_offset() == expected.storage_offset() or length == 0


LSE = (-np.inf, -1e5, 0.0, np.inf, np.nan)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("new", LSE)
@pytest.mark.parametrize("old", LSE)
def test_a_merge_is_that_of_the_specification(old: float, new: float) -> None:
    outs = np.full((1, 1, 1, 2), 3.0), np.full((1, 1, 1, 2), 5.0)  # [B, n, H, D] and [B, H, n, D]
    lses = np.full((1, 1, 1), old), np.full((1, 1, 1), new)
    expected = merge(outs[0], lses[0], outs[1], lses[1])
    state = AttentionState(*(torch.tensor(x) for x in (outs[0], lses[0])))
    if np.isneginf(old):  # the identity of merging
        state.out.zero_()
    merge_in_torch(state, *(torch.tensor(x) for x in (outs[1], lses[1])))
    np.testing.assert_allclose(state.out.numpy(), expected[0], rtol=1e-9)
    assert np.isnan(expected[0]).all() == (not np.maximum(old, new) < np.inf)

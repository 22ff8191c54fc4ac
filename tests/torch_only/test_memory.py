"""Memory of a call beyond its inputs and results: a formula for each strategy's passes, no cycles.

Memory peaks at a launch or an exchange. Temporaries within one operator are not counted. On a GPU
kernels and exchanges have other temporaries, but a strategy keeps the same.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from patched import replaced
from refused import refused
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ring_core import LayoutSpec, Mask, StrategyConfig, UnsupportedError
from ring_torch import capture, prepare, ring_attention
from ring_torch.call import Call
from ring_torch.comm import handshake
from ring_torch.comm.ranks import ALONE, Ranks, ranks_of
from ring_torch.comm.store import CallSignature
from ring_torch.kernels.eager import EagerKernel
from ring_torch.options import CallOptions

RANKS, LENGTH, HEADS, KV_HEADS, DIM = 4, 128, 16, 4, 64


class Peak(NamedTuple):
    """The peak memory of a strategy beyond inputs and results, on the rank that holds most.

    Attributes:
        strategy: As a call takes it.
        forward: Multiples of the bytes of this rank's q, and of its k and v together.
        backward: Likewise; what the forward has saved counts.
        launches: False if launches do nothing, as those of ``eager`` have blocks of scores.
        bias: True with a bias, which is an input.
    """

    strategy: str | StrategyConfig
    forward: tuple[float, float]
    backward: tuple[float, float]
    launches: bool = True
    bias: bool = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """Make the call."""
        layout: LayoutSpec = "contiguous" if self.strategy == "balanced" else "zigzag"
        return ring_attention(
            q, k, v, layout=layout, causal=True, strategy=self.strategy,
            **{"kernel": "sdpa" if self.launches else "eager", **options},
        )  # fmt: skip


# At a launch, the check for NaN in q takes 7/4 of q's bytes: absolute values and three masks.
PEAKS = {
    # Two buffers of K/V. Backward: K/V held and received; sums of dK/dV held and received.
    "ring": Peak("ring", (1.75, 2), (1.75, 4)),
    "ring with a bias": Peak("ring", (0, 2), (0, 4), launches=False, bias=True),
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
    *leaves, dout = inputs(HEADS, KV_HEADS, KV_HEADS, HEADS)
    options = {"bias": torch.zeros(1, 1, LENGTH, LENGTH * RANKS)} if peak.bias else {}
    without_launches = (
        nullcontext() if peak.launches
        else replaced(EagerKernel, attend=lambda *x: x[-3], differentiate=lambda *_: None)
    )  # fmt: skip
    least = {"forward": 1 << 62, "backward": 1 << 62}
    with without_launches:
        for _ in range(4):
            with LiveBytes([*leaves, dout, *options.values()]) as forward:
                out = peak.attend(*leaves, **options)
            with LiveBytes([*leaves, dout, out, *options.values()]) as backward:
                grads = torch.autograd.grad(out, leaves, dout)
            for name, live, results in (
                ("forward", forward, [out]), ("backward", backward, grads),
            ):  # fmt: skip
                least[name] = min(least[name], live.peak - sum(x.nbytes for x in results))
    return least


def inputs(*heads: int) -> list[Tensor]:
    """Return random tensors of this rank, with gradients."""
    return [torch.randn(1, LENGTH, n, DIM, requires_grad=True) for n in heads]


@pytest.mark.parametrize("name", PEAKS)
def test_memory(name: str, backend: Any) -> None:
    """The peak is within a quarter of K/V's bytes, so one more tensor as large as k fails."""
    peak, size = PEAKS[name], LENGTH * DIM * torch.float32.itemsize
    q_bytes, kv_bytes = HEADS * size, 2 * KV_HEADS * size
    by_rank = backend.pool(RANKS).run(held, peak)
    for which, (q_times, kv_times) in (("forward", peak.forward), ("backward", peak.backward)):
        most, formula = max(x[which] for x in by_rank), q_times * q_bytes + kv_times * kv_bytes
        assert abs(most - formula) < kv_bytes / 4, (which, most / kv_bytes, formula / kv_bytes)


@on_ranks
def test_a_call_leaves_no_reference_cycles(rank: int) -> None:
    """The tensors of a call are freed with its results, not at the next garbage collection."""
    torch.manual_seed(rank)
    leaves, cycles = inputs(HEADS, KV_HEADS, KV_HEADS), 0
    for _ in range(2):  # the first calls make tables
        gc.collect()
        gc.disable()
        for peak in PEAKS.values():
            out, lse = peak.attend(*leaves, return_lse=True, kernel="auto")
            torch.autograd.grad((out.sum(), lse.sum()), leaves)
        cycles = gc.collect()
        gc.enable()
    assert cycles == 0


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


#: Options that a graph cannot hold.
UNCAPTURED: tuple[dict[str, Any], ...] = (
    {"alibi_slopes": torch.ones(2)}, {"bias": torch.zeros(1, 1, 8, 8)}, {"kernel": "eager"},
    {"dropout_p": 0.5, "dropout_seed": 1}, {"mask": Mask(predicate=lambda q, k: q >= k)},
)  # fmt: skip


def test_what_a_graph_holds_and_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 8, 2, 4)

    def call(**options: Any) -> Call:
        return prepare.check_call(ALONE, 0, "contiguous", x, x, x, CallOptions(**options))[0]

    plain = call(kernel="sdpa")
    with patch.object(type(plain.kernel), "reads_on_host", new=False):
        plain.check_capture()
    for options in UNCAPTURED:
        message, check = "cannot be captured into a CUDA graph", call(**options).check_capture
        refused(message, check, error=UnsupportedError)
    monkeypatch.setattr(handshake, "is_capturing", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda _: "gloo")
    signature = CallSignature.of({}, "forward")
    refused("backend 'nccl'", handshake.check_graph, Ranks(None, 0, 2), signature)
    # A captured pass keeps its strategy alive, as the graph reads its index tables.
    monkeypatch.setattr(handshake, "has_agreed", lambda *_: True)
    monkeypatch.setattr(dist, "get_backend", lambda _: "nccl")
    for captures in (True, False):
        monkeypatch.setattr(handshake, "is_capturing", lambda captures=captures: captures)
        ranks, strategy = Ranks(None, 0, 2), {1}
        handshake.check_graph(ranks, signature, strategy)
        alive = ref(strategy)
        del strategy
        assert (alive() is not None) == captures


@on_ranks
def test_memory_of_a_group_goes_with_it(rank: int) -> None:
    groups: list[Any] = [dist.new_group([n]) for n in range(RANKS)]
    ranks, shared = ranks_of(groups[rank]), torch.zeros(1)
    ranks.state.captured[1], ranks.state.exchanges = shared, shared
    held = ref(shared)
    del shared
    assert held() is not None
    dist.destroy_process_group(groups[rank])
    del groups
    gc.collect()
    assert held() is None and not ranks.state.captured  # though the ranks are still there

"""Tensors shared by calls are cached, and never freed once a CUDA graph reads them."""

from __future__ import annotations

import gc
from typing import Any
from unittest.mock import patch
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_core import Mask, UnsupportedError
from ring_torch import capture, prepare
from ring_torch.call import Call
from ring_torch.comm import handshake
from ring_torch.comm.ranks import ALONE, Ranks, ranks_of
from ring_torch.comm.store import CallSignature
from ring_torch.local import LocalRanks
from ring_torch.options import CallOptions


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
    """Calls on CUDA make this check during a capture; on a CPU it is called here by hand."""
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

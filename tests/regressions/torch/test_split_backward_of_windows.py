"""Kernel ``fa4`` has a split backward for windows that begin inside tiles of keys."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks.common.cases import SHORT_SETTINGS, Setting, mask_of
from ring_core import Mask, Request, make_plan, ring_program
from ring_torch.buffers import KVPayload
from ring_torch.call import UNRESOLVED, Call, Transport
from ring_torch.comm.ranks import Ranks
from ring_torch.kernels import fa4
from ring_torch.kernels.api import Kernel, Selection
from ring_torch.kernels.eager import EagerKernel
from ring_torch.kernels.fa4 import library
from ring_torch.records import KernelParams
from ring_torch.strategies import gather
from ring_torch.strategies.gather import GATHER, Gather

OSS = SHORT_SETTINGS[1]  # a layer of gpt-oss with a window


@pytest.fixture(autouse=True)
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


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("rank", range(4))
def test_a_layer_of_gpt_oss_has_one(rank: int, layout: Any) -> None:
    """A layer of gpt-oss has a split backward of one launch: equal spans, items of equal rows."""
    strategy = resolved(OSS, rank, layout=layout)
    assert (
        strategy.backward_spec.sums.head_major
        and not strategy.own_work.launches
        and strategy.forward_spec.gather.tile == fa4.KEYS
    )
    assert strategy.rounding is not None
    assert len(gather._own_spans(strategy.own_fetches, strategy.forward_spec.gather.length)) == 1
    assert len({item.q_stop - item.q_start for item in strategy.forward_spec.gather.items}) == 1


@pytest.mark.parametrize("keys", [130, 200, 513, 1000])
def test_so_have_other_causal_windows(keys: int) -> None:
    mask = Mask(causal=True, window=(keys - 1, 0))
    assert all(resolved(OSS, rank, mask=mask).backward_spec.sums.head_major for rank in range(4))


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
    assert not strategy.backward_spec.sums.head_major and strategy.forward_spec.gather.tile == 1


def test_calls_that_return_lse_keep_that_of_whole_tiles() -> None:
    strategy = resolved(OSS, 1, mask=Mask(causal=True), returns_lse=True)
    assert strategy.backward_spec.sums.head_major and strategy.forward_spec.gather.tile == 1

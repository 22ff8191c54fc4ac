"""Peak memory of a call, played on one rank of four with launches that do nothing.

Peaks are multiples of the output's bytes, with 4 query heads of 128 for a K/V head, in bfloat16.
Memory that peers read is left out, as torch's counters of a GPU leave it out; where copies between
GPUs would fetch K/V, the buffers exist before, and sums for peers count. The short call has the
same peak on an H200. A ring's messages count, each of half the output's bytes; what the kernel's
own backward allocates besides its results does not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from alone import alone
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.development.host_stubs import as_rank, nothing, without_launches
from ring_core import Mask
from ring_torch import ring_attention
from ring_torch.buffers import HeadGroups
from ring_torch.call import Call
from ring_torch.kernels.fa4 import FA4
from ring_torch.strategies import gather
from ring_torch.transports import peer_copies

HEADS, KV_HEADS, DIM, RANKS = 8, 2, 128, 4


class Peak(NamedTuple):
    """A call, and its largest allowed peak in the forward, and in forward + backward."""

    mask: Mask
    tokens: int
    most: tuple[float, float]
    is_short: bool = False
    groups: HeadGroups = HeadGroups(1, 1, before_last_item=True)
    strategy: str = "gather"
    has_sinks: bool = False


CAUSAL, WINDOW = Mask(causal=True), Mask(causal=True, window=(128, 0))
PEAKS = {
    "short": Peak(CAUSAL, 8192, (3.1, 5.1), is_short=True, groups=HeadGroups(1, 1, before_last_item=False)),
    "long": Peak(CAUSAL, 8192, (1.02, 7.1)),
    "rows that see own keys": Peak(WINDOW, 16384, (1.07, 4.15)),
    "rows that see own keys, in two groups": Peak(WINDOW, 16384, (1.07, 3.7), groups=HeadGroups(1, 2, before_last_item=True)),
    # Two messages, the sums in float32 and a result that waits to be merged.
    "ring": Peak(CAUSAL, 8192, (4.07, 10.6), strategy="ring"),
    "ring with sinks": Peak(CAUSAL, 8192, (4.1, 10.6), strategy="ring", has_sinks=True),
}  # fmt: skip


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the peak bytes of tensors that ``run`` creates."""
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as recorded:
        run()
    events: Any = recorded.profiler.kineto_results.events()
    changes = sorted((x.start_ns(), x.nbytes()) for x in events if x.name() == "[memory]")
    total = most = 0
    for _, size in changes:
        total += size
        most = max(most, total)
    return most


def peaks(peak: Peak) -> list[float]:
    torch.manual_seed(0)
    length = peak.tokens // RANKS
    q, k, v, dout = (
        torch.randn(1, length, heads, DIM).to(torch.bfloat16).requires_grad_(heads > 0)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    sinks = torch.zeros(HEADS) if peak.has_sinks else None
    attend = partial(
        ring_attention, q, k, v, mask=peak.mask, sinks=sinks, kernel="fa4", strategy=peak.strategy,
        layout="contiguous" if peak.strategy == "ring" else "zigzag",
        transport="p2p" if peak.strategy == "ring" else "symm_mem",
    )  # fmt: skip

    def forward() -> object:
        with torch.no_grad():
            return attend()

    def both() -> object:
        out = attend()
        return out, torch.autograd.grad(out, (q, k, v), dout.detach())

    taken = []
    for run in (forward, both):
        for _ in range(2):  # the repeated call counts
            run()
        taken.append(peak_bytes(run) / (q.numel() * q.itemsize))
    return taken


def _empty_grads(_: object, _dout: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
    """Return memory for dQ, dK and dV of an item."""
    return tuple(torch.empty_like(x) for x in tensors[:3])


@pytest.mark.parametrize("name", PEAKS)
def test_peak(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    peak = PEAKS[name]
    monkeypatch.setattr(gather, "head_groups_of", lambda *_: peak.groups)
    monkeypatch.setattr(peer_copies, "fits_one_kernel", lambda *_: peak.is_short)
    # A ring compares no calls here, as no header arrives; its backward launches nothing, either.
    monkeypatch.setattr(Call, "agree", nothing)
    monkeypatch.setattr(type(FA4.flash), "backward", _empty_grads)
    # Copies between GPUs do nothing; their destination buffers are allocated.
    session: AbstractContextManager[None] = nullcontext() if peak.is_short else alone()
    with without_launches(), session:
        # The last rank of a contiguous layout sees all keys, so each launch has all of its rows.
        taken = as_rank(RANKS - 1 if peak.strategy == "ring" else 0, RANKS, peaks, peak)
    for most, multiple in zip(peak.most, taken, strict=True):
        assert multiple <= most, taken
        assert multiple > most - 0.15, f"it takes less, {taken}: say so above"

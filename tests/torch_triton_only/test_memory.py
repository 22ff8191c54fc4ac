"""Peak memory of a call, played on one rank of four with launches that do nothing.

Peaks are multiples of the output's bytes, with 4 query heads of 128 for a K/V head, in bfloat16.
Memory that peers read is left out, as torch's counters of a GPU leave it out; where copies between
GPUs would fetch K/V, the buffers exist before, and sums for peers count. The short call has the
same peak on an H200. A ring's messages count, each of half the output's bytes; what the kernel's
own backward allocates besides its results does not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from alone import alone
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.cases import Setting
from benchmarks.development import host_causes
from benchmarks.development.host_causes import (
    SETTINGS,
    STUBBED_TOKENS,
    Repeated,
    as_rank,
    as_stubbed_rank,
    nothing,
    without_launches,
)
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
    options: dict[str, Any] = {"profile_memory": True, "acc_events": True}
    with profile(activities=[ProfilerActivity.CPU], **options) as recorded:
        run()
    events: Any = recorded.profiler.kineto_results.events()
    changes = sorted((x.start_ns(), int(x.nbytes())) for x in events if x.name() == "[memory]")
    return max(accumulate(size for _, size in changes))


def peaks(peak: Peak) -> list[float]:
    q, k, v, dout = (
        torch.randn(1, peak.tokens // RANKS, heads, DIM).to(torch.bfloat16).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    is_ring = peak.strategy == "ring"
    attend = partial(
        ring_attention, q, k, v, mask=peak.mask, kernel="fa4", strategy=peak.strategy,
        sinks=torch.zeros(HEADS) if peak.has_sinks else None,
        layout="contiguous" if is_ring else "zigzag", transport="p2p" if is_ring else "symm_mem",
    )  # fmt: skip

    def both() -> object:
        out = attend()
        return out, torch.autograd.grad(out, (q, k, v), dout.detach())

    taken = []
    for run in (torch.no_grad()(attend), both):
        for _ in range(2):  # the repeated call counts
            run()
        taken.append(peak_bytes(run) / (q.numel() * q.itemsize))
    return taken


@pytest.mark.parametrize("name", PEAKS)
def test_peak(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    peak = PEAKS[name]
    monkeypatch.setattr(gather, "head_groups_of", lambda *_: peak.groups)
    monkeypatch.setattr(peer_copies, "fits_one_kernel", lambda *_: peak.is_short)
    # A ring compares no calls here, as no header arrives; its backward launches nothing, either.
    monkeypatch.setattr(Call, "agree", nothing)
    # Memory for dQ, dK and dV of an item.
    empty = lambda _, _dout, *x: tuple(torch.empty_like(y) for y in x[:3])  # noqa: E731 - one line
    monkeypatch.setattr(type(FA4.flash), "backward", empty)
    # Copies between GPUs do nothing; their destination buffers are allocated.
    session: AbstractContextManager[None] = nullcontext() if peak.is_short else alone()
    with without_launches(), session:
        # The last rank of a contiguous layout sees all keys, so each launch has all of its rows.
        taken = as_rank(RANKS - 1 if peak.strategy == "ring" else 0, RANKS, peaks, peak)
    for most, multiple in zip(peak.most, taken, strict=True):
        assert multiple <= most, taken
        assert multiple > most - 0.15, f"it takes less, {taken}: say so above"


#: Folders whose functions do not count: torch's, and that of the stubs in place of launches.
LEFT_OUT = (*(str(Path(str(x.__file__)).parent) for x in (torch, host_causes)), "<frozen")
#: The most function calls of a repeated forward, and of its backward, by setting.
MOST = ((68, 66), (75, 68))


def counted(setting: Setting) -> tuple[int, int]:
    """Return the calls of one more forward like those before, and of its backward."""
    call, calls = Repeated(setting, "cpu"), 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and not frame.f_code.co_filename.startswith(LEFT_OUT)

    for _ in range(3):
        call.backward(call.forward())
    sys.setprofile(count)
    out = call.forward()
    sys.setprofile(None)
    forward = calls
    sys.setprofile(count)
    call.backward(out)
    sys.setprofile(None)
    return forward, calls - forward


def test_a_repeated_call() -> None:
    for setting, most in zip(SETTINGS, MOST, strict=True):
        run = partial(counted, replace(setting, seq_len=STUBBED_TOKENS))
        counts = as_stubbed_rank(1, 4, run)
        for count, limit in zip(counts, most, strict=True):
            assert count <= limit, (setting, counts)
            assert count > limit - 5, f"it makes fewer calls, {counts}: say so above"


def test_causes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times by cause add up, and the functions that begin causes are put back."""

    def functions() -> list[Any]:
        causes = host_causes._BEGIN
        return [getattr(place, name) for _, place, names in causes for name in names]

    before, path = functions(), tmp_path / "causes.json"
    for name, few in (("WARM_UP", 3), ("ROUNDS", 2), ("AT_ONCE", 2)):
        monkeypatch.setattr(host_causes, name, few)
    assert host_causes.main(["--stubs", "2", "--json", str(path)]) == 0
    assert functions() == before
    rows = json.loads(path.read_text())["rows"]
    took = {(x["setting"], x["cause"]): (x["forward_us"], x["backward_us"]) for x in rows}
    for setting in {row["setting"] for row in rows}:
        causes = [took[setting, cause] for cause in (*host_causes.CAUSES, host_causes.MARKS)]
        for in_all, *(by_cause) in zip(took[setting, "in all"], *causes, strict=True):
            assert sum(by_cause[:-1]) - by_cause[-1] == pytest.approx(in_all, abs=1.0)

"""The host's cost of a repeated call, which has to stay ahead of the GPU, and its messages.

The cost is counted in calls of this project's Python functions, and in source files. The call is a
plain causal one in float32; windows, documents and 16 bits take more calls in ``eager``.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import ring_torch
from ring_core import StrategyConfig
from ring_torch.comm.handshake import HEADER_BYTES
from ring_torch.comm.ranks import Ranks

HYBRID_RING = StrategyConfig("hybrid", ulysses_size=2)
HYBRID_GATHER = StrategyConfig("hybrid", ulysses_size=2, outer="gather")
#: The most function calls and source files of a pass in any strategy.
GOAL = 120, 14
#: Ranks, strategy, layout: the most calls and files of a repeated forward, and of a backward.
MOST: dict[tuple[int, str | StrategyConfig, str], tuple[tuple[int, int], tuple[int, int]]] = {
    (1, "ring", "zigzag"): ((28, 10), (35, 11)),
    (4, "ring", "zigzag"): ((80, 12), (103, 11)),
    (4, "gather", "zigzag"): ((68, 13), (105, 13)),
    (4, "balanced", "contiguous"): ((101, 13), (114, 12)),
    (4, "ulysses", "zigzag"): ((63, 13), (72, 13)),
    (4, HYBRID_RING, "zigzag"): ((85, 14), (89, 13)),
    (4, HYBRID_GATHER, "zigzag"): ((94, 14), (104, 14)),
}


def counted(rank: int, strategy: str | StrategyConfig, layout: Any) -> list[tuple[int, int]]:
    """Return the calls and files of one more forward like those before, and of its backward."""
    del rank
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 64, heads, 16).requires_grad_() for heads in (4, 2, 2))
    dout, files = torch.randn(1, 64, 4, 16), Counter[str]()

    def count(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and "/ring_" in name:
            files[name] += 1

    def watched(what: Callable[[], Any]) -> Any:
        files.clear()
        gc.disable()
        sys.setprofile(count)
        result = what()
        sys.setprofile(None)
        gc.enable()
        counts.append((files.total(), len(files)))
        return result

    def forward() -> torch.Tensor:
        return ring_torch.ring_attention(q, k, v, causal=True, layout=layout, strategy=strategy)

    for _ in range(3):
        torch.autograd.grad(forward(), (q, k, v), dout)
    counts: list[tuple[int, int]] = []
    out = watched(forward)
    watched(lambda: torch.autograd.grad(out, (q, k, v), dout))
    return counts


@pytest.mark.parametrize(("size", "strategy", "layout"), MOST)
def test_a_repeated_call(
    size: int, strategy: str | StrategyConfig, layout: str, backend: Any
) -> None:
    assert all(
        calls <= GOAL[0] and files <= GOAL[1] for calls, files in MOST[size, strategy, layout]
    )
    for counts in backend.pool(size).run(counted, strategy, layout):
        for most, (calls, files) in zip(MOST[size, strategy, layout], counts, strict=True):
            assert calls <= most[0] and files <= most[1], counts


#: Rows of the table of messages in ``docs/layouts-and-strategies.md``.
SENT: dict[str, tuple[str | StrategyConfig, str]] = {
    "`ring`": ("ring", "zigzag"),
    "`balanced`, `contiguous`": ("balanced", "contiguous"),
    "`gather`": ("gather", "zigzag"),
    "`ulysses`": ("ulysses", "zigzag"),
    "hybrid, two groups, a ring between them": (HYBRID_RING, "zigzag"),
    "hybrid, two groups, a gather between them": (HYBRID_GATHER, "zigzag"),
}


def messages(rank: int, strategy: str | StrategyConfig, layout: Any) -> list[tuple[int, int]]:
    """Return the messages and all-to-alls of a forward, and of its backward, without headers."""
    del rank
    q, k, v = (torch.randn(1, 96, heads, 16).requires_grad_() for heads in (4, 2, 2))
    sent: list[int] = []
    exchanges: list[object] = []
    start, all_to_all = Ranks.start, Ranks._all_to_all

    def counted_start(ranks: Ranks, sends: Any, receives: Any) -> Any:
        sent.extend(x.nbytes for x, _ in sends if x.nbytes != HEADER_BYTES)
        return start(ranks, sends, receives)

    def counted_all_to_all(*args: Any, **options: Any) -> Any:
        exchanges.append(args)
        return all_to_all(*args, **options)

    def taken() -> tuple[int, int]:
        counts = len(sent), len(exchanges)
        sent.clear()
        exchanges.clear()
        return counts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "start", counted_start)
        patch.setattr(Ranks, "_all_to_all", counted_all_to_all)
        out = ring_torch.ring_attention(q, k, v, causal=True, layout=layout, strategy=strategy)
        forward = taken()
        out.sum().backward()
        return [forward, taken()]


def _span(numbers: Iterable[int]) -> str:
    least, most = min(found := list(numbers)), max(found)
    return f"{least}" if least == most else f"{least} to {most}"


@pytest.mark.parametrize("name", SENT)
def test_messages_are_those_of_the_page(name: str, backend: Any) -> None:
    ranks = backend.pool(4).run(messages, *SENT[name])
    forward, backward = ([counts[n][0] for counts in ranks] for n in range(2))
    (exchanges,) = {count for counts in ranks for _, count in counts}
    row = f"| {name} | {_span(forward)} | {_span(backward)} | {exchanges} |"
    page = Path(__file__).parents[2] / "docs" / "layouts-and-strategies.md"
    assert row in page.read_text().splitlines(), row

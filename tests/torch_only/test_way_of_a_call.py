"""A call goes the way that the picture and the table of ``docs/architecture.md`` describe.

The files and functions of a repeated call are followed, in order: over gloo, and with a GPU's code
on a CPU, whose launches do nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import ring_torch
from benchmarks.common.cases import Setting
from benchmarks.development.host_causes import Repeated
from benchmarks.development.host_stubs import as_stubbed_rank

PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
#: Rows of the table, by their numbers, and what a call runs there: ``file.py: name``.
RING = {
    "1": "attention.py: ring_attention", "2": "prepare.py: check_call",
    "3": "autograd.py: AttentionFunction.forward", "5": "strategies/ring.py: Ring.forward",
    "4": "comm/handshake.py: agree", "6": "comm/ranks.py: Ranks.rotate",
    "8": "accumulate.py: Accumulator.attend",
}  # fmt: skip
RING_BACK = {
    "11": "autograd.py: AttentionFunction.backward", "12": "strategies/ring.py: Ring.backward",
    "13": "accumulate.py: one_by_one", "14": "strategies/ring.py: RotatingKeyGrads.hop",
}  # fmt: skip
GATHER = {
    "1": "attention.py: ring_attention", "2": "prepare.py: check_call",
    "3": "autograd.py: AttentionFunction.forward", "5": "strategies/gather.py: Gather.forward",
    "8": "accumulate.py: Accumulator.attend",
}  # fmt: skip
GATHER_BACK = {
    "11": "autograd.py: AttentionFunction.backward", "12": "strategies/gather.py: Gather.backward",
}  # fmt: skip
#: Words of the picture, in its order, and the functions that they stand for.
PICTURE = {
    "ring_attention(": "ring_attention", "check_call": "check_call",
    "AttentionFunction.forward": "AttentionFunction.forward", "forward_pass": "forward_pass",
    "attend(call, inputs)": "attend", "call.strategy.forward": "Ring.forward", "agree:": "agree",
    "send K/V": "Ranks.rotate", "results.attend": "Accumulator.attend",
}  # fmt: skip


def followed(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Return what a function returns, and the functions of Ring that it calls first, in order."""
    seen: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        _, found, name = frame.f_code.co_filename.partition("/ring_torch/")
        if event == "call" and found:
            seen.setdefault(f"{name}: {frame.f_code.co_qualname.partition('.<locals>')[0]}")

    sys.setprofile(note)
    try:
        result = run()
    finally:
        sys.setprofile(None)
    return result, [*seen]


def over_gloo(_: int) -> list[list[str]]:
    """Return what the third of some calls of a ring runs, forward and backward."""
    q, k, v = (torch.randn(1, 32, n, 16).requires_grad_() for n in (4, 2, 2))

    def call() -> torch.Tensor:
        return ring_torch.ring_attention(q, k, v, causal=True, layout="zigzag", strategy="ring")

    for _ in range(2):
        call().sum().backward()
    out, forward = followed(call)
    # Autograd runs a backward in the thread that asks for it, on a CPU.
    _, backward = followed(lambda: out.sum().backward())
    return [forward, backward]


def on_stubs() -> list[list[str]]:
    """Return what a repeated call over peers' memory runs with flash-attn-4's code for Hopper."""
    repeated = Repeated(Setting(2048, heads=8, kv_heads=2), "cpu")
    for _ in range(2):
        repeated.backward(repeated.forward())
    out, forward = followed(repeated.forward)
    _, backward = followed(lambda: repeated.backward(out))
    return [forward, backward]


def assert_in_order(names: list[str], calls: list[str]) -> None:
    """Check that names are among the calls, in this order."""
    assert [name for name in names if name not in calls] == []
    places = [calls.index(name) for name in names]
    assert places == sorted(places), names


@pytest.mark.parametrize("way", [RING | RING_BACK, GATHER | GATHER_BACK])
def test_the_table_has_its_rows(way: dict[str, str]) -> None:
    lines = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    rows = {
        first.split()[1]: torch_column for first, torch_column, *_ in lines if first[2:3].isdigit()
    }
    for number, name in way.items():
        file, _, function = name.partition(": ")
        assert file.rpartition("/")[2] in rows[number] and function in rows[number], name


def test_the_picture_is_the_order_over_gloo(backend: Any) -> None:
    picture = PAGE.partition("```text\nring_attention")[2].partition("```")[0]
    picture = f"ring_attention{picture}"
    places = [picture.index(words) for words in PICTURE]
    assert places == sorted(places)
    for forward, backward in backend.pool(2).run(over_gloo):
        assert_in_order([*RING.values()], forward)
        names = [name.partition(": ")[2] for name in forward]
        assert_in_order([*PICTURE.values()], names)
        assert_in_order([*RING_BACK.values()], backward)


def test_gathered_keys_go_the_same_way_on_gpus() -> None:
    forward, backward = as_stubbed_rank(0, 4, on_stubs)
    assert_in_order([*GATHER.values()], forward)
    assert_in_order([*GATHER_BACK.values()], backward)

"""Pages that follow from the code: the support matrix, and the way of a call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from ring_torch import ring_attention
from ring_torch.tools.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "support-matrix.md"
#: Kernels of each of the page's tables, which are narrow.
TABLES = {
    "kernels with options": ("`fa4`", "`triton`", "`eager`"),
    "kernels of libraries": ("`fa3`", "`cudnn`", "`fa2`", "`sdpa`"),
}


def shown(name: str) -> str:
    """Return the table that stands between two marks of the page."""
    text = PAGE.read_text().split(f"<!-- {name} -->")[1]
    return text.split(f"<!-- end of {name} -->")[0].strip()


def of_kernels(matrix: str, kernels: tuple[str, ...]) -> str:
    """Return the columns of some kernels, and the rows in which not all of them say no."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in matrix.splitlines()]
    kept = [n for n, name in enumerate(rows[0]) if n == 0 or name in kernels]
    cut = [[row[n] for n in kept] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in cut if set(row[1:]) != {"no"}]
    return "\n".join(lines).replace("|  |", "| |", 1)


def test_support_matrix_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    """If not, paste what ``python -m ring_torch matrix`` prints of these kernels into the page."""
    assert main(["matrix"]) == 0
    printed = capsys.readouterr().out.strip()
    for name, kernels in TABLES.items():
        assert shown(name) == of_kernels(printed, kernels)
    header = {x.strip() for x in printed.splitlines()[0].split("|")[2:-1]}
    assert header == {x for kernels in TABLES.values() for x in kernels}


ARCHITECTURE = (PAGE.parent / "architecture.md").read_text()
#: Rows of the table by their numbers, and what a call runs there in order, forward and backward.
CALL = {
    "1": "attention.py: ring_attention", "2": "prepare.py: check_call",
    "3": "autograd.py: AttentionFunction.forward",
}  # fmt: skip
LAUNCH, BACK = "accumulate.py: Accumulator.attend", "autograd.py: AttentionFunction.backward"
RING = CALL | {
    "5": "strategies/ring.py: Ring.forward", "4": "comm/handshake.py: agree",
    "6": "comm/ranks.py: Ranks.rotate", "8": LAUNCH,
}, {
    "11": BACK, "12": "strategies/ring.py: Ring.backward", "13": "accumulate.py: one_by_one",
    "14": "strategies/ring.py: RotatingKeyGrads.hop",
}  # fmt: skip
GATHER = (
    CALL | {"5": "strategies/gather.py: Gather.forward", "8": LAUNCH},
    {"11": BACK, "12": "strategies/gather.py: Gather.backward"},
)


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


def over_gloo(_: int, strategy: str) -> list[list[str]]:
    """Return what the third of some calls runs, forward and backward."""
    q, k, v = (torch.randn(1, 32, n, 16).requires_grad_() for n in (4, 2, 2))

    def call() -> torch.Tensor:
        return ring_attention(q, k, v, causal=True, layout="zigzag", strategy=strategy).sum()

    for _turn in range(2):
        call().backward()
    out, forward = followed(call)
    # Autograd runs a backward in the thread that asks for it, on a CPU.
    return [forward, followed(out.backward)[1]]


def assert_in_order(names: Iterable[Any], calls: Any) -> None:
    """Check that names are among the calls, or in a text, in this order."""
    places = [calls.index(name) for name in names]
    assert places == sorted(places), names


def test_the_table_has_its_rows() -> None:
    lines = [line.split(" | ") for line in ARCHITECTURE.splitlines() if line.startswith("| ")]
    rows = {x.split()[1]: in_torch for x, in_torch, *_ in lines if x[2:3].isdigit()}
    for number, name in (x for way in (*RING, *GATHER) for x in way.items()):
        file, _, function = name.partition(": ")
        assert file.rpartition("/")[2] in rows[number] and function in rows[number], name


def test_the_picture_is_the_order_over_gloo(backend: Any) -> None:
    """The picture names the files, and of strategies the folder."""
    picture = ARCHITECTURE[ARCHITECTURE.index("```text\nring_attention") :].split("```")[1]
    files = [name.partition(":")[0].replace("ring.py", "") for name in RING[0].values()]
    assert_in_order(files, picture)
    for strategy, way in (("ring", RING), ("gather", GATHER)):
        for passes in backend.pool(2).run(over_gloo, strategy):
            for names, calls in zip(way, passes, strict=True):
                assert_in_order(names.values(), calls)

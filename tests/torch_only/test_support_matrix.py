"""Pages that follow from the code: the support matrix, and the way of a call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from benchmarks.common.cases import Setting
from benchmarks.development.host_causes import Repeated
from benchmarks.development.host_stubs import as_stubbed_rank
from ring_core import Mask, StrategyConfig, UnsupportedError
from ring_torch import ring_attention
from ring_torch.comm.ranks import Ranks
from ring_torch.options import CallOptions
from ring_torch.prepare import check_call
from ring_torch.tools.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "support-matrix.md"
#: Kernels of each of the page's tables, which are narrow.
TABLES = {
    "kernels with options": ("`fa4`", "`triton`", "`eager`"),
    "kernels of libraries": ("`fa3`", "`cudnn`", "`fa2`", "`sdpa`"),
}
BATCH, HEADS, TOKENS, RANKS = 1, 8, 64, 4
LOCAL = TOKENS // RANKS
STRATEGIES: dict[str, str | StrategyConfig] = {
    "`balanced`": "balanced", "`ring`": "ring", "`gather`": "gather", "`ulysses`": "ulysses",
    "hybrid, ring": StrategyConfig("hybrid", ulysses_size=2, outer="ring"),
    "hybrid, gather": StrategyConfig("hybrid", ulysses_size=2, outer="gather"),
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "causal, window": {"causal": True, "window": (9, 0)},
    "`cu_seqlens`": {"causal": True, "cu_seqlens": (0, 20, TOKENS)},
    "`chunk_size`": {"causal": True, "chunk_size": 16},
    "predicate": {"mask": Mask(predicate=lambda q, k: (q - k) % 3 == 0)},
    "`segment_ids`": {"segment_ids": torch.zeros(BATCH, LOCAL, dtype=torch.int32)},
    "`bias`": {"bias": torch.zeros(BATCH, HEADS, LOCAL, TOKENS)},
    "`sinks`": {"sinks": torch.zeros(HEADS)}, "`softcap`": {"softcap": 5.0},
    "`alibi_slopes`": {"alibi_slopes": torch.ones(HEADS)},
    "`dropout_p`": {"dropout_p": 0.1, "dropout_seed": 1}, "`return_lse`": {"return_lse": True},
    "3 K/V heads": {}, "2 query heads": {},
}  # fmt: skip
#: Sentences of the page that chooses a strategy.
EXCEPTIONS = (
    "Every strategy takes every mask and every option, with these exceptions: - predicates run under `ring`, "
    '`balanced`, `ulysses` and `hybrid` with `outer="ring"`, not where keys are gathered; - `ulysses` needs '
    "at least as many query heads as ranks; `hybrid` needs as many as its groups have ranks."
)
#: Query and K/V heads, where not 8 and 2.
COUNTS = {"3 K/V heads": (9, 3), "2 query heads": (2, 1)}


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


def takes(option: str, strategy: str | StrategyConfig) -> bool:
    """Return if a strategy takes a call with an option on four ranks."""
    heads = COUNTS.get(option, (HEADS, 2))
    q, k = (torch.zeros(BATCH, LOCAL, n, 16) for n in heads)
    options = CallOptions(strategy=strategy, **OPTIONS[option])
    try:
        check_call(Ranks(None, 0, RANKS), 0, "contiguous", q, k, k, options)
    except UnsupportedError:
        return False
    return True


def test_every_strategy_takes_every_option_with_the_exceptions_on_the_page() -> None:
    refused = {(x, name) for x in OPTIONS for name, y in STRATEGIES.items() if not takes(x, y)}
    assert refused == {
        ("predicate", "`gather`"), ("predicate", "hybrid, gather"), ("2 query heads", "`ulysses`"),
    }  # fmt: skip
    page = " ".join((PAGE.parent / "which-strategy.md").read_text().split())
    assert page.count(EXCEPTIONS) == 1


ARCHITECTURE = (PAGE.parent / "architecture.md").read_text()
#: Rows of the table, by their numbers, and what a call runs there, forward and backward.
BOTH = {
    "1": "attention.py: ring_attention", "2": "prepare.py: check_call",
    "3": "autograd.py: AttentionFunction.forward",
}  # fmt: skip
END = {"8": "accumulate.py: Accumulator.attend"}
BACK = {"11": "autograd.py: AttentionFunction.backward"}
RING = BOTH | {
    "5": "strategies/ring.py: Ring.forward", "4": "comm/handshake.py: agree",
    "6": "comm/ranks.py: Ranks.rotate",
} | END  # fmt: skip
RING_BACK = BACK | {
    "12": "strategies/ring.py: Ring.backward", "13": "accumulate.py: one_by_one",
    "14": "strategies/ring.py: RotatingKeyGrads.hop",
}  # fmt: skip
GATHER = BOTH | {"5": "strategies/gather.py: Gather.forward"} | END
GATHER_BACK = BACK | {"12": "strategies/gather.py: Gather.backward"}
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


def third(call: Callable[[], Any], differentiate: Callable[[Any], Any]) -> list[list[str]]:
    """Return what the third of some calls runs, forward and backward."""
    for _ in range(2):
        differentiate(call())
    out, forward = followed(call)
    # Autograd runs a backward in the thread that asks for it, on a CPU.
    return [forward, followed(lambda: differentiate(out))[1]]


def over_gloo(_: int) -> list[list[str]]:
    q, k, v = (torch.randn(1, 32, n, 16).requires_grad_() for n in (4, 2, 2))
    options: Any = {"causal": True, "layout": "zigzag", "strategy": "ring"}
    return third(lambda: ring_attention(q, k, v, **options), lambda out: out.sum().backward())


def on_stubs() -> list[list[str]]:
    """Return what a call over peers' memory runs with flash-attn-4's code for Hopper."""
    repeated = Repeated(Setting(2048, heads=8, kv_heads=2), "cpu")
    return third(repeated.forward, repeated.backward)


def assert_in_order(names: list[str], calls: list[str]) -> None:
    """Check that names are among the calls, in this order."""
    assert [name for name in names if name not in calls] == []
    places = [calls.index(name) for name in names]
    assert places == sorted(places), names


def test_the_table_has_its_rows() -> None:
    lines = [line.split(" | ") for line in ARCHITECTURE.splitlines() if line.startswith("| ")]
    rows = {x.split()[1]: in_torch for x, in_torch, *_ in lines if x[2:3].isdigit()}
    for way in (RING, RING_BACK, GATHER, GATHER_BACK):
        for number, name in way.items():
            file, _, function = name.partition(": ")
            assert file.rpartition("/")[2] in rows[number] and function in rows[number], name


def test_the_picture_is_the_order_over_gloo(backend: Any) -> None:
    start = ARCHITECTURE.index("```text\nring_attention")
    places = [ARCHITECTURE.index(words, start) for words in PICTURE]
    assert places == sorted(places) and "```" not in ARCHITECTURE[start + 3 : places[-1]]
    for forward, backward in backend.pool(2).run(over_gloo):
        assert_in_order([*RING.values()], forward)
        names = [name.partition(": ")[2] for name in forward]
        assert_in_order([*PICTURE.values()], names)
        assert_in_order([*RING_BACK.values()], backward)


def test_gathered_keys_go_the_same_way_on_gpus() -> None:
    forward, backward = as_stubbed_rank(0, 4, on_stubs)
    assert_in_order([*GATHER.values()], forward)
    assert_in_order([*GATHER_BACK.values()], backward)

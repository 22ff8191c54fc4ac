"""The tables of what is supported are those that kernels print, and that calls are checked by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ring_core import Mask, StrategyConfig, UnsupportedError
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


@pytest.mark.parametrize(("name", "kernels"), TABLES.items())
def test_support_matrix_is_current(
    name: str, kernels: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """If not, paste what ``python -m ring_torch matrix`` prints of these kernels into the page."""
    assert main(["matrix"]) == 0
    assert shown(name) == of_kernels(capsys.readouterr().out.strip(), kernels)


def test_the_page_has_every_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix"]) == 0
    header = capsys.readouterr().out.splitlines()[0]
    assert {x.strip() for x in header.split("|")[2:-1]} == {x for of in TABLES.values() for x in of}


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

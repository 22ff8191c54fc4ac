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
#: Query and K/V heads, where not 8 and 2.
COUNTS = {"3 K/V heads": (9, 3), "2 query heads": (2, 1)}


def shown(name: str) -> str:
    """Return the table that stands between two marks of the page."""
    text = PAGE.read_text().split(f"<!-- {name} -->")[1]
    return text.split(f"<!-- end of {name} -->")[0].strip()


def test_support_matrix_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    """The page holds the output of ``python -m ring_torch matrix``; paste it there to fix this."""
    assert main(["matrix"]) == 0
    assert shown("support matrix") == capsys.readouterr().out.strip()


def takes(option: str, strategy: str | StrategyConfig) -> str:
    """Return if a strategy takes a call with an option on four ranks."""
    heads = COUNTS.get(option, (HEADS, 2))
    q, k = (torch.zeros(BATCH, LOCAL, n, 16) for n in heads)
    options = CallOptions(strategy=strategy, **OPTIONS[option])
    try:
        check_call(Ranks(None, 0, RANKS), 0, "contiguous", q, k, k, options)
    except UnsupportedError:
        return "no"
    return "yes"


def test_options_by_strategy_are_current() -> None:
    """If not, paste the table that is expected here into the page."""
    rows = [["", *STRATEGIES], ["---"] * (1 + len(STRATEGIES))]
    rows += [[x, *(takes(x, strategy) for strategy in STRATEGIES.values())] for x in OPTIONS]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    assert shown("options by strategy") == table

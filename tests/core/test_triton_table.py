"""Launchers of Triton compute block sizes, from files, and parts of tiles on the host."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ring_core import KernelConfig
from ring_core.triton import tile_configs as table
from ring_core.triton.tile_configs import Blocks, Row, choose_blocks

OURS = table.default_table()


def test_a_file_holds_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "blocks.json"
    path.write_text(table.to_text(OURS))
    assert table.read_table(str(path)) == OURS
    assert path.read_text() == Path(table._OWN_TABLE).read_text(), "the package's own is written so"


@pytest.mark.parametrize("kernel", table.KERNEL_PASSES)
def test_every_call_has_a_row(kernel: table.KernelPass) -> None:
    dims = 1, 64, 65, 128, 129, 256, 300
    for more, itemsize, dim in product((False, True), (2, 4, 8), dims):
        row = table.find_row(OURS, kernel, itemsize, dim, per_score_inputs=more)
        assert row.kernel == kernel and row.itemsize == min(itemsize, 4)
        assert row.head_dim >= min(dim, 256)
        assert row.per_score_inputs == (more and itemsize == 2 and dim <= 128)


def test_the_first_row_that_fits_counts() -> None:
    first = Row("fwd", 2, 64, per_score_inputs=False, q=16, k=32, warps=4, stages=1)
    assert table.find_row((first, *OURS), "fwd", 2, 64, per_score_inputs=True) == first
    assert table.find_row((first, *OURS), "fwd", 2, 65, per_score_inputs=False) != first


def test_another_file_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.json"
    path.write_text(table.to_text(replace(row, q=32, warps=2) for row in OURS))

    def chosen(**asked: Any) -> Blocks:
        own = asked.pop("table", None)
        config = KernelConfig(**asked)
        return choose_blocks(config, "fwd", 128, 2, per_score_inputs=False, table=own)

    usual = chosen()
    monkeypatch.setenv(table.BLOCKS_VARIABLE, str(path))
    assert chosen() == replace(usual, q=32, warps=2)
    assert chosen(block_q=64, block_k=16) == replace(usual, q=64, k=16, warps=2)
    row = Row("fwd", 2, 256, per_score_inputs=False, q=16, k=16, warps=1, stages=1)
    assert chosen(table=(row,)) == Blocks(16, 16, 1, 1)  # a table of the call comes first
    monkeypatch.setenv(table.BLOCKS_VARIABLE, "")
    assert chosen() == usual


#: Rows, or a change of a good one, and what the error says of their file.
BAD: tuple[tuple[Any, str], ...] = (
    (3, "no table of blocks"), ([{"kernel": "fwd"}], "a row has kernel, itemsize"), ({"best": 1}, "a row has kernel, itemsize"),
    ({"kernel": "fwd_hopper"}, "kernels are fwd"), ({"q": 96}, "powers of two from 16 to 256"),
    ({"k": 8}, "powers of two from 16 to 256"), ({"k": "64"}, "powers of two"), ({"warps": 3}, "warps"),
    ({"stages": 0}, "stages 1 to 8"), ({"itemsize": 8}, "itemsize 2 or 4"), ({"head_dim": 0}, "head_dim >= 1"),
    ({"stages": True}, "stages 1 to 8"), ({"per_score_inputs": 1}, "got"), ({}, "has no row for fwd of 2 bytes"),
    ([], "has no row for fwd of 2 bytes"),
)  # fmt: skip


def test_a_file_that_is_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.json"
    monkeypatch.setenv(table.BLOCKS_VARIABLE, str(path))
    with pytest.raises(ValueError, match=r"mine.json is no table.*python -m ring_jax_gpu tune"):
        table.default_table()  # there is none
    good = asdict(OURS[0])
    texts = [("{", "no table of blocks")]
    texts += [(json.dumps([good | x] if isinstance(x, dict) else x), message) for x, message in BAD]
    for text, message in texts:
        path.write_text(text)
        with pytest.raises(ValueError, match=message) as error:
            table.read_table(str(path))
        assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        (range(16), True),
        (range(20), True),
        ([*range(40, 48), *range(8)], True),
        (range(4, 20), False),
        (range(0, 32, 2), False),
        ([*range(8), *range(8, 10), 12], False),
        ([*range(12), *range(16, 28)], False),
    ],
)
def test_positions_that_come_in_eights(positions: list[int], expected: bool) -> None:
    assert table.positions_aligned8(np.array(positions)) is expected

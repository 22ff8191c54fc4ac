"""The table of Triton block sizes: valid files, and the row that a call gets."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

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
@pytest.mark.parametrize("per_score_inputs", [False, True])
@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("dim", [1, 64, 65, 128, 129, 256, 300])
def test_every_call_has_a_row(
    kernel: table.KernelPass, per_score_inputs: bool, itemsize: int, dim: int
) -> None:
    row = table.find_row(OURS, kernel, itemsize, dim, per_score_inputs=per_score_inputs)
    assert row.kernel == kernel and row.itemsize == min(itemsize, 4)
    assert row.head_dim >= min(dim, 256)
    assert row.per_score_inputs == (per_score_inputs and itemsize == 2 and dim <= 128)


def test_the_first_row_that_fits_counts() -> None:
    first = Row("fwd", 2, 64, per_score_inputs=False, q=16, k=32, warps=4, stages=1)
    assert table.find_row((first, *OURS), "fwd", 2, 64, per_score_inputs=True) == first
    assert table.find_row((first, *OURS), "fwd", 2, 65, per_score_inputs=False) != first


def test_another_file_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.json"
    path.write_text(table.to_text(replace(row, q=32, warps=2) for row in OURS))
    usual = choose_blocks(KernelConfig(), "fwd", 128, 2, per_score_inputs=False)
    monkeypatch.setenv(table.BLOCKS_VARIABLE, str(path))
    blocks = choose_blocks(KernelConfig(), "fwd", 128, 2, per_score_inputs=False)
    assert blocks == replace(usual, q=32, warps=2)
    asked = KernelConfig(block_q=64, block_k=16)
    assert choose_blocks(asked, "fwd", 128, 2, per_score_inputs=False) == replace(
        blocks, q=64, k=16
    )
    monkeypatch.setenv(table.BLOCKS_VARIABLE, "")
    assert choose_blocks(KernelConfig(), "fwd", 128, 2, per_score_inputs=False) == usual


def test_a_table_of_the_call_comes_first() -> None:
    row = Row("fwd", 2, 256, per_score_inputs=False, q=16, k=16, warps=1, stages=1)
    assert choose_blocks(
        KernelConfig(), "fwd", 8, 2, per_score_inputs=False, table=(row,)
    ) == Blocks(16, 16, 1, 1)


GOOD = asdict(OURS[0])
BAD: dict[str, tuple[str, str]] = {
    "no-json": ("{", "no table of blocks"),
    "no-list": ("3", "no table of blocks"),
    "short": (json.dumps([{"kernel": "fwd"}]), "a row has kernel, itemsize"),
    "more": (json.dumps([{**GOOD, "best": 1}]), "a row has kernel, itemsize"),
    "kernel": (json.dumps([{**GOOD, "kernel": "fwd_hopper"}]), "kernels are fwd"),
    "size": (json.dumps([{**GOOD, "q": 96}]), "powers of two from 16 to 256"),
    "small": (json.dumps([{**GOOD, "k": 8}]), "powers of two from 16 to 256"),
    "text": (json.dumps([{**GOOD, "k": "64"}]), "powers of two"),
    "warps": (json.dumps([{**GOOD, "warps": 3}]), "warps"),
    "stages": (json.dumps([{**GOOD, "stages": 0}]), "stages 1 to 8"),
    "itemsize": (json.dumps([{**GOOD, "itemsize": 8}]), "itemsize 2 or 4"),
    "head-dim": (json.dumps([{**GOOD, "head_dim": 0}]), "head_dim >= 1"),
    "true": (json.dumps([{**GOOD, "stages": True}]), "stages 1 to 8"),
    "per-score-inputs": (json.dumps([{**GOOD, "per_score_inputs": 1}]), "got"),
    "few": (json.dumps([GOOD]), "has no row for fwd of 2 bytes"),
    "empty": ("[]", "has no row for fwd of 2 bytes"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_table(name: str, tmp_path: Path) -> None:
    text, message = BAD[name]
    path = tmp_path / f"{name}.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        table.read_table(str(path))
    assert str(path) in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(table.BLOCKS_VARIABLE, str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match=r"none.json is no table.*python -m ring_jax_gpu tune"):
        table.default_table()

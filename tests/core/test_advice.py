"""Errors say what to do instead, and name lengths that need no padding."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from ring_core import Layout, Mask, checks, divisor_of, make_plan, ring_program, viz
from ring_core.reference import attention, simulate


@pytest.mark.parametrize("shape", [(2, 1, 1, 8), (1, 1, 1, 8), (2, 1, 1, 4), (2, 8)])
def test_a_mask_of_keys_is_segment_ids(shape: tuple[int, ...]) -> None:
    """A mask of keys is refused with advice to use segment ids, in the shapes of BERT and Flax."""
    with pytest.raises(ValueError, match=r"segment_ids, int32 \[B, T_local\].*-1 for padding"):
        checks.check_dense_mask(checks.Tensor(shape, "bool"), (2, 4, 2, 8), 8, "cpu")
    sizes = checks.Sizes(2, 4, 4, 2, 2, 8, 8)
    with pytest.raises(ValueError, match=r"segment_ids, int32 \[B, T_local\].*-1 for padding"):
        checks.check_bias(checks.Tensor(shape, "float32"), sizes, 8, "cpu")


@pytest.mark.parametrize("shape", [(2, 2, 4, 9), (1, 1, 8, 8), (3, 3)])
def test_other_masks_are_not(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"got \([0-9, ]+\)$"):
        checks.check_dense_mask(checks.Tensor(shape, "bool"), (2, 4, 2, 8), 8, "cpu")


def test_a_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """The install command in the error works from a clone, as no index has the packages."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    program = ring_program(make_plan(Mask(), seq_len=4, cp_size=2))
    with pytest.raises(
        ImportError, match=r"pip install matplotlib.*'packages/ring-core\[viz\]'"
    ) as error:
        viz.plot(program, "plan.png")
    folder = str(error.value).split("pip install '")[-1].split("[")[0]
    assert (Path(__file__).parents[2] / folder / "pyproject.toml").exists()


@pytest.mark.parametrize("length", [1, 7, 8])
def test_zigzag_over_one_rank_takes_any_length(length: int) -> None:
    layout = Layout("zigzag", length, 1)
    assert layout.positions(0).tolist() == list(range(length))
    assert (layout.divisor, layout.num_runs, divisor_of("zigzag", 1)) == (1, 1, 1)
    mask = Mask(causal=True)
    program = ring_program(make_plan(mask, seq_len=length, cp_size=1, layout="zigzag"))
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, length, 2, 4))
    np.testing.assert_allclose(simulate(program, q, k, v)[0], attention(q, k, v, mask=mask)[0])


def test_a_length_that_is_an_array_is_told_by_its_shape() -> None:
    with pytest.raises(ValueError, match=r"got a ndarray of shape \[2, 512\]; it is the number of"):
        Layout("zigzag", np.zeros((2, 512)), 2)  # type: ignore[arg-type]  # wrong on purpose


def test_padding_is_told_for_cross_attention_too() -> None:
    with pytest.raises(
        ValueError, match=r"pass seq_len=13, in cross attention seq_len=\(queries', keys'\)"
    ):
        Layout("contiguous", 13, 4)

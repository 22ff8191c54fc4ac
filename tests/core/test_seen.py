"""Masked products read only the entries that are seen."""

from __future__ import annotations

import numpy as np

from ring_core.reference.item_kernel import masked_matmul


def test_what_is_finite_in_a_row_that_is_not_counts_as_it_is() -> None:
    """Finite entries of a row with a nonfinite one count unless the nonfinite one is seen."""
    weights = np.array([[2.0, 3.0], [5.0, 0.0]])
    visible = np.array([[True, True], [True, False]])
    x = np.array([[1.0, 10.0, 100.0], [np.inf, 7.0, np.nan]])
    product = masked_matmul(weights, visible, x)
    np.testing.assert_array_equal(product, [[np.inf, 41.0, np.nan], [5.0, 50.0, 500.0]])


def test_infinite_weights_warn_of_nothing() -> None:
    """``inf * 0`` gives NaN without a warning, in finite and in nonfinite rows."""
    weights = np.array([[np.inf, 0.0]])
    visible = np.array([[True, True]])
    product = masked_matmul(weights, visible, np.array([[0.0], [np.inf]]))
    assert np.isnan(product).all()

"""Matrix products of softmax weights that read only what the mask shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]


def seen_matmul(weights: Floats, visible: npt.NDArray[np.bool_], x: Floats) -> Floats:
    """``weights @ x``, where ``weights`` are zero unless ``visible``: rows not seen are not read.

    Plainly ``0 * nan`` is ``nan``, so rows of ``x`` that are not finite are added only where seen.
    """
    odd = ~np.isfinite(x).all(axis=-1)
    with np.errstate(invalid="ignore"):  # weights may be infinite themselves
        result = weights @ np.where(odd[..., None], 0, x)
    for j in np.flatnonzero(odd.any(axis=tuple(range(odd.ndim - 1)))):
        with np.errstate(invalid="ignore"):
            term = weights[..., :, j, None] * x[..., j, None, :]
        result = result + np.where(visible[..., :, j, None] & odd[..., j, None, None], term, 0)
    return result

"""cuDNN at every kind of head dim on one GPU: right, or refused by name."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from cases import Case
from tolerances import assert_close

from ring_core import Mask
from ring_torch.local import LocalRankError

DIMS = [
    *((dim, dim) for dim in (40, 64, 72, 96, 100, 128, 136, 160, 192, 250, 256)),
    (192, 128), (189, 121), (160, 128), (128, 64), (64, 128), (256, 128),
]  # fmt: skip
CASES = [
    Case(
        f"cudnn-{dims[0]}-{dims[1]}-{heads[0]}-{heads[1]}-{name}", mask, "contiguous", 1, 330, keys, 2,
        heads, dims, dtype,
    )
    for dims, heads, (name, mask, keys), dtype in product(
        DIMS, [(2, 2), (8, 2)],
        [("full", Mask(), None), ("causal", Mask(causal=True), None), ("keys", Mask(), 450)],
        ["bfloat16"],
    )
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_cudnn(case: Case, backend: Any) -> None:
    """Every case runs on Hopper, elsewhere those with equal head dims up to 128."""
    try:
        results = backend.run(case, kernel="cudnn")
    except LocalRankError as error:
        if torch.cuda.get_device_capability()[0] == 9 or "on Hopper from cuDNN" not in str(error):
            raise
        return
    assert_close(case, results)

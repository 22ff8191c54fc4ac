"""Recurrent layers by the kernels of flash-linear-attention, compared with torch's operations.

The kernels run in Triton's interpreter, which has no bfloat16 products: float16 and float32 are
compared, the latter past the check of dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from backends import fla_on_cpu
from torch import Tensor

from ring_core import LayoutSpec
from ring_torch import ContextParallel
from ring_torch.local import LocalRanks
from ring_torch.recurrent import fla

T, H, HV, K, V = 192, 1, 2, 16, 16
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3}


@pytest.fixture(scope="module")
def two() -> Iterator[LocalRanks]:
    with LocalRanks(2, timeout=120) as ranks:
        yield ranks


def inputs(rows: int, tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Draw q, k, v, g and beta."""
    torch.manual_seed(rows)
    q, k = torch.randn(2, rows, tokens, H, K).to(dtype)
    v, g, beta = (torch.randn(rows, tokens, HV, *shape) for shape in ((V,), (), ()))
    return [q, k, v.to(dtype), -g.abs(), beta.sigmoid()]


def _compare(
    rank: int, layout: LayoutSpec, documents: tuple[int, ...] | None, rows: int, dtype: torch.dtype,
    tokens: int,
) -> None:  # fmt: skip
    fla_on_cpu.load()
    cp, states = ContextParallel(layout=layout), rows if documents is None else len(documents) - 1
    whole = inputs(rows, tokens, dtype)
    torch.manual_seed(1)
    initial = torch.randn(states, HV, K, V) / 4
    results = []
    for kernel in ("fla", "eager"):
        own = [cp.shard(x, pad=True).requires_grad_() for x in whole]
        start = initial.clone().requires_grad_()
        with patch.object(fla, "reasons_against", lambda *_, **__: iter(())):
            out, final = cp.gated_delta_rule(
                *own, use_qk_l2norm=True, initial_state=start, output_final_state=True,
                cu_seqlens=documents, seq_len=tokens, kernel=kernel,
            )  # fmt: skip
        torch.manual_seed(2 + rank)
        loss = (out.float() * torch.randn(out.shape)).sum() + (
            final * torch.randn(final.shape)
        ).sum()
        loss.backward()
        results.append([out.detach(), final.detach(), start.grad, *(x.grad for x in own)])
    for name, actual, expected in zip(
        ("out", "final", "initial", "q", "k", "v", "g", "beta"), *results, strict=True
    ):
        assert actual.dtype == expected.dtype
        # A rank's part of a gradient may be zeros.
        error = float((actual.float() - expected.float()).norm())
        limit = LIMITS[dtype] * float(expected.float().norm())
        assert error <= limit, f"{name} is off by {error}, and may by {limit}"


@pytest.mark.parametrize(
    ("layout", "documents", "rows", "dtype", "tokens"),
    [
        ("zigzag", None, 1, torch.float32, T),
        ("contiguous", None, 2, torch.float32, T),
        ("zigzag", (0, 50, 51, 51, 140, T), 1, torch.float32, T),
        ("zigzag", None, 2, torch.float16, T - 3),
    ],
    ids=["zigzag", "rows", "documents", "padding in 16 bits"],
)
def test_its_runs_are_those_of_torch(
    two: LocalRanks, layout: LayoutSpec, documents: tuple[int, ...] | None, rows: int,
    dtype: torch.dtype, tokens: int,
) -> None:  # fmt: skip
    two.run(_compare, layout, documents, rows, dtype, tokens)


def test_every_function_is_in_the_library() -> None:
    fla_on_cpu.load()
    assert not isinstance(fla.library(), str)

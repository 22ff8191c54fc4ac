"""Recurrent layers by the kernels of flash-linear-attention, compared with torch's operations.

The kernels run in Triton's interpreter, which has no bfloat16 products: float16 and float32 are
compared, the latter past the check of dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from backends import fla_on_cpu
from on_ranks import on_ranks
from torch import Tensor

import ring_torch
from ring_core import LayoutSpec
from ring_torch import ContextParallel
from ring_torch.local import LocalRanks
from ring_torch.recurrent import fla

T, H, HV, K, V = 192, 1, 2, 16, 16
#: The library sums decays of a chunk in float32: sums of hundreds lose digits of the last decays.
LIMITS = {torch.float32: 3e-5, torch.float16: 2e-3}


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalRanks]:
    with LocalRanks(2, timeout=120) as ranks:
        yield ranks


#: Layers with what they are given beside initial states; some decays are 0, or exp(-50).
LAYERS: dict[str, dict[str, Any]] = {
    "gated_delta_rule": {"use_qk_l2norm": True}, "kda": {"use_qk_l2norm": True},
    "simple_gla": {"scale": 0.3}, "ssd": {"dt_softplus": True},
}  # fmt: skip


def inputs(name: str, rows: int, tokens: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Draw the inputs of a layer."""
    torch.manual_seed(rows)
    q, k = torch.randn(2, rows, tokens, H, K).to(dtype)
    v, g, beta = (torch.randn(rows, tokens, HV, *shape) for shape in ((V,), (), ()))
    if name == "ssd":
        return {"x": v.to(dtype), "dt": g, "A": -torch.rand(HV), "B": k, "C": q}
    g = -g.abs()
    g[:, 5::31], g[:, 17::53] = -50, -torch.inf
    given = {"q": q, "k": k, "v": v.to(dtype), "g": g, "beta": beta.sigmoid()}
    if name == "kda":
        given["g"] = g[..., None] * torch.rand(K)
    return given if LAYERS[name].get("use_qk_l2norm") else {x: given[x] for x in "qkvg"}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("layout", "documents", "rows", "dtype", "tokens"), [
    ("zigzag", None, 1, torch.float32, T), ("contiguous", None, 2, torch.float32, T),
    ("zigzag", (0, 50, 51, 51, 140, T), 1, torch.float32, T), ("zigzag", None, 2, torch.float16, T - 3),
], ids=["zigzag", "rows", "documents", "padding in 16 bits"])  # fmt: skip
@on_ranks
def test_its_runs_are_those_of_torch(
    rank: int, name: str, layout: LayoutSpec, documents: tuple[int, ...] | None, rows: int,
    dtype: torch.dtype, tokens: int,
) -> None:  # fmt: skip
    fla_on_cpu.load()
    cp, states = ContextParallel(layout=layout), rows if documents is None else len(documents) - 1
    whole = inputs(name, rows, tokens, dtype)
    torch.manual_seed(1)
    initial = torch.randn(states, HV, *((V, K) if name == "ssd" else (K, V))) / 4
    results = []
    for kernel in ("fla", "eager"):
        own = {
            key: (x.clone() if key == "A" else cp.shard(x, pad=True)).requires_grad_()
            for key, x in whole.items()
        }
        start = initial.clone().requires_grad_()
        # Of 16 bits the tripwire knows the library's rounding.
        with (
            patch.object(fla, "reasons_against", lambda *_, **__: iter(())),
            ring_torch.check(every=int(dtype == torch.float16)),
        ):
            state = {"initial_states" if name == "ssd" else "initial_state": start}
            out, final = getattr(cp, name)(
                **own, **state, output_final_state=True, cu_seqlens=documents, seq_len=tokens,
                kernel=kernel, **LAYERS[name],
            )  # fmt: skip
        torch.manual_seed(2 + rank)
        grads = [torch.randn(x.shape).to(x.dtype) for x in (out, final)]
        torch.autograd.backward([out, final], grads)
        results.append([out.detach(), final.detach(), start.grad, *(x.grad for x in own.values())])
    for result, actual, expected in zip(("out", "final", "initial", *whole), *results, strict=True):
        assert actual.dtype == expected.dtype
        # A rank's part of a gradient may be zeros.
        error = float((actual.float() - expected.float()).norm())
        limit = LIMITS[dtype] * float(expected.float().norm())
        assert error <= limit, f"{result} is off by {error}, and may by {limit}"

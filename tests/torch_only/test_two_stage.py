"""A gather in two stages prepares its launches, and repeated calls give the bits of the first.

The kernel has no band mask but the causal one, and returns views of its own tensors, as cuDNN's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from plain_flash import PlainFlash
from ring_torch.strategies.prepared_partials import PreparedPartials
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from views import offset

from ring_core import Capabilities
from ring_torch import ContextParallel, call, prepare, ring_attention
from ring_torch.kernels.api import Selection
from ring_torch.kernels.flash import FlashKernel
from ring_torch.kernels.library import LaunchOptions, PartialBackward, PartialForward, rounded_to_8

LENGTH, HEADS, DIM = 96, (4, 2, 2), 8


@dataclass(frozen=True)
class Bandless(PlainFlash):
    """A library that records its partial launches."""

    launched: list[str]

    def prepare_partial(
        self, q: Tensor, k: Tensor, options: LaunchOptions
    ) -> tuple[PartialForward, PartialBackward]:
        del q, k

        def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            self.launched.append("forward")
            out, lse = self.forward(q, k, v, options, None)
            # cuDNN's output has heads before tokens, in the memory order of the queries.
            return out.transpose(1, 2).clone().transpose(1, 2), lse.unsqueeze(3).squeeze(3)

        def backward(
            q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            self.launched.append("backward")
            return self.backward(dout, q, k, v, out, lse, options, None)

        return forward, backward


def kernel_of(launched: list[str]) -> FlashKernel:
    dtypes = "float64", "float32", "bfloat16"
    return FlashKernel(
        Bandless(launched), Capabilities("bandless", dtypes=dtypes, bands="causal"),
        head_dims=rounded_to_8, unavailable=lambda: None,
    )  # fmt: skip


def repeated(
    rank: int, layout: Any, causal: bool, dtype: torch.dtype, saves: bool, view: str
) -> tuple[list[str], list[list[Tensor]], list[Tensor]]:
    """Return launches of repeated calls, results of each call, and those of dense attention."""
    del rank
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(2, LENGTH, n, DIM, generator=generator, dtype=torch.float64).to(dtype)
        for n in (*HEADS, HEADS[0])
    ]
    cp = ContextParallel(layout=layout)
    launched: list[str] = []
    calls = []
    prepare._prepare.cache_clear()
    with (
        patch.object(prepare, "choose", lambda *_: Selection(kernel_of(launched), ())),
        patch.object(call, "MAX_SAVED_BYTES", (1 << 20) * saves),
    ):
        for n in range(3):
            if n == 1:
                launched.clear()
            q, k, v, dout = (cp.shard(x).clone() for x in whole)
            if view == "heads first":
                k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            out = ring_attention(
                q, k, v, causal=causal, layout=layout, strategy="gather", transport="p2p"
            )
            calls.append([out.detach(), *torch.autograd.grad(out, (q, k, v), dout)])
    prepare._prepare.cache_clear()
    q, k, v = (x.double().requires_grad_() for x in whole[:3])
    query, key, value = (
        x.repeat_interleave(HEADS[0] // x.shape[2], dim=2).transpose(1, 2) for x in (q, k, v)
    )
    expected = scaled_dot_product_attention(query, key, value, is_causal=causal).transpose(1, 2)
    grads = torch.autograd.grad(expected, (q, k, v), whole[3].double())
    return launched, calls, [cp.shard(x.detach()) for x in (expected, *grads)]


def _saved_elsewhere(_: int, name: str) -> tuple[list[str], list[tuple[Tensor, ...]]]:
    """Return partial launches of the third of three calls, and the gradients of all.

    In the third what is saved comes back one number behind a multiple of 16 bytes: the gathered
    K/V, or ``lse``.
    """
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, LENGTH // 2, n, DIM).requires_grad_() for n in HEADS)
    last = {"keys": HEADS[1] * 2 * DIM, "lse": LENGTH // 2}[name]

    def elsewhere(x: Tensor) -> Tensor:
        if x.ndim != 3 or x.shape[-1] != last:
            return x
        return offset(x)

    launched: list[str] = []
    results = []
    prepare._prepare.cache_clear()
    with patch.object(prepare, "choose", lambda *_: Selection(kernel_of(launched), ())):
        for unpack in (torch.clone, torch.clone, elsewhere):
            launched.clear()
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, unpack):
                out = ring_attention(q, k, v, causal=True, layout="zigzag", strategy="gather")
            results.append(torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))
    prepare._prepare.cache_clear()
    return launched, results


@pytest.mark.parametrize("name", ["keys", "lse"])
def test_prepared_launches_get_aligned_tensors(name: str, backend: Any) -> None:
    for launched, results in backend.pool(2).run(_saved_elsewhere, name):
        assert "forward" in launched and "backward" not in launched
        for grads in results[1:]:
            for x, first in zip(grads, results[0], strict=True):
                torch.testing.assert_close(x, first)


@pytest.mark.parametrize(
    ("layout", "causal", "dtype", "saves", "view"),
    [
        ("zigzag", True, torch.float64, True, "plain"),
        pytest.param("zigzag", True, torch.bfloat16, True, "plain", marks=pytest.mark.nightly),
        ("zigzag", True, torch.float32, False, "heads first"),
        pytest.param(
            "contiguous", True, torch.float32, True, "heads first", marks=pytest.mark.nightly
        ),
        ("contiguous", False, torch.bfloat16, False, "plain"),
    ],
)
def test_repeats(
    layout: str, causal: bool, dtype: torch.dtype, saves: bool, view: str, backend: Any
) -> None:
    # Launches over own keys, earlier tokens' keys, and later ones that half of the rows see.
    zigzag, contiguous = (2, 3, 2), (1, 2, 2)
    launches = zigzag if layout == "zigzag" else contiguous if causal else (2, 2, 2)
    results = backend.pool(3).run(repeated, layout, causal, dtype, saves, view)
    for number, (launched, calls, expected) in zip(launches, results, strict=True):
        assert sorted(launched) == ["backward"] * 2 * number + ["forward"] * 2 * number
        tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
        for first, second, third, expected_result in zip(*calls, expected, strict=True):
            torch.testing.assert_close(
                first.double(), expected_result, rtol=tolerance, atol=tolerance
            )
            assert torch.equal(first, second)
            assert torch.equal(second, third)


def with_sinks_or_lse(rank: int) -> None:
    """Check that a forward with sinks is rounded once, and that calls with lse save no keys."""
    del rank
    launched: list[str] = []
    q, k, v = (torch.randn(1, 32, n, DIM).requires_grad_() for n in HEADS)
    prepare._prepare.cache_clear()
    options: dict[str, Any] = {"causal": True, "strategy": "gather", "transport": "p2p"}
    with (
        patch.object(prepare, "choose", lambda *_: Selection(kernel_of(launched), ())),
        patch.object(PreparedPartials, "attend", side_effect=AssertionError),
    ):
        for _ in range(2):
            ring_attention(q, k, v, sinks=torch.zeros(HEADS[0]), **options)
    prepare._prepare.cache_clear()
    for _ in range(2):
        out, lse = ring_attention(q, k, v, return_lse=True, **options)
        assert len(out.grad_fn.saved_tensors) == 10  # inputs, given or not, out and lse
        torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    prepare._prepare.cache_clear()


def test_sinks_and_lse(backend: Any) -> None:
    backend.pool(2).run(with_sinks_or_lse)


def changed_in_place(rank: int) -> None:
    """Check that results of a repeated call can be changed in place, like those of the first."""
    del rank
    q, k, v = (torch.randn(1, 32, n, DIM).requires_grad_() for n in HEADS)
    bias = torch.ones(DIM, requires_grad=True)
    options: dict[str, Any] = {"causal": True, "strategy": "gather", "transport": "p2p"}
    prepare._prepare.cache_clear()
    with patch.object(prepare, "choose", lambda *_: Selection(kernel_of([]), ())):
        for grad in (True, False):
            for _ in range(2):
                with torch.set_grad_enabled(grad):
                    out, lse = ring_attention(q, k, v, return_lse=True, **options)
                out += bias
                lse += 1
    prepare._prepare.cache_clear()


def test_results_may_be_changed_in_place(backend: Any) -> None:
    backend.pool(2).run(changed_in_place)


def with_odd_gradients(rank: int) -> None:
    """Check gradients of ``out`` at any address, and of one sequence with any batch stride."""
    del rank
    q, k, v = (torch.randn(1, 32, n, DIM).requires_grad_() for n in HEADS)
    dout = torch.randn(1, 32, HEADS[0], DIM)
    options: dict[str, Any] = {"causal": True, "strategy": "gather", "transport": "p2p"}
    prepare._prepare.cache_clear()
    with patch.object(prepare, "choose", lambda *_: Selection(kernel_of([]), ())):
        grads = [
            torch.autograd.grad(ring_attention(q, k, v, **options), (q, k, v), x)
            for x in (dout, _among(dout, before=0), _among(dout, before=1))
        ]
    prepare._prepare.cache_clear()
    for others in grads[1:]:
        torch.testing.assert_close(others, grads[0])


def _among(x: Tensor, before: int) -> Tensor:
    """Return a copy of a one-sequence tensor in a larger one, with an odd stride of the batch."""
    apart = x.numel() + 1
    strides = (apart, *x.stride()[1:])
    return torch.zeros(2 * apart).as_strided(x.shape, strides, before).copy_(x)


def test_gradients_of_odd_strides(backend: Any) -> None:
    backend.pool(2).run(with_odd_gradients)


def with_infinities(rank: int, layout: Any) -> list[list[tuple[Tensor, Tensor]]]:
    """Return ``(out, lse)`` of the first and repeated calls where some scores are not finite."""
    del rank
    cp = ContextParallel(layout=layout)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, LENGTH, n, DIM, generator=generator) for n in HEADS]
    whole[0][0, 1, :, 0] = torch.inf
    whole[1][0, :2, :, 0] = -1.0  # all scores of row 1 are -inf, and its lse with them
    options: dict[str, Any] = {"causal": True, "strategy": "gather", "transport": "p2p"}
    prepare._prepare.cache_clear()
    with patch.object(prepare, "choose", lambda *_: Selection(kernel_of([]), ())):
        calls = [
            ring_attention(*map(cp.shard, whole), return_lse=True, layout=layout, **options)
            for _ in range(3)
        ]
    prepare._prepare.cache_clear()
    return [list(zip(calls[0], repeat, strict=True)) for repeat in calls[1:]]


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_rows_whose_scores_are_not_finite(layout: str, backend: Any) -> None:
    """Rows with NaN or infinite scores are NaN in every call, whatever the kernel leaves there."""
    ranks = backend.pool(3).run(with_infinities, layout)
    for repeats in ranks:
        for pair in (pair for repeat in repeats for pair in repeat):
            torch.testing.assert_close(*pair, rtol=0, atol=0, equal_nan=True)
    out, lse = ranks[0][0][0][0], ranks[0][0][1][0]
    assert out[:, 1].isnan().all() and lse[:, :, 1].isnan().all()

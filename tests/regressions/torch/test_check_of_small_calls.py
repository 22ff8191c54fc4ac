"""The check for running jobs on calls of a few tokens: right calls pass, and faults trip it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from plain_flash import FLASH, PlainFlash
from torch import Tensor

import ring_torch
from ring_torch import WrongResultError, prepare, ring_attention
from ring_torch.kernels.api import Selection
from ring_torch.kernels.eager import EagerKernel

DTYPES = ("bfloat16", "float16", "float32", "float64")
KERNELS = ("eager", "flash")
CALLS = 50  # calls of each kernel and dtype in a part
PARTS = 12


class SmallCall(NamedTuple):
    """Tensors and options of a call on one process."""

    tensors: tuple[Tensor, ...]  # q, k, v, and the gradient of out
    options: dict[str, Any]


def drawn(seed: int, dtype: torch.dtype) -> SmallCall:
    """Draw sizes and inputs: even to peaked scores, and K/V from independent to nearly equal."""
    rng = np.random.default_rng(seed)
    batch, length = int(rng.integers(1, 3)), int(rng.integers(1, 9))
    kv_heads, group = int(rng.choice([1, 2])), int(rng.choice([1, 2]))
    dim, v_dim = (int(rng.choice([1, 4, 16])) for _ in range(2))
    q_size, shift = float(rng.choice([1, 6, 20])), float(rng.choice([0, 0, 5]))

    def random(heads: int, dim: int) -> Tensor:
        return torch.as_tensor(rng.standard_normal((batch, length, heads, dim)))

    q, dout = q_size * random(kv_heads * group, dim), random(kv_heads * group, v_dim)
    k, v = (shift + random(kv_heads, n) for n in (dim, v_dim))
    options: dict[str, Any] = {"window": (2, 9), "softmax_scale": 0.3}
    if rng.random() < 0.5:
        options["sinks"] = torch.as_tensor(rng.standard_normal(kv_heads * group)).to(dtype)
    return SmallCall(tuple(x.to(dtype) for x in (q, k, v, dout)), options)


def run(call: SmallCall) -> None:
    """Run forward and backward, both checked."""
    q, k, v, dout = call.tensors
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with ring_torch.check():
        out: Any = ring_attention(*leaves, **call.options)
        torch.autograd.grad(out, leaves, dout)


def found_wrong(seeds: range, dtype: str) -> list[str]:
    """Return the error of each call that the check finds wrong."""
    calls_found_wrong = []
    for seed in seeds:
        try:
            run(drawn(seed, getattr(torch, dtype)))
        except WrongResultError as error:
            calls_found_wrong.append(f"{seed}: {str(error).partition('. Kernel')[0]}")
    return calls_found_wrong


@contextmanager
def chosen(kernel: str) -> Iterator[None]:
    """Let calls inside run a kernel with float32 sums: plain, or rounding as fused ones do."""
    prepare._prepare.cache_clear()
    kernel_object: Any = EagerKernel() if kernel == "eager" else FLASH
    with patch.object(prepare, "choose", lambda *_: Selection(kernel_object, ())):
        yield
    prepare._prepare.cache_clear()


@pytest.mark.nightly(
    unless=["eager-float32-0", "eager-bfloat16-0", "flash-float16-0", "flash-float64-0"]
)
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.nightly) for part in range(1, PARTS))]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_right_calls_pass(kernel: str, dtype: str, part: int) -> None:
    with chosen(kernel):
        assert found_wrong(range(part * CALLS, (part + 1) * CALLS), dtype) == []


def _scaled(which: int, by: float) -> Callable[..., Any]:
    """Return a backward whose gradient number ``which`` is scaled by ``by`` in its first head."""
    right = PlainFlash.backward

    def wrong(self: Any, *args: Any) -> Any:
        grads = right(self, *args)
        grads[which][:, :, 0] *= by
        return grads

    return wrong


def _without_delta(self: Any, *args: Any, right: Any = PlainFlash.backward) -> Any:
    dout, q, k, v, out, *rest = args
    return right(self, dout, q, k, v, torch.zeros_like(out), *rest)


def _at_another_scale(self: Any, *args: Any, right: Any = PlainFlash.backward) -> Any:
    *tensors, options, destination = args
    return right(self, *tensors, options._replace(scale=0.25), destination)


def _with_another_window(self: Any, *args: Any, right: Any = PlainFlash.forward) -> Any:
    *tensors, options, destination = args
    return right(self, *tensors, options._replace(window=(1, 9)), destination)


FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "dq a tenth larger": ("backward", _scaled(0, 1.1)),
    "dk a tenth larger": ("backward", _scaled(1, 1.1)),
    "dv a tenth larger": ("backward", _scaled(2, 1.1)),
    "no delta": ("backward", _without_delta),
    "another scale": ("backward", _at_another_scale),
    "another window": ("forward", _with_another_window),
}


@pytest.mark.nightly(
    unless=[f"{fault}-{DTYPES[n % len(DTYPES)]}" for n, fault in enumerate(FAULTS)]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_trips(fault: str, dtype: str) -> None:
    """The check finds many of the calls of several tokens that the fault changes."""
    method, wrong = FAULTS[fault]
    with chosen("flash"), patch.object(PlainFlash, method, wrong):
        calls_found_wrong = found_wrong(range(40), dtype)
    assert len(calls_found_wrong) >= 10
    assert all(f"({method})" in text for text in calls_found_wrong)

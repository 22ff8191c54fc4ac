"""Triton's kernel of log-probabilities computes what torch computes, in losses, too."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ring_torch import ContextParallel
from ring_torch.training import part, softmax_kernel, token_log_probs

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cap": {"softcap": 0.7},
    "large cap": {"softcap": 300.0},
    "temperature": {"temperature": 0.6},
    "both, bias": {"softcap": 2.0, "temperature": 1.7, "bias": True},
    "weight": {"weight": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["loss", "log_probs"])
def test_losses_by_the_kernel(kind: str, options: str, dtype: torch.dtype) -> None:
    kwargs = dict(OPTIONS[options])
    if kind == "log_probs" and kwargs.pop("weight", None):
        kwargs["temperature"] = 2.0
    torch.manual_seed(len(options))
    hidden = torch.randn(1, 11, 16)
    head = torch.randn(70, 16) / 2
    labels = torch.randint(0, 70, (1, 11))
    labels[0, ::4] = -100
    for name in kwargs.keys() & {"bias", "weight"}:
        kwargs[name] = torch.rand(70)
    grad = torch.randn(1, 11)

    def results(dtype: torch.dtype) -> list[Tensor]:
        x, w = (y.to(dtype).requires_grad_() for y in (hidden, head))
        wide = torch.promote_types(dtype, torch.float32)  # of a weight of classes
        more: dict[str, Any] = dict(kwargs)
        if "bias" in more:
            more["bias"] = more["bias"].to(dtype).requires_grad_()
        if "weight" in more:
            more["weight"] = more["weight"].to(wide)
        if kind == "loss":
            bias = more.pop("bias", None)
            out = part.linear_loss(x[0], w, bias, labels[0], tokens_at_once=4, **more)
            more["bias"] = bias
        else:
            out = token_log_probs(ContextParallel(), x, w, labels, tokens_at_once=4, **more)
        (out if kind == "loss" else (out * grad).sum()).backward()
        grads = [y.grad for y in (x, w, more.get("bias")) if y is not None]
        return [out.detach(), *(y for y in grads if y is not None)]

    hidden, head = (x.to(dtype).float() for x in (hidden, head))
    kwargs = {k: y.to(dtype).float() if isinstance(y, Tensor) else y for k, y in kwargs.items()}
    exact = results(torch.float64)
    with patch.object(softmax_kernel, "_BLOCK", 32):
        with patch.object(part, "_fused_log_probs", lambda _: softmax_kernel.log_probs_):
            got = results(dtype)
        plain = results(dtype)
    for x, y, z in zip(got, plain, exact, strict=True):
        assert x.dtype == y.dtype
        most = torch.finfo(dtype).eps * z.abs().max() + 2 * (y.double() - z).abs().max()
        assert (x.double() - z).abs().max() <= most


def test_what_rows_hold() -> None:
    """A row that does not count gets zeros, whatever it holds; a label of no class gets NaN."""
    logits = torch.tensor([[1.0, 2.0], [torch.nan, 0.0], [1.0, 2.0]])
    own = torch.tensor([1.0, 0.0, 1.0])
    log_probs = softmax_kernel.log_probs_(logits, torch.tensor([0, 1, 2]), own, 1.0, None)
    p = torch.tensor([1.0, 2.0]).softmax(0)
    torch.testing.assert_close(log_probs[0], p[0].log())
    torch.testing.assert_close(logits[0], torch.stack([1 - p[0], -p[1]]))
    assert (logits[1] == 0).all()
    assert log_probs[2].isnan()


@pytest.mark.parametrize("hip", [None, "7.0"])
def test_rocm_has_no_products_of_another_dtype(hip: str | None) -> None:
    with FakeTensorMode(), patch.object(torch.version, "hip", hip), patch("torch.addmm") as wide:
        hidden, head, logits = (
            torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            for shape in ((4, 16), (70, 16), (4, 70))
        )
        part._Gradients(hidden, head, torch.float32, trains_hidden=False, trains_head=True).add(
            logits, None, hidden, slice(4)
        )
    assert wide.called == (hip is None)

"""Views on a GPU: every kernel reads the right elements, aligned or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from views import OPERANDS, VIEWS, Entry, Given, Known, differences, made, results

from ring_core import UnsupportedError

KERNELS = ("fa4", "fa3", "cudnn", "fa2", "sdpa", "triton", "eager")
EVERY = ("q", "k", "v", "dout")  # tensors that all kernels take
#: Reasons to leave a kernel out: its library is missing, or has no kernels for this GPU.
NOT_HERE = ("is not installed", "has no cuDNN", "compute capability")
TOLERANCE: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2}


def _made(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return made(0, 1, length=256, dim=64, dtype=dtype, device="cuda")


def _compiled(call: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(call, fullgraph=True)


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_view_is_what_it_shows(kernel: str, operand: str) -> None:
    errors, known = list[str](), Known()
    options: dict[str, Any] = {"causal": True, "kernel": kernel}
    try:
        results(Given.of(Entry(operand, "sliced"), _made(), options).contiguous())
    except UnsupportedError as error:
        reasons = NOT_HERE if operand in EVERY else (*NOT_HERE, "has no ")
        if not any(reason in str(error) for reason in reasons):
            raise
        pytest.skip(str(error))
    for view in VIEWS:
        call = Given.of(Entry(operand, view), _made(), options)
        errors += [f"{view}: {message}" for message in differences(call, known=known, **TOLERANCE)]
    assert errors == []


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kernel", ["triton", "auto"])
def test_compiled(kernel: str, view: str) -> None:
    """Compiled results have the strides that the graph expects."""
    options: dict[str, Any] = {"causal": True, "kernel": kernel}
    known = Known()
    for operand in EVERY:
        call = Given.of(Entry(operand, view), _made(), options)
        assert list(differences(call, _compiled, known=known, **TOLERANCE)) == []


@pytest.mark.parametrize("view", VIEWS)
def test_in_float32(view: str) -> None:
    """Triton kernels are accurate to float32."""
    known = Known()
    for operand in OPERANDS:
        call = Given.of(
            Entry(operand, view), _made(torch.float32), {"causal": True, "kernel": "triton"}
        )
        assert list(differences(call, known=known, rtol=1e-4, atol=1e-4)) == []

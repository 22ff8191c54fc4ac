"""A call is checked by the setting of its forward, in whichever thread its backward runs."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from patched import replaced
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ring_torch
from ring_torch import WrongResultError, ring_attention
from ring_torch.kernels.eager import EagerKernel
from ring_torch.local import LocalRanks

SIZES = (1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ring_attention(q, k, v, causal=True, kernel="eager", strategy="ring").sin()


def _compiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    torch._dynamo.reset()
    out: Tensor = torch.compile(_attend, backend="aot_eager", fullgraph=True)(q, k, v)
    return out


def _checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = checkpoint(_attend, q, k, v, use_reentrant=False)
    return out


def _reentrant(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = checkpoint(_attend, q, k, v, use_reentrant=True)
    return out


WAYS = {"eager": _attend, "compiled": _compiled, "checkpointed": _checkpointed}


def _in_a_thread(run: Callable[[], None]) -> list[str]:
    """Run a function in a thread, as autograd runs backwards on GPUs, and return the errors."""
    raised: list[str] = []

    def backward() -> None:
        try:
            run()
        except WrongResultError as error:
            raised.append(str(error))

    thread = Thread(target=backward)
    thread.start()
    thread.join()
    return raised


def _wrong_grads(*args: Any, right: Any = EagerKernel.differentiate) -> None:
    right(*args)
    args[-1].dk[:, :, 0] *= 1.5


def _called(rank: int, attend: Callable[..., Tensor], forward: int, backward: int) -> list[str]:
    """Return the errors of a wrong backward, given the check's settings around either pass."""
    torch.manual_seed(rank)
    q, k, v = (torch.randn(1, 16, heads, 8).requires_grad_() for heads in (4, 2, 2))
    with replaced(EagerKernel, differentiate=_wrong_grads):
        with ring_torch.check(forward):
            out = attend(q, k, v)

        def run() -> None:
            with ring_torch.check(backward):
                out.sum().backward()

        return _in_a_thread(run)


@pytest.mark.nightly(only=["compiled-2"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_the_forward_decides(way: str, size: int, backend: Any) -> None:
    for raised in backend.pool(size).run(_called, WAYS[way], 1, 0):
        assert len(raised) == 1 and "(backward) is wrong" in raised[0]
    assert backend.pool(size).run(_called, WAYS[way], 0, 1) == [[]] * size


@pytest.mark.parametrize("size", SIZES)
def test_a_call_that_is_made_anew_is_checked_by_what_is_set_then(size: int, backend: Any) -> None:
    """Reentrant checkpoints are checked by the backward's setting, as it makes the call again."""
    for raised in backend.pool(size).run(_called, _reentrant, 0, 1):
        assert len(raised) == 1 and "(backward) is wrong" in raised[0]
    assert backend.pool(size).run(_called, _reentrant, 1, 0) == [[]] * size


def _numbers(rank: int, attend: Callable[..., Tensor]) -> list[int]:
    """Return which of six calls are found wrong in the backward, counted from 1."""
    messages = []
    with ring_torch.check(3), replaced(EagerKernel, differentiate=_wrong_grads):
        for number in range(1, 7):
            torch.manual_seed(rank)
            q, k, v = (torch.randn(1, 16, heads, 8).requires_grad_() for heads in (4, 2, 2))
            try:
                attend(q, k, v).sum().backward()
            except WrongResultError:
                messages.append(number)
    return messages


@pytest.mark.nightly(only=["_compiled"])
@pytest.mark.parametrize("attend", [_attend, _compiled])
def test_both_passes_are_of_one_number(attend: Callable[..., Tensor]) -> None:
    """Every third call is checked, in both passes: a compiled backward is not counted as a call."""
    with LocalRanks(2) as ranks:
        assert ranks.run(_numbers, attend) == [[3, 6], [3, 6]]

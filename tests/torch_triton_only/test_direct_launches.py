"""Repeated launches call the compiled Triton kernel directly; new kinds go through Triton first."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from ring_torch.launches.direct import VERSIONS, DirectKernel


class Kernel(JITFunction):  # type: ignore[misc]  # Triton has no types
    """A kernel that records its launches; each compiled variant has a number."""

    def __init__(self) -> None:
        self.arg_names = ["x", "y", "numel", "SIZE", "ROWS"]
        self.asked: list[tuple[Any, ...]] = []
        self.direct: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **named: Any) -> Any:
            self.asked.append((grid, args, named))
            return SimpleNamespace(
                run=lambda *actual: self.direct.append(actual), function=len(self.asked), packed_metadata="packed"
            )  # fmt: skip

        return launch


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand in for the current device and its stream."""
    launch_state = SimpleNamespace(device=0, stream=5)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: launch_state.device)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda _: launch_state.stream, raising=False
    )
    monkeypatch.setattr(triton, "__version__", VERSIONS[0])
    return launch_state


def test_a_repeat_calls_what_was_compiled(state: SimpleNamespace) -> None:
    kernel = Kernel()
    direct = DirectKernel(kernel)
    x = torch.zeros(2, 16)
    direct[3, 2](x, None, 7, ROWS=4, SIZE=8, num_warps=2)
    assert kernel.asked == [((3, 2), (x, None, 7), {"ROWS": 4, "SIZE": 8, "num_warps": 2})]
    fresh, state.stream = torch.zeros(4, 16), 6
    direct[9,](fresh, None, 7, ROWS=4, SIZE=8, num_warps=2)
    assert len(kernel.asked) == 1
    launch = (9, 1, 1, 6, 1, "packed", None, None, None)
    assert kernel.direct == [(*launch, fresh.data_ptr(), None, 7, 8, 4)]


def test_numbers_of_a_kind_share_what_was_compiled(state: SimpleNamespace) -> None:
    """Integers of one kind share a compiled kernel, as digests do, which differ in each call."""
    del state
    kernel = Kernel()
    direct = DirectKernel(kernel)
    for number in (7, 9, -5):
        direct[1,](X, None, number, SIZE=8, ROWS=4)
    assert len(kernel.asked) == 1
    assert [launch[-3] for launch in kernel.direct] == [9, -5]


def test_a_flag_is_no_integer(state: SimpleNamespace) -> None:
    """The key tells ``False`` from the integer 0, by which it marks odd 64-bit integers."""
    del state
    kernel = Kernel()
    direct = DirectKernel(kernel)
    direct[1,](X, None, (1 << 40) + 1, SIZE=8, ROWS=4)
    direct[1,](X, None, False, SIZE=8, ROWS=4)
    assert len(kernel.asked) == 2


X = torch.zeros(4, 16)
Given = tuple[Tensor | None, Tensor | None, int]
UNLIKE: dict[str, tuple[Given, dict[str, int]]] = {
    "one": ((X, None, 1), {}), "a multiple of 16": ((X, None, 32), {}),
    "a wider number": ((X, None, 1 << 40), {}),
    "an unsigned number": ((X, None, (1 << 64) - 1), {}),
    "an alignment": ((X.view(-1)[1:], None, 7), {}), "a dtype": ((X.half(), None, 7), {}),
    "a tensor more": ((X, X, 7), {}), "a tensor less": ((None, None, 7), {}),
    "a constant": ((X, None, 7), {"SIZE": 16}), "an option": ((X, None, 7), {"num_warps": 4}),
}  # fmt: skip


@pytest.mark.parametrize("name", UNLIKE)
@pytest.mark.usefixtures("state")
def test_unlike_launches_ask_triton(name: str) -> None:
    kernel = Kernel()
    direct = DirectKernel(kernel)
    same = {"SIZE": 8, "ROWS": 4, "num_warps": 2}
    direct[1,](X, None, 7, **same)
    args, named = UNLIKE[name]
    for _ in range(2):
        direct[1,](*args, **{**same, **named})
    direct[1,](X, None, 7, **same)
    assert len(kernel.asked) == 2
    assert [actual[4] for actual in kernel.direct] == [2, 1]


def test_each_device_has_its_own(state: SimpleNamespace) -> None:
    kernel = Kernel()
    direct = DirectKernel(kernel)
    for state.device in (0, 1, 0, 1):
        direct[1,](X, None, 7, SIZE=8, ROWS=4)
    assert len(kernel.asked) == 2 and [actual[4] for actual in kernel.direct] == [1, 2]


@pytest.mark.usefixtures("state")
def test_profilers_see_launches() -> None:
    kernel = Kernel()
    direct, hook = DirectKernel(kernel), triton.knobs.runtime.launch_enter_hook
    hook.add(print)
    try:
        for _ in range(2):
            direct[1,](X, None, 7, SIZE=8, ROWS=4)
    finally:
        hook.remove(print)
    assert len(kernel.asked) == 2 and not kernel.direct


@pytest.mark.usefixtures("state")
def test_other_versions_launch_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.99.0")
    kernel = Kernel()
    direct = DirectKernel(kernel)
    for _ in range(2):
        direct[1,](X, None, 7, SIZE=8, ROWS=4)
    assert len(kernel.asked) == 2 and not kernel.direct


@pytest.mark.usefixtures("state")
def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ring_torch.launches.direct._MOST_LAUNCHES", 4)
    direct = DirectKernel(Kernel())
    for n in range(20):
        direct[1,](X, None, n, SIZE=8, ROWS=4)
        assert len(direct._compiled) <= 4

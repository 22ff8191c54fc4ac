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

from ring_torch.launches import direct as launches
from ring_torch.launches.direct import VERSIONS, DirectKernel

X = torch.zeros(4, 16)


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


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand in for the current device and its stream."""
    current = SimpleNamespace(device=0, stream=5)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current.device)
    stream = "_cuda_getCurrentRawStream"
    monkeypatch.setattr(torch._C, stream, lambda _: current.stream, raising=False)
    monkeypatch.setattr(triton, "__version__", VERSIONS[0])
    return current


def test_a_repeat_calls_what_was_compiled(state: SimpleNamespace) -> None:
    """Integers of one kind share a compiled kernel, as digests do, which differ in each call."""
    kernel = Kernel()
    direct = DirectKernel(kernel)
    direct[3, 2](X, None, 7, ROWS=4, SIZE=8, num_warps=2)
    assert kernel.asked == [((3, 2), (X, None, 7), {"ROWS": 4, "SIZE": 8, "num_warps": 2})]
    fresh, state.stream = torch.zeros(4, 16), 6
    for number in (9, -5):
        direct[9,](fresh, None, number, ROWS=4, SIZE=8, num_warps=2)
    assert len(kernel.asked) == 1
    launch = (9, 1, 1, 6, 1, "packed", None, None, None, fresh.data_ptr(), None)
    assert kernel.direct == [(*launch, 9, 8, 4), (*launch, -5, 8, 4)]


Launch = tuple[tuple[Tensor | None, Tensor | None, int], dict[str, int]]
USUAL: Launch = ((X, None, 7), {})
#: Launches of which each needs a kernel of its own.
UNLIKE: dict[str, tuple[Launch, Launch]] = {
    "one": (USUAL, ((X, None, 1), {})), "a multiple of 16": (USUAL, ((X, None, 32), {})),
    "a wider number": (USUAL, ((X, None, 1 << 40), {})),
    "an unsigned number": (USUAL, ((X, None, (1 << 64) - 1), {})),
    "an alignment": (USUAL, ((X.view(-1)[1:], None, 7), {})),
    "a dtype": (USUAL, ((X.half(), None, 7), {})), "a tensor more": (USUAL, ((X, X, 7), {})),
    "a tensor less": (USUAL, ((None, None, 7), {})),
    "a constant": (USUAL, ((X, None, 7), {"SIZE": 16})),
    "an option": (USUAL, ((X, None, 7), {"num_warps": 4})),
    # The key tells a flag from the integer 0, by which it marks odd 64-bit integers.
    "a flag": (((X, None, (1 << 40) + 1), {}), ((X, None, False), {})),
}  # fmt: skip


@pytest.mark.parametrize("name", UNLIKE)
def test_unlike_launches_ask_triton(name: str) -> None:
    kernel, (first, second) = Kernel(), UNLIKE[name]
    direct = DirectKernel(kernel)
    for args, named in (first, second, second, first):
        direct[1,](*args, **{"SIZE": 8, "ROWS": 4, "num_warps": 2, **named})
    assert len(kernel.asked) == 2
    assert [actual[4] for actual in kernel.direct] == [2, 1]


def test_each_device_has_its_own(state: SimpleNamespace) -> None:
    kernel = Kernel()
    direct = DirectKernel(kernel)
    for state.device in (0, 1, 0, 1):
        direct[1,](X, None, 7, SIZE=8, ROWS=4)
    assert len(kernel.asked) == 2 and [actual[4] for actual in kernel.direct] == [1, 2]


@pytest.mark.parametrize("case", ["a profiler's hook", "another version of Triton"])
def test_triton_launches(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hook, kernel = triton.knobs.runtime.launch_enter_hook, Kernel()
    if case == "another version of Triton":
        monkeypatch.setattr(triton, "__version__", "3.99.0")
    else:
        monkeypatch.setattr(hook, "calls", [print])
    direct = DirectKernel(kernel)
    for _ in range(2):
        direct[1,](X, None, 7, SIZE=8, ROWS=4)
    assert len(kernel.asked) == 2 and not kernel.direct


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "_MOST_LAUNCHES", 4)
    direct = DirectKernel(Kernel())
    for n in range(20):
        direct[1,](X, None, n, SIZE=8, ROWS=4)
        assert len(direct._compiled) <= 4


DIGEST = 1 << 40 | 12345


@pytest.mark.parametrize("word", [None, 0, 1, 100, 255])
@pytest.mark.parametrize("other", [DIGEST ^ 1, -DIGEST, (1 << 63) - 1, -(1 << 63)])
def test_words_that_differ_are_an_error(
    word: int | None, other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel that compares the digests of two ranks' calls accepts equal words only."""
    # Imported here, as Triton reads TRITON_INTERPRET when it is imported.
    from triton.runtime import interpreter
    from triton.runtime.errors import InterpreterError

    from ring_torch.comm.digest_kernel import assert_words

    # Triton's interpreter runs device asserts, for which launches have no option there.
    checking = interpreter.InterpreterOptions(debug=True, sanitize_overflow=False)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", checking)
    words = torch.full((256,), other, dtype=torch.int64)
    assert assert_words(words, other) is None  # the interpreter makes no direct launches
    if word is not None:
        words[word] = DIGEST
        with pytest.raises(InterpreterError, match="ranks of a ring make different calls"):
            assert_words(words, other)


def test_later_messages_are_compared_with_their_own_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    from ring_torch.comm import digest_kernel

    launched: list[tuple[Any, ...]] = []
    compiled: Any = SimpleNamespace(
        launch=lambda _grid, _device, values: launched.append((*values,))
    )
    first, later = (torch.zeros(256, dtype=torch.int64) for _ in range(2))
    prepared = launches.PreparedLaunch(compiled, (1,), 0, (first.data_ptr(), DIGEST))
    monkeypatch.setattr(DirectKernel, "launch", lambda *_, **__: prepared)
    check = digest_kernel.assert_words(first, DIGEST)
    assert check is not None
    check(later, -DIGEST)
    assert launched == [(later.data_ptr(), -DIGEST)]
    # With a launch hook installed, Triton itself launches, so that the hook is called.
    monkeypatch.setattr(digest_kernel, "has_launch_hooks", lambda: True)
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        DirectKernel, "__getitem__", lambda *_: lambda *args, **_options: asked.append(args)
    )
    check(later, DIGEST)
    assert launched[1:] == []
    assert asked == [(later, DIGEST)]

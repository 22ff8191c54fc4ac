"""The kernel that compares the digests of two ranks' calls accepts equal words only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

DIGEST = 1 << 40 | 12345


@pytest.fixture(autouse=True)
def _asserts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter run device asserts, for which launches have no option there."""
    # Imported here, as Triton reads TRITON_INTERPRET when it is imported.
    from triton.runtime import interpreter

    checking = interpreter.InterpreterOptions(debug=True, sanitize_overflow=False)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", checking)


@pytest.mark.parametrize("digest", [DIGEST, -DIGEST, (1 << 63) - 1, -(1 << 63)])
def test_equal_words_pass(digest: int) -> None:
    from ring_torch.comm.digest_kernel import assert_words

    # The interpreter makes no direct launches.
    assert assert_words(torch.full((256,), digest, dtype=torch.int64), digest) is None


@pytest.mark.parametrize("word", [0, 1, 100, 255])
@pytest.mark.parametrize("difference", [1, 1 << 40, -(1 << 63)])
def test_a_word_that_differs_is_an_error(word: int, difference: int) -> None:
    from triton.runtime.errors import InterpreterError

    from ring_torch.comm.digest_kernel import assert_words

    words = torch.full((256,), DIGEST, dtype=torch.int64)
    words[word] ^= difference
    with pytest.raises(InterpreterError, match="ranks of a ring make different calls"):
        assert_words(words, DIGEST)


def test_later_messages_are_compared_with_their_own_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    from ring_torch.comm import digest_kernel
    from ring_torch.launches import direct

    launched: list[tuple[Any, ...]] = []
    compiled = SimpleNamespace(launch=lambda _grid, _device, values: launched.append((*values,)))
    first, later = (torch.zeros(256, dtype=torch.int64) for _ in range(2))
    prepared = direct.PreparedLaunch(compiled, (1,), 0, (first.data_ptr(), DIGEST))  # type: ignore[arg-type]
    monkeypatch.setattr(direct.DirectKernel, "launch", lambda *_, **__: prepared)
    check = digest_kernel.assert_words(first, DIGEST)
    assert check is not None
    check(later, -DIGEST)
    assert launched == [(later.data_ptr(), -DIGEST)]
    # With a launch hook installed, Triton itself launches, so that the hook is called.
    monkeypatch.setattr(digest_kernel, "has_launch_hooks", lambda: True)
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        direct.DirectKernel, "__getitem__",
        lambda _, grid: lambda *args, **_options: asked.append((grid, *args)),
    )  # fmt: skip
    check(later, DIGEST)
    assert launched[1:] == []
    assert asked == [((1,), later, DIGEST)]

"""Triton kernel that asserts on the GPU that the previous rank makes the same call as this one."""

# Triton's decorator, and the arguments of kernels, have no types in Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_torch.launches.direct import DirectKernel, has_launch_hooks

# With `debug` a device assert ends the stream. Checks for integer overflow, which it would bring,
# too, are left out.
_OPTIONS = {"num_warps": 1, "debug": True, "sanitize_overflow": False}


def loaded_check(number: int, device: torch.device) -> Callable[[Tensor, int], None] | None:
    """Return :func:`assert_words` for messages of ``number`` words, with its kernel loaded.

    A CUDA graph needs that. It is ``None`` if the kernel cannot be launched directly.
    """
    digest = 1 << 40  # of more than 32 bits, as all are
    return assert_words(torch.full((number,), digest, dtype=torch.int64, device=device), digest)


def assert_words(words: Tensor, digest: int) -> Callable[[Tensor, int], None] | None:
    """Queue an assertion that all words of a message are a digest; if not, the stream fails.

    Args:
        words: int64, contiguous, a power of two of them, at a multiple of 16 bytes.
        digest: What each has to be; a number of more than 32 bits.

    Returns:
        The same function for messages of this size on this GPU; ``None`` if the kernel cannot be
        launched directly.
    """
    options = {"NUMBER": words.numel(), **_OPTIONS}
    launch = _assert_words.launch((1,), words, digest, **options)
    if launch is None:
        return None

    def repeat(words: Tensor, digest: int) -> None:
        if has_launch_hooks():
            _assert_words[(1,)](words, digest, **options)
        else:
            launch({0: words.data_ptr(), 1: digest})

    return repeat


@DirectKernel
@triton.jit(do_not_specialize=["digest"])
def _assert_words(words, digest, NUMBER: tl.constexpr):
    """Assert that each word is the digest."""
    received = tl.load(words + tl.arange(0, NUMBER))
    tl.device_assert(received == digest, "ranks of a ring make different calls")

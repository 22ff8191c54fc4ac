"""Comparison of digests on a GPU's stream, for calls that the host has compared before."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ring_torch.optional import has_triton

#: Called as ``(words, digest)``, it lets the stream end in an error unless int64 words of a message
#: are a digest. Nothing that is queued later runs then.
DigestCheck = Callable[[Tensor, int], None]


def check_digest(words: Tensor, digest: int) -> None:
    """Compare the first word by torch's operations; a message holds the digest throughout."""
    torch._assert_async(words[0] == digest, "ranks of a ring make different calls")  # noqa: SLF001 - the public assert waits on the host


def loaded_check(number: int, device: torch.device) -> DigestCheck:
    """Return a check of messages of so many words, which a CUDA graph may hold from now on.

    With Triton it is one launch, of a kernel that is compiled and loaded here.
    """
    if device.type == "cuda" and not torch.version.hip and has_triton():
        from ring_torch.comm.digest_kernel import assert_words

        digest = 1 << 40  # as all digests, of more than 32 bits
        words = torch.full((number,), digest, dtype=torch.int64, device=device)
        return assert_words(words, digest) or check_digest
    return check_digest

"""Where cuDNN's attention is taken before the kernels in Triton: where it was faster."""

from __future__ import annotations

from typing import NamedTuple

_GAIN = 1.1  # below, the kernels in Triton stay: they merge in float32, and are exact with NaN


class Row(NamedTuple):
    """Calls of up to these head dims, and how long both passes of one took, in milliseconds."""

    head_dim: int
    v_head_dim: int
    bias: bool | None  # ``None``: with and without one
    triton: float
    cudnn: float


#: On a GPU of this compute capability: an H200, 16,384 tokens, causal, bfloat16, 32 query and 8
#: key heads. Of the rows that a call fits the first counts.
CAPABILITY = 90
MEASURED = (
    Row(128, 128, True, 67.1, 32.5),
    Row(64, 64, False, 9.56, 9.09),
    Row(128, 128, False, 14.7, 14.5),
    Row(256, 256, None, 107.0, 36.6),
)


def slower(head_dim: int, v_head_dim: int, *, bias: bool, capability: int | None) -> str:
    """Why cuDNN should not be taken where it could; empty if it should.

    Without a GPU at hand a program is for one like that of the figures.
    """
    if capability not in (None, CAPABILITY):
        return f"was not timed beside triton on compute capability {capability / 10:.1f}"
    for row in MEASURED:
        fits = head_dim <= row.head_dim and v_head_dim <= row.v_head_dim
        if fits and row.bias in (None, bias):
            if row.cudnn * _GAIN <= row.triton:
                return ""
            return f"{row.cudnn} ms where triton takes {row.triton} (head dim {row.head_dim}, H200)"
    return "was not timed beside triton at these head dims"

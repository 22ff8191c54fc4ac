"""Copies by the GPU's copy engines, which take no multiprocessor from kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

from ring_core.programs.gather import Fetch
from ring_torch.buffers import KVPayload

#: Least mean bytes of a copy for which it pays to fetch half of the heads by copies: twelve of them
#: hide behind half of the launches of 8k causal tokens on four H200s.
LEAST_COPY = 1 << 20

_MOST_STRIDE = (1 << 31) - 1  # largest pitch in bytes of a two-dimensional copy


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``[rows, ...]`` on the current stream by a copy engine; rows are contiguous each.

    Rows that lie apart are one two-dimensional copy if ``cuda.bindings`` is installed, which torch
    brings on Linux, and less than 2 GiB lie from row to row; and a copy each otherwise. Torch's own
    ``copy_`` of all of them would launch a kernel.

    Raises:
        RuntimeError: The two-dimensional copy could not be queued.
    """
    if target.is_contiguous() and source.is_contiguous():
        target.copy_(source)
        return
    strides = [x.stride(0) * x.itemsize for x in (target, source)]
    module = _cuda()
    # All of these are queued on the copy's stream; the host goes on.
    if module is None or max(strides) > _MOST_STRIDE:
        for target_row, source_row in zip(target.unbind(), source.unbind(), strict=True):
            target_row.copy_(source_row)
        return
    width = target[0].numel() * target.itemsize
    (error,) = module.cudaMemcpy2DAsync(
        target.data_ptr(), strides[0], source.data_ptr(), strides[1], width, target.shape[0],
        module.cudaMemcpyKind.cudaMemcpyDeviceToDevice,
        torch.cuda.current_stream(target.device).cuda_stream,
    )  # fmt: skip
    if error != module.cudaError_t.cudaSuccess:
        raise RuntimeError(f"a copy out of a peer's memory failed: {error}")


def comes_in_parts(keys: KVPayload, fetches: Sequence[Fetch]) -> bool:
    """Return True if a pass with these fetches from peers makes them in two parts of the heads.

    Of an even number of heads the second half is fetched beside kernels of the first, by a copy of
    K and one of V for each fetch and row of the batch. Only a CUDA graph does so: without one the
    host would take longer to launch the parts than they save.
    """
    half = keys.heads // 2 * keys.dtype.itemsize
    aligned = half * keys.dim % 16 == 0 and half * keys.v_dim % 16 == 0
    size = keys.size(sum(fetch.target.stop - fetch.target.start for fetch in fetches)) // 2
    copies = 2 * keys.batch * len(fetches)
    return (
        keys.heads % 2 == 0 and aligned and copies > 0 and size >= copies * LEAST_COPY
        and _cuda() is not None
    )  # fmt: skip


@cache
def _cuda() -> ModuleType | None:
    """Return the module ``cuda.bindings.runtime``, or ``None`` if it is not installed."""
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return None
    return import_module("cuda.bindings.runtime")

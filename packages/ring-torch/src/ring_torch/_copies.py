"""Copies by a GPU's copy engines, which take no multiprocessors from kernels."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

_MOST_PITCH = (1 << 31) - 1  # bytes from row to row that an engine steps over


def copy(target: Tensor, source: Tensor) -> None:
    """Copy, on the current stream, ``[rows, ...]`` whose rows are contiguous and may lie apart.

    In one go, if torch brings NVIDIA's ``cuda.bindings`` as it does on Linux, else row by row.
    """
    if target.is_contiguous() and source.is_contiguous():
        target.copy_(source)
        return
    pitches = [x.stride(0) * x.itemsize for x in (target, source)]
    runtime = _runtime()
    if runtime is None or max(pitches) > _MOST_PITCH:
        for to, x in zip(target.unbind(), source.unbind(), strict=True):
            to.copy_(x)
        return
    width = target[0].numel() * target.itemsize
    kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
    stream = torch.cuda.current_stream(target.device).cuda_stream
    (error,) = runtime.cudaMemcpy2DAsync(
        target.data_ptr(), pitches[0], source.data_ptr(), pitches[1], width, target.shape[0], kind,
        stream,
    )  # fmt: skip
    if error != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"a copy out of a peer's memory failed: {error}")


@cache
def _runtime() -> ModuleType | None:
    """NVIDIA's bindings of the CUDA runtime, if there are any."""
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return None
    return import_module("cuda.bindings.runtime")

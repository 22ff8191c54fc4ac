"""Compiles the Triton kernels that ring_torch launches, on machines without a GPU.

It runs as a separate program, because a process that interprets Triton kernels cannot compile
them. A question names calls; the answer is the resource usage of each kernel of each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from patched import chosen

from backends import cubins
from backends.cubins import NAMES, described
from backends.kept_process import asked, serve
from ring_core import KernelConfig, Mask, WorkItem
from ring_torch import ring_attention
from ring_torch.kernels.triton import TritonKernel, launch as _launch

_HERE = Path(__file__).resolve()

#: Head dims and options of calls of 1,024 tokens.
CALLS: dict[str, tuple[int, dict[str, Any]]] = {
    "causal": (128, {"causal": True}),
    "fused": (128, {"causal": True, "kernel": KernelConfig("triton", fused_backward=True)}),
    "wide": (256, {"causal": True}),
    "odd": (80, {"window": (100, 3), "softcap": 5.0}),
    "predicate": (128, {"mask": Mask(predicate=lambda q, k: (q // 100 + k // 100) % 2 == 0)}),
    "segments": (128, {"causal": True, "segment_ids": torch.zeros(1, 1024, dtype=torch.int32)}),
    "dropout": (128, {"causal": True, "dropout_p": 0.1, "dropout_seed": 3}),
    "bias": (128, {"bias": torch.zeros(1, 1, 1024, 1024, requires_grad=True)}),
}


def passes() -> Iterator[dict[str, Any]]:
    """Return launches of kernels around those of attention.

    They list blocks for FlashAttention-4's block sparsity, compute ``delta = rowsum(out * dout)``
    and the gradient of sinks.
    """
    from ring_torch import memory_ops
    from ring_torch.kernels.block_index import Grid
    from ring_torch.kernels.fa4.block_lists import block_lists

    item = WorkItem(0, 0, 0, 0, 1024, 0, 1024, None, None)
    ids = torch.zeros(1, 1024, dtype=torch.int32)
    grid = Grid(128, 96, False, False, torch.device("cpu"), None)
    x, lse = torch.zeros(1, 1024, 4, 80, dtype=torch.bfloat16), torch.zeros(1, 4, 1024)
    with kept_launches() as kept:
        block_lists(item, grid, (ids, ids))
        memory_ops.row_dots_on_gpu(x, x)
        memory_ops.sink_grads_on_gpu(torch.zeros(4, dtype=torch.bfloat16), lse, lse)
    yield from kept


def merges() -> Iterator[dict[str, Any]]:
    """Return launches of the kernel that merges results of a ring and of a two-stage gather."""
    from ring_torch import merge_ops

    spans = (0, 1024), (512, 512), (0, 512)
    outs = [torch.zeros(1, n, 4, 128, dtype=torch.bfloat16) for _, n in spans]
    lses = [torch.zeros(1, 4, n) for _, n in spans]
    results = [x for pair in zip(outs, lses, strict=True) for x in pair]
    with kept_launches() as kept:
        # A first, a middle and a last merge, with sums in two halves and in one tensor.
        for out in (outs[0], outs[0].float()):
            for count, first, last in ((2, True, False), (1, False, False), (1, False, True)):
                merge_ops.merge_on_gpu(
                    out, torch.zeros_like(out), lses[0], *results[: 2 * count], spans=spans[:count],
                    marks=(1 << count) - 1, first=first, last=last,
                )  # fmt: skip
        # All at once, of which the first lies where the merged ones go.
        merge_ops.merge_on_gpu(
            outs[0], outs[0], lses[0], *results, spans=spans, marks=7, first=True, last=True
        )
    yield from kept


@contextmanager
def kept_launches() -> Iterator[list[dict[str, Any]]]:
    """Record kernel launches instead of running them."""
    from ring_torch.launches.direct import DirectKernel

    kept: list[dict[str, Any]] = []

    def keep(direct: Any, _grid: Any, *arguments: Any, **options: Any) -> None:
        kernel = direct.kernel
        constants = {name: options.pop(name) for name in kernel.arg_names if name in options}
        names = kernel.arg_names[: len(arguments)]
        arguments_by_name = dict(zip(names, arguments, strict=True)) | constants
        kept.append({"kernel": kernel, "arguments": arguments_by_name, **options})

    with (
        patch.object(DirectKernel, "launch", keep),
        patch.object(DirectKernel, "__getitem__", lambda direct, grid: partial(keep, direct, grid)),
    ):
        yield kept


def exchanges() -> Iterator[dict[str, Any]]:
    """Return launches of the kernels that exchange K/V and dK/dV and compare the ranks' calls."""
    from ring_torch.comm.digest_kernel import assert_words
    from ring_torch.transports import exchange_kernel as exchange

    headers = torch.zeros(4, dtype=torch.int64)
    setup = exchange.ExchangeSetup(headers, headers.data_ptr(), 3, 66, 96, 10**12)
    k, own = torch.zeros(1, 64, 8, 128, dtype=torch.bfloat16), torch.zeros(1, 64, 2048)
    table, sums = torch.zeros(32, 4, dtype=torch.int64), torch.zeros(1 << 16)
    arguments = setup, 1 << 40, k, k, own.bfloat16(), table, own.bfloat16(), table
    with kept_launches() as kept:
        exchange.exchange_keys(*arguments)
        exchange.exchange_keys(*arguments, exchange.Blocks(64, 128, 512))
        exchange.finish_reading(setup)
        exchange.wait_reusable(setup, sums, zero=True)
        exchange.reduce_from_peers(setup, 1 << 40, table, sums)
        assert_words(torch.zeros(256, dtype=torch.int64), 1 << 40)
    yield from kept


#: Kernels that have no call of their own.
PASSES: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {
    "passes": passes, "merges": merges, "exchanges": exchanges,
}  # fmt: skip


def compiled(names: list[str], arch: int) -> list[dict[str, Any]]:
    """Compile the kernels of calls, in another process, for a compute capability."""
    return asked(_HERE, {"names": names, "arch": arch})


def launches(name: str, arch: int) -> Iterator[dict[str, Any]]:
    """Return the kernel launches of a call's forward and backward, with their arguments."""
    if name in PASSES:
        yield from PASSES[name]()
        return
    kept: list[dict[str, Any]] = []

    def keep(kernel: Any, programs: Any, arguments: Mapping[str, Any], **options: int) -> None:
        del programs
        kept.append({"kernel": kernel, "arguments": arguments, **options})

    dim, options = CALLS[name]
    q, k, v = (
        torch.zeros(1, 1024, heads, dim, dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, 2, 2)
    )
    least = patch.object(_launch, "_LEAST_CAPABILITY", divmod(arch, 10))
    with chosen(TritonKernel(), patch.object(_launch, "_start", keep), least):
        ring_attention(q, k, v, **options).sum().backward()
    yield from kept


def type_of(value: Any) -> str | None:
    """Return the type of a pointer."""
    is_tensor = isinstance(value, torch.Tensor)
    return f"*{NAMES[str(value.dtype).removeprefix('torch.')]}" if is_tensor else None


def answer(question: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Compile the calls that a question names."""
    for name in question["names"]:
        for launch in launches(name, question["arch"]):
            kernel, arguments = launch.pop("kernel"), launch.pop("arguments")
            facts = described(kernel, arguments, type_of)
            usage = cubins.compiled(kernel, facts, question["arch"], **launch)
            yield {"call": name, "kernel": kernel.fn.__name__, **usage}


if __name__ == "__main__":
    serve(answer)

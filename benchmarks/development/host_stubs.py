"""Run Ring on a CPU as on a Hopper GPU, to time the host: launches do nothing.

One process is one rank of a group; flash-attn-4's compiled functions, Triton's launches and the
memory of peers are replaced, and nothing that these would do is done. What a call costs the host
beside them is as on a GPU, in the same Python; its results mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ring_torch import accumulate, autograd, kernels, prepare, transports
from ring_torch.buffers import BufferSpec
from ring_torch.comm.ranks import Ranks
from ring_torch.kernels.fa4 import FA4, library
from ring_torch.launches import direct
from ring_torch.merge_ops import merge_on_gpu
from ring_torch.records import AttentionState
from ring_torch.strategies import Way, ways
from ring_torch.transports import one_kernel

_TILE = 64  # queries of a tile of the backward


def nothing(*_: object, **__: object) -> None:
    """Do nothing, in place of a launch."""


@dataclass
class OwnMemory:
    """Stand-in for :class:`ring_torch.transports.symm_buffer.SymmetricMemory`: no peer reads it."""

    ranks: Ranks
    header: int
    _memory: Tensor | None = None
    _views: dict[object, list[Tensor]] = field(default_factory=dict)

    def reserve(self, size: int) -> bool:
        """Ensure ``size`` bytes; return True if they are new."""
        if self._memory is not None and self._memory.numel() >= self.header + size:
            return False
        self._memory = torch.zeros(self.header + size, dtype=torch.uint8)
        self._views.clear()
        return True

    def headers(self) -> list[Tensor]:
        """Return a header for each rank."""
        return [torch.zeros(self.header // 8, dtype=torch.int64) for _ in range(self.ranks.size)]

    def views(self, rank: int, start: int, packing: BufferSpec) -> list[Tensor]:
        """Return the tensors of a message, kept for later calls; those of all ranks are here."""
        if (key := (rank, start, packing)) not in self._views:
            assert self._memory is not None
            start += self.header
            self._views[key] = packing.views(self._memory[start : start + packing.size])
        return self._views[key]


def _library() -> Any:
    """Return a stand-in for flash-attn-4's module, of which only the forward is used here."""

    def forward(
        q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor | None, softmax_scale: float,
        window_size_left: int | None, window_size_right: int | None, learnable_sink: Tensor | None,
        **_: object,
    ) -> None:  # fmt: skip
        is_causal = (window_size_left, window_size_right) == (None, 0)
        window = (None, None) if is_causal else (window_size_left, window_size_right)
        made.compile_cache["forward"](
            q, k, v, out, lse, softmax_scale, None, None, None, None, None, *window, learnable_sink,
            None, (None, None), None, None,
        )  # fmt: skip

    made: Any = partial(forward)  # a partial, so that it takes attributes
    made.compile_cache = {"forward": nothing}
    return SimpleNamespace(_flash_attn_fwd=made)


def _launch(
    self: direct.DirectKernel, grid: tuple[int, ...], *arguments: Any, **options: Any
) -> direct.PreparedLaunch:
    """Launch nothing; return a prepared launch that launches nothing, either."""
    del self
    values = direct._key_and_values(0, arguments, options)[1]  # noqa: SLF001 - as it does itself
    launch = SimpleNamespace(function=0, packed_metadata=())
    return direct.PreparedLaunch(direct._Compiled(launch, nothing, ()), grid, 0, tuple(values))  # noqa: SLF001 - likewise


@contextmanager
def without_launches() -> Iterator[None]:
    """Let calls on CPU tensors run the code for a Hopper GPU with flash-attn-4."""
    fa4 = replace(
        FA4, capabilities=replace(FA4.capabilities, devices=("cpu",)), unavailable=lambda: None
    )
    stream, module = SimpleNamespace(cuda_stream=0), _library()

    def merge(
        state: AttentionState, low: Tensor, results: Sequence[Tensor], **options: Any
    ) -> None:
        merge_on_gpu(state.out, low, state.lse, *results, **options)

    def functions(_: Any, dim: int, *__: object) -> library.SplitFunctions:
        return library.SplitFunctions(nothing, nothing, (), nothing, nothing, _TILE, dim)

    replaced: list[tuple[Any, str, Any]] = [
        (kernels, "KERNELS", (fa4,)), (library, "is_known", lambda: True),
        (library, "interface", lambda: module), (library, "split_functions", functions),
        (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        (torch.cuda, "current_device", lambda: 0), (torch.cuda, "current_stream", lambda: stream),
        (direct.DirectKernel, "launch", _launch),
        (direct.DirectKernel, "__getitem__", lambda *_: nothing), (one_kernel, "SymmetricMemory", OwnMemory),
        (one_kernel, "_programs", lambda _: (66, 96)), (one_kernel, "timeout_of", lambda *_: timedelta(seconds=1)),
        (transports, "has_agreed", lambda *_: True), (accumulate, "merge", merge),
    ]  # fmt: skip
    prepare._prepare.cache_clear()  # noqa: SLF001  # calls hold their kernel
    with ExitStack() as stack:
        for place, name, value in replaced:
            stack.enter_context(patch.object(place, name, value))
        # Where torch is built without CUDA there is no such function.
        stream_of = ("_cuda_getCurrentRawStream", lambda _: 0)
        stack.enter_context(patch.object(torch._C, *stream_of, create=True))  # noqa: SLF001 - as launches ask
        yield
    prepare._prepare.cache_clear()  # noqa: SLF001 - calls hold their kernel


def as_stubbed_rank[R](rank: int, world: int, run: Callable[[], R]) -> R:
    """Run as one rank of a group, with all launches replaced."""
    with without_launches():
        return as_rank(rank, world, run)


def as_rank[**P, R](
    rank: int, world: int, run: Callable[P, R], *args: P.args, **named: P.kwargs
) -> R:
    """Run a function as one rank of a fake group, whose collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        # The group is fake: there are no peers to ask for their memory, or to compare with before
        # a call may be captured.
        with (
            patch.object(prepare, "choose_strategy", _as_named),
            patch.object(autograd, "check_graph"),
        ):
            return run(*args, **named)
    finally:
        dist.destroy_process_group()
        prepare._prepare.cache_clear()  # noqa: SLF001  # forgets strategies chosen here


def _as_named(strategy: str, transport: str, ring: Ranks, *_: object, **__: object) -> Way:
    return next(ways(strategy, transport) if ring.size > 1 else ways("ring", "p2p"))

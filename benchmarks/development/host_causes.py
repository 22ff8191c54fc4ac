"""Measure the host's time of a repeated call by cause: forward and backward, in microseconds.

Functions that begin a cause are replaced by ones that read a clock; time counts for the innermost
of them. The time of reading is the difference to the same calls without it. Each rank times
itself; the rank whose call takes longest is shown, as all wait for it::

    python -m benchmarks.development.host_causes --gpus 4 --json causes.json
    python -m benchmarks.development.host_causes --stubs 4 --json causes.json

The second needs no GPU: one process is each rank in turn. flash-attn-4's compiled functions,
Triton's launches and the memory of peers are replaced, and nothing that these would do is done:
what a call costs the host beside them is as on a GPU, in the same Python; its results mean nothing.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache, partial
from itertools import product
from statistics import median
from types import GeneratorType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._C as C
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.common.cases import SHORT_SETTINGS, K, Setting, mask_of
from benchmarks.common.harness import Report, command
from benchmarks.development.host_time import finish
from benchmarks.torch import check_gpus, described
from benchmarks.torch.scaling import inputs
from ring_torch import accumulate, attention, autograd, kernels, prepare, ring_attention, transports
from ring_torch.call import Call
from ring_torch.comm.ranks import Ranks
from ring_torch.kernels import fa4
from ring_torch.kernels.fa4 import FA4, library
from ring_torch.launches import direct
from ring_torch.local import LocalRanks
from ring_torch.merge_ops import merge_on_gpu
from ring_torch.records import AttentionState
from ring_torch.strategies import Way, ways
from ring_torch.transports import one_kernel
from ring_torch.transports.one_kernel import ExchangeState, OneKernel
from ring_torch.transports.peer_copies import PeerCopies
from ring_torch.transports.symm_buffer import SymmetricMemory

SETTINGS = SHORT_SETTINGS[:2]  # 8k causal, and a layer of gpt-oss
STUBBED_TOKENS = 2 * K  # length without a GPU: buffers are cheap, work items whole tiles
WARM_UP, ROUNDS, AT_ONCE = 30, 40, 8  # calls, rounds, calls of a round
PASSES = ("forward", "backward")
Times = dict[tuple[str, str], float]  # seconds by pass and cause

ARGUMENTS, KEY = "arguments and options read", "call known again by its key"
AUTOGRAD, PASS = "autograd, its thread included", "the rest of a pass: records, errors of peers"
VIEWS, FLASH = "views and new tensors", "launches of flash-attn-4"
EXCHANGE, TRITON = "exchange of K/V and dK/dV", "launches of Triton's kernels"
SESSION = "session opened: digest of the call, room"
LAUNCH_KEYS = "launches known again by strides and alignment"
SINKS, MARKS = "gradients of sinks", "reading the clock"
CAUSES = (
    ARGUMENTS, KEY, AUTOGRAD, PASS, SESSION, LAUNCH_KEYS, EXCHANGE, VIEWS, FLASH, TRITON, SINKS,
)  # fmt: skip

#: Functions that begin a cause, by the object that has them.
_BEGIN: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    (KEY, attention, ("check_call",)),
    (AUTOGRAD, autograd.AttentionFunction, ("apply",)),
    (PASS, autograd, ("forward_pass", "backward_pass")),
    (SINKS, autograd, ("_sink_grads",)),
    (SESSION, Call, ("open_session",)),
    *((LAUNCH_KEYS, place, ("tensors_key",)) for place in (accumulate, fa4)),
    *((EXCHANGE, session, ("fetch", "accumulators", "return_grads")) for session in (OneKernel, PeerCopies)),
    (EXCHANGE, OneKernel, ("_add",)), (EXCHANGE, ExchangeState, ("begin_pass",)),
    (TRITON, direct.PreparedLaunch, ("__call__",)),
    (TRITON, direct.DirectKernel, ("launch", "_launch")),
    (VIEWS, torch, ("empty", "zeros", "empty_like", "zeros_like")),
    (VIEWS, Tensor, (
        "__getitem__", "as_strided", "contiguous", "copy_", "detach", "fill_", "flatten", "narrow", "new_empty",
        "to", "transpose", "unbind", "unsafe_split_with_sizes", "view", "zero_",
    )),
)  # fmt: skip
_TILE = 64  # queries of a tile of the backward


def nothing(*_: object, **__: object) -> None:
    """Do nothing, in place of a launch."""


class OwnMemory(SymmetricMemory):
    """Memory that no peer reads: buffers of all ranks are this one's."""

    def reserve(self, size: int) -> bool:
        """Ensure ``size`` bytes; return True if they are new."""
        if self._memory is not None and self._memory.numel() >= self.header + size:
            return False
        self._memory, self.handle = torch.zeros(self.header + size, dtype=torch.uint8), self
        self._views.clear()
        return True

    def get_buffer(self, _rank: int, sizes: tuple[int], _dtype: torch.dtype, start: int) -> Tensor:
        """Return bytes of this rank's, in place of a peer's."""
        assert self._memory is not None
        return self._memory[start : start + sizes[0]]


@contextmanager
def replaced_by(*replaced: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes of objects; calls inside are prepared anew, as are those that follow."""
    prepare._prepare.cache_clear()  # noqa: SLF001  # calls keep their kernel and its launches
    with ExitStack() as stack:
        for place, name, value in replaced:
            # Where torch is built without CUDA some functions are missing.
            stack.enter_context(patch.object(place, name, value, create=place is C))
        stack.callback(prepare._prepare.cache_clear)  # noqa: SLF001 - likewise
        yield


def without_launches() -> AbstractContextManager[None]:
    """Let calls on CPU tensors run the code for a Hopper GPU with flash-attn-4."""
    can = replace(FA4.capabilities, devices=("cpu",))
    stream = SimpleNamespace(cuda_stream=0)

    def flash(
        q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor | None, softmax_scale: float,
        window_size_left: int | None, window_size_right: int | None, learnable_sink: Tensor | None,
        **_: object,
    ) -> None:  # fmt: skip
        is_causal = (window_size_left, window_size_right) == (None, 0)
        window = (None, None) if is_causal else (window_size_left, window_size_right)
        forward.compile_cache["forward"](
            q, k, v, out, lse, softmax_scale, None, None, None, None, None, *window, learnable_sink,
            None, (None, None), None, None,
        )  # fmt: skip

    # In place of flash-attn-4's module, of which only the forward is used here.
    forward: Any = partial(flash)  # a partial, so that it takes attributes
    forward.compile_cache = {"forward": nothing}

    def launch(
        _self: direct.DirectKernel, grid: tuple[int, ...], *arguments: Any, **options: Any
    ) -> direct.PreparedLaunch:
        values = direct._key_and_values(0, arguments, options)[1]  # noqa: SLF001 - as it does itself
        compiled: Any = SimpleNamespace(function=0, packed_metadata=())
        kernel = direct._Compiled(compiled, nothing, ())  # noqa: SLF001 - likewise
        return direct.PreparedLaunch(kernel, grid, 0, tuple(values))

    def merge(
        state: AttentionState, low: Tensor, results: Sequence[Tensor], **options: Any
    ) -> None:
        merge_on_gpu(state.out, low, state.lse, *results, **options)

    def functions(_: Any, dim: int, *__: object) -> library.SplitFunctions:
        return library.SplitFunctions(nothing, nothing, (), nothing, nothing, _TILE, dim)

    return replaced_by(
        (kernels, "KERNELS", (replace(FA4, capabilities=can, unavailable=lambda: None),)),
        (library, "is_known", lambda: True), (library, "split_functions", functions),
        (library, "interface", lambda: SimpleNamespace(_flash_attn_fwd=forward)),
        (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        (torch.cuda, "current_device", lambda: 0), (torch.cuda, "current_stream", lambda: stream),
        (C, "_cuda_getCurrentRawStream", lambda _: 0),
        (direct.DirectKernel, "launch", launch), (one_kernel, "SymmetricMemory", OwnMemory),
        (one_kernel, "_programs", lambda _: (66, 96)), (one_kernel, "timeout_of", lambda *_: timedelta(seconds=1)),
        (transports, "has_agreed", lambda *_: True), (accumulate, "merge", merge),
    )  # fmt: skip


def as_stubbed_rank[R](rank: int, world: int, run: Callable[[], R]) -> R:
    """Run as one rank of a group, with all launches replaced."""
    with without_launches():
        return as_rank(rank, world, run)


def as_rank[**P, R](
    rank: int, world: int, run: Callable[P, R], *args: P.args, **named: P.kwargs
) -> R:
    """Run a function as one rank of a fake group, whose collectives do nothing."""

    def as_named(strategy: str, transport: str, ring: Ranks, *_: object, **__: object) -> Way:
        return next(ways(strategy, transport) if ring.size > 1 else ways("ring", "p2p"))

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        # The group is fake: there are no peers to ask for their memory.
        with replaced_by((prepare, "choose_strategy", as_named)):
            return run(*args, **named)
    finally:
        dist.destroy_process_group()


class Clock:
    """Clock of seconds by cause, which stands still while no cause has begun.

    Autograd runs a backward in a thread of its own while its caller waits: one stack serves both.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
        self._begun: list[str] = []  # causes under way, the innermost last
        self._since = [0.0]  # when time was last counted

    def marked(self, cause: str, function: Any, *, outermost: bool = False) -> Any:
        """Return a wrapper of a function that begins a cause, if another cause is under way.

        Of a generator each step is counted. With ``outermost`` it begins without another, too.
        """
        seconds, begun, since, now = self.seconds, self._begun, self._since, time.perf_counter

        # Plain statements: their own time, spent many times a call, adds to the table's figures.
        def call(*args: Any, **kwargs: Any) -> Any:
            if begun:
                start = now()
                seconds[begun[-1]] += start - since[0]
                since[0] = start
            elif outermost:
                since[0] = now()
            else:
                return function(*args, **kwargs)
            begun.append(cause)
            result = function(*args, **kwargs)
            end = now()
            seconds[begun.pop()] += end - since[0]
            since[0] = end
            return steps(result) if isinstance(result, GeneratorType) else result

        def steps(items: Iterator[Any]) -> Iterator[Any]:
            step, end = self.marked(cause, next), object()
            while (item := step(items, end)) is not end:
                yield item

        return call

    @contextmanager
    def marks(self) -> Iterator[None]:
        """Replace the functions that begin causes, for calls that are prepared inside."""

        def preparing(prepare_launch: Any) -> Any:  # what is prepared begins a cause
            def prepared(*args: Any) -> Any:
                launch = prepare_launch(*args)
                return None if launch is None else self.marked(FLASH, launch)

            return prepared

        @lru_cache
        def split(*args: Any, make: Any = library.split_functions) -> library.SplitFunctions:
            functions: library.SplitFunctions = make(*args)
            names = "prepare", "main", "round_dq", "round_dkv"
            marked = {name: self.marked(FLASH, getattr(functions, name)) for name in names}
            return functions._replace(**marked)

        with replaced_by(
            *(
                (place, name, self.marked(cause, getattr(place, name)))
                for cause, place, names in _BEGIN
                for name in names
            ),
            *(
                (fa4.Flash4, name, preparing(getattr(fa4.Flash4, name)))
                for name in ("repeated_forward", "repeated_backward")
            ),
            (library, "split_functions", split),
        ):
            yield


class Repeated:
    """A repeated call of a setting on this rank, forward and backward."""

    def __init__(self, setting: Setting, device: str) -> None:
        length = setting.seq_len // dist.get_world_size()
        q, k, v, self.dout, *sinks = inputs(setting, length, dist.get_rank(), device)
        self.inputs = [x.requires_grad_() for x in (q, k, v)]
        self.leaves = [*self.inputs, *sinks]
        self.attend = partial(
            ring_attention, layout="zigzag", mask=mask_of(setting.mask, setting.seq_len),
            kernel="fa4", sinks=sinks[0] if sinks else None, strategy="gather", transport="symm_mem",
        )  # fmt: skip

    def forward(self) -> Tensor:
        """Run the forward, for autograd to differentiate."""
        out: Tensor = self.attend(*self.inputs)
        return out

    def backward(self, out: Tensor) -> object:
        """Run the backward."""
        return torch.autograd.grad(out, self.leaves, self.dout)


def causes(_: int, setting: Setting, device: str) -> dict[str, dict[str, float]]:
    """Return microseconds by pass, in all and by cause: medians of this rank's rounds.

    A round is the mean of a few calls that the device can queue.
    """
    call, clock = Repeated(setting, device), Clock()
    forward = clock.marked(ARGUMENTS, call.forward, outermost=True)
    backward = clock.marked(AUTOGRAD, call.backward, outermost=True)

    def rounds() -> list[Times]:
        for _ in range(WARM_UP):
            call.backward(call.forward())
        times: list[Times] = []
        for _ in range(ROUNDS):
            finish(device)
            times.append(dict.fromkeys(product(PASSES, CAUSES), 0.0))
            for _ in range(AT_ONCE):
                out = None
                for name in PASSES:
                    out = forward() if name == "forward" else backward(out)
                    for cause in CAUSES:
                        times[-1][name, cause] += clock.seconds[cause] / AT_ONCE
                        clock.seconds[cause] = 0.0
        return times

    gc.disable()
    plain = rounds()
    with clock.marks():
        marked = rounds()
    plain += rounds()  # a machine that slows down slows both
    gc.enable()
    by_pass: dict[str, dict[str, float]] = {}
    for name in PASSES:
        parts = {cause: 1e6 * median(times[name, cause] for times in marked) for cause in CAUSES}
        # Without marks all of a pass is one cause.
        took = 1e6 * median(sum(times[name, cause] for cause in CAUSES) for times in plain)
        by_pass[name] = parts | {MARKS: sum(parts.values()) - took, "in all": took}
    return by_pass


@command(
    __doc__,
    {
        "--gpus": torch.cuda.device_count(),
        "--stubs": {"type": int, "metavar": "P", "help": "no GPU: each of P ranks in turn"},
    },
)
def main(options: Any) -> int:
    """Print, and write, the host's time by cause; return the exit code."""
    report, count = Report(options, described()), options.stubs
    if not count:
        check_gpus(options.gpus, least=2)
    with nullcontext() if count else LocalRanks(options.gpus, cuda=True, patience=300.0) as ranks:
        for of_gpus in SETTINGS:
            if ranks is None:
                setting = replace(of_gpus, seq_len=STUBBED_TOKENS)
                runs = [partial(causes, rank, setting, "cpu") for rank in range(count)]
                by_rank = [as_stubbed_rank(rank, count, run) for rank, run in enumerate(runs)]
            else:
                setting, by_rank = of_gpus, ranks.run(causes, of_gpus, "cuda")
            # The rank whose forward and backward take longest.
            slowest = max(by_rank, key=lambda x: sum(x[name]["in all"] for name in PASSES))
            for cause in ("in all", *CAUSES, MARKS):
                report.add({
                    "setting": setting.name, "cause": cause,
                    **{f"{name}_us": round(slowest[name][cause], 1) for name in PASSES},
                    "of_ranks": {name: [round(x[name][cause], 1) for x in by_rank] for name in PASSES},
                })  # fmt: skip
    return 0

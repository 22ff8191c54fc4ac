"""Measure the host's time of a repeated call by cause: forward and backward, in microseconds.

Functions that begin a cause are replaced by ones that read a clock; time counts for the innermost
of them. The time of reading is the difference to the same calls without it. Each rank times
itself; the rank whose call takes longest is shown, as all wait for it::

    python -m benchmarks.development.host_causes --gpus 4 --json causes.json
    python -m benchmarks.development.host_causes --stubs 4 --json causes.json

The second needs no GPU: its launches do nothing, so it shows what Python and torch take besides.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from statistics import median
from types import GeneratorType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.cases import SHORT_SETTINGS, K, Setting, mask_of
from benchmarks.common.report import Report, command
from benchmarks.development.host_stubs import as_stubbed_rank
from benchmarks.development.host_time import finish
from benchmarks.torch import check_gpus, described
from ring_torch import accumulate, attention, autograd, prepare, ring_attention
from ring_torch.call import Call
from ring_torch.kernels import fa4
from ring_torch.kernels.fa4 import library
from ring_torch.launches import direct
from ring_torch.local import LocalRanks
from ring_torch.transports.one_kernel import ExchangeState, OneKernel
from ring_torch.transports.peer_copies import PeerCopies

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

        prepare._prepare.cache_clear()  # noqa: SLF001  # calls keep launches, which are replaced
        with ExitStack() as stack:
            for cause, place, names in _BEGIN:
                for name in names:
                    marked = self.marked(cause, getattr(place, name))
                    stack.enter_context(patch.object(place, name, marked))
            for name in ("repeated_forward", "repeated_backward"):
                launches = preparing(getattr(fa4.Flash4, name))
                stack.enter_context(patch.object(fa4.Flash4, name, launches))
            stack.enter_context(patch.object(library, "split_functions", split))
            yield
        prepare._prepare.cache_clear()  # noqa: SLF001 - likewise


class Repeated:
    """A repeated call of a setting on this rank, forward and backward."""

    def __init__(self, setting: Setting, device: str) -> None:
        length = setting.seq_len // dist.get_world_size()
        torch.manual_seed(dist.get_rank())
        q, k, v, self.dout = (
            torch.randn(setting.batch, length, *shape, device=device).to(torch.bfloat16)
            for shape in setting.shapes
        )
        self.inputs = [x.requires_grad_() for x in (q, k, v)]
        sinks = [torch.zeros(setting.heads, device=device).requires_grad_()] * setting.sinks
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

    def timed() -> Times:
        finish(device)
        times: Times = dict.fromkeys(product(PASSES, CAUSES), 0.0)
        for _ in range(AT_ONCE):
            out = None
            for name in PASSES:
                out = forward() if name == "forward" else backward(out)
                for cause in CAUSES:
                    times[name, cause] += clock.seconds[cause] / AT_ONCE
                    clock.seconds[cause] = 0.0
        return times

    def rounds() -> list[Times]:
        for _ in range(WARM_UP):
            call.backward(call.forward())
        return [timed() for _ in range(ROUNDS)]

    gc.disable()
    plain = rounds()
    with clock.marks():
        marked = rounds()
    plain += rounds()  # a machine that slows down slows both
    gc.enable()
    found: dict[str, dict[str, float]] = {}
    for name in PASSES:
        parts = {cause: 1e6 * median(times[name, cause] for times in marked) for cause in CAUSES}
        # Without marks all of a pass is one cause.
        took = 1e6 * median(sum(times[name, cause] for cause in CAUSES) for times in plain)
        found[name] = parts | {MARKS: sum(parts.values()) - took, "in all": took}
    return found


def rows_of(setting: Setting, by_rank: list[dict[str, dict[str, float]]]) -> list[dict[str, Any]]:
    """Return a row for each cause of the rank whose forward and backward take longest."""
    slowest = max(by_rank, key=lambda x: sum(x[name]["in all"] for name in PASSES))
    return [
        {
            "setting": setting.name, "cause": cause,
            **{f"{name}_us": round(slowest[name][cause], 1) for name in PASSES},
            "of_ranks": {name: [round(x[name][cause], 1) for x in by_rank] for name in PASSES},
        }
        for cause in ("in all", *CAUSES, MARKS)
    ]  # fmt: skip


@command(
    __doc__,
    {
        "--gpus": torch.cuda.device_count(),
        "--stubs": {"type": int, "metavar": "P", "help": "no GPU: each of P ranks in turn"},
    },
)
def main(options: Any) -> int:
    """Print, and write, the host's time by cause; return the exit code."""
    report, count = Report(options, described()), options.stubs or options.gpus
    if options.stubs:
        for setting in SETTINGS:
            short = replace(setting, seq_len=STUBBED_TOKENS)
            runs = [partial(causes, rank, short, "cpu") for rank in range(count)]
            by_rank = [as_stubbed_rank(rank, count, run) for rank, run in enumerate(runs)]
            report.add(*rows_of(short, by_rank))
        return 0
    check_gpus(count, least=2)
    with LocalRanks(count, cuda=True, patience=300.0) as ranks:
        for setting in SETTINGS:
            report.add(*rows_of(setting, ranks.run(causes, setting, "cuda")))
    return 0


if __name__ == "__main__":
    sys.exit(main())

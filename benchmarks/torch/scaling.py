"""Time the ring on GPUs, beside others: ``nox -s bench_gpu`` (``-- --help`` for settings).

Every method first has to agree with float32 attention on a short sequence; one that does not gets
no time. Times are CUDA events, of the slowest rank: the median of up to 20 runs, or, of short
ones, of up to 50 rounds of 20, as many as fit the seconds. TFLOP/s are per GPU: causal forward
FLOPs are ``2 N^2 H D``, the backward takes 2.5 times that. Scaling efficiency is a method's rate
over that of one GPU on the same sequence.

Words at the end of a method's name say how it runs. ``graph`` replays a CUDA graph. ``layers`` is
one of eight calls in a row, each of which has the output before as its q: a model's backward wakes
autograd's thread once for all layers. ``one-thread`` runs the backward in the thread of the
forward, as ``torch.autograd.set_multithreading_enabled(False)`` lets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common import cases
from benchmarks.common.cases import WRONG, K, Setting, mask_of
from benchmarks.common.harness import Report, command, selected
from benchmarks.torch import described, methods
from benchmarks.torch.methods import dense, method
from benchmarks.torch.timing import captured, timed
from ring_core import RingProgram, make_plan, ring_program
from ring_core.tools.bench import watched
from ring_torch import prepare
from ring_torch.buffers import HeadGroups, KVPayload
from ring_torch.local import LocalRankError, LocalRanks
from ring_torch.strategies import gather
from ring_torch.transports import peer_copies, symm_buffer

GATE_LENGTH = cases.SCALING_GATE


def inputs(setting: Setting, length: int, seed: int, device: str = "cuda") -> list[torch.Tensor]:
    """Return random q, k, v and dout ``[batch, length, heads, dim]``, and sinks ``[H]`` if any."""
    torch.manual_seed(seed)
    made = [
        torch.randn(setting.batch, length, *shape, device=device, dtype=torch.bfloat16)
        for shape in setting.shapes
    ]
    if setting.sinks:
        torch.manual_seed(0)  # equal on all ranks
        made.append(torch.randn(setting.heads, device=device).requires_grad_())
    return made


@contextmanager
def _as_long(setting: Setting) -> Iterator[None]:
    """Make a short call run as the setting's would: the same head groups and kinds of copies."""
    head_groups_of, fits_one_kernel = gather.head_groups_of, peer_copies.fits_one_kernel

    def groups_of(program: RingProgram, keys: KVPayload, q_heads: int) -> HeadGroups:
        world, mask = program.plan.cp_size, mask_of(setting.mask, setting.seq_len)
        plan = make_plan(mask, seq_len=setting.seq_len, cp_size=world, layout="zigzag")
        long = replace(keys, length=setting.seq_len // world)
        return head_groups_of(ring_program(plan), long, q_heads)

    def fits(*x: Any) -> bool:
        return setting.seq_len <= 8 * K and fits_one_kernel(*x)

    least = symm_buffer.LEAST_COPY * GATE_LENGTH // setting.seq_len
    prepare._prepare.cache_clear()  # noqa: SLF001 - calls are prepared anew
    with (
        patch.object(gather, "head_groups_of", groups_of),
        patch.object(peer_copies, "fits_one_kernel", fits),
        patch.object(symm_buffer, "LEAST_COPY", least),
    ):
        yield
    prepare._prepare.cache_clear()  # noqa: SLF001 - calls are prepared anew


def gate(_: int, setting: Setting, name: str) -> dict[str, float]:
    """Return the largest errors of a method on a short sequence, over all ranks.

    They are those of the output and the gradients, against float32 attention; that of sinks, a sum
    over all rows, is relative to its largest entry. Of ``layers`` one call is checked.
    """
    mask = mask_of(setting.mask, GATE_LENGTH)
    q, k, v, dout, *sinks = inputs(setting, GATE_LENGTH, seed=1)
    own_sinks = (x.detach().requires_grad_() for x in sinks)
    way = method(name, mask, GATE_LENGTH, *own_sinks)._replace(layers=1)
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    position = np.arange(q.shape[1])
    visible = torch.tensor(mask.dense(position, position), device="cuda")
    expected = dense(*leaves, visible=visible, sinks=sinks[0] if sinks else None)
    exact = [expected, *torch.autograd.grad(expected, [*leaves, *sinks], dout.float())]
    local, upstream = [way.shard(x).requires_grad_() for x in (q, k, v)], way.shard(dout)
    results: list[torch.Tensor] = []

    def both() -> None:
        results[:] = way.both(*local, upstream)

    with _as_long(setting), way.around():
        run = captured(both) if way.in_graph else both
        for _ in range(3):  # what is timed is a repeated call
            run()
    if sinks:
        dist.all_reduce(results[4])
        exact[4] = exact[4] / (scale := exact[4].abs().max())
        results[4] = results[4] / scale
    errors = {}
    for key, actual, want in zip(("out", "dq", "dk", "dv", "dsinks"), results, exact, strict=False):
        error = actual.float() - (want if key == "dsinks" else way.shard(want))
        largest = error.detach().abs().max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        errors[f"{key} max"] = float(largest)
    return errors


def wrong(errors: dict[str, float]) -> dict[str, float]:
    """Return those of the errors that are too large for a time to be printed."""
    return {key: x for key, x in errors.items() if key.endswith("max") and not x < WRONG}


def measure(rank: int, setting: Setting, name: str, seconds: float) -> dict[str, Any]:
    """Return milliseconds of both passes, their spread, the host's time and peak memory."""
    length = setting.seq_len // _shares(name, dist.get_world_size())
    q, k, v, dout, *sinks = inputs(setting, length, seed=rank)
    way = method(name, mask_of(setting.mask, setting.seq_len), setting.seq_len, *sinks)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    before = torch.cuda.memory_allocated()
    results: dict[str, Any] = {}
    passes: dict[str, Callable[[], Any]] = {
        "forward": partial(way.forward, *leaves),
        "both": partial(way.both, *leaves, dout),
    }
    for key, once in passes.items():
        torch.cuda.reset_peak_memory_stats()
        with way.around():
            run = captured(once) if way.in_graph else once
            results[key] = timed(run, seconds, way.layers)
        results[key]["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    return results | {"chosen": way.chosen(*leaves)}


def _shares(name: str, world: int) -> int:
    """Return over how many GPUs a method splits a sequence."""
    return 1 if name.split("/", maxsplit=1)[0] == "one" else world


def _row(ranks: LocalRanks, setting: Setting, name: str, seconds: float) -> dict[str, Any]:
    """Compare a method with float32 attention, then time it; return a row, or why there is none."""
    try:
        errors = ranks.run(gate, setting, name)[0]
        if off := wrong(errors):
            return {"wrong": off}
        times = ranks.run(measure, setting, name, seconds)[0]
    except LocalRankError as error:
        reason = str(error).strip().splitlines()[-1]
        # A refusal, or too little memory: every rank says so, and can go on.
        shared = str(error).count(f"\n{reason}") == len(ranks)
        broken = any(word in str(error) for word in ("CUDA error", "NCCL", "DistBackendError"))
        return {"failed": reason, "by_all": shared and not broken}
    return {"errors": errors, **times, **setting.rates(times, _shares(name, len(ranks)))}


@command(
    __doc__,
    {
        "--gpus": {"type": int, "nargs": "+", "default": [torch.cuda.device_count()]},
        "--strategies": {"action": "store_true", "help": "the table of every strategy"},
        "--settings": {"nargs": "+", "metavar": "NAME"},
        "--methods": {"nargs": "+", "metavar": "NAME"},
        "--seconds": 10.0,  # for each figure
    },
)
def main(options: Any) -> int:
    """Time the settings row by row; rows already in the JSON are kept."""
    report = Report(options, described(), keep=True)
    every = (*cases.SETTINGS, *cases.SHORT_SETTINGS, *cases.STRATEGY_SETTINGS)
    default = cases.STRATEGY_SETTINGS if options.strategies else cases.SETTINGS
    settings = selected(every, options.settings) if options.settings else default
    names = options.methods or (methods.EVERY_STRATEGY if options.strategies else methods.OVER_GPUS)
    for world in options.gpus:
        left = [
            (setting, name) for setting in settings for name in names
            if not report.has(gpus=world, setting=setting.name, method=name)
            # Chunks balanced for a mask are worth a row where shares of documents are uneven.
            and not (options.strategies and "chunks/" in name and setting.mask != "documents")
        ]  # fmt: skip
        waiting = watched(left, len(left), "row")
        for first in waiting:  # once, and again after a failure that ranks do not share
            with LocalRanks(world, cuda=True, patience=300.0) as ranks:
                for setting, name in chain([first], waiting):
                    row = {"gpus": world, "setting": setting.name, "method": name}
                    row |= {"every_strategy": True} if options.strategies else {}
                    result = _row(ranks, setting, name, options.seconds)
                    report.add(row | result)
                    if "failed" in result and not result["by_all"]:
                        break
    return 0

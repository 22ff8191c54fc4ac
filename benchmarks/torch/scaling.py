"""Time the ring on GPUs, beside others: ``nox -s bench_gpu`` (``-- --help`` for settings).

Every method first has to agree with float32 attention on a short sequence; one that does not gets
no time. Times are CUDA events, of the slowest rank: the median of up to 20 runs, or, of short
ones, of up to 50 rounds of 20, as many as fit the seconds. TFLOP/s are per GPU: causal forward
FLOPs are ``2 N^2 H D``, the backward takes 2.5 times that. Scaling efficiency is a method's rate
over that of one GPU on the same sequence.

Words at the end of a method's name say how it runs. ``alone`` runs its launches over keys that are
there already: kernels only; the share of the time that the rest takes is exposed communication.
``graph`` replays a CUDA graph. ``layers`` is one of eight calls in a row, each of which has the
output before as its q: a model's backward wakes autograd's thread once for all layers.
``one-thread`` runs the backward in the thread of the forward, as
``torch.autograd.set_multithreading_enabled(False)`` lets it.

With ``--bind`` each process runs on processors of its own. With ``--ranks 4 8`` one GPU emulates
all ranks of such rings, one after the other, ``alone``: what so many would reach if nothing had to
travel. The slowest rank counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common.cases import (
    PASSES,
    SCALING_GATE as GATE_LENGTH,
    SETTINGS,
    SHORT_SETTINGS,
    STRATEGY_SETTINGS,
    K,
    Setting,
    mask_of,
)
from benchmarks.common.report import Report, environment, parser_of, rows_of, show
from benchmarks.common.tables import ALONE, IN_LAYERS
from benchmarks.torch.alone import as_rank
from benchmarks.torch.methods import Method, dense, in_layers
from benchmarks.torch.over_gpus import EVERY_STRATEGY, OVER_GPUS, method
from benchmarks.torch.processors import bind
from benchmarks.torch.timing import timed
from ring_core import Mask, RingProgram, make_plan, ring_program
from ring_core.tools.bench import watched
from ring_torch import prepare
from ring_torch.buffers import HeadGroups, KVPayload
from ring_torch.local import LocalRankError, LocalRanks
from ring_torch.strategies import gather as gather_strategy
from ring_torch.transports import peer_copies, symm_buffer

Pair = tuple[Setting, str]  # what to time, and by which method
# At the end of a method's name: as a CUDA graph, replayed; the backward in the forward's thread.
GRAPH, ONE_THREAD = "/graph", "/one-thread"
LAYERS = 8  # calls in a row


def without_end(name: str) -> tuple[str, str]:
    """Return a method's name without its end, and the end: how the calls are made, or nothing."""
    end = next((x for x in (GRAPH, IN_LAYERS, ONE_THREAD) if name.endswith(x)), "")
    return name.removesuffix(end), end


@contextmanager
def running(way: Method, end: str) -> Iterator[None]:
    """Enter the context in which a method's forward and backward run."""
    with way.around(), torch.autograd.set_multithreading_enabled(end != ONE_THREAD):
        yield


def inputs(setting: Setting, length: int, seed: int) -> list[torch.Tensor]:
    """Return random q, k, v and dout ``[batch, length, heads, dim]``, and sinks ``[H]`` if any."""
    torch.manual_seed(seed)
    made = [
        torch.randn(setting.batch, length, *shape, device="cuda", dtype=torch.bfloat16)
        for shape in setting.shapes
    ]
    if setting.sinks:
        torch.manual_seed(0)  # equal on all ranks
        made.append(torch.randn(setting.heads, device="cuda").requires_grad_())
    return made


def gate(_: int, setting: Setting, name: str) -> dict[str, float]:
    """Return the largest and the RMS errors of a method on a short sequence, over all ranks.

    ``alone`` has no result, so its method is checked with communication; of ``layers`` one call is.
    """
    plain, end = without_end(name)
    if setting.sinks and "/" not in plain:
        raise ValueError(f"{name} takes no sinks")
    mask = mask_of(setting.mask, GATE_LENGTH)
    way = method(plain.removesuffix(ALONE), mask, GATE_LENGTH)
    tensors = inputs(setting, GATE_LENGTH, seed=1)
    with _as_long(setting):
        return _errors(way, mask, tensors, end)


@contextmanager
def _as_long(setting: Setting) -> Iterator[None]:
    """Make a short call run as the setting's would: the same head groups and kinds of copies."""
    rule = mask_of(setting.mask, setting.seq_len)

    head_groups_of = gather_strategy.head_groups_of

    def groups_of(program: RingProgram, keys: KVPayload, q_heads: int) -> HeadGroups:
        world = program.plan.cp_size
        plan = make_plan(rule, seq_len=setting.seq_len, cp_size=world, layout="zigzag")
        length = setting.seq_len // world
        return head_groups_of(ring_program(plan), replace(keys, length=length), q_heads)

    fits_one_kernel, least = peer_copies.fits_one_kernel, symm_buffer.LEAST_COPY
    prepare._prepare.cache_clear()  # noqa: SLF001 - calls are prepared anew
    with (
        patch.object(gather_strategy, "head_groups_of", groups_of),
        patch.object(
            peer_copies,
            "fits_one_kernel",
            lambda *x: setting.seq_len <= 8 * K and fits_one_kernel(*x),
        ),
        patch.object(symm_buffer, "LEAST_COPY", least * GATE_LENGTH // setting.seq_len),
    ):
        yield
    prepare._prepare.cache_clear()  # noqa: SLF001 - calls are prepared anew


def _errors(way: Method, mask: Mask, tensors: list[torch.Tensor], end: str) -> dict[str, float]:
    """Return the errors of the output and the gradients, against those of float32 attention."""
    q, k, v, dout, *sinks = tensors
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    position = np.arange(q.shape[1])
    visible = torch.tensor(mask.dense(position, position), device="cuda")
    expected = dense(*leaves, visible=visible, sinks=sinks[0] if sinks else None)
    expected.backward(dout.float())
    local, upstream = [way.shard(x).requires_grad_() for x in (q, k, v)], way.shard(dout)
    own_sinks = [x.detach().requires_grad_() for x in sinks]
    results: list[torch.Tensor] = []

    def both() -> None:
        results[:] = way.both(*local, upstream, *own_sinks)

    with running(way, end):
        run = _captured(both) if end == GRAPH else both
        for _ in range(3):  # what is timed is a repeated call
            run()
    errors = {}
    expected_value = [expected, *(leaf.grad for leaf in leaves)]
    for key, actual, want in zip(
        ("out", "dq", "dk", "dv"), results[:4], expected_value, strict=True
    ):
        assert want is not None
        error = (actual.float() - way.shard(want)).detach()
        largest, squares = error.abs().max(), error.square().mean()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        dist.all_reduce(squares)
        rms = (float(squares) / dist.get_world_size()) ** 0.5
        errors[f"{key} max"], errors[f"{key} rms"] = float(largest), rms
    if sinks:  # their gradient is a sum over all rows: relative to its largest entry
        total = results[4].detach().clone()
        dist.all_reduce(total)
        expected_sum = sinks[0].grad
        assert expected_sum is not None
        errors["dsinks max"] = float((total - expected_sum).abs().max() / expected_sum.abs().max())
    return errors


def measure(rank: int, setting: Setting, name: str, seconds: float) -> dict[str, Any]:
    """Return milliseconds of both passes, their spread, the host's time and peak memory."""
    mask = mask_of(setting.mask, setting.seq_len)
    plain, end = without_end(name)
    way, layers = method(plain, mask, setting.seq_len), 1
    if end == IN_LAYERS:
        way, layers = in_layers(way, LAYERS), LAYERS
    world = dist.get_world_size()
    length = setting.seq_len if plain == "one" else setting.seq_len // world
    *qkv, dout = inputs(setting, length, seed=rank)[:4]
    sinks = inputs(setting, length, seed=rank)[4:]
    leaves = [x.requires_grad_() for x in qkv]
    before = torch.cuda.memory_allocated()
    results: dict[str, Any] = {}

    passes: dict[str, Callable[[], Any]]
    passes = {
        "forward": partial(way.forward, *leaves, *sinks),
        "both": partial(way.both, *leaves, dout, *sinks),
    }
    for key, once in passes.items():
        torch.cuda.reset_peak_memory_stats()
        with running(way, end):
            run = _captured(once) if end == GRAPH else once
            results[key] = timed(run, seconds, layers)
        peak = torch.cuda.max_memory_allocated() - before
        results[key]["peak_gib"] = peak / 2**30
    results["chosen"] = way.chosen(*leaves, *sinks)
    return results


def _captured(run: Callable[[], Any]) -> Callable[[], None]:
    """Return a run as a CUDA graph, whose replay costs the host next to nothing."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay


def main(argv: list[str] | None = None) -> int:
    """Time the settings row by row; rows already in the JSON are kept."""
    parser = parser_of(__doc__, json_path=Path("out/bench_gpu.json"))
    settings = {s.name: s for s in (*SETTINGS, *SHORT_SETTINGS, *STRATEGY_SETTINGS)}
    parser.add_argument("--gpus", type=int, nargs="+", default=[torch.cuda.device_count()])
    parser.add_argument("--ranks", type=int, nargs="+", default=[], help="emulated by one GPU")
    parser.add_argument(
        "--strategies", action="store_true",
        help="every strategy beside others, instead of the first table's settings and methods",
    )  # fmt: skip
    parser.add_argument("--settings", nargs="+", choices=settings, metavar="NAME")
    parser.add_argument("--methods", nargs="+", metavar="NAME")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each figure")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds a row may take")
    parser.add_argument("--bind", action="store_true", help="each process on its own processors")
    options = parser.parse_args(argv)
    if options.table:
        return show(options.table)
    report = Report(options.json, _environment)
    if options.json.exists():
        report.rows = rows_of(options.json)
    default_settings = STRATEGY_SETTINGS if options.strategies else SETTINGS
    methods = options.methods or (EVERY_STRATEGY if options.strategies else OVER_GPUS)
    names = options.settings or [setting.name for setting in default_settings]
    pairs = [
        (setting, name) for setting, name in product(map(settings.__getitem__, names), methods)
        # Chunks balanced for a mask are worth a row where shares of documents are uneven.
        if not (options.strategies and name.startswith("chunks/") and setting.mask != "documents")
    ]  # fmt: skip

    def rows(world: int) -> Iterator[Pair]:
        """Yield settings and methods that have no row yet."""
        timed = {
            (row["gpus"], row["setting"], row["method"])
            for row in report.rows
            if ("processors" in row) == options.bind
        }
        left = [pair for pair in pairs if (world, pair[0].name, pair[1]) not in timed]
        return watched(left, len(left), "row")

    def add(world: int, pair: Pair, result: dict[str, Any]) -> None:
        row: dict[str, Any] = {"gpus": world, "setting": pair[0].name, "method": pair[1]}
        if options.strategies:
            row["every_strategy"] = True
        if processors:
            row["processors"] = processors  # of each process
        report.add(row | result)
        print(_line(report.rows[-1]), flush=True)

    processors = 0
    for world in options.ranks:
        for pair in rows(world):
            add(world, pair, _emulated(world, *pair, options.seconds))
    for world in options.gpus if not options.ranks else ():
        waiting, started = rows(world), True
        while started:  # once, and again after a failure that ranks do not share
            started = False
            with LocalRanks(world, cuda=True, patience=options.patience) as ranks:
                if options.bind:
                    processors = ranks.run(bind)[0]
                for pair in waiting:
                    result = _row(ranks, *pair, options.seconds)
                    add(world, pair, result)
                    started = "failed" in result and not result["by_all"]
                    if started:
                        break
    return 0


def _emulated(world: int, setting: Setting, name: str, seconds: float) -> dict[str, Any]:
    """Return a row of ``world`` ranks that one GPU emulates, without communication.

    Their results mean nothing, so the same calls are compared on one rank.
    """
    if name != "one" and ALONE not in name:
        raise SystemExit(f"one GPU emulates ranks without communication only, not {name}")
    errors = as_rank(0, 1, gate, 0, setting, name)
    if off := wrong(errors):
        return {"wrong": off}
    ranks = range(1 if name == "one" else world)
    by_rank = [as_rank(rank, len(ranks), measure, rank, setting, name, seconds) for rank in ranks]
    slowest = {key: max((x[key] for x in by_rank), key=lambda x: x["ms"]) for key in PASSES}
    return {"errors": errors, **_with_rates(slowest, setting, len(ranks))}


def wrong(errors: dict[str, float]) -> dict[str, float]:
    """Return those of the errors that are too large for a time to be printed."""
    return {key: x for key, x in errors.items() if key.endswith("max") and not x < 0.1}


def _with_rates(times: dict[str, Any], setting: Setting, shares: int) -> dict[str, Any]:
    """Return times with the TFLOP/s of each of the ``shares`` GPUs."""
    rates = {
        key: times[key] | {"tflops": flops / shares / times[key]["ms"] / 1e9}
        for key, flops in setting.flops.items()
    }
    return times | rates


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
    shares = 1 if without_end(name)[0] == "one" else len(ranks)
    return {"errors": errors, **_with_rates(times, setting, shares)}


def _line(row: dict[str, Any]) -> str:
    head = f"{row['gpus']} {row['setting']:<26} {row['method']:<18}"
    if "forward" not in row:
        return f"{head} {row.get('wrong') or row.get('failed')}"
    parts = [
        f"{row[key]['tflops']:6.0f} TFLOP/s {row[key]['ms']:9.3f} ms host {row[key]['host_ms']:7.3f}"
        for key in ("forward", "both")
    ]
    return f"{head} {' | '.join(parts)} | {row['both']['peak_gib']:.2f} GiB"


def _environment() -> dict[str, Any]:
    return environment(
        torch.cuda.get_device_name(), torch=torch.__version__, cuda=torch.version.cuda,
        settings=[asdict(setting) for setting in (*SETTINGS, *SHORT_SETTINGS, *STRATEGY_SETTINGS)],
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

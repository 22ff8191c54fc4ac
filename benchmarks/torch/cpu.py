"""Time plans and the ring on CPUs: ``nox -s bench_cpu`` (``-- --quick`` for a short run).

Prints, and writes as JSON where ``--json`` says: milliseconds per plan, the CPU time of a ring of
four processes over that of one process with the same kernel, and the peak memory per rank beyond
its own tensors over what two K/V slots and the accumulators take. The ring's result is compared
with the single process's first; if they differ, no times are printed.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ring_core
from benchmarks.common.report import parser_of, write
from ring_core import Mask, make_plan, ring_program
from ring_core.programs.steps import pairs_of
from ring_core.tools.bench import watched
from ring_torch import ContextParallel
from ring_torch.local import LocalRanks

HEADS, KV_HEADS, DIM = 8, 2, 64


@dataclass(frozen=True)
class Shape:
    """Arguments of one measurement of the ring."""

    seq_len: int
    cp_size: int
    layout: Any
    strategy: str
    kernel: str
    dtype: str = "float32"


def main(argv: list[str] | None = None) -> int:
    """Measure plans, CPU time and memory; return the exit code."""
    parser = parser_of(__doc__, tables=False)
    parser.add_argument("--quick", action="store_true", help="shorter sequences, fewer repeats")
    options = parser.parse_args(argv)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # freed tensors go back to the system
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{machine}, numpy {np.__version__}, torch {torch.__version__}\n")
    plans = bench_plans()
    seq_len = 4096 if options.quick else 16384
    times = bench_time(seq_len, repeats=1 if options.quick else 3)
    if times is None:
        return 1
    memory = bench_memory(1024 if options.quick else 4096)
    if options.json:
        figures = {"machine": machine, "plans": plans, "time": times, "memory": memory}
        write(options.json, figures)
    return 0


def bench_plans() -> list[dict[str, Any]]:
    """Return the milliseconds to make each plan, best of several, and their limit."""
    tokens = 1 << 20
    rng = np.random.default_rng(0)
    cuts = np.sort(rng.choice(np.arange(1, tokens), 9999, replace=False)).tolist()
    documents = Mask(causal=True, cu_seqlens=(0, *cuts, tokens))
    causal = Mask(causal=True)
    rows = []
    for name, mask, cp_size, limit in (
        ("causal", causal, 8, 5.0),
        ("causal", causal, 1024, 1000.0),
        ("10,000 documents", documents, 64, 2000.0),
    ):
        for layout, strategy in pairs_of(ring_core.LAYOUTS):
            make = partial(fresh_plan, mask, tokens, cp_size, layout, strategy)
            rows.append((f"{name}, {cp_size} ranks, {layout}/{strategy}", best(make, 3), limit))
    cached = partial(make_plan, causal, seq_len=tokens, cp_size=8)
    rows.append(("cached, 8 ranks", best(lambda: [cached() for _ in range(1000)], 3) / 1000, 0.02))
    print(f"plan of {tokens} tokens                    milliseconds    at most")
    for name, ms, limit in rows:
        print(f"  {name:42} {ms:12.4f} {limit:10.2f}")
    return [{"plan": name, "ms": ms, "limit_ms": limit} for name, ms, limit in rows]


def fresh_plan(mask: Mask, tokens: int, cp_size: int, layout: Any, strategy: Any) -> None:
    """Make a plan that no cache holds: its mask has a new window, too wide to hide a key."""
    unseen = Mask(
        causal=True, cu_seqlens=mask.cu_seqlens, window=(tokens + time.monotonic_ns() % 2**30, None)
    )
    plan = make_plan(unseen, seq_len=tokens, cp_size=cp_size, layout=layout)
    ring_program(plan, strategy)


def best(function: Callable[[], object], repeats: int) -> float:
    """Return the shortest of several runs, in milliseconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1000 * min(times)


def bench_time(seq_len: int, repeats: int) -> list[dict[str, Any]] | None:
    """Return the CPU time of all ranks over one process's; ``None`` if results differ."""
    print(
        f"\nCPU time, forward + backward, causal, T = {seq_len}, H = {HEADS}, K = {KV_HEADS}, D = {DIM}, float32"
    )
    rows: list[dict[str, Any]] = []
    for kernel in ("sdpa", "eager"):
        single = run_ranks(Shape(seq_len, 1, "zigzag", "ring", kernel), repeats)
        rings = (("zigzag", "ring"), ("striped", "ring"), ("contiguous", "balanced"))
        for layout, strategy in watched(rings, len(rings), "ring"):
            ring = run_ranks(Shape(seq_len, 4, layout, strategy, kernel), repeats)
            error = max(abs(a - b) for a, b in zip(ring["sums"], single["sums"], strict=True))
            if error > 1e-4 * max(map(abs, single["sums"])):
                print(
                    f"{kernel} {layout}/{strategy}: the ring's result is wrong by {error}; no figures"
                )
                return None
            ratio = ring["cpu"] / single["cpu"]
            rows.append(
                {"kernel": kernel, "layout": layout, "strategy": strategy, "ratio": ratio, **ring}
            )
            print(
                f"  {kernel:6} {layout}/{strategy:9} 4 processes {ring['cpu']:7.2f} s, 1 process {single['cpu']:7.2f} s, "
                f"ratio {ratio:5.3f} (at most 1.10)"
            )
    return rows


def run_ranks(shape: Shape, repeats: int) -> dict[str, Any]:
    """Run a shape on its ranks; return CPU seconds per call, best of several, and checksums."""
    with LocalRanks(shape.cp_size) as ranks:
        ranks.run(rank_time, Shape(256, shape.cp_size, shape.layout, shape.strategy, shape.kernel))
        runs = [ranks.run(rank_time, shape) for _ in range(repeats)]
    cpu = min(sum(seconds for seconds, _ in run) for run in runs)
    sums = np.sum([sums for _, sums in runs[0]], axis=0)
    return {"cpu": cpu, "sums": sums.tolist()}


def inputs(shape: Shape) -> tuple[ContextParallel, list[torch.Tensor]]:
    """Return a rank's ``cp``, q, k, v and dout, shards of the same tensors at every ring size."""
    cp = ContextParallel(layout=shape.layout)
    generator = torch.Generator().manual_seed(0)
    local = []
    for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS):
        whole = torch.randn(1, shape.seq_len, heads, DIM, generator=generator)
        local.append(cp.shard(whole).to(getattr(torch, shape.dtype)))
    return cp, local


def rank_time(_: int, shape: Shape) -> tuple[float, list[float]]:
    """Return this rank's CPU seconds, and sums of squares that reveal wrong results."""
    cp, (q, k, v, dout) = inputs(shape)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    start = time.process_time()
    out = cp.attention(*leaves, causal=True, kernel=shape.kernel, strategy=shape.strategy)
    out.backward(dout)
    seconds = time.process_time() - start
    results = [out, *(leaf.grad for leaf in leaves)]
    return seconds, [float(x.detach().double().square().sum()) for x in results if x is not None]


def bench_memory(local_len: int) -> list[dict[str, Any]]:
    """Return the peak memory per rank beyond its own tensors, and what the ring may need."""
    print(
        f"\npeak memory per rank beyond its own tensors, {local_len} tokens per rank, MiB of allowed MiB (ratio)"
    )
    rows = []
    for kernel, dtype in (("sdpa", "float32"), ("eager", "float32"), ("eager", "bfloat16")):
        for layout, strategy in (("zigzag", "ring"), ("contiguous", "balanced")):
            for cp_size in (2, 4, 8):
                shape = Shape(local_len * cp_size, cp_size, layout, strategy, kernel, dtype)
                with LocalRanks(cp_size) as ranks:
                    ranks.run(
                        rank_memory, Shape(16 * cp_size, cp_size, layout, strategy, kernel, dtype)
                    )
                    measured = np.max(ranks.run(rank_memory, shape), axis=0).tolist()
                allowed = memory_allowed(shape)
                rows.append(
                    {
                        "kernel": kernel,
                        "dtype": dtype,
                        "layout": layout,
                        "strategy": strategy,
                        "cp_size": cp_size,
                        "forward": measured[0],
                        "backward": measured[1],
                        "allowed": allowed,
                    }
                )
                parts = [
                    f"{m / 2**20:6.1f} of {a / 2**20:6.1f} ({m / a:4.2f})"
                    for m, a in zip(measured, allowed, strict=True)
                ]
                print(
                    f"  {kernel:6} {dtype:9} {layout}/{strategy:9} {cp_size} ranks: forward {parts[0]}, backward {parts[1]}"
                )
    return rows


def memory_allowed(shape: Shape) -> list[float]:
    """Return the bytes that the forward and the backward may take.

    They are two K/V slots, accumulators and one block of scores, times 1.1.
    """
    local, size = shape.seq_len // shape.cp_size, torch.finfo(getattr(torch, shape.dtype)).bits // 8
    slots = 2 * (2 * local * KV_HEADS * DIM * size)
    wide_rows, wide_keys = 4 * local * HEADS * DIM, 2 * 4 * local * KV_HEADS * DIM
    block = 4 * HEADS * 256 * 512
    helped = (2 * local * HEADS * DIM * size + wide_rows) if shape.strategy == "balanced" else 0
    forward, backward = slots + wide_rows + block, slots + wide_rows + 3 * wide_keys + block
    return [1.1 * (forward + helped), 1.1 * (backward + helped)]


def rank_memory(_: int, shape: Shape) -> tuple[int, int]:
    """Return this rank's peak bytes by pass, beyond q, k, v, out, lse and their gradients."""
    cp, (q, k, v, dout) = inputs(shape)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    before = peak_memory(reset=True)
    out = cp.attention(*leaves, causal=True, kernel=shape.kernel, strategy=shape.strategy)
    lse_bytes = out.shape[1] * out.shape[2] * 4
    forward = peak_memory() - before - out.nbytes - lse_bytes
    peak_memory(reset=True)
    out.backward(dout)
    grads = sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None)
    backward = peak_memory() - before - out.nbytes - lse_bytes - grads
    return forward, backward


def peak_memory(*, reset: bool = False) -> int:
    """Return the peak resident bytes of this process since the last reset (Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())

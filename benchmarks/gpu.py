"""How fast the ring is on GPUs, beside others: ``nox -s bench_gpu`` (``-- --help`` for settings).

Every method first has to agree with float32 attention on a short sequence; one that does not prints
no speed. Times are CUDA events, the median of up to 20 runs, of the slowest rank. TFLOP/s are per
GPU: causal forward FLOPs are ``2 N^2 H D``, the backward takes 2.5 times that. Scaling efficiency
is a method's rate over that of one GPU on the same sequence. ``alone`` is a method's launches over
keys that are there already: kernels only. Exposed communication is the share of the time that the
rest takes. With ``--ranks 4 8`` one GPU emulates all ranks of such rings, one after the other,
``alone``: what so many would reach if nothing had to travel. The slowest rank counts.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from gpu_alone import as_rank
from gpu_methods import Mask, Method, method
from gpu_table import ALONE, table

import ring_core
from ring_core import make_plan, ring_program
from ring_core.checks import Sizes
from ring_torch import head_groups, prepare, strategies
from ring_torch.local import LocalRankError, LocalRanks
from ring_torch.transports import one_kernel, peer_copies

DIM = 128
GATE_LENGTH = 2048
K = 1024


@dataclass(frozen=True)
class Setting:
    """A sequence to attend over: bf16, batch 1, head dim 128."""

    seq_len: int
    heads: int = 32
    kv_heads: int = 8
    mask: str = "causal"

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.mask} {self.seq_len // K}k {self.heads}/{self.kv_heads}"


SETTINGS = (
    *(Setting(n * K) for n in (8, 32, 128, 512, 1024)),
    *(Setting(n * K, kv_heads=32) for n in (32, 128)),
    Setting(128 * K, mask="full"),
    Setting(512 * K, mask="window"),
    Setting(128 * K, mask="documents"),
)
METHODS = (
    "one", "zigzag/fa4/gather/symm_mem", "zigzag/fa4/gather/symm_mem/alone", "zigzag/fa4/gather/symm_mem/graph",
    "zigzag/fa4/gather/symm_mem/alone/graph", "zigzag/fa4/ring/p2p", "contiguous/fa4/gather/symm_mem", "ulysses", "all-gather",
    "ring-flash-attn", "torch-cp",
)  # fmt: skip
PASSES = {"forward": 1.0, "both": 3.5}  # times the forward's FLOPs
GRAPH = "/graph"  # at the end of a method's name: as a CUDA graph, replayed


def mask_of(name: str, seq_len: int) -> Mask:
    """The masks of the benchmark at a length."""
    if name == "documents":
        rng = np.random.default_rng(0)
        lengths = rng.lognormal(np.log(4096) - 0.5, 1.0, 4 * seq_len // 4096).astype(int) + 1
        ends = np.cumsum(lengths)
        return Mask(cu_seqlens=(0, *ends[ends < seq_len].tolist(), seq_len))
    window = (4096 if seq_len > GATE_LENGTH else 300, 0)
    return {"causal": Mask(), "full": Mask(causal=False), "window": Mask(window=window)}[name]


def pairs_of(setting: Setting) -> int:
    """Visible (query, key) pairs."""
    mask = ring_core.Mask(**mask_of(setting.mask, setting.seq_len).options)
    return int(ring_program(make_plan(mask, seq_len=setting.seq_len, cp_size=1)).work().sum())


def inputs(setting: Setting, length: int, seed: int) -> list[torch.Tensor]:
    """Fresh random q, k, v and dout ``[1, length, heads, DIM]``."""
    torch.manual_seed(seed)
    heads = (setting.heads, setting.kv_heads, setting.kv_heads, setting.heads)
    return [torch.randn(1, length, h, DIM, device="cuda", dtype=torch.bfloat16) for h in heads]


def gate(_: int, setting: Setting, name: str) -> dict[str, float]:
    """Largest and root mean square error of a method on a short sequence, over all ranks.

    Without communication there is no result: then of the same with it.
    """
    mask = mask_of(setting.mask, GATE_LENGTH)
    way = method(name.removesuffix(GRAPH).removesuffix(ALONE), mask, GATE_LENGTH)
    q, k, v, dout = inputs(setting, GATE_LENGTH, seed=1)
    with _as_long(setting):
        return _errors(way, mask, (q, k, v, dout), captured=name.endswith(GRAPH))


@contextmanager
def _as_long(setting: Setting) -> Iterator[None]:
    """Let short calls go the way of the setting's: in as many groups of heads, large copies."""
    rule = ring_core.Mask(**mask_of(setting.mask, setting.seq_len).options)
    world = dist.get_world_size()
    program = ring_program(make_plan(rule, seq_len=setting.seq_len, cp_size=world, layout="zigzag"))
    length = setting.seq_len // world
    sizes = Sizes(1, length, length, setting.heads, setting.kv_heads, DIM, DIM)
    groups = head_groups.head_groups_of(program, sizes, 2)
    fits_one_kernel = one_kernel.fits_one_kernel
    prepare._prepare.cache_clear()  # noqa: SLF001
    with (
        patch.object(strategies, "head_groups_of", lambda *_: groups),
        patch.object(
            peer_copies,
            "fits_one_kernel",
            lambda *x: setting.seq_len <= 8 * K and fits_one_kernel(*x),
        ),
    ):
        yield
    prepare._prepare.cache_clear()  # noqa: SLF001


def _errors(
    way: Method, mask: Mask, tensors: tuple[torch.Tensor, ...], *, captured: bool
) -> dict[str, float]:
    """Of the output and the gradients, against those of float32 attention."""
    q, k, v, dout = tensors
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    expected = _dense(leaves[0], leaves[1], leaves[2], mask)
    expected.backward(dout.float())
    local, upstream = [way.shard(x).requires_grad_() for x in (q, k, v)], way.shard(dout)
    found: list[torch.Tensor] = []

    def both() -> None:
        out = way.attend(*local)
        found[:] = [out, *torch.autograd.grad(out, local, upstream)]

    with way.around():
        run = _captured(both) if captured else both
        run()
    errors = {}
    wanted = [expected, *(leaf.grad for leaf in leaves)]
    for key, got, want in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        assert want is not None
        error = (got.float() - way.shard(want)).detach()
        largest, squares = error.abs().max(), error.square().mean()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        dist.all_reduce(squares, op=dist.ReduceOp.AVG)
        errors[f"{key} max"], errors[f"{key} rms"] = float(largest), float(squares) ** 0.5
    return errors


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
    """Attention by definition, in float32."""
    position = np.arange(q.shape[1])
    visible = torch.tensor(ring_core.Mask(**mask.options).dense(position, position), device="cuda")
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * DIM**-0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


def measure(rank: int, setting: Setting, name: str, seconds: float) -> dict[str, Any]:
    """Milliseconds forward and forward + backward, spread, host time and peak memory."""
    mask = mask_of(setting.mask, setting.seq_len)
    way = method(name.removesuffix(GRAPH), mask, setting.seq_len)
    world = dist.get_world_size()
    length = setting.seq_len if name == "one" else setting.seq_len // world
    *qkv, dout = inputs(setting, length, seed=rank)
    leaves = [x.requires_grad_() for x in qkv]
    before = torch.cuda.memory_allocated()
    results: dict[str, Any] = {}

    def forward() -> None:
        with torch.no_grad():
            way.attend(*leaves)

    def both() -> None:
        torch.autograd.grad(way.attend(*leaves), leaves, dout)

    for key, passes in (("forward", forward), ("both", both)):
        torch.cuda.reset_peak_memory_stats()
        with way.around():
            run = _captured(passes) if name.endswith(GRAPH) else passes
            results[key] = _timed(run, seconds)
        peak = torch.cuda.max_memory_allocated() - before
        results[key]["peak_gib"] = peak / 2**30
    return results


def _captured(run: Callable[[], None]) -> Callable[[], None]:
    """The same as a CUDA graph; replaying it costs the host next to nothing."""
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


def _timed(run: Any, seconds: float) -> dict[str, float]:
    for _ in range(3):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        once = torch.tensor(time.perf_counter() - start, device="cuda")
        dist.all_reduce(once, op=dist.ReduceOp.MAX)
        if float(once) > 1:  # nothing at the start counts then
            break
    repeats = max(3, min(20, int(seconds / float(once))))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    dist.barrier()
    host = time.perf_counter()
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    host = (time.perf_counter() - host) / repeats
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairwise(events)]
    mine = torch.tensor(times, device="cuda")
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    ordered = sorted(mine.tolist())
    return {
        "ms": statistics.median(ordered), "low": ordered[0], "high": ordered[-1],
        "runs": repeats, "host_ms": 1e3 * host,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the settings asked for, row by row; rows already in the JSON are kept."""
    how = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    parser.add_argument("--gpus", type=int, nargs="+", default=[torch.cuda.device_count()])
    parser.add_argument("--ranks", type=int, nargs="+", default=[], help="emulated by one GPU")
    parser.add_argument("--settings", nargs="+", default=[s.name for s in SETTINGS])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--seconds", type=float, default=10.0, help="for each figure")
    parser.add_argument("--json", type=Path, default=Path("out/bench_gpu.json"))
    parser.add_argument("--table", type=Path, help="print the rows of a JSON as Markdown and stop")
    options = parser.parse_args(argv)
    if options.table:
        print(table(json.loads(options.table.read_text())["rows"]))
        return 0
    rows: list[dict[str, Any]] = []
    if options.json.exists():
        rows = json.loads(options.json.read_text())["rows"]
    chosen = [s for s in SETTINGS if s.name in options.settings]

    def add(world: int, make: Callable[[Setting, str, float], dict[str, Any]]) -> None:
        for setting, name in product(chosen, options.methods):
            key = {"gpus": world, "setting": setting.name, "method": name}
            if not any(key.items() <= row.items() for row in rows):
                rows.append(key | make(setting, name, options.seconds))
                print(_line(rows[-1]), flush=True)
                _save(options.json, rows)

    for world in options.ranks:
        add(world, partial(_played, world))
    for world in options.gpus if not options.ranks else ():
        with LocalRanks(world, cuda=True, patience=300) as ranks:
            add(world, partial(_row, ranks))
    return 0


def _played(world: int, setting: Setting, name: str, seconds: float) -> dict[str, Any]:
    """One line of the table for so many ranks that one GPU emulates, without communication.

    Their results mean nothing, so it is the same calls on one rank that have to be right.
    """
    if name != "one" and ALONE not in name:
        raise SystemExit(f"one GPU emulates ranks without communication only, not {name}")
    errors = as_rank(0, 1, gate, 0, setting, name)
    if wrong := _wrong(errors):
        return {"wrong": wrong}
    ranks = range(1 if name == "one" else world)
    found = [as_rank(rank, len(ranks), measure, rank, setting, name, seconds) for rank in ranks]
    slowest = {key: max((x[key] for x in found), key=lambda x: x["ms"]) for key in PASSES}
    return {"errors": errors, **_with_rates(slowest, setting, len(ranks))}


def _wrong(errors: dict[str, float]) -> dict[str, float]:
    return {key: x for key, x in errors.items() if key.endswith("max") and not x < 0.1}


def _with_rates(times: dict[str, Any], setting: Setting, shares: int) -> dict[str, Any]:
    """With TFLOP/s of each of so many GPUs."""
    flops = 4 * pairs_of(setting) * setting.heads * DIM / shares
    return {
        key: times[key] | {"tflops": factor * flops / times[key]["ms"] / 1e9}
        for key, factor in PASSES.items()
    }


def _row(ranks: LocalRanks, setting: Setting, name: str, seconds: float) -> dict[str, Any]:
    """One line of the table: gate first, then times."""
    try:
        errors = ranks.run(gate, setting, name)[0]
        if wrong := _wrong(errors):
            return {"wrong": wrong}
        times = ranks.run(measure, setting, name, seconds)[0]
    except LocalRankError as error:
        return {"failed": str(error).strip().splitlines()[-1]}
    return {"errors": errors, **_with_rates(times, setting, 1 if name == "one" else len(ranks))}


def _line(row: dict[str, Any]) -> str:
    head = f"{row['gpus']} {row['setting']:<22} {row['method']:<18}"
    if "forward" not in row:
        return f"{head} {row.get('wrong') or row.get('failed')}"
    parts = [
        f"{row[key]['tflops']:6.0f} TFLOP/s {row[key]['ms']:9.3f} ms host {row[key]['host_ms']:7.3f}"
        for key in ("forward", "both")
    ]
    return f"{head} {' | '.join(parts)} | {row['both']['peak_gib']:.2f} GiB"


def _save(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    environment = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "cuda": torch.version.cuda, "python": platform.python_version(),
        "settings": [asdict(setting) for setting in SETTINGS],
    }  # fmt: skip
    path.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1))


if __name__ == "__main__":
    sys.exit(main())

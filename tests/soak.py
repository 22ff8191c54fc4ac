"""Soak tests: thousands of calls that must leak nothing, and one of a million tokens.

``python tests/soak.py`` makes 10,000 forward and backward passes of changing shapes on a ring of
three processes, twice, and prints what grew; then a million tokens, whose results it compares with
dense attention at the borders of shards. The exit code is 1 if anything grew or differed. ``--json
PATH`` keeps the numbers.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import RINGS
from reliability import environment
from torch import Tensor
from tqdm import tqdm

from ring_core import Mask, reference
from ring_core.base.caches import MOST_KEPT
from ring_core.plan import plan as _plan
from ring_torch import ContextParallel, prepare
from ring_torch.comm import handshake, ranks as _ranks
from ring_torch.local import LocalRanks

HEAD_DIM = 8
KINDS = 4000  # distinct shapes and options: more than any cache holds
GROWTH = 32 << 20  # bytes by which a process may grow after the first fifth of a run
WINDOW = 256  # attention window of the long sequence
NEAR = 1e-4  # allowed error of the long sequence's float32 results


#: How much a process holds of each resource: resident bytes, open files, entries of caches.
Held = dict[str, int]


def held() -> Held:
    """Return this process's resources now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": max(threading.active_count(), len(list(Path("/proc/self/task").iterdir()))),
        "plans": _plan._make_plan.cache_info().currsize,
        "calls": max(x.cache_info().currsize for x in prepare._prepare.values()),
        "agreed": max((len(ring.state.agreed) for ring in _ranks._ranks_of.values()), default=0),
    }


@dataclass(frozen=True)
class Run:
    """Run of calls: resources after the first fifth and at the end, and a digest of all results."""

    warm: Held
    end: Held
    digest: str
    seconds: float


def options(rng: np.random.Generator, length: int) -> dict[str, Any]:
    """Draw options of any kind for a sequence."""
    kinds: list[Callable[[], dict[str, Any]]] = [
        dict,
        lambda: {"causal": True},
        lambda: {"causal": True, "window": (int(rng.integers(length)), 0)},
        lambda: {"window": tuple(rng.integers(length, size=2).tolist())},
        lambda: {"chunk_size": int(rng.integers(1, length + 1))},
        lambda: {"cu_seqlens": (0, *sorted(rng.integers(length, size=3).tolist()), length)},
        lambda: {"softcap": float(rng.uniform(1, 9))},
        lambda: {"dropout_p": 0.1, "dropout_seed": int(rng.integers(2**40))},
    ]
    return kinds[rng.integers(len(kinds))]()


def one_call(kind: int, number: int) -> list[Tensor]:
    """Run forward and backward of one kind of call; return the output and gradients."""
    rng = np.random.default_rng(kind)
    layout, strategy = tuple(RINGS.values())[kind % len(RINGS)]
    cp = ContextParallel(layout=layout)
    length = 2 * cp.cp_size * int(rng.integers(1, 9))
    heads = int(rng.choice([1, 2]))
    call_options = options(rng, length)
    generator = torch.Generator().manual_seed(number)
    q, k, v = (
        cp.shard(torch.randn(1, length, h, HEAD_DIM, generator=generator)).requires_grad_()
        for h in (2, heads, heads)
    )
    out = cp.attention(q, k, v, deterministic=True, strategy=strategy, **call_options)
    out.square().sum().backward()
    grads = [x.grad for x in (q, k, v)]
    return [out.detach(), *(x for x in grads if x is not None)]


def many_calls(rank: int, calls: int) -> Run:
    """Run ``calls`` calls on this rank, the same ones on every rank."""
    started, rng, digest = time.monotonic(), np.random.default_rng(0), hashlib.blake2b()
    warm: Held = {}
    for n in tqdm(range(calls), unit="call", disable=True if rank else None):
        for x in one_call(int(rng.integers(KINDS)), n):
            digest.update(x.numpy().tobytes())
        if n == calls // 5:
            warm = held()
    return Run(warm, held(), digest.hexdigest()[:16], time.monotonic() - started)


def growth(warm: Held, end: Held) -> list[str]:
    """Return a message for each resource that grew, and for each cache that did not fill up."""
    allowed = {"memory": GROWTH, "files": 0, "threads": 0}
    wrong = [
        f"{name} grew from {warm[name]} to {end[name]}"
        for name, more in allowed.items()
        if end[name] > warm[name] + more
    ]
    plans, agreed = _plan._make_plan.cache_info().maxsize, handshake._MOST_AGREED
    limits = {"plans": plans, "calls": MOST_KEPT, "agreed": agreed}
    return wrong + [
        f"{name} kept: {end[name]}, where the bound is {limit}"
        for name, limit in limits.items()
        if end[name] != limit  # with fewer entries the run did not test the bound
    ]


def drawn(first: int, last: int, seed: int) -> Tensor:
    """Return tokens ``[1, last - first, 1, HEAD_DIM]`` of a long sequence, equal on all ranks."""
    n = torch.arange(first, last, dtype=torch.float64)[:, None] + 1
    wave = torch.sin(n * (torch.arange(HEAD_DIM) + 1.37 + seed) * 0.7311 + seed) * 1.7
    return wave.float()[None, :, None]


def long_sequence(rank: int, length: int, window: int) -> tuple[float, float]:
    """Run attention over a long sequence on contiguous shards; return its error and the seconds.

    Rows at the shard borders are compared with a reference on a slab with all keys they depend on.
    """
    started = time.monotonic()
    cp = ContextParallel(layout="contiguous")
    share = length // cp.cp_size
    first = rank * share
    q, k, v = (drawn(first, first + share, seed).requires_grad_() for seed in range(3))
    out = cp.attention(q, k, v, causal=True, window=(window, 0), deterministic=True)
    out.backward(drawn(first, first + share, 3))
    error, mask = 0.0, Mask(causal=True, window=(window, 0))
    for start in (first, first + share // 2, first + share - window):
        low, high = max(0, start - 2 * window), min(length, start + 3 * window)
        stop = min(start + window, first + share)
        *slab, dout = (drawn(low, high, seed).double().numpy() for seed in range(4))
        grads = reference.attention_grads(dout, *slab, mask=mask)[:3]
        expected = [reference.attention(*slab, mask=mask)[0], *grads]
        for x, right in zip((out, q.grad, k.grad, v.grad), expected, strict=True):
            assert x is not None
            local = x.detach()[:, start - first : stop - first].double().numpy()
            assert np.isfinite(local).all()
            error = max(error, float(np.abs(local - right[:, start - low : stop - low]).max()))
    return error, time.monotonic() - started


def compared(first: Sequence[Run], again: Sequence[Run]) -> list[str]:
    """Print the resources of two equal runs by rank, and return what is wrong with them."""
    wrong: list[str] = []
    for rank, (one, other) in enumerate(zip(first, again, strict=True)):
        print(f"rank {rank}: {one.seconds:.0f} s, digest {one.digest}", flush=True)
        print(f"  after a fifth {one.warm}\n  at the end    {one.end}", flush=True)
        print(f"  again         {other.end}, digest {other.digest}", flush=True)
        texts = [text for end in (one.end, other.end) for text in growth(one.warm, end)]
        texts += ["results differ from run to run, bit for bit"] * (one.digest != other.digest)
        wrong += [f"rank {rank}: {text}" for text in texts]
    return wrong


def main() -> int:
    """Run both tests, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000, help="forward and backward passes")
    parser.add_argument("--tokens", type=int, default=1 << 20, help="of the long sequence")
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    arguments = parser.parse_args()
    with LocalRanks(3, patience=None) as ranks:
        first, again = (ranks.run(many_calls, arguments.calls) for _ in range(2))
    wrong = compared(first, again)
    with LocalRanks(4, patience=None) as ranks:
        result = ranks.run(long_sequence, arguments.tokens, WINDOW)
    error, seconds = (max(column) for column in zip(*result, strict=True))
    print(
        f"{arguments.tokens} tokens, forward and backward: {seconds:.0f} s, error {error:.1e}",
        flush=True,
    )
    if not error <= NEAR:
        wrong.append(f"{arguments.tokens} tokens: an error of {error:.1e}")
    for text in wrong:
        print(f"wrong: {text}", flush=True)
    if arguments.json is not None:
        both = zip(map(asdict, first), map(asdict, again), strict=True)
        report = {
            "calls": {
                "calls": arguments.calls, "times": 2, "kinds": KINDS,
                "ranks": [{"first": before, "again": repeated} for before, repeated in both],
            },
            "long": {
                "tokens": arguments.tokens, "ranks": len(result), "window": WINDOW,
                "seconds": round(seconds), "error": error, "allowed": NEAR,
            },
            "wrong": wrong, "environment": environment("torch", "numpy"),
        }  # fmt: skip
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

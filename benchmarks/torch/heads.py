"""Time losses and log-probabilities that make no logits beside Liger's, on one GPU.

    python -m benchmarks.torch.heads --json heads.json
    python -m benchmarks.torch.heads --tokens 96 --dim 16 --classes 50 --rounds 1  # on a CPU

A run is both passes: the median seconds of rounds in which all take turns, and the bytes held at
most beyond inputs. Results are compared with float32 logits first; what is wrong is not timed.
Liger's loss sums gradients of the head in 16 bits, unless ``wide``.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from timeit import timeit
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.common.report import Report, command, reason_of
from benchmarks.common.turns import take_turns
from benchmarks.torch import described
from ring_torch import ContextParallel, linear_cross_entropy
from ring_torch.training import token_log_probs

MOST_ERROR, PIECE = 0.02, 1024  # relative to norms; tokens whose float32 logits exist at a time
Head = Callable[..., Tensor]  # of hidden states [N, dim], weight [V, dim] and labels [N]


def heads(cp: ContextParallel) -> Iterator[tuple[str, str, Head]]:
    """Yield kinds, names and functions; without Liger's where it is not installed."""
    yield "loss", "ring", partial(linear_cross_entropy, cp)
    yield "log_probs", "ring", partial(token_log_probs, cp)
    try:
        fused = import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss
        scaled = import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
        policy = import_module("liger_kernel.chunked_loss.fused_linear_ppo")
    except ImportError:
        return
    narrow, wide, each = fused(), fused(accum_dtype=torch.float32), fused(reduction="none")
    nll = scaled.LigerFusedLinearScaledCrossEntropyFunction.apply
    of_grpo = policy.LigerFusedLinearPPOBase.chunk_forward
    yield "loss", "liger", lambda h, w, y: narrow(w, h, y)
    yield "loss", "liger wide", lambda h, w, y: wide(w, h, y)
    yield "log_probs", "liger none", lambda h, w, y: -each(w, h, y)
    yield "log_probs", "liger scaled", lambda *x: -nll(*x)
    yield "log_probs", "liger grpo", lambda h, w, y: of_grpo(h[None], w, y[None])[0]


def exact(kind: str, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return what functions of a kind do, by logits of a few tokens at a time."""

    def of_piece(hidden: Tensor, labels: Tensor) -> Tensor:
        return (hidden @ weight.T).log_softmax(-1).gather(1, labels[:, None])[:, 0]

    pieces = zip(hidden.split(PIECE), labels.split(PIECE), strict=True)
    own = torch.cat([checkpoint(of_piece, *x, use_reentrant=False) for x in pieces])
    return -own.mean() if kind == "loss" else own


def both(head: Head, inputs: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """Return a function's output, and gradients of hidden states and weight."""
    out = head(*inputs)
    grad = grad.to(out.dtype) if out.ndim else torch.ones_like(out)
    grads = torch.autograd.grad(out, inputs[:2], grad)
    grads[1][0, 0].item()  # waits for the GPU
    return [out.detach(), *grads]


def row_of(run: Callable[[], list[Tensor]], expected: Sequence[Tensor]) -> dict[str, Any]:
    """Return a run's error, and on a GPU the bytes that it holds at most."""
    try:
        run()  # which compiles kernels
        if held := torch.cuda.memory_allocated():
            torch.cuda.reset_peak_memory_stats()
        pairs = zip(run(), expected, strict=True)
        peak = torch.cuda.max_memory_allocated() - held
        far = float(torch.stack([(x.float() - y).norm() / y.norm() for x, y in pairs]).max())
    except Exception as error:  # noqa: BLE001 - a library's own; the row says so
        return {"failed": reason_of(error)}
    return {"error": far, "peak_bytes": peak} | ({} if far <= MOST_ERROR else {"failed": "WRONG"})


@command(__doc__, {"--tokens": 32768, "--dim": 4096, "--classes": 152_064, "--rounds": 7})
def main(options: Any) -> int:
    """Compare, measure, print, and write the figures; return how many rows of ours were wrong."""
    torch.manual_seed(0)
    report = Report(options, described("liger-kernel", "nvidia-cutlass-dsl"))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        hidden = torch.randn(options.tokens, options.dim)
        weight = torch.randn(options.classes, options.dim) * 2 / options.dim**0.5
        labels, grad = torch.randint(options.classes, hidden.shape[:1]), torch.randn(len(hidden))
    rounded = [x.bfloat16().requires_grad_() for x in (hidden, weight)]
    wide = [x.detach().float().requires_grad_() for x in rounded]
    for kind in ("loss", "log_probs"):
        expected = both(partial(exact, kind), [*wide, labels], grad)
        of_kind = {name: head for x, name, head in heads(ContextParallel()) if x == kind}
        runs = {name: partial(both, x, [*rounded, labels], grad) for name, x in of_kind.items()}
        rows = {name: row_of(run, expected) for name, run in runs.items()}
        right = {name: run for name, run in runs.items() if "failed" not in rows[name]}
        took = take_turns(right, options.rounds, lambda _: 1, lambda run, n: timeit(run, number=n))
        times = {name: {"seconds": statistics.median(x), "rounds": x} for name, x in took.items()}
        report.add(*({"kind": kind, "name": x} | times.get(x, {}) | rows[x] for x in runs))
    return sum("failed" in row and row["name"] == "ring" for row in report.rows)


if __name__ == "__main__":
    sys.exit(main())

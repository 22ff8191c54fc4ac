"""Time recurrent layers that one device computes as all ranks of a group, one after the other.

    python -m benchmarks.torch.recurrent --json recurrent.json
    python -m benchmarks.torch.recurrent --layer ssd --kernel eager
    python -m benchmarks.torch.recurrent --layer all --kernel fla
    python -m benchmarks.torch.recurrent --layer selective_scan --kernel triton

Ranks' messages are exchanged beforehand, so that work alone is timed, on a GPU that of its kernels:
forward and backward of each zigzag rank, medians of ``--repeats``, whose sum is compared with the
whole layer's on one rank. Errors are of a shorter sequence, against the recurrence in float64 of
the same inputs, split and on one rank; memory is what a forward keeps.

Results are compared first: where a library's are not those of float64 but for rounding, the command
fails before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.common.harness import Report, command
from benchmarks.torch import described
from benchmarks.torch.timing import median_ms
from ring_core import Layout
from ring_torch.recurrent import calls, libraries
from ring_torch.recurrent.calls import RecurrentCall
from ring_torch.recurrent.kernels import Kernel, LinearAttention, SelectiveScan

RANKS, SHORT = 4, 2048  # ranks; tokens that are compared with float64
STATE = 16  # numbers of a channel of the selective scan
LAYERS = ["gated_delta_rule", "kda", "simple_gla", "ssd"]
MOST_ERROR = 0.02  # of results in 16 bits, relative to their norms


class Group:
    """A layer over ranks that this process emulates, one after the other.

    What ranks gather is recorded first, and given back when work is timed.
    """

    def __init__(
        self, kernel: Kernel, library: str, inputs: Sequence[Tensor], grad: Tensor, size: int
    ) -> None:
        dtype = torch.float64 if inputs[0].dtype == torch.float64 else torch.float32
        layout = Layout("zigzag", seq_len=inputs[0].shape[1], cp_size=size)
        self.kernel, self.size = kernel, size
        self.positions = [torch.tensor(layout.positions(n)).to(grad.device) for n in range(size)]
        pairs = [*zip(inputs, kernel.fills, strict=True)]  # without a fill all tokens share it
        self.inputs = [
            [x if fill is None else x[:, at].contiguous() for x, fill in pairs]
            for at in self.positions
        ]
        self.grads = [grad[:, at].contiguous() for at in self.positions]
        ranks: list[Any] = [SimpleNamespace(rank=n, size=size, group=None) for n in range(size)]
        self.calls = [
            RecurrentCall(x, "zigzag", kernel, None, None, dtype, False, False, True, 0, library)
            for x in ranks
        ]
        self.way = "forward"  # the pass under way
        self.sent: dict[tuple[str, int], Tensor] = {}  # by pass and rank
        self.gathered: dict[str, Tensor] = {}  # what all ranks send in a pass
        # What ranks send backward follows from what they gathered forward, and results from both.
        for _ in range(3):
            with self.without_messages():
                self.parts = [self.both(rank) for rank in range(size)]
            self.gathered = {
                way: torch.stack([self.sent[way, rank] for rank in range(size)])
                for way in ("forward", "backward")
            }

    @contextmanager
    def without_messages(self) -> Iterator[None]:
        """Let calls inside agree without a word, and gather what was recorded."""

        def gather(call: RecurrentCall, sent: Tensor) -> Tensor:
            self.sent[self.way, call.ranks.rank] = sent
            if self.way not in self.gathered:
                return sent.new_zeros(call.ranks.size, *sent.shape)
            return self.gathered[self.way]

        with (
            patch.object(calls, "agree_on_call", lambda *_: None),
            patch.object(calls, "GuardedPass", lambda *_: nullcontext()),
            patch.object(RecurrentCall, "_gather", gather),
            torch.no_grad(),
        ):
            yield

    def both(self, rank: int) -> tuple[calls.Results, tuple[Tensor, ...]]:
        """Run a rank's forward and backward; return its results and gradients."""
        call, inputs, self.way = self.calls[rank], self.inputs[rank], "forward"
        done = call.forward(None, inputs)
        self.way = "backward"
        _, grads = call.backward(
            None, inputs, done.entries, done.transitions, self.grads[rank], done.final
        )
        return done, grads

    def results(self) -> list[Tensor]:
        """Return the whole outputs and gradients, joined from all ranks."""
        order = torch.cat(self.positions).argsort()
        parts = ((done.out, *grads) for done, grads in self.parts)
        return [  # of what ranks share each has its part of the gradient
            torch.stack(of_ranks).sum(0) if fill is None else torch.cat(of_ranks, dim=1)[:, order]
            for fill, *of_ranks in zip([0, *self.kernel.fills], *parts, strict=True)
        ]

    def figures(self, repeats: int) -> dict[str, Any]:
        """Return each rank's milliseconds, the most bytes that a forward keeps, and bytes sent."""
        with self.without_messages():
            ms = [median_ms(partial(self.both, n), repeats, kernel_ms) for n in range(self.size)]
        kept = [
            sum(x.nbytes for x in (done.out, done.entries, done.transitions, *inputs))
            for (done, _), inputs in zip(self.parts, self.inputs, strict=True)
        ]
        _, forward, backward = self.calls[0].traffic(self.inputs[0])
        sent = {"forward": forward, "backward": backward}
        return {"ms": ms, "sum_ms": sum(ms), "kept_bytes": max(kept), "sent_bytes": sent}


def kernel_ms(run: Callable[[], object]) -> float:
    """Return the milliseconds that a GPU's kernels and copies take in a run.

    One process emulates all ranks, and short runs would wait for it.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    on_gpu = (x for x in profile.events() or () if x.device_type.name == "CUDA")
    return float(sum(x.device_time for x in on_gpu)) / 1e3


def layer_of(
    name: str, tokens: int, heads: int, width: int, dtype: torch.dtype, device: str
) -> tuple[LinearAttention | SelectiveScan, list[Tensor], Tensor]:
    """Return a layer, inputs of which it remembers something, and a gradient of its outputs."""
    make = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, tokens, heads, *shape, generator=make, device=device)

    if name == "selective_scan":
        u, step, grad = (normal(width).flatten(2) for _ in range(3))
        b, c = (normal(STATE)[:, :, :1] for _ in range(2))
        rates = -torch.arange(1.0, STATE + 1, device=device).expand(heads * width, -1) / 16
        inputs = [u.to(dtype), step.abs(), b.to(dtype), c.to(dtype), rates.contiguous()]
        return SelectiveScan(), inputs, grad.to(dtype)
    q, k, v, grad = (normal(width) for _ in range(4))
    g = -normal(*(width,) * (name == "kda")).abs() / 16
    rows, is_delta = [x.to(dtype) for x in (q, k, v)], name in ("gated_delta_rule", "kda")
    kernel = LinearAttention(
        name, 1.0 if name == "ssd" else width**-0.5, is_delta=is_delta, normalizes=is_delta,
        by_channel=name == "kda",
    )  # fmt: skip
    beta = [normal().sigmoid().to(dtype)] * is_delta
    return kernel, [*rows, g, *beta], grad.to(dtype)


def errors(name: str, library: str, *sizes: Any) -> dict[str, Any]:
    """Return how far results are from float64, split in zigzag and on one rank."""
    kernel, inputs, grad = layer_of(name, SHORT, *sizes)
    wide = [x.double() for x in inputs]
    exact = Group(kernel, "eager", wide, grad.double(), 1).results()
    off: dict[str, list[float]] = {}
    for way, size in (("one_rank", 1), ("zigzag", RANKS)):
        results = Group(kernel, library, inputs, grad, size).results()
        pairs = zip(results, exact, strict=True)
        off[way] = [float((x.double() - y).norm() / y.norm()) for x, y in pairs]
    worst = max(b / max(a, 1e-12) for a, b in zip(*off.values(), strict=True))
    return {"results": ["out", *kernel.inputs], **off, "worst_ratio": worst}


def measured(name: str, options: Any) -> Iterator[dict[str, Any]]:
    """Compare and measure a layer; yield its errors, figures of it whole and split, and ratios."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = options.heads, options.width, getattr(torch, options.dtype), device
    kernel, inputs, grad = layer_of(name, options.tokens, *sizes)
    library, reason = libraries.chosen(
        options.kernel, kernel, inputs, torch.float32, needs_grad=True
    )
    row: dict[str, Any] = {"layer": name, "kernel": library, "reason": reason}
    if options.kernel not in ("auto", library):
        yield row | {"failed": f"--kernel {options.kernel}: {reason}"}
        return
    row_of_errors = row | (far := errors(name, library, *sizes))
    if library != "eager" and not max(*far["one_rank"], *far["zigzag"]) <= MOST_ERROR:
        yield row_of_errors | {"failed": f"WRONG: errors may be {MOST_ERROR}"}
        return
    yield row_of_errors
    took = {}
    for size in (1, RANKS):
        took[size] = Group(kernel, library, inputs, grad, size).figures(options.repeats)
        yield row | {"ranks": size} | took[size]
    yield row | {
        "all ranks over whole": took[RANKS]["sum_ms"] / took[1]["sum_ms"],
        "kept, rank over whole": took[RANKS]["kept_bytes"] / took[1]["kept_bytes"],
    }


@command(
    __doc__,
    {
        "--tokens": 32768, "--heads": 32, "--width": 128, "--repeats": 10, "--dtype": "bfloat16",
        "--layer": {"default": LAYERS[0], "choices": [*LAYERS, "selective_scan", "all"]},
        "--kernel": {"default": "auto", "choices": ["auto", "eager", "fla", "triton"]},
    },
)  # fmt: skip
def main(options: Any) -> int:
    """Compare and measure, print, and write the figures; return how many layers were wrong."""
    report = Report(options, described("fla-core"))
    for name in LAYERS if options.layer == "all" else [options.layer]:
        for row in measured(name, options):
            report.add(row)
    return report.failed

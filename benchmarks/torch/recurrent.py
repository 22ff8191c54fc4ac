"""Time recurrent layers that one device computes as all ranks of a group, one after the other.

    python -m benchmarks.torch.recurrent --json recurrent.json
    python -m benchmarks.torch.recurrent --layer ssd --kernel eager
    python -m benchmarks.torch.recurrent --layer all --kernel fla --configs 2  # one check of a GPU
    python -m benchmarks.torch.recurrent --layer selective_scan --kernel triton

Ranks' messages are exchanged beforehand, so that work alone is timed, on a GPU that of its kernels:
forward and backward of each rank, medians of ``--repeats``, whose sum is compared with the whole
layer's on one rank, and with flash-linear-attention's own call, if it is installed. Errors are of a
shorter sequence, against the recurrence in float64 of the same inputs, split and on one rank;
memory is the most that forward and backward hold beside their inputs, and what a forward keeps.

Results are compared first: where a library's are not those of float64 but for rounding, the command
fails before anything is timed. flash-linear-attention tries up to 100 configurations of each kernel
when it first meets heads and channels, whatever the length; ``--configs`` bounds them, so that the
comparison, with few tokens, has them all compiled in a minute or two.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from math import log2
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.common.report import Report, command
from benchmarks.torch.methods import described
from benchmarks.torch.timing import median_ms
from ring_core import Layout, LayoutSpec
from ring_torch.recurrent import calls, libraries
from ring_torch.recurrent.calls import RecurrentCall
from ring_torch.recurrent.kernels import Kernel, LinearAttention, SelectiveScan

RANKS, SHORT = 4, 2048  # ranks; tokens that are compared with float64
STATE = 16  # numbers of a channel of the selective scan
LAYOUTS: tuple[LayoutSpec, ...] = ("contiguous", "zigzag")
#: Layers, with flash-linear-attention's own calls.
LAYERS = {
    "gated_delta_rule": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "kda": ("fla.ops.kda", "chunk_kda"), "simple_gla": ("fla.ops.simple_gla", "chunk_simple_gla"),
    "ssd": ("fla.ops.simple_gla", "chunk_simple_gla"),
}  # fmt: skip
#: Most that results in 16 bits may be off, relative to their norms.
MOST_ERROR = 0.02
#: Most that ratios may be.
GOALS = {
    "gated_delta_rule": 1.25, "ssd": 1.2, "zigzag over contiguous": 1.05, "kept": 0.27,
    "error": 1.1,
}  # fmt: skip


class Group:
    """A layer over ranks that this process emulates, one after the other.

    What ranks gather is recorded in a first run of each pass, and given back when work is timed.
    """

    def __init__(
        self, kernel: Kernel, library: str, inputs: Sequence[Tensor], grad: Tensor, size: int,
        layout: LayoutSpec,
    ) -> None:  # fmt: skip
        dtype = torch.float64 if inputs[0].dtype == torch.float64 else torch.float32
        spread = Layout(layout, seq_len=inputs[0].shape[1], cp_size=size)
        self.size = size
        self.positions = [
            torch.from_numpy(spread.positions(n)).to(grad.device) for n in range(size)
        ]
        self.is_shared = [fill is None for fill in kernel.fills]
        self.inputs = [
            [
                x if shared else x[:, at].contiguous()
                for x, shared in zip(inputs, self.is_shared, strict=True)
            ]
            for at in self.positions
        ]
        self.grads = [grad[:, at].contiguous() for at in self.positions]
        ranks: list[Any] = [SimpleNamespace(rank=n, size=size, group=None) for n in range(size)]
        self.calls = [
            RecurrentCall(x, layout, kernel, None, None, dtype, False, False, True, 0, library)
            for x in ranks
        ]
        self.sent: dict[tuple[str, int], Tensor] = {}  # what each rank sends in a pass
        self.gathered: dict[str, Tensor] = {}  # what all of them send, once that is known
        self.way = "forward"  # the pass under way
        with self.without_messages():
            for run in (self.forward, self.both):
                for rank in range(size):
                    run(rank)
                if size > 1:
                    self.gathered[self.way] = torch.stack(
                        [self.sent[self.way, n] for n in range(size)]
                    )

    @contextmanager
    def without_messages(self) -> Iterator[None]:
        """Let calls inside agree without a word, and gather what was recorded."""

        def gather(call: RecurrentCall, sent: Tensor) -> Tensor:
            if self.size == 1:
                return sent[None]
            self.sent[self.way, call.ranks.rank] = sent
            return self.gathered.get(self.way, sent.new_zeros(self.size, *sent.shape))

        with (
            patch.object(calls, "agree_on_call", lambda *_: None),
            patch.object(calls, "GuardedPass", lambda *_: nullcontext()),
            patch.object(RecurrentCall, "_gather", gather),
            torch.no_grad(),
        ):
            yield

    def forward(self, rank: int) -> calls.Results:
        """Run a rank's forward."""
        self.way = "forward"
        return self.calls[rank].forward(None, self.inputs[rank])

    def both(self, rank: int) -> tuple[Tensor, ...]:
        """Run a rank's forward and backward; return its outputs and gradients."""
        done = self.forward(rank)
        self.way = "backward"
        _, grads = self.calls[rank].backward(
            None, self.inputs[rank], done.entries, done.transitions, self.grads[rank], done.final
        )
        return done.out, *grads

    def results(self) -> list[Tensor]:
        """Return the whole outputs and gradients, joined from all ranks."""
        with self.without_messages():
            parts = [self.both(rank) for rank in range(self.size)]
        order = torch.cat(self.positions).argsort()
        return [  # of what ranks share each has its part of the gradient
            torch.stack(of_ranks).sum(0) if shared else torch.cat(of_ranks, dim=1)[:, order]
            for shared, *of_ranks in zip([False, *self.is_shared], *parts, strict=True)
        ]

    def figures(self, repeats: int) -> dict[str, Any]:
        """Return times and memory of each rank, in milliseconds and bytes."""
        with self.without_messages():
            ms = [median_ms(partial(self.both, n), repeats, kernel_ms) for n in range(self.size)]
            memory = [self._memory(rank) for rank in range(self.size)]
        return {
            "ms": ms, "sum_ms": sum(ms), "peak_bytes": max(x[0] for x in memory),
            "kept_bytes": max(x[1] for x in memory),
        }  # fmt: skip

    def _memory(self, rank: int) -> tuple[int, int]:
        """Return the most bytes beside the inputs, and those that a forward keeps with them."""
        done = self.forward(rank)
        kept = sum(x.nbytes for x in (done.out, done.entries, done.transitions, *self.inputs[rank]))
        del done
        if not self.grads[rank].is_cuda:
            return 0, kept
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.both(rank)
        return torch.cuda.max_memory_allocated() - before, kept


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


def library_call(
    kernel: LinearAttention | SelectiveScan, inputs: Sequence[Tensor], grad: Tensor, repeats: int
) -> float | None:
    """Return the milliseconds of flash-linear-attention's own call of a whole layer."""
    if find_spec("fla") is None or not grad.is_cuda or isinstance(kernel, SelectiveScan):
        return None
    module, name = LAYERS[kernel.name]
    function = getattr(import_module(module), name)
    options = {"use_qk_l2norm_in_kernel": True} if kernel.normalizes else {}
    leaves = [x.detach().requires_grad_() for x in inputs]

    def run() -> None:
        out, _ = function(*leaves, scale=kernel.scale, **options)
        torch.autograd.grad(out, leaves, grad)

    return median_ms(run, repeats, kernel_ms)


def errors(name: str, library: str, *sizes: Any) -> dict[str, Any]:
    """Return how far results are from float64, split in both layouts over those of one rank."""
    kernel, inputs, grad = layer_of(name, SHORT, *sizes)
    wide = [x.double() for x in inputs]
    exact = Group(kernel, "eager", wide, grad.double(), 1, "contiguous").results()

    def off(results: Sequence[Tensor]) -> list[float]:
        return [
            float((x.double() - y).norm() / y.norm()) for x, y in zip(results, exact, strict=True)
        ]

    alone = off(Group(kernel, library, inputs, grad, 1, "contiguous").results())
    groups = {str(x): Group(kernel, library, inputs, grad, RANKS, x) for x in LAYOUTS}
    split = {name: off(group.results()) for name, group in groups.items()}
    worst = max(a / max(b, 1e-12) for of in split.values() for a, b in zip(of, alone, strict=True))
    names = ["out", *kernel.inputs]
    return {"results": names, "one_rank": alone, "split": split, "worst_ratio": worst}


@contextmanager
def bounded(most: int | None) -> Iterator[None]:
    """Let Triton try the most usual configurations of a kernel alone, so many."""
    if most is None:
        yield
        return
    tuner = import_module("triton.runtime.autotuner").Autotuner
    prune = tuner.prune_configs

    def usual(config: Any) -> tuple[float, ...]:
        sizes = sum(x for x in config.kwargs.values() if isinstance(x, int))
        return abs(log2(config.num_warps) - 2), abs(config.num_stages - 2), -sizes

    def few(self: Any, *args: Any, **kwargs: Any) -> list[Any]:
        return sorted(prune(self, *args, **kwargs), key=usual)[:most]

    with patch.object(tuner, "prune_configs", few):
        yield


def measured(name: str, options: Any) -> Iterator[dict[str, Any]]:
    """Compare and measure a layer; yield its errors, then figures by layout, and ratios."""
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
    far = errors(name, library, *sizes)
    if library != "eager" and not max(*far["one_rank"], *far["split"]["zigzag"]) <= MOST_ERROR:
        yield row | far | {"failed": f"WRONG: errors may be {MOST_ERROR}"}
        return
    yield row | far
    took: dict[str, dict[str, Any]] = {}
    splits = ("whole", 1, LAYOUTS[0]), *((str(x), RANKS, x) for x in LAYOUTS)
    for shown, size, layout in splits:
        group = Group(kernel, library, inputs, grad, size, layout)
        took[shown] = figures = group.figures(options.repeats)
        sent = group.calls[0].traffic(group.inputs[0])
        figures["sent_bytes"] = {"forward": sent[1], "backward": sent[2]}
        yield row | {"layout": shown, "ranks": size} | figures
        del group
    whole, contiguous, zigzag = took.values()
    ratios = {
        "contiguous over whole": contiguous["sum_ms"] / whole["sum_ms"],
        "zigzag over whole": zigzag["sum_ms"] / whole["sum_ms"],
        "zigzag over contiguous": zigzag["sum_ms"] / contiguous["sum_ms"],
        "kept, zigzag rank over whole": zigzag["kept_bytes"] / whole["kept_bytes"],
        "peak, zigzag rank over whole": zigzag["peak_bytes"] / max(whole["peak_bytes"], 1),
    }
    if (of_library := library_call(kernel, inputs, grad, options.repeats)) is not None:
        ratios["zigzag over fla's own call"] = zigzag["sum_ms"] / of_library
        ratios["whole over fla's own call"] = whole["sum_ms"] / of_library
    yield row | {"fla_ms": of_library, "ratios": ratios, "goals": GOALS}


def body(options: Any) -> int:
    """Compare and measure, print, and write the figures; return how many layers were wrong."""
    sizes = {name: x for name, x in vars(options).items() if isinstance(x, int)}
    report = Report(options.json, partial(described, "fla-core", dtype=options.dtype, **sizes))
    with bounded(options.configs):
        for name in LAYERS if options.layer == "all" else (options.layer,):
            for row in measured(name, options):
                report.add(row)
    return sum("failed" in row for row in report.rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Time the layers asked for; return the exit code."""
    sizes = {"--tokens": 32768, "--heads": 32, "--width": 128, "--repeats": 10, "--configs": None}
    layers = (*LAYERS, "selective_scan", "all")
    choices = {
        "--layer": ("gated_delta_rule", layers),
        "--kernel": ("auto", ("auto", "eager", "fla", "triton")),
        "--dtype": ("bfloat16", ("bfloat16", "float16", "float32")),
    }
    arguments: dict[str, dict[str, Any]] = {
        **{name: {"type": int, "default": x} for name, x in sizes.items()},
        **{name: {"default": x, "choices": several} for name, (x, several) in choices.items()},
    }
    return command(__doc__, arguments, body, argv)


if __name__ == "__main__":
    sys.exit(main())

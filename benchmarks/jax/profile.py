"""Summarize what GPUs do in a call, from a trace of JAX's profiler: kernels, transfers, waiting.

A GPU's time is that from its first operation in the trace to its last. ``exposed`` is exposed
communication: the share in which a transfer runs and no attention kernel does. ``idle`` is the
share in which nothing runs at all.
"""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

Span = tuple[float, float]  # begin and end, in nanoseconds

_GPU = re.compile(r"/device:GPU:(\d+)")
_STREAM = "Stream"  # how names of lines begin; the other lines sum these up
_ATTENTION = re.compile(r"fwd|bwd|flash|fmha|sdpa|fprop|bprop|mosaic", re.IGNORECASE)
_TRANSFER = re.compile(r"nccl|p2p|ptop", re.IGNORECASE)
_TO_DEVICE = re.compile(r"\bdest:(\d+)")
_TOP = 12


@dataclass(frozen=True)
class Operation:
    """A kernel or a copy that ran on a GPU."""

    name: str
    span: Span
    is_transfer: bool

    @property
    def is_attention(self) -> bool:
        """True for an attention kernel."""
        return not self.is_transfer and _ATTENTION.search(self.name) is not None


def united(spans: Iterable[Span]) -> list[Span]:
    """Return spans in order, those that touch or overlap as one."""
    spans_united: list[Span] = []
    for begin, end in sorted(spans):
        if spans_united and begin <= spans_united[-1][1]:
            spans_united[-1] = spans_united[-1][0], max(end, spans_united[-1][1])
        else:
            spans_united.append((begin, end))
    return spans_united


def total(spans: Iterable[Span]) -> float:
    """Return for how long at least one of the spans lasts, in nanoseconds."""
    return sum(end - begin for begin, end in united(spans))


def overlap(a: Iterable[Span], b: Iterable[Span]) -> float:
    """Return for how long spans of ``a`` and of ``b`` last at once, in nanoseconds."""
    a, b = list(a), list(b)
    return total(a) + total(b) - total([*a, *b])


def summary(operations: Iterable[Operation], calls: int) -> dict[str, Any]:
    """Return what one GPU did in some calls: shares of its time, and microseconds per call."""
    operations = list(operations)
    spans = {
        "all": [x.span for x in operations],
        "attention": [x.span for x in operations if x.is_attention],
        "transfer": [x.span for x in operations if x.is_transfer],
    }
    whole = max(end for _, end in spans["all"]) - min(begin for begin, _ in spans["all"])
    transfer = total(spans["transfer"])
    exposed = transfer - overlap(spans["transfer"], spans["attention"])
    by_name: dict[str, list[Span]] = defaultdict(list)
    for x in operations:
        by_name[x.name].append(x.span)
    took = {
        name: sum(end - begin for begin, end in united_spans)
        for name, united_spans in by_name.items()
    }
    longest = sorted(by_name, key=lambda name: -took[name])[:_TOP]
    per_call = calls * 1e3
    return {
        "us": whole / per_call,
        "attention": total(spans["attention"]) / whole,
        "transfer": transfer / whole,
        "exposed": exposed / whole,
        "idle": 1 - total(spans["all"]) / whole,
        "operations": [
            {"name": name, "us": took[name] / per_call, "times": len(by_name[name]) / calls}
            for name in longest
        ],
    }


def operations_of(data: ProfileData) -> dict[str, list[Operation]]:
    """Return the operations in a trace, by GPU."""
    by_device: dict[str, list[Operation]] = {}
    for plane in data.planes:
        gpu = _GPU.search(plane.name)
        if gpu is None:
            continue
        # An event must not outlive its line, nor a line its plane.
        for line in plane.lines:
            if line.name.startswith(_STREAM):
                by_device.setdefault(gpu[1], []).extend(_operations(line.events, int(gpu[1])))
    return {gpu: operations for gpu, operations in by_device.items() if operations}


def _operations(events: Iterable[Any], gpu: int) -> Iterator[Operation]:
    for event in events:
        details = dict(event.stats).get("memcpy_details", "")
        to_device = _TO_DEVICE.search(str(details))
        leaves = to_device is not None and "Memcpy" in event.name and int(to_device[1]) != gpu
        leaves = leaves and re.search("H2D|D2H", event.name) is None
        yield Operation(
            event.name,
            (event.start_ns, event.start_ns + event.duration_ns),
            leaves or _TRANSFER.search(event.name) is not None,
        )


def profiled(run: Callable[[], Any], calls: int = 4) -> dict[str, Any]:
    """Trace ``calls`` calls in a row, after one that is not traced; return each GPU's summary.

    Raises:
        ValueError: The trace holds nothing of GPUs.
    """
    jax.block_until_ready(run())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([run() for _ in range(calls)])
        paths = list(Path(folder).rglob("*.xplane.pb"))
        by_device = {
            gpu: summary(operations, calls)
            for path in paths
            for gpu, operations in operations_of(ProfileData.from_file(str(path))).items()
        }
    if not by_device:
        raise ValueError(f"the trace holds nothing of GPUs ({len(paths)} files)")
    return by_device

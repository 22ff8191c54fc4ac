"""Time each kernel alone: ``python -m ring_torch bench --rates FILE``.

The times are a table from which ``kernel="auto"`` chooses. Before it is timed, a kernel's output
and gradients are compared on a short sequence with exact ones. A kernel gets no time if it errs
more than twice as much as a plain implementation, which forms dense scores and rounds weights,
score gradients and results to the dtype. The kernels then run in turns.
"""

from __future__ import annotations

import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ring_core import Mask, UnsupportedError, make_plan, ring_program
from ring_core.choose.rates import Case, Option, Rates, Times, default, read, to_text
from ring_core.tools.bench import progress
from ring_core.tools.doctor import RESULTS
from ring_torch.attention import ring_attention
from ring_torch.kernels import capability_number, in_order
from ring_torch.kernels.eager import dropout_keep
from ring_torch.tools.timing import seconds_of

ROUNDS, GATE_LENGTH = 5, 1024
LENGTHS = {"cuda": 16384, "cpu": 1024}
DTYPES = {"cuda": (torch.bfloat16, torch.float32), "cpu": (torch.float32, torch.float64)}
SHOWN_LIBRARIES = ("torch", "triton", "flash-attn-4", "flash-attn-3", "flash-attn", "CUDA", "cuDNN")

_CAP, _DROPOUT, _DOCUMENT = 20.0, 0.1, 1500
_SCALE = 3.0  # factor of queries with a soft cap, which only matters for large scores
_STRIPE, _FIRST = 512, 64  # numbers in the timed predicate: see `_predicate`
_TURN, _MOST_CALLS = 0.02, 20  # seconds that a kernel's turn takes, and most calls in a turn

_LIMIT = 2  # largest error, in multiples of the plain implementation's

Tensors = list[Tensor]


class Sizes(NamedTuple):
    """Case that is timed: the option it uses, and its sizes.

    Attributes:
        option: Option of attention, as ``"window"``.
        dims: Head dims of Q and K, and of V.
        heads: Numbers of query heads and of K/V heads.
    """

    option: Option = "causal"
    dims: tuple[int, int] = (128, 128)
    heads: tuple[int, int] = (32, 8)


CASES = (
    *(Sizes(dims=(dim, dim)) for dim in (64, 80, 96, 112, 128, 160, 192, 256)),
    Sizes(dims=(192, 128)), Sizes(heads=(16, 16)), Sizes(dims=(192, 128), heads=(16, 16)),
    Sizes("window"), Sizes("documents"), Sizes("segment_ids"), Sizes("predicate"),
    Sizes("softcap"), Sizes("alibi"), Sizes("bias"), Sizes("dropout"),
)  # fmt: skip


class TimedRuns(NamedTuple):
    """Functions that run a kernel once, to be timed.

    Attributes:
        forward: Runs the forward, and returns its output.
        forward_backward: Runs forward and backward, and returns the output, dQ, dK and dV.
    """

    forward: Callable[[], Tensor]
    forward_backward: Callable[[], Tensors]


def renew(
    path: Path, length: int | None, versions: Mapping[str, str], cases: Sequence[Sizes] = CASES
) -> Rates:
    """Time the kernels that can run here, and write a file with the table of their times.

    All of torch's entries for this compute capability are replaced, also those of another GPU that
    has it, and of cases that are not timed. The CPU counts as a capability of its own. Other
    entries, and those of JAX, are kept; a new file takes them from the table in use.

    Args:
        path: The file.
        length: Sequence length in tokens; ``None`` for 16,384 on a GPU, and 1,024 on the CPU.
        versions: Versions of the installed libraries.
        cases: Cases to time.

    Returns:
        The table that was written.

    Raises:
        ValueError: The file exists and is no such table, tables have no entry for this kind of
            device, or ``length`` is below 1.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    capability = capability_number(device)
    if capability is None:
        raise ValueError(
            "--rates times kernels on NVIDIA GPUs and on the CPU; this GPU is of another vendor"
        )
    length = LENGTHS[device] if length is None else length
    if length < 1:
        raise ValueError(f"--seq-len must be at least 1, got {length}")
    old_entries = (read(str(path)) if path.exists() else default()).cases
    other_entries = tuple(
        x for x in old_entries if (x.framework, x.capability) != ("torch", capability)
    )
    path.write_text(
        to_text(Rates(old_entries))
    )  # fail now, not after minutes, if it cannot be written
    entries: list[Case] = []
    with progress(len(cases), "case") as bar:
        for sizes in cases:
            if times := _times(sizes, length, device):
                entries.append(_case(sizes, length, capability, times, versions))
            bar.update()
    table = Rates((*entries, *other_entries))
    path.write_text(to_text(table))
    return table


def _case(
    sizes: Sizes, length: int, capability: int, times: dict[str, Times], versions: Mapping[str, str]
) -> Case:
    """Return the table's entry of a case: device, library versions, sizes and times by kernel."""
    program = ring_program(make_plan(_mask(sizes.option, length), seq_len=length, cp_size=1))
    return Case(
        "torch", capability, torch.cuda.get_device_name() if capability else platform.machine(),
        tuple((library, versions[library]) for library in SHOWN_LIBRARIES if library in versions), length, int(program.work().sum()), sizes.heads, sizes.dims, sizes.option, tuple(times.items()),
    )  # fmt: skip


def _times(sizes: Sizes, length: int, device: str) -> dict[str, Times]:
    """Return the times of a case by kernel.

    A kernel that refuses the case has none. Why another one has none is said on stderr: it raised
    an error, or its results err too much.
    """
    runs: dict[str, TimedRuns] = {}
    short, (dtype, acc_dtype) = min(length, GATE_LENGTH), DTYPES[device]
    exact = _timed_functions(sizes, "eager", short, acc_dtype, device).forward_backward()
    limits = [_LIMIT * error for error in _rms_errors(_plain(sizes, short, device), exact)]
    for name in _kernels_to_time(device):
        try:
            errors = _rms_errors(
                _timed_functions(sizes, name, short, dtype, device).forward_backward(), exact
            )
            for result, error, limit in zip(RESULTS, errors, limits, strict=True):
                if not error <= limit:
                    raise ArithmeticError(f"{result} errs by {error:.1e}, more than {limit:.1e}")  # noqa: TRY301 - refuses this case alone
            kernel_runs = _timed_functions(sizes, name, length, dtype, device)
            for run in kernel_runs:  # compile before anything is timed
                run()
        except UnsupportedError:
            continue
        except Exception as error:  # noqa: BLE001 - whatever it is, this one has no time
            reason = str(error).strip().partition("\n")[0]
            sys.stderr.write(f"no time of {name}, {sizes.option}, {sizes.dims}: {reason}\n")
            continue
        runs[name] = kernel_runs
    forward, forward_backward = (
        _times_in_turn([kernel_runs[n] for kernel_runs in runs.values()], device) for n in range(2)
    )
    return {
        name: Times(*milliseconds)
        for name, *milliseconds in zip(runs, forward, forward_backward, strict=True)
    }


def _kernels_to_time(device: str) -> Iterator[str]:
    """Yield the kernels to time on this machine; on a GPU without ``eager`` (plain torch)."""
    return (
        kernel.capabilities.name
        for kernel in in_order(device)
        if device in (kernel.capabilities.devices or (device,))
        and kernel.unavailable_reason() is None
        and (kernel.capabilities.name, device) != ("eager", "cuda")
    )


def _rms_errors(actual: Tensors, exact: Tensors) -> list[float]:
    """Return root mean square errors relative to the standard deviation of the exact values."""
    return [
        float((a.to(b.dtype) - b).square().mean().sqrt() / b.std())
        for a, b in zip(actual, exact, strict=True)
    ]


def _plain(sizes: Sizes, length: int, device: str) -> Tensors:
    """Return output, dQ, dK and dV of the dense formula, rounded where a framework would round.

    They are in the accumulation dtype.
    """
    dtype = DTYPES[device][0]
    acc_dtype = torch.promote_types(dtype, torch.float32)

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).to(acc_dtype)

    q, k, v, dout, options = _inputs(sizes, length, acc_dtype, device)
    positions = torch.arange(length, device=device)
    group = sizes.heads[0] // sizes.heads[1]
    products = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, dim=2))
    products.register_hook(rounded)
    scores = products * sizes.dims[0] ** -0.5
    if "softcap" in options:
        scores = _CAP * torch.tanh(scores / _CAP)
    if "alibi_slopes" in options:
        scores = (
            scores - options["alibi_slopes"][:, None, None] * (positions[:, None] - positions).abs()
        )
    scores = scores + options.get("bias", 0.0)
    dense = options["mask"].dense(np.arange(length), np.arange(length))
    visible = torch.as_tensor(dense, device=device)
    if "segment_ids" in options:
        ids = options["segment_ids"]
        visible = visible & (ids[:, None, :, None] == ids[:, None, None])
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    if "dropout_p" in options:
        keep = dropout_keep(
            _DROPOUT, options["dropout_seed"], range(len(q)), sizes.heads[0], positions, positions
        )
        weights = weights * keep.to(acc_dtype) / (1 - _DROPOUT)
    weights = weights + (rounded(weights) - weights).detach()
    out = torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(group, dim=2))
    return [rounded(x.detach()) for x in (out, *torch.autograd.grad(out, (q, k, v), dout))]


def _timed_functions(
    sizes: Sizes, kernel: str, length: int, dtype: torch.dtype, device: str
) -> TimedRuns:
    """Return the functions that run a kernel on the inputs of a case."""
    q, k, v, dout, options = _inputs(sizes, length, dtype, device)
    attend: Callable[..., Tensor] = partial(ring_attention, kernel=kernel, **options)

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(q, k, v)

    def forward_backward() -> Tensors:
        out = attend(q, k, v)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

    return TimedRuns(forward, forward_backward)


def _inputs(
    sizes: Sizes, length: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
    """Return ``(q, k, v, dout, options)`` of a case: the same numbers whatever the dtype.

    They are drawn in float32 and rounded to the timed dtype first, so a wider dtype holds them
    exactly.
    """
    rng = torch.Generator(device).manual_seed(length)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        x = scale * torch.randn(shape, generator=rng, device=device)
        return x.to(DTYPES[device][0]).to(dtype)

    (heads, kv_heads), (dim, v_dim) = sizes.heads, sizes.dims
    q = draw(1, length, heads, dim, scale=_SCALE if sizes.option == "softcap" else 1.0)
    k, v = (draw(1, length, kv_heads, n) for n in (dim, v_dim))
    dout = draw(1, length, heads, v_dim)
    options = {"mask": _mask(sizes.option, length), **_option(sizes, length, device)}
    if sizes.option == "bias":
        options["bias"] = draw(1, 1, length, length)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout, options


def _option(sizes: Sizes, length: int, device: str) -> dict[str, Any]:
    """Return the options of a case's call other than its mask and bias."""
    ids = torch.arange(length, device=device) // _document(length)
    numbers = torch.arange(1, sizes.heads[0] + 1, device=device)
    options: dict[str, dict[str, Any]] = {
        "softcap": {"softcap": _CAP},
        "alibi": {"alibi_slopes": torch.exp2(-8 / sizes.heads[0] * numbers)},
        "segment_ids": {"segment_ids": ids.int()[None]},
        "dropout": {"dropout_p": _DROPOUT, "dropout_seed": 7},
    }
    return options.get(sizes.option, {})


def _mask(option: Option, length: int) -> Mask:
    """Return the mask of a case."""
    if option == "predicate":
        return Mask(predicate=_predicate)
    if option == "documents":
        return Mask(causal=True, cu_seqlens=(*range(0, length, _document(length)), length))
    return Mask(causal=True, window=(length // 4, 0) if option == "window" else None)


def _predicate(i: Any, j: Any) -> Any:
    """Return True for keys up to the query's own that lie in a window, or begin a stripe."""
    return (i >= j) & ((i - j < _STRIPE) | (j % _STRIPE < _FIRST))


def _document(length: int) -> int:
    """Return the length of a document in tokens."""
    return max(1, min(_DOCUMENT, length // 3))


def _times_in_turn(runs: Sequence[Callable[[], object]], device: str) -> list[float]:
    """Return the median time of each run in milliseconds, with the runs taking turns."""
    calls = [max(1, min(_MOST_CALLS, int(_TURN / seconds_of(run, 1, device)))) for run in runs]
    seconds: list[list[float]] = [[] for _ in runs]
    for n in range(ROUNDS):
        # Each round starts with another run, so that none profits from its place in the order.
        for index in ((n + m) % len(runs) for m in range(len(runs))):
            seconds[index].append(seconds_of(runs[index], calls[index], device))
    return [float(f"{1e3 * statistics.median(samples):.4g}") for samples in seconds]

"""``python -m ring_torch bench --rates``: the table of times that ``auto`` chooses by, renewed.

First each kernel's out and gradients are compared with exact ones on a short sequence: what errs
more than twice as much as the formula written down densely, with weights, gradients of scores and
results rounded to the dtype, has no time. Then kernels take turns.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ring_core import Mask, UnsupportedError, make_plan, ring_program
from ring_core.choose.rates import Case, Option, Rates, Times, default, read, written
from ring_core.tools.bench import progress
from ring_torch.attention import ring_attention
from ring_torch.kernels import capability_number, in_order
from ring_torch.kernels.eager import dropout_keep

ROUNDS, GATE_LENGTH = 5, 1024
LENGTHS = {"cuda": 16384, "cpu": 1024}
DTYPES = {"cuda": (torch.bfloat16, torch.float32), "cpu": (torch.float32, torch.float64)}
RESULTS = ("out", "dq", "dk", "dv")
LIBRARIES = ("torch", "triton", "flash-attn-4", "flash-attn-3", "flash-attn", "CUDA", "cuDNN")

_CAP, _DROPOUT, _DOCUMENT = 20.0, 0.1, 1500
_SCALE = 3.0  # what queries are multiplied by where scores have to be large for the cap to matter
_STRIPE, _FIRST = 512, 64  # of the predicate
_TURN, _MOST_CALLS = 0.02, 20  # a turn takes so many seconds, unless these are more calls

_LIMIT = 2  # times the error of the plain implementation

Arrays = list[Tensor]


class Sizes(NamedTuple):
    """What is timed: an option, head dims of Q and K and of V, heads of queries and of keys."""

    option: Option = "causal"
    dims: tuple[int, int] = (128, 128)
    heads: tuple[int, int] = (32, 8)


CASES = (
    *(Sizes(dims=(dim, dim)) for dim in (64, 80, 96, 112, 128, 160, 192, 256)),
    Sizes(dims=(192, 128)), Sizes(heads=(16, 16)), Sizes(dims=(192, 128), heads=(16, 16)),
    Sizes("window"), Sizes("documents"), Sizes("segment_ids"), Sizes("predicate"),
    Sizes("softcap"), Sizes("alibi"), Sizes("bias"), Sizes("dropout"),
)  # fmt: skip


class Runs(NamedTuple):
    """The passes of a kernel, to be timed."""

    forward: Callable[[], Tensor]
    both: Callable[[], Arrays]


def renew(
    path: Path, length: int | None, versions: Mapping[str, str], cases: Sequence[Sizes] = CASES
) -> Rates:
    """Time the kernels that can run here, and write the table with these times in it.

    What the file says of other GPUs and of JAX stays; a new one takes it from the table in use.

    Args:
        path: The file.
        length: Tokens; ``None`` is 16,384 on a GPU, and 1,024 on the host.
        versions: Of the libraries there are.
        cases: What is timed.

    Raises:
        ValueError: The file is no such table, this device is none that tables know, or there are
            no tokens.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    capability = capability_number(device)
    if capability is None:
        raise ValueError("--rates: a table knows NVIDIA GPUs and the host; this GPU is another")
    length = LENGTHS[device] if length is None else length
    if length < 1:
        raise ValueError(f"--seq-len must be at least 1, got {length}")
    before = (read(str(path)) if path.exists() else default()).cases
    kept = tuple(x for x in before if (x.framework, x.capability) != ("torch", capability))
    path.write_text(written(Rates(before)))  # that it can be is seen now, not after minutes
    found: list[Case] = []
    with progress(len(cases), "case") as bar:
        for sizes in cases:
            times = _times(sizes, length, device)
            if times:
                found.append(_case(sizes, length, capability, times, versions))
            bar.update()
    table = Rates((*found, *kept))
    path.write_text(written(table))
    return table


def _case(
    sizes: Sizes, length: int, capability: int, times: dict[str, Times], versions: Mapping[str, str]
) -> Case:
    program = ring_program(make_plan(_mask(sizes.option, length), seq_len=length, cp_size=1))
    name = torch.cuda.get_device_name() if capability else platform.machine()
    return Case(
        "torch", capability, name, tuple((one, versions[one]) for one in LIBRARIES if one in versions),
        length, int(program.work().sum()), sizes.heads, sizes.dims, sizes.option, tuple(times.items()),
    )  # fmt: skip


def _times(sizes: Sizes, length: int, device: str) -> dict[str, Times]:
    """Of the kernels that are right; why another is not is said on stderr."""
    runs: dict[str, Runs] = {}
    short, (dtype, acc_dtype) = min(length, GATE_LENGTH), DTYPES[device]
    exact = _runs(sizes, "eager", short, acc_dtype, device).both()
    limits = [_LIMIT * error for error in _errors(_plain(sizes, short, device), exact)]
    for name in _names(device):
        try:
            errors = _errors(_runs(sizes, name, short, dtype, device).both(), exact)
            for what, error, limit in zip(RESULTS, errors, limits, strict=True):
                if not error <= limit:
                    raise ArithmeticError(f"{what} errs by {error:.1e}, more than {limit:.1e}")  # noqa: TRY301
            found = _runs(sizes, name, length, dtype, device)
            for run in found:
                run()
        except UnsupportedError:
            continue
        except Exception as error:  # noqa: BLE001 - whatever it is, this one has no time
            why = str(error).strip().partition("\n")[0]
            sys.stderr.write(f"no time of {name}, {sizes.option}, {sizes.dims}: {why}\n")
            continue
        runs[name] = found
    forward, both = (_in_turn([one[n] for one in runs.values()], device) for n in range(2))
    return {name: Times(*one) for name, *one in zip(runs, forward, both, strict=True)}


def _names(device: str) -> Iterator[str]:
    """Kernels of this machine; on a GPU plain torch is compared with, not timed."""
    for kernel in in_order(device):
        name, devices = kernel.capabilities.name, kernel.capabilities.devices or (device,)
        if (
            device in devices
            and kernel.unavailable_reason() is None
            and (name, device) != ("eager", "cuda")
        ):
            yield name


def _errors(found: Arrays, exact: Arrays) -> list[float]:
    """Root mean square errors, over the deviation of what is exact."""
    pairs = zip(found, exact, strict=True)
    return [float((a.to(b.dtype) - b).square().mean().sqrt() / b.std()) for a, b in pairs]


def _plain(sizes: Sizes, length: int, device: str) -> Arrays:
    """The formula, densely, rounded where a framework would round."""
    dtype = DTYPES[device][0]
    acc_dtype = torch.promote_types(dtype, torch.float32)

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).to(acc_dtype)

    q, k, v, dout, options = _given(sizes, length, acc_dtype, device)
    at = torch.arange(length, device=device)
    group = sizes.heads[0] // sizes.heads[1]
    products = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, dim=2))
    products.register_hook(rounded)
    scores = products * sizes.dims[0] ** -0.5
    if "softcap" in options:
        scores = _CAP * torch.tanh(scores / _CAP)
    if "alibi_slopes" in options:
        scores = scores - options["alibi_slopes"][:, None, None] * (at[:, None] - at).abs()
    scores = scores + options.get("bias", 0.0)
    dense = options["mask"].dense(np.arange(length), np.arange(length))
    visible = torch.as_tensor(dense, device=device)
    if "segment_ids" in options:
        ids = options["segment_ids"]
        visible = visible & (ids[:, None, :, None] == ids[:, None, None])
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    if "dropout_p" in options:
        seed = options["dropout_seed"]
        kept = dropout_keep(_DROPOUT, seed, range(len(q)), sizes.heads[0], at, at)
        weights = weights * kept.to(acc_dtype) / (1 - _DROPOUT)
    weights = weights + (rounded(weights) - weights).detach()
    out = torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(group, dim=2))
    return [rounded(x.detach()) for x in (out, *torch.autograd.grad(out, (q, k, v), dout))]


def _runs(sizes: Sizes, kernel: str, length: int, dtype: torch.dtype, device: str) -> Runs:
    """A call of a kernel."""
    q, k, v, dout, options = _given(sizes, length, dtype, device)
    attend: Callable[..., Tensor] = partial(ring_attention, kernel=kernel, **options)

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(q, k, v)

    def both() -> Arrays:
        out = attend(q, k, v)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

    return Runs(forward, both)


def _given(
    sizes: Sizes, length: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
    """``(q, k, v, dout, options)``: the same numbers in any dtype, rounded to what is timed."""
    rng = torch.Generator(device).manual_seed(length)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        x = scale * torch.randn(shape, generator=rng, device=device)
        return x.to(DTYPES[device][0]).to(dtype)

    (heads, kv_heads), (dim, v_dim) = sizes.heads, sizes.dims
    scale = _SCALE if sizes.option == "softcap" else 1.0
    q = draw(1, length, heads, dim, scale=scale).requires_grad_()
    k, v = (draw(1, length, kv_heads, n).requires_grad_() for n in (dim, v_dim))
    dout = draw(1, length, heads, v_dim)
    options = {"mask": _mask(sizes.option, length), **_option(sizes, length, device)}
    if sizes.option == "bias":
        options["bias"] = draw(1, 1, length, length)
    return q, k, v, dout, options


def _option(sizes: Sizes, length: int, device: str) -> dict[str, Any]:
    """What a call is given, beside its mask and a bias."""
    match sizes.option:
        case "softcap":
            return {"softcap": _CAP}
        case "alibi":
            numbers = torch.arange(1, sizes.heads[0] + 1, device=device)
            return {"alibi_slopes": torch.exp2(-8 / sizes.heads[0] * numbers)}
        case "segment_ids":
            ids = torch.arange(length, device=device) // _document(length)
            return {"segment_ids": ids.int()[None]}
        case "dropout":
            return {"dropout_p": _DROPOUT, "dropout_seed": 7}
        case _:
            return {}


def _mask(option: Option, length: int) -> Mask:
    if option == "predicate":
        return Mask(predicate=_predicate)
    if option == "documents":
        return Mask(causal=True, cu_seqlens=(*range(0, length, _document(length)), length))
    return Mask(causal=True, window=(length // 4, 0) if option == "window" else None)


def _predicate(i: Any, j: Any) -> Any:
    """A window, and the first keys of each stripe."""
    return (i >= j) & ((i - j < _STRIPE) | (j % _STRIPE < _FIRST))


def _document(length: int) -> int:
    return max(1, min(_DOCUMENT, length // 3))


def _in_turn(runs: Sequence[Callable[[], object]], device: str) -> list[float]:
    """The median of each, in milliseconds."""
    calls = [max(1, min(_MOST_CALLS, int(_TURN / _seconds(run, 1, device)))) for run in runs]
    seconds: list[list[float]] = [[] for _ in runs]
    for n in range(ROUNDS):
        for at in ((n + m) % len(runs) for m in range(len(runs))):  # another first each time
            seconds[at].append(_seconds(runs[at], calls[at], device))
    return [float(f"{1e3 * statistics.median(each):.4g}") for each in seconds]


def _seconds(run: Callable[[], object], calls: int, device: str) -> float:
    """Of one of so many calls, of which a GPU is given the next while it computes."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls

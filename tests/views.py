"""Strided views with the values of contiguous tensors, and attention calls on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_torch import ring_attention


def strided(x: Tensor) -> Tensor:
    """Return a view of every other element; those between are poison."""
    wide = torch.full((*x.shape, 2), _poison(x), dtype=x.dtype, device=x.device)
    wide[..., 0] = x
    return wide[..., 0]


def permuted(x: Tensor) -> Tensor:
    """Return a view whose axes are reversed in memory."""
    axes = tuple(reversed(range(x.ndim)))
    return x.permute(axes).contiguous().permute(axes)


def heads_first(x: Tensor) -> Tensor:
    """Return a view with heads before tokens in memory, as in ``[B, H, T, D]``."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2) if x.ndim > 2 else permuted(x)


def sliced(x: Tensor) -> Tensor:
    """Return the middle of a tensor that is larger in every dimension, with poison around it."""
    wide = torch.full([n + 2 for n in x.shape], _poison(x), dtype=x.dtype, device=x.device)
    middle = wide[(slice(1, -1),) * x.ndim]
    middle.copy_(x)
    return middle


def expanded(x: Tensor) -> Tensor:
    """Return the first element along the last axis, expanded with stride 0."""
    return x[..., :1].expand(x.shape)


def broadcast(x: Tensor) -> Tensor:
    """Return the first row, expanded to all others with stride 0."""
    return x[(slice(0, 1),) * (x.ndim - 1)].expand(x.shape)


def offset(x: Tensor) -> Tensor:
    """Return a view one element into an allocation, so not aligned to 16 bytes."""
    flat = torch.full((x.numel() + 1,), _poison(x), dtype=x.dtype, device=x.device)
    flat[1:] = x.flatten()
    return flat[1:].view(x.shape)


def _poison(x: Tensor) -> float | int:
    return float("nan") if x.is_floating_point() else 77


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    view.__name__: view
    for view in (strided, permuted, heads_first, sliced, expanded, broadcast, offset)
}
#: Tensors that a call may get as a view, and the capability that its kernel needs for them.
OPERANDS = {
    "q": None, "k": None, "v": None, "dout": None, "sinks": "sinks", "dlse": "lse",
    "segment_ids": "segments", "bias": "bias", "alibi_slopes": "alibi",
}  # fmt: skip


class Entry(NamedTuple):
    """Tensor of a call, and the kind of view that it is."""

    operand: str
    view: str


def entries(options: Sequence[str], part: int, parts: int, turn: int = 0) -> list[Entry]:
    """Return one of ``parts`` shares of all pairs of a tensor and a view, for a kernel's options.

    Every tensor and every view occurs in each share.
    """
    operands = [name for name, needs in OPERANDS.items() if needs is None or needs in options]
    return [
        Entry(operand, view)
        for n, operand in enumerate(operands)
        for m, view in enumerate(VIEWS)
        if (n + m + turn) % parts == part
    ]


class Given(NamedTuple):
    """Tensors of one rank's call, and its other options."""

    tensors: dict[str, Tensor]
    options: dict[str, Any]
    numbers: Entry | None  # the view that changes values, or a tensor that other calls lack

    @classmethod
    def of(cls, entry: Entry, made: dict[str, Tensor], options: dict[str, Any]) -> Given:
        """Select the tensors that every call has, and make that of the entry a view."""
        names = {"q", "k", "v", "dout", entry.operand}
        tensors = {name: x for name, x in made.items() if name in names}
        tensors[entry.operand] = VIEWS[entry.view](tensors[entry.operand])
        view = entry.view if entry.view in ("expanded", "broadcast") else ""
        as_others = not view and OPERANDS[entry.operand] is None
        return cls(tensors, options, None if as_others else Entry(entry.operand, view))

    def contiguous(self) -> Given:
        """Return the call with contiguous copies of all tensors."""
        copies = {
            name: x.clone(memory_format=torch.contiguous_format) for name, x in self.tensors.items()
        }
        return self._replace(tensors=copies)


def made(
    rank: int, size: int, *, batch: int = 2, length: int = 24, heads: tuple[int, int] = (4, 2), dim: int = 8,
    dtype: torch.dtype = torch.float64, device: str = "cpu",
) -> dict[str, Tensor]:  # fmt: skip
    """Make all tensors that a rank's call may get."""
    generator = torch.Generator().manual_seed(rank)

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype).to(device)

    q_heads, kv_heads = heads
    common = torch.Generator().manual_seed(99)  # for tensors that are equal on all ranks
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    ids = torch.randint(0, 3, (batch, length), generator=generator, dtype=torch.int32)
    return {
        "q": random(batch, length, q_heads, dim), "k": random(batch, length, kv_heads, dim),
        "v": random(batch, length, kv_heads, dim), "dout": random(batch, length, q_heads, dim),
        "dlse": random(batch, q_heads, length, dtype=wide),
        "bias": random(batch, q_heads, length, size * length), "segment_ids": ids.to(device),
        "sinks": torch.randn(q_heads, generator=common, dtype=wide).to(device),
        "alibi_slopes": torch.rand(batch, q_heads, generator=common, dtype=wide).to(device),
    }  # fmt: skip


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def results(given: Given, wrap: Wrap | None = None) -> dict[str, Tensor]:
    """Return ``out``, ``lse`` if it has a gradient, and all gradients of a call."""
    x = {name: y.detach() for name, y in given.tensors.items()}
    dout, dlse = x.pop("dout"), x.pop("dlse", None)
    leaves = {
        name: x[name].requires_grad_() for name in ("q", "k", "v", "sinks", "bias") if name in x
    }
    options = {name: y for name, y in x.items() if name not in ("q", "k", "v")}

    attend: Any = ring_attention

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        outputs: Any = attend(q, k, v, return_lse=dlse is not None, **options, **given.options)
        out, *lse = outputs if dlse is not None else (outputs,)
        # A model's output projection flattens the heads like this.
        return out.flatten(2).unflatten(2, out.shape[2:]), *lse

    result = (call if wrap is None else wrap(call))(x["q"], x["k"], x["v"])
    grads = torch.autograd.grad(result, list(leaves.values()), [dout, dlse][: len(result)])
    named_grads = {f"d{name}": y for name, y in zip(leaves, grads, strict=True)}
    return dict(zip(("out", "lse"), result, strict=False)) | named_grads


Known = dict[Entry | None, dict[str, Tensor]]


def differences(
    given: Given, wrap: Wrap | None = None, *, known: Known, rtol: float, atol: float
) -> Iterator[str]:
    """Yield the results that differ from those of contiguous tensors with the same values.

    ``known`` caches the latter among calls with the same options.
    """
    if given.numbers not in known:
        known[given.numbers] = results(given.contiguous())
    expected = known[given.numbers]
    for name, x in results(given, wrap).items():
        if not torch.allclose(x.detach(), expected[name].detach(), rtol=rtol, atol=atol):
            error = (x - expected[name]).detach().abs().max()
            yield f"{name} is off by {float(error):.1e}"

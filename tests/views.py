"""Views of tensors that hold the same numbers in other places, and calls that are given them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_torch import ring_attention


def strided(x: Tensor) -> Tensor:
    """Every other number of a tensor whose others are not to be read."""
    wide = torch.full((*x.shape, 2), _poison(x), dtype=x.dtype, device=x.device)
    wide[..., 0] = x
    return wide[..., 0]


def permuted(x: Tensor) -> Tensor:
    """The last axis is the outermost in memory, and the first one the innermost."""
    axes = tuple(reversed(range(x.ndim)))
    return x.permute(axes).contiguous().permute(axes)


def heads_first(x: Tensor) -> Tensor:
    """The two axes in the middle change places in memory, as in ``[B, H, T, D]``."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2) if x.ndim > 2 else permuted(x)


def sliced(x: Tensor) -> Tensor:
    """The middle of a tensor that is wider in every dimension."""
    wide = torch.full([n + 2 for n in x.shape], _poison(x), dtype=x.dtype, device=x.device)
    middle = wide[(slice(1, -1),) * x.ndim]
    middle.copy_(x)
    return middle


def expanded(x: Tensor) -> Tensor:
    """One number along the last axis, which has no stride."""
    return x[..., :1].expand(x.shape)


def broadcast(x: Tensor) -> Tensor:
    """One row for all others, of which none has a place of its own."""
    return x[(slice(0, 1),) * (x.ndim - 1)].expand(x.shape)


def offset(x: Tensor) -> Tensor:
    """One number behind the beginning of an allocation: not aligned to 16 bytes."""
    flat = torch.full((x.numel() + 1,), _poison(x), dtype=x.dtype, device=x.device)
    flat[1:] = x.flatten()
    return flat[1:].view(x.shape)


def _poison(x: Tensor) -> float | int:
    return float("nan") if x.is_floating_point() else 77


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    view.__name__: view
    for view in (strided, permuted, heads_first, sliced, expanded, broadcast, offset)
}
#: What a call may be given as a view, and an option that its kernel has to have for that.
OPERANDS = {
    "q": None, "k": None, "v": None, "dout": None, "sinks": "sinks", "dlse": "lse",
    "segment_ids": "segments", "bias": "bias", "alibi_slopes": "alibi",
}  # fmt: skip


class Entry(NamedTuple):
    """A tensor of a call and what it is a view of."""

    operand: str
    view: str


def entries(options: Sequence[str], part: int, parts: int, turn: int = 0) -> list[Entry]:
    """A part of all tensors and views, in which each comes up, for kernels with some options."""
    operands = [name for name, needs in OPERANDS.items() if needs is None or needs in options]
    return [
        Entry(operand, view)
        for n, operand in enumerate(operands)
        for m, view in enumerate(VIEWS)
        if (n + m + turn) % parts == part
    ]


class Given(NamedTuple):
    """The tensors of a call of one rank, and its other options."""

    tensors: dict[str, Tensor]
    options: dict[str, Any]
    numbers: Entry | None  # whose numbers it changes, or which tensor others do not have

    @classmethod
    def of(cls, entry: Entry, made: dict[str, Tensor], options: dict[str, Any]) -> Given:
        """Those that every call has, and the one that is a view."""
        names = {"q", "k", "v", "dout", entry.operand}
        tensors = {name: x for name, x in made.items() if name in names}
        tensors[entry.operand] = VIEWS[entry.view](tensors[entry.operand])
        view = entry.view if entry.view in ("expanded", "broadcast") else ""
        as_others = not view and OPERANDS[entry.operand] is None
        return cls(tensors, options, None if as_others else Entry(entry.operand, view))

    def contiguous(self) -> Given:
        """The same numbers as torch would make them."""
        copies = {
            name: x.clone(memory_format=torch.contiguous_format) for name, x in self.tensors.items()
        }
        return self._replace(tensors=copies)


def made(
    rank: int, size: int, *, batch: int = 2, length: int = 24, heads: tuple[int, int] = (4, 2), dim: int = 8,
    dtype: torch.dtype = torch.float64, device: str = "cpu",
) -> dict[str, Tensor]:  # fmt: skip
    """All tensors that a rank's call may be given."""
    generator = torch.Generator().manual_seed(rank)

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype).to(device)

    q_heads, kv_heads = heads
    common = torch.Generator().manual_seed(99)  # of what is equal on all ranks
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
    """``out``, ``lse`` where it has a gradient, and all gradients of a call."""
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
        return out.flatten(2).unflatten(2, out.shape[2:]), *lse  # as a model's projection needs it

    result = (call if wrap is None else wrap(call))(x["q"], x["k"], x["v"])
    grads = torch.autograd.grad(result, list(leaves.values()), [dout, dlse][: len(result)])
    named_grads = {f"d{name}": y for name, y in zip(leaves, grads, strict=True)}
    return dict(zip(("out", "lse"), result, strict=False)) | named_grads


Known = dict[Entry | None, dict[str, Tensor]]


def differences(
    given: Given, wrap: Wrap | None = None, *, known: Known, rtol: float, atol: float
) -> Iterator[str]:
    """The results that are others than those of the same numbers in contiguous tensors.

    ``known`` keeps the latter, of calls whose options are the same.
    """
    if given.numbers not in known:
        known[given.numbers] = results(given.contiguous())
    expected = known[given.numbers]
    for name, x in results(given, wrap).items():
        if not torch.allclose(x.detach(), expected[name].detach(), rtol=rtol, atol=atol):
            error = (x - expected[name]).detach().abs().max()
            yield f"{name} is off by {float(error):.1e}"

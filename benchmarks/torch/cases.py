"""Tensors of the rows of ``options.py``, and their options as arguments and as definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common.cases import Row
from ring_core import Mask

CAP = 20.0  # of softcap
STRIPE, FIRST = 512, 64  # keys of a stripe and of its start, in the predicate
DROPOUT = 0.1
Options = dict[str, Any]
Rule = Callable[[Any, Any], Any]
Score = Callable[[Any, Any, Any, Any], Any]


class Case(NamedTuple):
    """A row of the table of options, at a length and on a device."""

    row: Row
    length: int
    device: str

    @property
    def window(self) -> int:
        """Keys before its own that a query sees: 4,096 for 16,384 tokens."""
        return self.length // 4

    @property
    def document(self) -> int:
        """Tokens of a document: 1,500, or a third of the sequence if that is less."""
        return min(1500, self.length // 3)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Boundaries of documents, as ``cu_seqlens``."""
        return (*range(0, self.length, self.document), self.length)

    @property
    def alibi_step(self) -> float:
        """ALiBi's step in the exponent: head ``h`` has the slope ``2 ** (-step * (h + 1))``."""
        return 8 / self.row.heads

    def random(self, *shape: int) -> Tensor:
        """Return random bfloat16 numbers, which are the same in every call."""
        made = torch.Generator(self.device).manual_seed(5)
        return torch.randn(shape, generator=made, device=self.device).bfloat16()

    def segments(self) -> Tensor:
        """Return the segment ids of documents, int32 ``[1, T]``."""
        return (torch.arange(self.length, device=self.device) // self.document).int()[None]

    def slopes(self) -> Tensor:
        """Return ALiBi's slopes, ``[H]``."""
        heads = torch.arange(1, self.row.heads + 1, device=self.device)
        return torch.exp2(-self.alibi_step * heads)

    def bias(self) -> Tensor:
        """Return a random bias for all heads, ``[T, T]``."""
        return self.random(self.length, self.length)

    def sinks(self) -> Tensor:
        """Return random sinks, float32 ``[H]``, a parameter."""
        return self.random(self.row.heads).float().requires_grad_()

    def inputs(self, dtype: torch.dtype, sharpness: float = 1.0) -> list[Tensor]:
        """Return random q, k, v and dout, rounded to bfloat16; q is times ``sharpness``."""
        made = torch.Generator(self.device).manual_seed(self.length)
        tensors = [
            torch.randn(1, self.length, *shape, generator=made, device=self.device)
            for shape in self.row.shapes
        ]
        tensors[0] *= sharpness
        return [x.bfloat16().to(dtype).requires_grad_(n < 3) for n, x in enumerate(tensors)]


class Option(NamedTuple):
    """An option of attention, as arguments and as a definition.

    Attributes:
        ours: Arguments of ``ring_attention``.
        shown: Returns a rule that is True where the query at ``i`` sees the key at ``j``.
        score: Returns a function that changes scores of head ``h``; ``None`` if they stay.
        random: True if results of methods differ by chance, as with dropout.
    """

    ours: Callable[[Case], Options]
    shown: Callable[[Case], Rule] = lambda _: lambda i, j: i >= j
    score: Callable[[Case], Score | None] = lambda _: None
    random: bool = False


def striped(i: Any, j: Any) -> Any:
    """Return True where a key is visible: in a window, or among the first of its stripe."""
    return (i >= j) & ((i - j < STRIPE) | (j % STRIPE < FIRST))


def _own_document(case: Case) -> Rule:
    return lambda i, j: (i >= j) & (i // case.document == j // case.document)


def _capped(_: Case) -> Score:
    return lambda score, _h, _i, _j: CAP * torch.tanh(score / CAP)


def _sloped(case: Case) -> Score:
    slopes = case.slopes()
    return lambda score, h, i, j: score - slopes[h] * (i - j)


def _biased(case: Case) -> Score:
    bias = case.bias()
    return lambda score, _h, i, j: score + bias[i, j]


CAUSAL: Options = {"causal": True}
OPTIONS = {
    "causal": Option(lambda _: CAUSAL),
    "softcap": Option(lambda _: CAUSAL | {"softcap": CAP}, score=_capped),
    "alibi": Option(lambda case: CAUSAL | {"alibi_slopes": case.slopes()}, score=_sloped),
    "segment_ids": Option(lambda case: CAUSAL | {"segment_ids": case.segments()}, _own_document),
    "cu_seqlens": Option(lambda case: CAUSAL | {"cu_seqlens": case.offsets}, _own_document),
    "predicate": Option(lambda _: {"mask": Mask(predicate=striped)}, lambda _: striped),
    "sinks": Option(lambda case: CAUSAL | {"sinks": case.sinks()}),
    "window": Option(
        lambda case: CAUSAL | {"window": (case.window, 0)},
        lambda case: lambda i, j: (i >= j) & (i - j <= case.window),
    ),
    "bias": Option(lambda case: CAUSAL | {"bias": case.bias()[None, None]}, score=_biased),
    "dropout": Option(lambda _: CAUSAL | {"dropout_p": DROPOUT, "dropout_seed": 7}, random=True),
}  # fmt: skip

"""Stand-ins for the scores of attention that a model writes out, and for what it adds to them.

Some models of transformers do not call an attention function: they multiply queries and keys, add a
mask, take a softmax and multiply by values. Their product of queries and keys becomes a
:class:`Scores` object (``hf.products``), which has no numbers and records the operations applied to
it. Its product with the values calls ring attention. Any operation that ring attention cannot
express is refused with an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ring_torch.hf.masks import LayerMask
from ring_torch.hf.models.placeholders import (
    AnyDevice,
    Placeholder,
    PlaceholderError,
    positive_number,
)

_HIDDEN = -1e4  # models hide a score by a value at or below this
_SUMMANDS = ("mask", "bias", "slopes")


@dataclass(frozen=True, eq=False)
class ScoreBias(AnyDevice):
    """Summand of the attention scores: a mask, a bias, ALiBi slopes, or several of these.

    Attributes:
        shape: Shape of the tensor that the model expects in its place.
        mask: Mask that it stands for, if any.
        bias: Bias ``[1 or B, 1 or H, T_local, T_kv]``, if any.
        slopes: ALiBi slopes ``[H]``, if any.
    """

    shape: tuple[int, ...]
    mask: LayerMask | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None

    _refusal = (
        "a layer of this model does more with its mask or position bias than add it to its scores, "
        "which is not supported on split sequences"
    )

    def size(self, dim: int | None = None) -> Any:
        """Return the shape or one of its sizes, as :meth:`torch.Tensor.size` does."""
        return torch.Size(self.shape) if dim is None else self.shape[dim]

    def __getitem__(self, _: object) -> ScoreBias:
        return self  # models cut off columns past the last key, and it has none

    def __add__(self, other: object) -> ScoreBias:
        if isinstance(other, Tensor):
            other = ScoreBias(tuple(other.shape), bias=other)
        if isinstance(other, LayerMask):
            other = ScoreBias(self.shape, mask=other)
        if not isinstance(other, ScoreBias):
            raise PlaceholderError(self._refusal)
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in _SUMMANDS}
        if any(None not in pair for pair in pairs.values()):  # two of a kind
            raise PlaceholderError(self._refusal)
        summands = {name: a if b is None else b for name, (a, b) in pairs.items()}
        return ScoreBias(max(self.shape, other.shape, key=len), **summands)

    __radd__ = __add__

    def baddbmm(self, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
        """Return the scores ``alpha * batch1 @ batch2``, with this term added."""
        if beta != 1:
            raise PlaceholderError(self._refusal)
        scores: Any = torch.bmm(batch1, batch2)
        return scores * alpha + self


@dataclass(frozen=True, eq=False)
class Scores(Placeholder):
    """Product of queries and keys, without its numbers, and the operations applied to it so far.

    Attributes:
        layer: Watcher of the running module, which computes the attention in the end.
        q, k: Queries ``[..., T_local, D]`` and keys ``[..., T_kv_local, D]``.
        shape, dtype: As the model sees them: ``[..., T_local, T_kv_local]``.
        scale: Product of all factors applied: the softmax scale.
        term: Sum of all that was added; ``None`` for nothing.
        is_softmax: True once the softmax was taken.
        dropout: Dropout probability of the attention weights.
    """

    layer: Any
    q: Tensor
    k: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    scale: float = 1.0
    term: ScoreBias | None = None
    is_softmax: bool = False
    dropout: float = 0.0

    _refusal = (
        "attention that this model writes out does more with its scores than scale them, add a mask "
        "and a bias, and take a softmax: that cannot be done on split sequences"
    )

    def __getattr__(self, name: str) -> Any:
        if name in _METHODS:
            return partial(_METHODS[name], self)
        return self.q.device if name == "device" else super().__getattr__(name)

    def _with(self, allowed: object, **changes: Any) -> Scores:
        """Return the scores with changes, if the operation is allowed."""
        if not allowed:
            raise PlaceholderError(self._refusal)
        return replace(self, **changes)

    def __mul__(self, factor: object) -> Scores:
        # A bias that is there already would be scaled, too; a mask hides at any scale.
        has_sums = self.term and (self.term.bias is not None or self.term.slopes is not None)
        allowed = not self.is_softmax and not has_sums
        return self._with(allowed, scale=self.scale * self._number(factor))

    def __truediv__(self, divisor: object) -> Scores:
        return self * (1 / self._number(divisor))

    def _number(self, x: object) -> float:
        """Return a positive factor as a float; refuse any other."""
        if (number := positive_number(x)) is None:
            raise PlaceholderError(self._refusal)
        return number

    def __add__(self, term: object) -> Scores:
        self._with(not self.is_softmax and isinstance(term, ScoreBias | LayerMask | Tensor))
        return replace(self, term=(self.term or ScoreBias(self.shape)) + term)

    __radd__ = __iadd__ = __add__
    __imul__, __itruediv__ = __mul__, __truediv__

    def __matmul__(self, v: Tensor) -> Tensor:
        self._with(self.is_softmax and isinstance(v, Tensor))
        out: Tensor = self.layer.attend(self, v)
        return out

    def _view(self, *shape: int) -> Scores:
        """Merge batch and heads into one dimension, or split them again."""
        new_shape = torch.empty(self.shape, device="meta").view(*shape).shape
        return self._with(new_shape[-2:] == self.shape[-2:], shape=tuple(new_shape))

    def _to(self, *args: Any, **kwargs: Any) -> Scores:
        """Change the dtype. A device is ignored."""
        dtypes = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype))
        return replace(self, dtype=next(dtypes, self.dtype))

    def _fill(self, mask: object, value: float) -> Scores:
        """Fill the mask's hidden entries by ``value``, at most -1e4."""
        self._with(isinstance(mask, ScoreBias | LayerMask) and value <= _HIDDEN)
        return self + mask

    def _bound(self, least: Tensor) -> Scores:
        """Take a lower bound of at most -1e4, which has no effect on the softmax."""
        return self._with(least.numel() == 1 and least.item() <= _HIDDEN)

    def _softmax(
        self, dim: int = -1, _stacklevel: int = 3, dtype: torch.dtype | None = None
    ) -> Scores:
        """Take the softmax over keys: these are the attention weights."""
        allowed = dim in (-1, len(self.shape) - 1) and not self.is_softmax
        return self._with(allowed, is_softmax=True, dtype=dtype or self.dtype)

    def _drop(self, p: float = 0.5, training: bool = True, inplace: bool = False) -> Scores:
        """Apply dropout to the attention weights."""
        del inplace
        return self._with(self.is_softmax and not self.dropout, dropout=p if training else 0.0)

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # GPT-Neo hides later tokens by its own buffer. The mask that it adds afterwards hides them
        # too, so the buffer becomes a term without effect.
        scores = args[1] if func is torch.where and len(args) == 3 else None
        if isinstance(scores, Scores) and scores.layer.hides_by_itself:
            return scores.masked_fill(ScoreBias(scores.shape), float(args[2]))
        if func in _FUNCTIONS and isinstance(args[0], Scores):
            return _FUNCTIONS[func](*args, **(kwargs or {}))
        raise PlaceholderError(f"{cls._refusal} (asked for {getattr(func, '__name__', func)})")


#: Methods of a tensor that a model calls, and functions of torch that it gives scores to.
_METHODS: dict[str, Callable[..., Any]] = {
    "size": ScoreBias.size, "view": Scores._view, "reshape": Scores._view, "to": Scores._to,  # noqa: SLF001 - of this module
    "float": lambda scores: scores.to(torch.float32),
    "type_as": lambda scores, other: scores.to(other.dtype),
    "masked_fill": Scores._fill, "softmax": Scores._softmax,  # noqa: SLF001 - likewise
}  # fmt: skip
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    functional.softmax: Scores._softmax, torch.softmax: Scores._softmax,  # noqa: SLF001 - likewise
    functional.dropout: Scores._drop, torch.max: Scores._bound,  # noqa: SLF001 - likewise
    torch.masked_fill: Scores._fill, torch.matmul: Scores.__matmul__,  # noqa: SLF001 - likewise
    torch.bmm: Scores.__matmul__,
}  # fmt: skip

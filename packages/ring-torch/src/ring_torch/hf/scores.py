"""Ring attention for models that write out their attention as matrix products and a softmax.

Some models of transformers do not call an attention function: they multiply queries and keys, add a
mask, take a softmax and multiply by values. While such a module runs, the product of queries and
keys is a :class:`Scores` object, which has no numbers and records the operations applied to it. Its
product with the values then calls ring attention. Any operation that ring attention cannot express
is refused with an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface

from ring_core import UnsupportedError
from ring_torch.capture import untraced
from ring_torch.hf.masks import LayerMask
from ring_torch.hf.models.classes import EagerAttentionSpec
from ring_torch.hf.models.implementation import attention_of
from ring_torch.hf.models.placeholders import AnyDevice, Placeholder, PlaceholderError

_HIDDEN = -1e4  # models hide a score by a value at or below this
_PRODUCTS = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__)
_SUMS_OF_PRODUCTS = (torch.baddbmm, Tensor.baddbmm)


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
        """Return self: models index it to cut off columns past the last key, and it has none."""
        return self

    def __add__(self, other: object) -> ScoreBias:
        """Return the sum with a tensor, a mask or another summand.

        A second mask, a second bias and second slopes are refused.
        """
        if isinstance(other, Tensor):
            other = ScoreBias(tuple(other.shape), bias=other)
        if isinstance(other, LayerMask):
            other = ScoreBias(self.shape, mask=other)
        if not isinstance(other, ScoreBias):
            raise PlaceholderError(self._refusal)
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in _SUMMANDS}
        if any(None not in pair for pair in pairs.values()):
            raise PlaceholderError(self._refusal)
        return ScoreBias(
            max(self.shape, other.shape, key=len),
            **{name: left if right is None else right for name, (left, right) in pairs.items()},
        )

    __radd__ = __add__

    def baddbmm(self, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
        """Return the scores ``alpha * batch1 @ batch2``, with this term added."""
        if beta != 1:
            raise PlaceholderError(self._refusal)
        scores: Any = torch.bmm(batch1, batch2)
        return scores * alpha + self


_SUMMANDS = ("mask", "bias", "slopes")


@dataclass(frozen=True, eq=False)
class Scores(Placeholder):
    """Product of queries and keys, without its numbers, and the operations applied to it so far.

    Attributes:
        layer: Watcher of the running module; it computes the attention in the end.
        q: Queries ``[..., T_local, D]``.
        k: Keys ``[..., T_kv_local, D]``.
        shape: Shape that the model sees, ``[..., T_local, T_kv_local]``.
        dtype: Dtype that the model sees.
        scale: Product of all factors applied: the softmax scale.
        term: Sum of all that was added; ``None`` for nothing.
        is_softmax: True once the softmax was taken.
        dropout: Dropout probability of the attention weights.
    """

    layer: _Products
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
    _functions: ClassVar[dict[Any, str]] = {
        torch.nn.functional.softmax: "softmax", torch.softmax: "softmax",
        functional.dropout: "dropped", torch.max: "maximum", torch.where: "where",
        torch.matmul: "__matmul__", torch.bmm: "__matmul__", torch.masked_fill: "masked_fill",
    }  # fmt: skip

    @property
    def device(self) -> torch.device:
        """Device of the queries."""
        return self.q.device

    def size(self, dim: int | None = None) -> Any:
        """Return the shape or one of its sizes, as :meth:`torch.Tensor.size` does."""
        return torch.Size(self.shape) if dim is None else self.shape[dim]

    def view(self, *shape: int) -> Scores:
        """Return the scores with batch and heads merged into one dimension, or split again."""
        new_shape = torch.empty(self.shape, device="meta").view(*shape).shape
        if new_shape[-2:] != self.shape[-2:]:
            raise PlaceholderError(self._refusal)
        return replace(self, shape=tuple(new_shape))

    reshape = view

    def to(self, *args: Any, **kwargs: Any) -> Scores:
        """Return the scores in another dtype. A device is ignored."""
        dtypes = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype))
        return replace(self, dtype=next(dtypes, self.dtype))

    def type_as(self, other: Any) -> Scores:
        """Return the scores in the dtype of another tensor."""
        return self.to(other.dtype)

    def __mul__(self, factor: object) -> Scores:
        """Return the scores multiplied by a positive number.

        It must come before a bias is added, which it would scale too; a mask may be there, as it
        hides at any scale.
        """
        term = self.term
        has_sums = term is not None and (term.bias is not None or term.slopes is not None)
        if self.is_softmax or has_sums:
            raise PlaceholderError(self._refusal)
        return replace(self, scale=self.scale * self._number(factor))

    __imul__ = __mul__

    def __truediv__(self, divisor: object) -> Scores:
        return self * (1 / self._number(divisor))

    __itruediv__ = __truediv__

    def _number(self, x: object) -> float:
        """Return a factor as a float; refuse one with a gradient, which would be lost."""
        if isinstance(x, Tensor) and x.numel() == 1 and not x.requires_grad:
            x = x.item()
        if not isinstance(x, Real) or not float(x) > 0:
            raise PlaceholderError(self._refusal)
        return float(x)

    def __add__(self, term: object) -> Scores:
        """Return the scores with a mask or a bias added, which must come before the softmax."""
        if self.is_softmax or not isinstance(term, ScoreBias | LayerMask | Tensor):
            raise PlaceholderError(self._refusal)
        return replace(self, term=(self.term or ScoreBias(self.shape)) + term)

    __radd__ = __iadd__ = __add__

    def masked_fill(self, mask: object, value: float) -> Scores:
        """Return the scores with the mask's hidden entries filled by ``value``, at most -1e4."""
        if not isinstance(mask, ScoreBias | LayerMask) or value > _HIDDEN:
            raise PlaceholderError(self._refusal)
        return self + mask

    def maximum(self, lower_bound: Tensor) -> Scores:
        """Return self for a lower bound of at most -1e4, which has no effect on the softmax."""
        if lower_bound.numel() != 1 or lower_bound.item() > _HIDDEN:
            raise PlaceholderError(self._refusal)
        return self

    def softmax(
        self, dim: int = -1, _stacklevel: int = 3, dtype: torch.dtype | None = None
    ) -> Scores:
        """Return the attention weights: the softmax over keys."""
        if dim not in (-1, len(self.shape) - 1) or self.is_softmax:
            raise PlaceholderError(self._refusal)
        return replace(self, is_softmax=True, dtype=dtype or self.dtype)

    def dropped(self, p: float = 0.5, training: bool = True, inplace: bool = False) -> Scores:
        """Return the attention weights with dropout."""
        del inplace
        if not self.is_softmax or self.dropout:
            raise PlaceholderError(self._refusal)
        return replace(self, dropout=p if training else 0.0)

    def __matmul__(self, v: Tensor) -> Tensor:
        """Return the attention output: weights times values ``[..., T_kv_local, Dv]``."""
        if not self.is_softmax or not isinstance(v, Tensor):
            raise PlaceholderError(self._refusal)
        return self.layer.attend(self, v)

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = cls._functions.get(func)
        if name == "where":
            # GPT-Neo hides later tokens by its own buffer. The mask that it adds afterwards hides
            # them too, so the buffer becomes a term without effect.
            _, scores, value = args
            if isinstance(scores, Scores) and scores.layer.hides_by_itself:
                return scores.masked_fill(ScoreBias(scores.shape), float(value))
        elif name is not None and isinstance(args[0], Scores):
            return getattr(args[0], name)(*args[1:], **(kwargs or {}))
        raise PlaceholderError(f"{cls._refusal} (asked for {getattr(func, '__name__', func)})")

    # The last method, as in the class body below it the name hides the type ``float``.
    def float(self) -> Scores:
        """Return the scores in float32."""
        return self.to(torch.float32)


class _Products(TorchFunctionMode):
    """Torch function mode that replaces the product of queries and keys by :class:`Scores`.

    It is active while a module with written-out attention runs. A product counts as that of queries
    and keys if its last two sizes are the batch's ``(T_local, T_kv_local)``.

    Args:
        layer: Hooks of the module.
        module: The module.
        masks: Masks among the module's arguments, whose batches have these lengths.
    """

    def __init__(
        self, layer: EagerAttentionHooks, module: nn.Module, masks: list[LayerMask]
    ) -> None:
        super().__init__()
        self.layer = layer
        self.hides_by_itself = layer.spec.hides_by_itself
        self.module: Any = module
        self.lengths = {(x.batch.shape[1], (x.keys or x.batch).shape[1]) for x in masks}
        self.calls = 0

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS and len(args) == 2 and self._are_scores(*args):
            return self._scores(*args)
        if func in _SUMS_OF_PRODUCTS and self._are_scores(*args[1:]):
            if kwargs.get("beta", 1) and args[0].any():
                raise PlaceholderError(Scores._refusal)  # noqa: SLF001 - a class of this module
            return self._scores(*args[1:]) * kwargs.get("alpha", 1)
        return func(*args, **kwargs)

    def attend(self, scores: Scores, v: Tensor) -> Tensor:
        """Return ring attention of the scores' queries and keys to ``v [..., T_kv_local, Dv]``.

        Raises:
            UnsupportedError: No mask was added to the scores, so the batch is not known.
        """
        term = scores.term
        if term is None or term.mask is None:
            raise UnsupportedError(
                f"{type(self.module).__name__} adds no mask to its scores: the batch must come from "
                f"hf.shard_batch, and its attention_mask reach every attention layer"
            )
        self.calls += 1
        q, k, values = (
            x.reshape(term.mask.batch.shape[0], -1, *x.shape[-2:]).to(v.dtype)
            for x in (scores.q, scores.k, v)
        )
        # GPT-Neo's local layers see a window only, by their own buffer. That has no effect here, so
        # the window is given to ring attention.
        module, spec = self.module, self.layer.spec
        is_local = spec.local and getattr(module, spec.local) == "local"
        mask = replace(term.mask, window=(module.config.window_size - 1, 0) if is_local else None)
        # The kernel's products have the shape of scores, too, and after `@` this mode is active.
        lengths, self.lengths = self.lengths, set()
        try:
            out: Tensor = AttentionInterface()[attention_of(self.layer)].attend(
                module, q, k, values, mask, scaling=scores.scale, dropout=scores.dropout,
                bias=term.bias, alibi_slopes=term.slopes,
            )  # fmt: skip
        finally:
            self.lengths = lengths
        return out.transpose(1, 2).reshape(*scores.shape[:-1], v.shape[-1])

    def _scores(self, q: Tensor, keys: Tensor) -> Scores:
        """Return the scores of ``q [..., T_local, D]`` and ``keys [..., D, T_kv_local]``."""
        batch = torch.broadcast_shapes(q.shape[:-2], keys.shape[:-2])
        return Scores(self, q, keys.mT, (*batch, q.shape[-2], keys.shape[-1]), q.dtype)

    def _are_scores(self, left: object, right: object) -> bool:
        """Return True if the product of two tensors has the shape of this batch's scores."""
        return (
            isinstance(left, Tensor)
            and isinstance(right, Tensor)
            and min(left.ndim, right.ndim) > 2
            and (left.shape[-2], right.shape[-1]) in self.lengths
        )


@dataclass(eq=False)
class EagerAttentionHooks:
    """Forward hooks of one module whose attention is written out.

    Attributes:
        spec: Facts about its class.
        config: Config of its model, which names the attention implementation.
        products: Watchers of its forwards under way, the innermost last.
    """

    spec: EagerAttentionSpec
    config: Any
    products: list[_Products] = field(default_factory=list)

    def __deepcopy__(self, _: object) -> EagerAttentionHooks:
        """Return hooks for a copy of the module, with no forward under way."""
        return EagerAttentionHooks(self.spec, self.config)

    @untraced
    def begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Turn masks into terms before the forward, and start watching the module's products."""
        products = _Products(
            self, module, [x for x in (*args, *kwargs.values()) if isinstance(x, LayerMask)]
        )
        products.__enter__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.products.append(products)
        return tuple(map(_as_score_bias, args)), {
            name: _as_score_bias(x) for name, x in kwargs.items()
        }

    @untraced
    def end(self, module: nn.Module, _args: object, _kwargs: object, output: object) -> None:
        """Stop watching after the forward, also when it raised, and check that it attended once.

        Raises:
            UnsupportedError: It attended never or several times, so something saw local tokens
                only.
        """
        products = self.products.pop()
        products.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch gives it no types
        if output is not None and products.calls != 1:
            raise UnsupportedError(
                f"{type(module).__name__} attends {products.calls} times where one was expected: it "
                f"would see this rank's tokens only"
            )


def _as_score_bias(x: object) -> object:
    """Return a mask as a term ``[B, 1, T_local, T_kv_local]``, and anything else unchanged."""
    if not isinstance(x, LayerMask):
        return x
    rows, length = x.batch.shape
    return ScoreBias((rows, 1, length, (x.keys or x.batch).shape[1]), mask=x)

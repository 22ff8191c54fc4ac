"""Stand-in for the logits of a language model's head, of which the loss alone is computed.

The head returns it in place of logits. It records what the model does to them, a scale and a soft
cap, and computes cross entropy from the hidden states, for a few tokens at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ring_core import UnsupportedError
from ring_torch.capture import untraced
from ring_torch.hf.models.placeholders import (
    Placeholder,
    PlaceholderError,
    UnshiftedLabels,
    keeps_all,
    positive_number,
)
from ring_torch.training.part import IGNORED, as_in_autocast, linear_loss, mean_of

_TOKENS_AT_ONCE = 1024  # tokens whose logits exist at a time


@dataclass(frozen=True, eq=False)
class HeadLogits(Placeholder):
    """Logits of a head, without their numbers: ``scale * z``, or ``bound * tanh(scale * z)``.

    Attributes:
        hidden: What the head was applied to, ``[B, T_local, dim]``.
        head: The head, whose weight is read where the loss is computed.
        shape: ``(B, T_local, V)``; flattened, ``(B * T_local, V)``.
        dtype: Dtype that the model expects.
        scale: Product of the factors before a tanh.
        bound: Product of the factors behind it; ``None`` before one.
    """

    hidden: Tensor
    head: nn.Linear
    shape: torch.Size
    dtype: torch.dtype
    scale: float = 1.0
    bound: float | None = None

    _refusal = (
        "logits='none' was given to hf.parallelize, so there are no logits: this model does more with "
        "them than scale and cap them and take their cross entropy. Give logits='local'"
    )

    def __getattr__(self, name: str) -> Any:
        return self.hidden.device if name == "device" else super().__getattr__(name)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape or one of its sizes, as :meth:`torch.Tensor.size` does."""
        return self.shape if dim is None else self.shape[dim]

    def __getitem__(self, index: object) -> HeadLogits:
        """Return self for an index that cuts nothing off; others are refused."""
        if not keeps_all(index, tuple(self.shape)):
            raise PlaceholderError(self._refusal)
        return self

    def to(self, *args: Any, **kwargs: Any) -> HeadLogits:
        """Return the logits in a dtype. A device is ignored."""
        dtypes = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype))
        return replace(self, dtype=next(dtypes, self.dtype))

    def float(self) -> HeadLogits:
        """Return the logits as float32."""
        return self.to(torch.float32)

    def contiguous(self) -> HeadLogits:
        """Return self."""
        return self

    def view(self, *shape: int) -> HeadLogits:
        """Return the logits with tokens flattened, or as they were."""
        new_shape = torch.empty(self.shape, device="meta").view(*shape).shape
        if new_shape[-1] != self.shape[-1]:
            raise PlaceholderError(self._refusal)
        return replace(self, shape=new_shape)

    reshape = view

    def __mul__(self, factor: object) -> HeadLogits:
        if (number := positive_number(factor)) is None:
            raise PlaceholderError(self._refusal)
        if self.bound is None:
            return replace(self, scale=self.scale * number)
        return replace(self, bound=self.bound * number)

    def __truediv__(self, divisor: object) -> HeadLogits:
        number = positive_number(divisor)
        return self * (None if number is None else 1 / number)

    __rmul__ = __imul__ = __mul__
    __itruediv__ = __truediv__

    def tanh(self) -> HeadLogits:
        """Return the tanh of the logits, once."""
        if self.bound is not None:
            raise PlaceholderError(self._refusal)
        return replace(self, bound=1.0)

    def cross_entropy(self, target: Any, options: dict[str, Any]) -> Tensor:
        """Return cross entropy with labels of each token, as torch does of logits."""
        ignored, reduction = options.pop("ignore_index", IGNORED), options.pop("reduction", "mean")
        is_plain = not any(x is not None and x != 0.0 for x in options.values())
        items: Tensor | int | None = None
        if isinstance(target, UnshiftedLabels):  # of which each rank has a part of the mean
            is_plain, items, target = is_plain and ignored == IGNORED, target.items, target.values
        if not is_plain or reduction not in ("mean", "sum") or self.ndim != 2:
            raise PlaceholderError(self._refusal)
        head, bias, labels = self.head, self.head.bias, target.long()
        total = linear_loss(
            as_in_autocast(self.hidden).flatten(0, -2), as_in_autocast(head.weight),
            None if bias is None else as_in_autocast(bias), labels,
            # bound * tanh(scale * z) is softcap * tanh(z / softcap) / temperature.
            temperature=1 / (self.scale * (1 if self.bound is None else self.bound)),
            softcap=None if self.bound is None else 1 / self.scale, ignore_index=ignored,
            tokens_at_once=_TOKENS_AT_ONCE,
        )  # fmt: skip
        items = (labels != ignored).sum() if items is None else items
        return mean_of(total, items if reduction == "mean" else None)

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute tanh and cross entropy; refuse all other functions."""
        if func is torch.tanh and isinstance(args[0], HeadLogits):
            return args[0].tanh()
        named = {**dict(zip(("input", "target"), args, strict=False)), **(kwargs or {})}
        logits, target = named.pop("input", None), named.pop("target", None)
        is_known = func is functional.cross_entropy and len(args) <= len(("input", "target"))
        if is_known and isinstance(logits, HeadLogits):
            return logits.cross_entropy(target, named)
        raise PlaceholderError(f"{cls._refusal} (asked for {getattr(func, '__name__', func)})")


def head_without_logits(model: Any, is_under_way: Callable[[], bool]) -> tuple[nn.Linear, Any]:
    """Return the head of a language model, and a forward for it that makes no logits.

    Args:
        model: The model, without wrappers.
        is_under_way: Function that returns True while a split batch is computed; else the head
            makes logits as before.

    Raises:
        UnsupportedError: The head is no plain linear layer, whose weight says all.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if type(head) is not nn.Linear:
        raise UnsupportedError(
            f"logits='none': the loss is computed from the weight of a head that is a torch.nn.Linear, and "
            f"that of {type(model).__name__} is {type(head).__name__} (adapters, quantization and "
            f"fully_shard of the head alone make it another): give logits='local'"
        )
    return head, HeadForward(head, vars(head).get("forward"), is_under_way)


@dataclass(eq=False)
class HeadForward:
    """Forward of a head without logits; a copy of the model gets one of the copied head.

    Attributes:
        head: The head.
        forward: A forward that its instance had, if any, in place of its class's.
        is_under_way: See :func:`head_without_logits`.
    """

    head: nn.Linear
    forward: Callable[[Tensor], Tensor] | None
    is_under_way: Callable[[], bool]

    @untraced
    def __call__(self, hidden: Tensor) -> Tensor | HeadLogits:
        """Return what stands for the logits while a split batch is computed, else logits."""
        head = self.head
        if not self.is_under_way():
            return nn.Linear.forward(head, hidden) if self.forward is None else self.forward(hidden)
        shape = torch.Size((*hidden.shape[:-1], head.out_features))
        return HeadLogits(hidden, head, shape, hidden.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> HeadForward:
        return HeadForward(deepcopy(self.head, memo), self.forward, self.is_under_way)

"""Ring attention for models that write out their attention: their products become stand-ins.

While a module with written-out attention runs, the product of its queries and keys is a
:class:`~ring_torch.hf.scores.Scores` object, whose product with the values attends on the ring.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface

from ring_core import UnsupportedError
from ring_torch.capture import untraced
from ring_torch.hf.masks import LayerMask
from ring_torch.hf.models.classes import EagerAttentionSpec
from ring_torch.hf.models.implementation import attention_of
from ring_torch.hf.models.placeholders import PlaceholderError
from ring_torch.hf.scores import ScoreBias, Scores

_PRODUCTS = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__)
_SUMS_OF_PRODUCTS = (torch.baddbmm, Tensor.baddbmm)


class Products(TorchFunctionMode):
    """Torch function mode that replaces the product of queries and keys by :class:`Scores`.

    It is active while a module with written-out attention runs. A product counts as that of queries
    and keys if its last two sizes are the ``(T_local, T_kv_local)`` of the masks it is given.
    """

    def __init__(
        self, hooks: EagerAttentionHooks, module: nn.Module, masks: list[LayerMask]
    ) -> None:
        super().__init__()
        self.hooks, self.module = hooks, module
        self.hides_by_itself = hooks.spec.hides_by_itself
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
        """Return ring attention of the scores' queries and keys to ``v [..., T_kv_local, Dv]``."""
        term, module, spec = scores.term, self.module, self.hooks.spec
        if term is None or term.mask is None:
            raise UnsupportedError(
                f"{type(module).__name__} adds no mask to its scores: the batch must come from "
                f"hf.shard_batch, and its attention_mask reach every attention layer"
            )
        self.calls += 1
        q, k, values = (
            x.reshape(term.mask.batch.shape[0], -1, *x.shape[-2:]).to(v.dtype)
            for x in (scores.q, scores.k, v)
        )
        # GPT-Neo's local layers see a window only, by their own buffer. That has no effect here, so
        # the window is given to ring attention.
        window = None
        if spec.local and getattr(module, spec.local) == "local":
            window = cast("Any", module).config.window_size - 1, 0
        # The kernel's products have the shape of scores, too, and after `@` this mode is active.
        lengths, self.lengths = self.lengths, set()
        try:
            out: Tensor = AttentionInterface()[attention_of(self.hooks)].attend(
                module, q, k, values, replace(term.mask, window=window), scaling=scores.scale,
                dropout=scores.dropout, bias=term.bias, alibi_slopes=term.slopes,
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
    products: list[Products] = field(default_factory=list)

    def __deepcopy__(self, _: object) -> EagerAttentionHooks:
        """Return hooks for a copy of the module, with no forward under way."""
        return EagerAttentionHooks(self.spec, self.config)

    @untraced
    def begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Turn masks into terms before the forward, and start watching the module's products."""
        masks = [x for x in (*args, *kwargs.values()) if isinstance(x, LayerMask)]
        products = Products(self, module, masks)
        products.__enter__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.products.append(products)
        return tuple(map(_as_score_bias, args)), {
            name: _as_score_bias(x) for name, x in kwargs.items()
        }

    @untraced
    def end(self, module: nn.Module, _args: object, _kwargs: object, output: object) -> None:
        """Stop watching after the forward, also when it raised, and check that it attended once."""
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

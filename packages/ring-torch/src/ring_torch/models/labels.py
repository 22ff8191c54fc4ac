"""What a model is given in place of labels, and of a mask: only ring's functions can read it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Never, Self

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ring_core import UnsupportedError

IGNORED = -100  # the label of a token that has nothing to predict


class SealedError(UnsupportedError, AttributeError):
    """Somebody reads what only ring's functions can; ``hasattr`` takes it for no."""


class Sealed:
    """What a model hands on and only ring's functions read: others are told what is wrong."""

    _words: ClassVar[str]

    def __getattr__(self, name: str) -> Never:
        raise SealedError(f"{self._words} (asked for {name!r})")

    def __getitem__(self, _: object) -> Never:
        raise SealedError(self._words)

    def __eq__(self, other: object) -> bool:
        """Refuse what a tensor would answer element by element, and an object with False."""
        if not isinstance(other, Sealed):
            raise SealedError(self._words)
        return self is other

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        """Refuse what torch would do with it."""
        raise SealedError(cls._words)


class AnyDevice(Sealed):
    """What is the same on any device and in any dtype, for models that move it."""

    def to(self, *_: object, **__: object) -> Self:
        """Itself."""
        return self


class ShiftedLabels(AnyDevice):
    """In place of ``labels``, where ``shift_labels`` hold them."""

    _words = (
        "labels were shifted before the sequence was split, and are in shift_labels: a loss that "
        "reads labels would shift them again, within each rank's part. Models whose loss reads "
        "shift_labels work; for others compute the loss from logits and shift_labels"
    )


@dataclass(frozen=True, eq=False)
class UnshiftedLabels(Sealed):
    """This rank's labels, of which cross entropy takes the mean over the labels of the whole batch.

    Many models take the mean over the labels they are given, whatever ``num_items_in_batch`` says,
    and such means of ranks do not add up to one. Here each is a rank's sum over all ranks' count.

    Attributes:
        values: int ``[B, T_local]`` or, flattened, ``[B * T_local]``.
        items: Labels of the whole batch that are not ignored.
    """

    values: Tensor
    items: int | Tensor

    _words = (
        "these labels are a rank's part of the batch's, and cross entropy of logits of every token "
        "is all that can be done with them: for another loss leave labels out of the batch, and "
        "compute it from ContextParallel.unshard of the logits"
    )

    @property
    def device(self) -> torch.device:
        """Of the labels."""
        return self.values.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the labels."""
        return self.values.dtype

    def to(self, *args: Any, **kwargs: Any) -> UnshiftedLabels:
        """The same on a device or in a dtype, as :meth:`torch.Tensor.to`."""
        return replace(self, values=self.values.to(*args, **kwargs))

    def view(self, *shape: int) -> UnshiftedLabels:
        """The same, flattened: ``view(-1)``."""
        if shape != (-1,):
            raise SealedError(f"{self._words} (asked for view{shape})")
        return replace(self, values=self.values.reshape(-1))

    reshape = view

    def flatten(self) -> UnshiftedLabels:
        """The same, flattened."""
        return self.view(-1)

    def long(self) -> UnshiftedLabels:
        """The same as int64."""
        return self.to(torch.int64)

    def contiguous(self) -> UnshiftedLabels:
        """Itself."""
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Tensor:
        """This rank's part of a cross entropy; refuse what else torch would do with them."""
        if func is not cross_entropy or len(args) > len(("input", "target")):
            raise SealedError(cls._words)
        given = {**dict(zip(("input", "target"), args, strict=False)), **(kwargs or {})}
        target, reduction = given.get("target"), given.get("reduction", "mean")
        others = [given.get(name) for name in ("weight", "size_average", "reduce")]
        if not isinstance(target, UnshiftedLabels) or any(x is not None for x in others):
            raise SealedError(cls._words)
        if given.get("ignore_index", IGNORED) != IGNORED or reduction not in ("mean", "sum"):
            raise SealedError(cls._words)
        total: Tensor = cross_entropy(
            given["input"], target.values, ignore_index=IGNORED, reduction="sum",
            label_smoothing=given.get("label_smoothing", 0.0),
        )  # fmt: skip
        return total if reduction == "sum" else total / target.items

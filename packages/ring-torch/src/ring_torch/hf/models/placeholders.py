"""Stand-ins for labels and masks in a model's arguments, which only ring attention can read.

Model code that would compute with a rank's part as if it were the whole sequence gets an error that
says what is wrong, not a wrong result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, ClassVar, Never, Self

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from ring_core import UnsupportedError
from ring_torch.sharding import Sharding
from ring_torch.training.part import IGNORED, loss_part


class PlaceholderError(UnsupportedError, AttributeError):
    """Error for reading a stand-in. As an ``AttributeError`` it makes ``hasattr`` return False."""


class Placeholder:
    """Base of the stand-ins: indexing, attributes, comparisons and torch functions raise an error.

    Subclasses define ``_refusal``, the message, and what they do allow.
    """

    _refusal: ClassVar[str]

    def __getattr__(self, name: str) -> Never:
        raise PlaceholderError(f"{self._refusal} (asked for {name!r})")

    def __getitem__(self, _: object) -> Any:
        raise PlaceholderError(self._refusal)

    def __eq__(self, other: object) -> bool:
        """Return True for the same object; refuse a comparison with anything but a stand-in.

        A tensor would answer element by element, and a plain object with False.
        """
        if not isinstance(other, Placeholder):
            raise PlaceholderError(self._refusal)
        return self is other

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        """Refuse every function of torch."""
        raise PlaceholderError(cls._refusal)


def keeps_all(index: object, shape: tuple[int, ...]) -> bool:
    """Return True for an index that cuts nothing off a tensor of this shape, as ``[:, -0:]``."""
    indices = index if isinstance(index, tuple) else (index,)
    return len(indices) <= len(shape) and all(
        isinstance(x, slice) and x.indices(size) == (0, size, 1)
        for x, size in zip(indices, shape, strict=False)
    )


def positive_number(x: object) -> float | None:
    """Return a factor of scores or logits as a float; ``None`` if it is none, or has a gradient.

    A stand-in keeps it as a number, so that its gradient would be lost.
    """
    if isinstance(x, Tensor) and x.numel() == 1 and not x.requires_grad:
        x = x.item()
    return float(x) if isinstance(x, Real) and float(x) > 0 else None


class AnyDevice(Placeholder):
    """Stand-in that a model may move to any device and cast to any dtype."""

    def to(self, *_: object, **__: object) -> Self:
        """Return self."""
        return self


class ShiftedLabels(AnyDevice):
    """Stand-in for ``labels`` where the batch has ``shift_labels`` instead.

    A loss that reads it would shift labels within each rank's part, and gets an error. Models test
    it for ``None`` to decide if there is a loss.
    """

    _refusal = (
        "labels were shifted before the sequence was split, and are in shift_labels: a loss that "
        "reads labels would shift them again, within each rank's part. Models whose loss reads "
        "shift_labels work; for others compute the loss from logits and shift_labels"
    )


@dataclass(frozen=True, eq=False)
class UnshiftedLabels(Placeholder):
    """Labels of this rank, whose mean cross entropy is over all labels of the whole batch.

    Many models take the mean over the labels that they are given, whatever ``num_items_in_batch``
    says. Means of ranks do not add up to the mean of the batch; sums divided by its count do.

    Attributes:
        values: int ``[B, T_local]``; flattened, ``[B * T_local]``, or some of these.
        items: Number of labels of the whole batch that are not ignored.
    """

    values: Tensor
    items: int | Tensor

    _refusal = (
        "these labels are a rank's part of the batch's, and cross entropy of logits of every token "
        "is all that can be done with them: for another loss leave labels out of the batch, and "
        "compute it on every rank from ContextParallel.unshard(logits, grad='slice')"
    )

    @property
    def device(self) -> torch.device:
        """Device of the labels."""
        return self.values.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the labels."""
        return self.values.dtype

    def to(self, *args: Any, **kwargs: Any) -> UnshiftedLabels:
        """Return the labels on a device or in a dtype, as :meth:`torch.Tensor.to` does."""
        return replace(self, values=self.values.to(*args, **kwargs))

    @property
    def shape(self) -> torch.Size:
        """Shape of the labels, ``(B, T_local)``, which is that of other tensors of the batch."""
        return self.values.shape

    def __ne__(self, other: object) -> Any:
        """Return which of the flattened labels are not ignored, bool ``[B * T_local]``.

        Models that make logits of labelled tokens alone (``sparse_prediction`` of ModernBERT) ask
        for it. Any other comparison is refused.
        """
        if type(other) is int and other == IGNORED:
            return self._flat("!=") != IGNORED
        return not self == other

    __hash__ = Placeholder.__hash__

    def __getitem__(self, index: object) -> UnshiftedLabels:
        """Return some of the flattened labels, by a mask of them."""
        if not isinstance(index, Tensor) or index.dtype != torch.bool:
            raise PlaceholderError(self._refusal)
        return replace(self, values=self._flat("an index")[index])

    def _flat(self, name: str) -> Tensor:
        """Return flattened labels; refuse others, which a model may index by row."""
        if self.values.ndim != 1:
            raise PlaceholderError(f"{self._refusal} (asked for {name})")
        return self.values

    def view(self, *shape: int) -> UnshiftedLabels:
        """Return the labels flattened, as ``view(-1)`` does; other views are refused."""
        if shape not in ((-1,), (self.values.numel(),)):
            raise PlaceholderError(f"{self._refusal} (asked for view{shape})")
        return replace(self, values=self.values.reshape(-1))

    reshape = view

    def flatten(self) -> UnshiftedLabels:
        """Return the labels flattened."""
        return self.view(-1)

    def long(self) -> UnshiftedLabels:
        """Return the labels as int64."""
        return self.to(torch.int64)

    def contiguous(self) -> UnshiftedLabels:
        """Return self."""
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Tensor:
        """Return this rank's part of the cross entropy, mean or sum; refuse other functions."""
        if func is not cross_entropy or len(args) > len(("input", "target")):
            raise PlaceholderError(cls._refusal)
        kwargs = {**dict(zip(("input", "target"), args, strict=False)), **(kwargs or {})}
        target, reduction = kwargs.get("target"), kwargs.get("reduction", "mean")
        if (
            not isinstance(target, UnshiftedLabels)
            or any(kwargs.get(name) is not None for name in ("weight", "size_average", "reduce"))
            or kwargs.get("ignore_index", IGNORED) != IGNORED
            or reduction not in ("mean", "sum")
        ):
            raise PlaceholderError(cls._refusal)
        return loss_part(
            kwargs["input"], target.values, target.items if reduction == "mean" else None,
            label_smoothing=kwargs.get("label_smoothing", 0.0),
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class ShardedMask(Placeholder):
    """Stand-in for ``attention_mask``: documents and padding of a batch whose sequences are split.

    Attributes:
        sharding: Which rank holds which tokens.
        shape: ``(B, T_local)``.
        seq_len: ``T``, the length of a row with the padding that the layout needs.
        single: True if each row is one document from its first token on, followed by padding.
            Causal attention then needs no documents.
        cu_seqlens: Bounds of documents and of runs of padding, ``(0, ..., T)``, if they are the
            same in all rows; ``None`` if they differ, or if a row is one run.
        segment_ids: Document of each token, int32 ``[B, T_local]``, negative for padding. They are
            there where rows differ or padding cuts a document in two, and for chunks and the
            sequences of an encoder-decoder; else ``None``.
        last_position: Largest position id of the whole batch, on all ranks.
        dropout_seed: Seed of the batch, from which each layer derives its own.
        length: Length of a row without the padding that the layout needs.
        position_ids: int64 ``[B, T_local]``, of this rank's tokens.
        joins_router: True if a router's loss is computed from the whole sequence.
        has_padding: True if there is any padding, of the batch or of the layout.
        padding_sees: True if padding attends to its row's tokens, as causal attention of one device
            lets it; rows are one document.
        gathers: True if there are recurrent layers, which look up their sequences in this mask.
        documents: Offsets of each row's documents, ``(0, ..., T)``, for recurrent layers; one entry
            if they are the same in all rows, and ``None`` for a row that is one. Padding is of the
            document before it, at the beginning of a row of the first one.
        whole: Mask for modules that run on whole sequences, int64 ``[B, length]`` of 0 and 1;
            ``None`` if all are 1.
        first: Index of the first token of each row that is no padding.
        has_holes: True if some row has padding between tokens.
    """

    sharding: Sharding
    shape: tuple[int, int]
    seq_len: int
    single: bool
    cu_seqlens: tuple[int, ...] | None
    segment_ids: Tensor | None
    last_position: int | Tensor
    dropout_seed: int | None
    length: int
    position_ids: Tensor
    joins_router: bool = False
    has_padding: bool = False
    padding_sees: bool = False
    gathers: bool = False
    documents: tuple[tuple[int, ...] | None, ...] = (None,)
    whole: Tensor | None = None
    first: tuple[int, ...] = ()
    has_holes: bool = False

    ndim = 2  # of a mask [B, T_local]

    _refusal = (
        "this batch is split over ranks by hf.shard_batch, and its attention_mask "
        "can only be read by ring attention: give the model attn_implementation="
        "ring_torch.hf.register(). If it has that, something else in it reads the mask (chunked "
        "attention, recurrent or convolutional layers, router losses), and needs whole sequences"
    )

    def __eq__(self, other: object) -> Any:
        """Return a False tensor if compared with 1, so that recurrent models keep their mask.

        Such models compare the mask with 1, and pass their layers none if all entries are equal. On
        a ring the layers need it, to know the sequence. Only a mask that ``gathers`` answers so;
        any other refuses, as every stand-in does.
        """
        if self.gathers and isinstance(other, int) and other == 1:
            return torch.zeros((), dtype=torch.bool, device="cpu")
        return super().__eq__(other)

    __hash__ = object.__hash__

    def __getitem__(self, key: object) -> ShardedMask:
        """Return self for ``mask[:, -T_local:]``, a cut that recurrent models make.

        Only a mask that ``gathers`` takes it; all other indices are refused.
        """
        if self.gathers and key == (slice(None), slice(-self.shape[1], None)):
            return self
        raise PlaceholderError(self._refusal)

    def contiguous(self) -> ShardedMask:
        """Return self."""
        return self

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of the ``length`` tokens along ``dim``, padded with 0."""
        more = self.seq_len - x.shape[dim]
        return self.sharding.shard(pad(x, (*(0, 0) * (x.ndim - 1 - dim), 0, more)), dim=dim)

    def unshard(self, x: Tensor) -> Tensor:
        """Join all ranks' parts ``[B, T_local, ...]`` to ``[B, length, ...]``.

        The layout's padding is left out. In the backward, gradients of all ranks are summed, and
        each rank gets its part.
        """
        whole = self.sharding.unshard(x, grad="sum" if x.is_floating_point() else None)
        return whole.narrow(1, 0, self.length).contiguous()

    def with_chunks(self, size: int, position_ids: Tensor) -> ShardedMask:
        """Return a mask in which each chunk of ``size`` tokens is a document of its own.

        Chunks are counted from each document's first token. A row with padding is one document,
        whose chunks are counted from its first token that is no padding.

        Args:
            size: Length of a chunk.
            position_ids: Position of each token in its document, int ``[B, T_local]``.
        """
        assert self.segment_ids is not None
        ids, device = self.segment_ids, self.segment_ids.device
        first = torch.tensor(self.first, device=device)[:, None]
        chunks = (position_ids.to(device) - first).clamp(min=0) // size
        cut = (ids * -(-self.seq_len // size) + chunks).to(torch.int32).where(ids >= 0, -1)
        return replace(self, single=False, cu_seqlens=None, segment_ids=cut)

    def view(self, *shape: int) -> ShardedMask:
        """Return self for ``view(B, -1)`` or ``view(B, T_local)``; other views are refused.

        Some models ensure the shape of a mask so.
        """
        if shape not in ((self.shape[0], -1), self.shape):
            raise PlaceholderError(f"{self._refusal} (asked for view{shape})")
        return self

    def long(self) -> ShardedMask:
        """Return self, for models that cast the mask before they pass it on."""
        return self

    def to(
        self,
        device: torch.device | str | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> ShardedMask:
        """Return the mask with its segment ids on a device; they keep their dtype.

        As in :meth:`torch.Tensor.to` the first argument may be a dtype.
        """
        del dtype  # models cast masks to bool, which would destroy the ids
        if self.segment_ids is None or device is None or isinstance(device, torch.dtype):
            return self
        return replace(self, segment_ids=self.segment_ids.to(device, non_blocking=non_blocking))


@dataclass(frozen=True, eq=False)
class CrossMask(AnyDevice):
    """Stand-in for ``encoder_attention_mask``: queries of one sequence, keys of another.

    Segment ids are moved to a device where they are used.

    Attributes:
        queries: Mask of the decoder's sequence.
        keys: Mask of the encoder's sequence.
    """

    queries: ShardedMask
    keys: ShardedMask

    ndim = 2  # of a mask of keys, [B, T_local]

    _refusal = ShardedMask._refusal  # noqa: SLF001 - a class of this module

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of a mask of the keys, ``(B, T_local)``."""
        return self.keys.shape

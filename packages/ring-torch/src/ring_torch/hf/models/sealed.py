"""What a model is given in place of labels and of masks: only ring's functions can read it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Never, Self

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from ring_core import UnsupportedError
from ring_torch.sharding import Sharding

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
        "compute it on every rank from ContextParallel.unshard(logits, grad='slice')"
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
        if (
            not isinstance(target, UnshiftedLabels)
            or any(given.get(name) is not None for name in ("weight", "size_average", "reduce"))
            or given.get("ignore_index", IGNORED) != IGNORED
            or reduction not in ("mean", "sum")
        ):
            raise SealedError(cls._words)
        total: Tensor = cross_entropy(
            given["input"], target.values, ignore_index=IGNORED, reduction="sum",
            label_smoothing=given.get("label_smoothing", 0.0),
        )  # fmt: skip
        return total if reduction == "sum" else total / target.items


@dataclass(frozen=True, eq=False)
class ShardedMask(Sealed):
    """In place of ``attention_mask``: who sees whom in a batch whose sequences are split.

    Attributes:
        sharding: Which rank holds which of their tokens.
        shape: ``(B, T_local)``.
        seq_len: ``T``, padding included.
        single: Each row is one document from its first token on, and padding after it, which
            causal attention need not be told.
        cu_seqlens: Documents, and runs of padding, where they are the same in all rows.
        segment_ids: int32 ``[B, T_local]``, where they are not; negative for padding.
        last_positions: Smallest and largest, over ranks, of the largest position id of a rank.
        dropout_seed: Of the batch; layers derive theirs.
        joins_router: Whether a router's loss is computed of the whole sequence.
        has_padding: Whether there is any, of the batch or of the layout.
        length: Tokens of a row, the layout's padding left out.
        position_ids: int64 ``[B, T_local]``, of this rank's tokens.
        gathers: Recurrent layers are given whole sequences, which they are told by this mask.
        whole: int64 ``[B, length]`` of 0 and 1, for those layers; ``None`` where all is 1.
        first: The first token of each row that is no padding.
        has_holes: In some row padding lies between tokens.
    """

    sharding: Sharding
    shape: tuple[int, int]
    seq_len: int
    single: bool
    cu_seqlens: tuple[int, ...] | None
    segment_ids: Tensor | None
    last_positions: tuple[int, int]
    dropout_seed: int | None
    length: int
    position_ids: Tensor
    joins_router: bool = False
    has_padding: bool = False
    gathers: bool = False
    whole: Tensor | None = None
    first: tuple[int, ...] = ()
    has_holes: bool = False

    ndim = 2  # of a mask [B, T_local]

    _words = (
        "this batch is split over ranks by hf.shard_batch, and its attention_mask "
        "can only be read by ring attention: give the model attn_implementation="
        "ring_torch.hf.register(). If it has that, something else in it reads the mask (chunked "
        "attention, recurrent or convolutional layers, router losses), and needs whole sequences"
    )

    def __eq__(self, other: object) -> Any:
        """Answer no if a model asks whether all is 1: recurrent layers would be given no mask."""
        if self.gathers and isinstance(other, int) and other == 1:
            return torch.zeros((), dtype=torch.bool)
        return super().__eq__(other)

    __hash__ = object.__hash__

    def __getitem__(self, key: object) -> ShardedMask:  # type: ignore[override]
        """Return itself if a model cuts it to the tokens it runs, ``mask[:, -T_local:]``."""
        if self.gathers and key == (slice(None), slice(-self.shape[1], None)):
            return self
        raise SealedError(self._words)

    def contiguous(self) -> ShardedMask:
        """Itself."""
        return self

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of a tensor of the whole sequence, ``[B, length, ...]``."""
        more = self.seq_len - x.shape[dim]
        return self.sharding.shard(pad(x, (*(0, 0) * (x.ndim - 1 - dim), 0, more)), dim=dim)

    def unshard(self, x: Tensor) -> Tensor:
        """Join every rank's part ``[B, T_local, ...]``, and leave out the layout's padding."""
        whole = self.sharding.unshard(x, grad="sum" if x.is_floating_point() else None)
        return whole.narrow(1, 0, self.length).contiguous()

    def with_chunks(self, size: int, position_ids: Tensor) -> ShardedMask:
        """With documents cut into chunks, which count from each document's first token.

        A row with padding is one document, whose chunks count from the first token that is none.
        """
        assert self.segment_ids is not None
        ids, device = self.segment_ids, self.segment_ids.device
        first = torch.tensor(self.first, device=device)[:, None]
        chunks = (position_ids.to(device) - first).clamp(min=0) // size
        cut = (ids * -(-self.seq_len // size) + chunks).to(torch.int32).where(ids >= 0, -1)
        return replace(self, single=False, cu_seqlens=None, segment_ids=cut)

    def view(self, *shape: int) -> ShardedMask:
        """Itself, for models that make sure of its shape: ``view(B, -1)``."""
        if shape not in ((self.shape[0], -1), self.shape):
            raise SealedError(f"{self._words} (asked for view{shape})")
        return self

    def long(self) -> ShardedMask:
        """Itself, for models that cast it before they hand it on."""
        return self

    def to(
        self,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> ShardedMask:
        """The same with its ids on a device; ids keep their dtype."""
        del dtype  # who moves an attention mask asks for bool, and ids would not survive that
        if self.segment_ids is None or device is None:
            return self
        return replace(self, segment_ids=self.segment_ids.to(device, non_blocking=non_blocking))


@dataclass(frozen=True, eq=False)
class CrossMask(AnyDevice):
    """In place of ``encoder_attention_mask``: queries of one sequence, keys of another.

    Its ids are moved where they are used.
    """

    queries: ShardedMask
    keys: ShardedMask

    ndim = 2  # of a mask of keys, [B, T_local]

    _words = ShardedMask._words  # noqa: SLF001 - of the same module

    @property
    def shape(self) -> tuple[int, int]:
        """Of a mask of keys, ``[B, T_local]``."""
        return self.keys.shape

"""In place of ``attention_mask``: who holds the tokens of a split batch, and who sees whom."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ring_torch.models.labels import AnyDevice, Sealed, SealedError
from ring_torch.sharding import Sharding


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
        gathers: Whether recurrent layers are given whole sequences, and the whole mask.
        first: The first token of each row that is no padding.
    """

    sharding: Sharding
    shape: tuple[int, int]
    seq_len: int
    single: bool
    cu_seqlens: tuple[int, ...] | None
    segment_ids: Tensor | None
    last_positions: tuple[int, int]
    dropout_seed: int | None
    joins_router: bool = False
    has_padding: bool = False
    gathers: bool = False
    first: tuple[int, ...] = ()

    ndim = 2  # of a mask [B, T_local]

    _words = (
        "this batch is split over ranks by ContextParallel.shard_batch, and its attention_mask "
        "can only be read by ring attention: give the model attn_implementation="
        "ring_torch.hf.register(). If it has that, something else in it reads the mask (chunked "
        "attention, recurrent or convolutional layers, router losses), and needs whole sequences"
    )

    def __eq__(self, other: object) -> Any:
        """Yes to whether all is 1, of recurrent layers that are given the mask elsewhere."""
        if self.gathers and isinstance(other, int) and other == 1:
            return torch.ones((), dtype=torch.bool)
        return super().__eq__(other)

    __hash__ = object.__hash__

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

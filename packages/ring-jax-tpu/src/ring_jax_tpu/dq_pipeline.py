"""Move blocks of dQ from main memory and back while matrix products run, over three slots.

A kernel that walks over the blocks column by column meets a block of dQ once per column: each time
it is read, added to and written back. At each visit one slot is added to, the next one receives the
next visit's block, and the one before is being written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ring_jax_tpu.scores import Ref

_SLOTS = 3
_NONE = -1


class DqBlock(NamedTuple):
    """A block of dQ in main memory."""

    name: Any  # a number that no other block has, not negative
    rows: Ref  # [q, D]


class DqPipeline(NamedTuple):
    """The scratch memory of a kernel that holds blocks of dQ in flight."""

    blocks: Ref  # float32 [slots, q, D]
    reads: Ref  # semaphores, one a slot
    writes: Ref  # semaphores, one a slot
    is_writing: Ref  # int32, one a slot
    slot: Ref  # int32 [1]: the slot of this visit
    prefetched: Ref  # int32 [1]: name of the block that is being read ahead, or -1
    last: Ref  # int32 [1]: name of the last visit's block, or -1

    @classmethod
    def scratch(cls, q: int, head_dim: int) -> DqPipeline:
        """Return the scratch shapes that a kernel must ask for, for blocks ``[q, head_dim]``."""
        semaphores, word = pltpu.SemaphoreType.DMA((_SLOTS,)), pltpu.SMEM((1,), jnp.int32)
        return cls(
            pltpu.VMEM((_SLOTS, q, head_dim), jnp.float32), semaphores, semaphores,
            pltpu.SMEM((_SLOTS,), jnp.int32), word, word, word,
        )  # fmt: skip

    def begin(self) -> None:
        """Initialise the scratch memory before the first visit: nothing is in flight."""
        for slot in range(_SLOTS):
            self.is_writing[slot] = 0
        self.slot[0], self.prefetched[0], self.last[0] = 0, _NONE, _NONE

    def take(self, block: DqBlock, next_block: DqBlock, *, is_last: Any) -> Ref:
        """Return this visit's block on chip, and start to read the next visit's.

        The caller adds to it in place, and then calls :meth:`write_back`, once for each call of
        this.

        A block that this visit or the last one writes is not in main memory yet: it is not read
        ahead, but at its own visit, after all writes. ``is_last`` says that there is no next visit.
        """
        slot = self.slot[0]
        next_slot = lax.rem(slot + 1, np.int32(_SLOTS))

        # The block was not read ahead. A write of it may be in flight, so wait for all writes.
        @pl.when(self.prefetched[0] != block.name)
        def _read_now() -> None:
            self.finish_writes(block)
            self._read(block, slot).start()

        # Read ahead or just now: until this wait the slot is being filled.
        self._read(block, slot).wait()
        # The next slot was written from two visits ago. Once that is done it may be overwritten.
        self._finish_write(block, next_slot)
        # This visit's block is about to change, and the last one's is being written: main memory
        # has old numbers of both. Blocks of visits before these have been written, the latest from
        # `next_slot`. The read goes on beside this visit's products.
        is_readable = (next_block.name != block.name) & (next_block.name != self.last[0])
        prefetches = is_readable & jnp.logical_not(is_last)
        pl.when(prefetches)(lambda: self._read(next_block, next_slot).start())
        self.prefetched[0] = jnp.where(prefetches, next_block.name, _NONE)
        self.last[0] = block.name
        return self.blocks.at[slot]

    def write_back(self, block: DqBlock) -> None:
        """Start to write this visit's block to main memory, and move on to the next slot."""
        slot = self.slot[0]
        # In flight during the next visit, which uses another slot; waited for two visits on, before
        # this slot is filled again.
        self._write(block, slot).start()
        self.is_writing[slot] = 1
        self.slot[0] = lax.rem(slot + 1, np.int32(_SLOTS))

    def finish_writes(self, block: DqBlock) -> None:
        """Wait for all writes in flight; each is as long as ``block``.

        A loop is compiled to a branch, which costs nothing if it is not taken; three waits in a row
        are not.
        """
        lax.fori_loop(0, _SLOTS, lambda slot, _: self._finish_write(block, slot), None)

    def _finish_write(self, block: DqBlock, slot: Any) -> None:
        """Wait for the write from a slot, if one is in flight."""

        @pl.when(self.is_writing[slot] == 1)
        def _wait() -> None:
            self._write(block, slot).wait()
            self.is_writing[slot] = 0

    def _read(self, block: DqBlock, slot: Any) -> Any:
        return pltpu.make_async_copy(block.rows, self.blocks.at[slot], self.reads.at[slot])

    def _write(self, block: DqBlock, slot: Any) -> Any:
        return pltpu.make_async_copy(self.blocks.at[slot], block.rows, self.writes.at[slot])

"""Blocks of dQ on their way from main memory and back, beside the products of three visits.

A kernel that walks over the blocks column by column meets a block of dQ once per column: each time
it is read, added to and written back. One block is added to while the next is read and the one
before is written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ring_jax_tpu.scores import Ref

_SLOTS = 3
_NONE = -1


class Block(NamedTuple):
    """A block of dQ: a number of its own, not negative, and its rows in main memory."""

    name: Any
    rows: Ref  # [q, D]


class DqPipeline(NamedTuple):
    """Scratch memory of a kernel."""

    blocks: Ref  # [slots, q, D]
    reads: Ref  # semaphores, one a slot
    writes: Ref
    is_writing: Ref  # int32, one a slot
    slot: Ref  # int32 [1]: what is added to
    ahead: Ref  # int32 [1]: the block that is read ahead
    last: Ref  # int32 [1]: the block of the last visit

    @classmethod
    def scratch(cls, q: int, head_dim: int) -> DqPipeline:
        """What a kernel has to ask for."""
        semaphores, word = pltpu.SemaphoreType.DMA((_SLOTS,)), pltpu.SMEM((1,), jnp.int32)
        return cls(
            pltpu.VMEM((_SLOTS, q, head_dim), jnp.float32), semaphores, semaphores,
            pltpu.SMEM((_SLOTS,), jnp.int32), word, word, word,
        )  # fmt: skip

    def begin(self) -> None:
        """Nothing is on its way."""
        for slot in range(_SLOTS):
            self.is_writing[slot] = 0
        self.slot[0], self.ahead[0], self.last[0] = 0, _NONE, _NONE

    def take(self, block: Block, after: Block, *, is_last: Any) -> Ref:
        """What a block holds; what the one after it holds will be read meanwhile.

        What this visit or the last one writes is not there yet: such a block is read when its turn
        comes, after all writes.
        """
        slot = self.slot[0]
        free = lax.rem(slot + 1, _SLOTS)

        @pl.when(self.ahead[0] != block.name)
        def _read_now() -> None:
            self.end(block)
            self._read(block, slot).start()

        self._read(block, slot).wait()
        self._finish_write(block, free)
        is_there = (after.name != block.name) & (after.name != self.last[0])
        early = is_there & jnp.logical_not(is_last)
        pl.when(early)(lambda: self._read(after, free).start())
        self.ahead[0], self.last[0] = jnp.where(early, after.name, _NONE), block.name
        return self.blocks.at[slot]

    def write_back(self, block: Block) -> None:
        """Write what was taken."""
        slot = self.slot[0]
        self._write(block, slot).start()
        self.is_writing[slot] = 1
        self.slot[0] = lax.rem(slot + 1, _SLOTS)

    def end(self, block: Block) -> None:
        """Wait for all writes; each is as long as the block given.

        A loop stays a branch, which costs nothing where it is not taken; a few waits would not.
        """
        lax.fori_loop(0, _SLOTS, lambda slot, _: self._finish_write(block, slot), None)

    def _finish_write(self, block: Block, slot: Any) -> None:
        @pl.when(self.is_writing[slot] == 1)
        def _wait() -> None:
            self._write(block, slot).wait()
            self.is_writing[slot] = 0

    def _read(self, block: Block, slot: Any) -> Any:
        return pltpu.make_async_copy(block.rows, self.blocks.at[slot], self.reads.at[slot])

    def _write(self, block: Block, slot: Any) -> Any:
        return pltpu.make_async_copy(self.blocks.at[slot], block.rows, self.writes.at[slot])

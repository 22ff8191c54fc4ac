"""Record of one call of a recurrent layer: its options, whose states travel, and their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ring_core import LayoutSpec
from ring_core.base.arguments import Ints
from ring_core.checks import padded_layout
from ring_core.recurrence import Bools, DocumentRuns, runs_of_documents
from ring_torch.comm.ranks import Ranks
from ring_torch.recurrent.kernels import Kernel

#: Most tokens of a chunk of Ring's own scan in Triton.
SCAN_TOKENS = 64


class Shapes(NamedTuple):
    """Shapes of a run's transition and of a state, ``[B, ...]``."""

    transition: tuple[int, ...]
    state: tuple[int, ...]


@dataclass(frozen=True)
class LayerCall:
    """Everything static about one call of a recurrent layer: what it computes, and what it sends.

    Attributes:
        ranks: Ranks of the group.
        layout: Layout, which says which rank holds which tokens.
        kernel: Kernel with its options.
        cu_seqlens: Offsets of documents; ``None`` if each row is one.
        seq_len: Number of tokens of the whole sequence; ``None`` if there is no padding.
        dtype: Dtype of states, in which all is computed.
        has_initial: True if initial states are given.
        wants_final: True if final states are wanted.
        needs_grad: True if there will be a backward.
        number: Number of the call on its group, from :meth:`Ranks.next_call`.
        library: Whose kernels compute the runs: ``"eager"`` for torch's operations, ``"fla"``, or
            ``"triton"`` for Ring's own.
        check_every: The tripwire's setting when the layer was called; 0 for no checks.
        checked: Not 0 if it checks this call.
    """

    ranks: Ranks
    layout: LayoutSpec
    kernel: Kernel
    cu_seqlens: tuple[int, ...] | None
    seq_len: int | None
    dtype: torch.dtype
    has_initial: bool
    wants_final: bool
    needs_grad: bool
    number: int
    library: str = "eager"
    check_every: int = 0
    checked: int = 0

    @property
    def most_tokens(self) -> int:
        """Most tokens of a chunk."""
        return SCAN_TOKENS if self.library == "triton" else self.kernel.most_tokens

    def traffic(self, inputs: Sequence[Tensor]) -> tuple[int, int, int]:
        """Return how many runs of a rank travel, and the bytes that it sends forward and backward.

        So many go to each other rank.
        """
        layout = padded_layout(self.seq_len, inputs[0].shape[1], self.layout, self.ranks.size)
        runs = runs_of_documents(layout, self.cu_seqlens)
        slots = self.slots(runs)[1]
        transition, state = (prod(x) * self.dtype.itemsize for x in self.shapes(inputs))
        if self.ranks.size == 1:
            return slots, 0, 0
        back = runs.slots(runs.follows)[1] + runs.documents * self.wants_final
        return slots, slots * (transition + state), back * state

    def slots(self, runs: DocumentRuns) -> tuple[Ints, int, Bools]:
        """Return the slots of a forward's gather, how many a rank has, and which runs travel."""
        # Final states are wanted on all ranks, so that all runs have to travel.
        travels = runs.continues | self.wants_final
        return *runs.slots(travels), travels

    def shapes(self, inputs: Sequence[Tensor]) -> Shapes:
        """Return the shapes of a run's transition and of a state, of all rows."""
        rows = inputs[0].shape[0]
        return Shapes(
            (rows, *self.kernel.transition_shape(*inputs)),
            (rows, *self.kernel.state_shape(*inputs)),
        )

"""What carries keys to who needs them, and gradients back: sessions, one a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ring_core import GatherProgram, Plan
from ring_torch.comm.handshake import CallSignature
from ring_torch.comm.ranks import Ranks
from ring_torch.payload import KeyGradBuffer, KVPayload
from ring_torch.records import Inputs

Where = Callable[[slice], slice]  # from local indices to columns of a buffer


class SessionSpec(NamedTuple):
    """What a transport is told of a pass over gathered keys.

    Attributes:
        ranks: Who takes part.
        plan: What they fetch: ``gather_program(plan, rank, own=own)`` of each.
        own: Whether a rank's own keys lie in its buffer, too: one launch sees all keys of a row.
        keys: The shape of what travels for one group of heads.
        groups: Into how many groups heads are cut.
        device: Where it lies.
        acc_dtype: Of gradients.
        needs_grad: Whether gradients will travel back.
        signature: What ranks have to agree on, beside ``number`` and ``seed``, the call's.
    """

    ranks: Ranks
    plan: Plan
    own: bool
    keys: KVPayload
    groups: int
    device: torch.device
    acc_dtype: torch.dtype
    needs_grad: bool
    signature: CallSignature
    number: int
    seed: int


class GatherSession(Protocol):
    """Moves what ranks fetch in one pass, for each group of heads.

    All ranks call its methods in the same order, groups from the first to the last.
    """

    @property
    def spec(self) -> SessionSpec:
        """What it was opened with."""
        ...

    def fetch(self, gather: GatherProgram, inputs: Inputs) -> Iterator[PendingKV]:
        """Start fetching into new tensors like a :attr:`KVPayload.message` of ``gather.length``.

        What comes for each group; all are to be taken, each before the kernels that need it.
        """
        ...

    def accumulators(
        self, gather: GatherProgram, sums: KeyGradBuffer, *, zero: bool
    ) -> list[Tensor]:
        """Room for the sums of gradients of what was fetched, flat; in a backward, called first.

        Full of zeros if ``zero``, else of anything.
        """
        ...

    def return_grads(
        self, gather: GatherProgram, sums: KeyGradBuffer, grads: Tensor, group: int, *, overlapped: bool,
        early: bool | None = None,
    ) -> PendingGrads:  # fmt: skip
        """Start sending a group's sums to the ranks the keys belong to.

        All of them, or those that :meth:`ring_core.GatherProgram.is_early`, or then the others.
        ``overlapped`` says that kernels go on meanwhile, and are not to be held up.
        """
        ...


@dataclass(frozen=True)
class PendingKV:
    """Tensors that fill up, fetch by fetch."""

    tensors: list[Tensor]
    #: Until so many fetches have arrived, or (``None``) all, when the own tensors may change, too.
    wait: Callable[[int | None], None]


@dataclass(frozen=True)
class PendingGrads:
    """Gradients on their way."""

    #: Wait, and add what came to the sums of so many tokens, of which the own ones lie somewhere.
    #: Called once, in the order in which they were sent.
    add_to: Callable[[Tensor, int, Where], None]

"""Check some rows of ``decode`` and ``prefill``, and the bytes that they sent, on all ranks.

Each rank samples four of its queries, of one request. All ranks receive them, and attend to their
own pages densely, by the mask's rule over positions; what they return is merged and compared. No
kernel, merge or strategy of the call takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ring_core import WrongResultError
from ring_core.base.arguments import Ints
from ring_core.pages import own_positions
from ring_core.tripwire import SampledRows, sampled
from ring_torch.checking.watch import Watch, shared_findings
from ring_torch.comm.exchange import exchange
from ring_torch.positions import on_device
from ring_torch.records import KernelParams, folded
from ring_torch.serving.arguments import ServingCall
from ring_torch.tripwire.dense import (
    EXACT,
    Partial,
    SampledKeys,
    SampledQueries,
    ScoreRule,
    merged,
    plain_precision,
    query_means,
)


class Sample(NamedTuple):
    """Queries of one request of a checked call, on this rank.

    Attributes:
        call: The call.
        row: Row of the batch.
        q: Queries ``[n, H, D]`` of that row on this rank.
        positions: Positions of a rank's queries, by rank; -1 for padding.
    """

    call: ServingCall
    row: int
    q: Tensor
    positions: Callable[[int], Ints]

    def watch(self) -> AbstractContextManager[Watch | None]:
        """Return a counter of what is sent in a block, if the call is checked."""
        return Watch(self.q.device) if self.call.checked else nullcontext()

    def _index(self, rank: int) -> Ints:
        """Return which of a rank's queries are sampled, int64 ``[4]``."""
        return sampled("queries", self.call.checked, rank, len(self.positions(rank)))

    def _keys(self) -> SampledKeys:
        """Return this rank's keys of the request, in the order of their positions."""
        call, cache, ranks = self.call, self.call.cache, self.call.ranks
        request = call.known[self.row]
        length, size = cache.lengths[request], cache.page_size
        positions = own_positions(0, length, size, ranks.rank, ranks.size)
        keys, _ = cache.keys_of(call.layer, (request,), 1, is_last=False)
        pages = keys.table[0, : -(-len(positions) // size)].long()
        k, v = (x[pages].flatten(0, 1)[: len(positions)] for x in (keys.k, keys.v))
        if not len(positions):  # a key that nobody sees stands for none
            k, v = (x[0, :1].new_zeros(1, *x.shape[2:]) for x in (keys.k, keys.v))
            positions = np.array([length])
        return SampledKeys(k, v, on_device(positions, k.device), None)

    def _means(self) -> tuple[Partial, Partial]:
        """Return the outputs of this rank's sampled queries: exact, plain."""
        call, ranks, device = self.call, self.call.ranks, self.q.device
        own = on_device(self._index(ranks.rank), device)
        (q,) = exchange(ranks, [[self.q[own]] * ranks.size], device)
        positions = on_device(
            np.concatenate([self.positions(x)[self._index(x)] for x in range(ranks.size)]), device
        )
        rules = call.rules
        slopes = None if rules.slopes is None else rules.slopes[self.row % len(rules.slopes)]
        length = call.cache.lengths[call.known[self.row]]
        params = KernelParams(rules.mask, rules.scale, rules.softcap)
        rule = ScoreRule(params, self.row, slopes, 1, length)
        queries = SampledQueries(
            torch.cat(q), torch.zeros_like(positions), positions, None, None
        )  # fmt: skip
        partials = query_means(rule, queries, self._keys(), (EXACT, plain_precision(self.q.dtype)))
        by_rank = [list(x.chunk(ranks.size)) for partial in partials for x in partial]
        # Each rank merges the parts that it receives for its queries.
        returned = exchange(ranks, by_rank, device)
        exact, plain = (
            merged([Partial(*x) for x in zip(*fields, strict=True)])
            for fields in (returned[:3], returned[3:])
        )
        if call.sinks is not None:
            exact, plain = (x.with_sinks(folded(call.sinks, x.lse.dtype)) for x in (exact, plain))
        return exact, plain

    def faults(self, out: Tensor, lse: Tensor, sent: int, expected: int) -> str | None:
        """Return the error message, the same on all ranks; ``None`` if no fault is found.

        Args:
            out: The call's output of this row's queries, ``[n, H, Dv]``.
            lse: Its ``lse``, ``[H, n]``.
            sent: Bytes that were sent.
            expected: Bytes that the call states.
        """
        call, index = self.call, self._index(self.call.ranks.rank)
        exact, plain = self._means()
        at = on_device(index, out.device)
        size = call.cache.largest_value(call.layer)
        lse_rows = lse[:, at].t().unsqueeze(-1)
        results: dict[str, Sequence[Tensor]] = {
            "out": (
                out[at], exact.means, plain.means.to(out.dtype), size.expand(len(at)), plain.squares.sqrt(),
            ),
            "lse": (
                lse_rows, exact.lse.unsqueeze(-1), plain.lse.unsqueeze(-1), torch.ones(len(at), device="cpu"),
                torch.zeros_like(plain.lse).unsqueeze(-1),
            ),
        }  # fmt: skip
        messages = []
        for name, tensors in results.items():
            rows = SampledRows(*(x.detach().double().cpu().numpy() for x in tensors))
            worst = rows.worst(str(out.dtype).removeprefix("torch."))
            if worst is not None:
                shape = (1, *out.shape) if name == "out" else (1, *lse.shape)
                messages.append(worst.describe(name, self.row, int(index[worst.row]), shape))
        if sent != expected:
            messages.append(f"{sent:,} bytes were sent, and the call states {expected:,}")
        lines = shared_findings(call.ranks, messages, out.device)
        if lines is None:
            return None
        return (
            f"call {call.checked} ({call.signature.fields['pass']}) is wrong. {lines}. Kernel {call.kernel!r}, layer "
            f"{call.layer}, request {call.known[self.row]}, mask {call.rules.mask.describe()!r}, "
            f"{call.ranks.size} ranks. Every rank of the group raises this"
        )


def raise_faults(message: str | None) -> None:
    """Raise what a check has found, behind the call's last message.

    Raises:
        WrongResultError: It has found something.
    """
    if message is not None:
        raise WrongResultError(message)

"""Batches of prompts and completions, packed so that rings, and ranks of a ring, work equally."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ring_core import RankMismatchError, pack_sequences
from ring_core.base.arguments import check_size, numbers_as_python
from ring_torch.comm.ranks import Group, ranks_of
from ring_torch.context import ContextParallel, check_context
from ring_torch.sharding import Sharding, UnshardGrad
from ring_torch.training.common import check_ignored
from ring_torch.training.data import Item, balanced_context, chained, is_same, rings_of
from ring_torch.training.part import IGNORED
from ring_torch.training.sequences import sum_by_sequence


@dataclass(frozen=True)
class RolloutBatch:
    """Part of a row of packed sequences that this rank holds.

    Attributes:
        tokens: int64 ``[1, T_local]``, prompts and completions.
        labels: int64 ``[1, T_local]``: for each token the next one if that is of a completion, else
            ``ignore_index``.
        positions: int64 ``[T_local]``, place of each token in its sequence, as for RoPE.
        owner: int64 ``[1, T_local]``, number of each token's sequence as the loader was given them;
            0 in padding. So ``advantages[batch.owner]`` is of tokens.
        cu_seqlens: ``(0, ..., T)``, bounds of sequences, and of padding behind them.
        index: Numbers of this row's sequences, in its order. It may be empty: a ring without
            sequences runs a row of padding, as others wait for it.
        cp: The ranks, and the layout in which this row is sharded.
        offsets: For each sequence of the row where its completion's labels begin and end.
        sequences: Number of sequences that the loader was given.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    owner: Tensor
    cu_seqlens: tuple[int, ...]
    index: tuple[int, ...]
    cp: ContextParallel
    offsets: tuple[tuple[int, int], ...]
    sequences: int

    def to(self, device: torch.device | str) -> RolloutBatch:
        """Return the batch with its tensors on a device."""
        names = ("tokens", "labels", "positions", "owner")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def shard(self, numbers: Sequence[Tensor]) -> Tensor:
        """Return numbers of completions' tokens where their labels are, ``[1, T_local]``; else 0.

        Args:
            numbers: For each sequence that the loader was given ``[completion length]``, as the
                sampler's log-probabilities.

        Raises:
            ValueError: They are not as many as the sequences, or not of the completions' lengths.
        """
        if len(numbers) != self.sequences:
            raise ValueError(
                f"numbers must have a tensor for each of the {self.sequences} sequences that the loader "
                f"was given, got {len(numbers)}"
            )
        rows = [numbers[n] for n in self.index]
        for n, x, (start, stop) in zip(self.index, rows, self.offsets, strict=True):
            if x.shape != (stop - start,):
                raise ValueError(
                    f"numbers[{n}] must be [{stop - start}], a number for each token of that "
                    f"completion, got {tuple(x.shape)}"
                )
        whole = numbers[0].new_zeros(1, self.cu_seqlens[-1])
        for x, (start, stop) in zip(rows, self.offsets, strict=True):
            whole[0, start:stop] = x
        return self.cp.shard(whole).to(self.tokens.device)

    def sum(self, x: Tensor, *, grad: UnshardGrad | None = None) -> Tensor:
        """Return the sums of tokens' numbers over this row's sequences, equal on all ranks.

        Args:
            x: ``[1, T_local]``.
            grad: As of :func:`sum_by_sequence`.

        Returns:
            ``[len(index)]``.
        """
        sums = sum_by_sequence(self.cp, x, cu_seqlens=self.cu_seqlens, grad=grad)
        return sums[: len(self.index)]


class RolloutLoader:
    """Iterable over rows of prompts and completions, packed for data x ring to equal work.

    Sequences are assigned to rows of at most ``tokens``, a row for each ring at each step, by
    :func:`ring_core.pack_sequences`: rings have equally much work, and equally many steps. Each row
    is sharded in a :func:`ring_core.balanced_layout` of its own, so ranks of a ring have, too. All
    ranks give the same sequences, and compare a digest; nothing else is sent.

    Args:
        cp: The ranks that share a row.
        prompts: int64 ``[length]`` each, with a token or more.
        completions: int64 ``[length]`` each, as many as prompts; may be empty.
        tokens: Most tokens of a row, over all ranks of a ring.
        dp: Ranks that hold the same part of different rows, as ``mesh["dp"]``; ``None`` if there is
            one ring.
        hidden_size: Of the model: how much a token's linear layers weigh beside attention.
        ignore_index: Label of tokens that have nothing to predict, which is no completion's token.

    Raises:
        ValueError: An argument is malformed, a sequence is longer than ``tokens``, or ``dp`` is
            missing.
        RankMismatchError: Ranks give different sequences.

    Example::

        loader = RolloutLoader(cp, prompts, completions, tokens=65536, dp=mesh["dp"])
        for batch in loader:
            hidden = model(batch.tokens, batch.positions, batch.cu_seqlens, batch.cp)
            log_probs = token_log_probs(batch.cp, hidden, model.head.weight, batch.labels)
            ratio = (log_probs - batch.shard(old)).exp()  # [1, T_local]
            part = -batch.sum(ratio * advantages[batch.owner], grad="slice").sum() / loader.count
            part.backward()
    """

    @numbers_as_python
    def __init__(
        self, cp: ContextParallel, prompts: Sequence[Tensor], completions: Sequence[Tensor], *,
        tokens: int, dp: Group = None, hidden_size: int = 4096, ignore_index: int = IGNORED,
    ) -> None:  # fmt: skip
        check_context(cp)
        check_ignored(ignore_index)
        dp = rings_of(cp, dp)
        self._cp, self._dp, self._ignored = cp, dp, ignore_index
        self._prompts = _checked("prompts", prompts, 1)
        self._completions = _checked("completions", completions, 0)
        if len(prompts) != len(completions) or not len(prompts):
            raise ValueError(
                f"prompts and completions must be as many, and one or more, got {len(prompts)} and "
                f"{len(completions)}"
            )
        for n, completion in enumerate(self._completions):
            if (completion == ignore_index).any():
                raise ValueError(
                    f"completions[{n}] has a token {ignore_index}, which as a label would be ignored: "
                    f"give an ignore_index that is no token, as {IGNORED}"
                )
        rings, ring = (1, 0) if dp is None else (ranks_of(dp).size, ranks_of(dp).rank)
        lengths = [len(x) + len(y) for x, y in zip(prompts, completions, strict=True)]
        check_size("tokens", tokens)
        steps = pack_sequences(lengths, rings=rings, tokens=tokens, hidden_size=hidden_size)
        self._rows = [step[ring] for step in steps]
        every = Item(
            torch.cat([*self._prompts, *self._completions])[None].cpu(),
            torch.tensor([[rings, tokens, hidden_size]], device="cpu"),
            tuple(accumulate(map(len, (*self._prompts, *self._completions)))),
        )
        if not is_same(cp, dp, chained(b"", [every]), len(lengths)):
            raise RankMismatchError(
                "ranks gave RolloutLoader different sequences or arguments: gather what each ring "
                "sampled, so that all ranks have all of it in one order"
            )

    @cached_property
    def count(self) -> int:
        """Number of completions' tokens of all sequences, of all rings."""
        return sum(map(len, self._completions))

    def __len__(self) -> int:
        """Return the number of rows, the same on all rings."""
        return len(self._rows)

    def __iter__(self) -> Iterator[RolloutBatch]:
        """Yield this rank's part of each of its ring's rows."""
        return map(self._row, self._rows)

    def restore(self, numbers: Sequence[Tensor]) -> Tensor:
        """Return numbers of all rings' sequences in the order in which the loader was given them.

        Args:
            numbers: For each batch ``[len(index)]``, equal on the ranks of a ring. All ranks must
                call it.

        Returns:
            ``[sequences]``, on all ranks, without a gradient.

        Raises:
            ValueError: They are of other shapes, or not as many as batches; nothing was sent.
        """
        _check_shapes(numbers, [(len(row),) for row in self._rows])
        batches = zip(self._rows, numbers, strict=True)
        values = [(n, x) for row, of_row in batches for n, x in zip(row, of_row, strict=True)]
        return self._of_rings(numbers[0], len(self._prompts), values)

    def restore_tokens(self, numbers: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return numbers of all rings' completions in the order of sequences, as log-probabilities.

        Args:
            numbers: For each batch ``[1, T_local]``, of this rank's tokens. All ranks must call it.

        Returns:
            For each sequence ``[completion length]``, on all ranks, without a gradient.

        Raises:
            ValueError: They are of other shapes, or not as many as batches; nothing was sent.
        """
        starts = (0, *accumulate(map(len, self._completions)))
        values, batches = [], [*self]
        _check_shapes(numbers, [(*batch.tokens.shape,) for batch in batches])
        for batch, x in zip(batches, numbers, strict=True):
            whole = batch.cp.unshard(x.detach())[0]
            for n, (start, stop) in zip(batch.index, batch.offsets, strict=True):
                values.append((slice(starts[n], starts[n + 1]), whole[start:stop]))
        flat = self._of_rings(numbers[0], self.count, values)
        return tuple(flat[start:stop] for start, stop in pairwise(starts))

    def _of_rings(
        self, like: Tensor, size: int, values: Sequence[tuple[int | slice, Tensor]]
    ) -> Tensor:
        """Return ``[size]`` with values at their indices, added up over the rings."""
        whole = like.new_zeros(size)
        for index, x in values:
            whole[index] = x.detach()
        if self._dp is None:
            return whole
        return Sharding(self._dp, "contiguous").unshard(whole[None], dim=0).sum(0).to(like.dtype)

    def _row(self, index: tuple[int, ...]) -> RolloutBatch:
        """Return this rank's part of a row of these sequences."""
        pairs = [(self._prompts[n], self._completions[n]) for n in index]
        lengths = [len(prompt) + len(completion) for prompt, completion in pairs]
        empty = self._prompts[0].new_empty(0)
        tokens = torch.cat([empty, *(x for pair in pairs for x in pair)])[None]
        labels = torch.cat([
            empty, *(x for prompt, y in pairs for x in (torch.full_like(prompt, self._ignored), y))
        ])[None]  # fmt: skip
        owner = torch.tensor(
            [n for n, x in zip(index, lengths, strict=True) for _ in range(x)], device="cpu"
        )
        bounds = (0, *accumulate(lengths))
        item, cp = balanced_context(self._cp, Item(tokens, labels, bounds), self._ignored)
        more = item.tokens.shape[1] - len(owner)
        owner = torch.nn.functional.pad(owner.long(), (0, more))[None].to(tokens.device)
        offsets = [  # the label of a completion's first token is the last one's of its prompt
            (start + len(prompt) - 1, start + len(prompt) - 1 + len(completion))
            for start, (prompt, completion) in zip(bounds, pairs, strict=False)
        ]
        return RolloutBatch(
            cp.shard(item.tokens), cp.shard(item.shifted_labels(self._ignored)),
            cp.shard(item.positions(), dim=0), cp.shard(owner), item.bounds, index, cp,
            tuple(offsets), len(self._prompts),
        )  # fmt: skip


def _check_shapes(numbers: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> None:
    """Check that there is a tensor of its shape for each batch.

    Raises:
        ValueError: There is not.
    """
    if len(numbers) != len(shapes):
        raise ValueError(
            f"numbers must have a tensor for each of the loader's {len(shapes)} batches, got {len(numbers)}"
        )
    for n, (x, shape) in enumerate(zip(numbers, shapes, strict=True)):
        if x.shape != shape:
            raise ValueError(
                f"numbers[{n}] must be {list(shape)}, as the loader's batch {n} is, got {list(x.shape)}"
            )


def _checked(name: str, sequences: object, least: int) -> list[Tensor]:
    """Return token ids that are int64 ``[length]`` each, of at least this length."""
    if not isinstance(sequences, Sequence) or not all(
        isinstance(x, Tensor) and x.dtype == torch.int64 and x.ndim == 1 and len(x) >= least
        for x in sequences
    ):
        raise ValueError(
            f"{name} must be a list of int64 [length], with {least} token{'s' * (least != 1)} or more"
        )
    return list(sequences)

"""Pack sequences of unlike lengths into rows, so that all rings have equally much work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ring_core.base.arguments import Floats, Ints, check_size, numbers_as_python

_PAIRS_PER_TOKEN = 6  # times the hidden size: 24 * dim**2 FLOPs of a token, 4 * dim of a pair


@numbers_as_python
def pack_sequences(
    lengths: Sequence[int], *, rings: int, tokens: int, hidden_size: int = 4096
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Assign sequences to rows of as many tokens as fit, a row for each ring at each step.

    Attention's work grows with the square of a sequence's length, that of all other layers with the
    length. The heaviest sequences are assigned first, each to the row with the least work that has
    room for it; the fewest steps are taken in which all fit. Rows of like work are one step, as
    rings wait for each other there. The same arguments give the same rows, on every rank.

    >>> from ring_core import pack_sequences
    >>> pack_sequences([7, 2, 5, 3, 6, 1], rings=2, tokens=8, hidden_size=1)
    (((0,), (4,)), ((2,), (1, 3, 5)))

    Args:
        lengths: Number of tokens of each sequence.
        rings: Number of rows of a step.
        tokens: Most tokens of a row.
        hidden_size: Hidden size of the model: a token's linear layers are the work of ``6 *
            hidden_size`` pairs of a query and a key that it sees.

    Returns:
        For each step and ring the numbers of a row's sequences, ascending. The last step may have
        empty rows.

    Raises:
        ValueError: An argument is malformed, there are no sequences, or one is longer than
            ``tokens``.
    """
    rings, tokens = check_size("rings", rings), check_size("tokens", tokens)
    check_size("hidden_size", hidden_size)
    value: object = lengths
    if not isinstance(value, Sequence | np.ndarray):
        raise ValueError(f"lengths must be a list of integers, got {value!r}")
    sizes = np.array([check_size(f"lengths[{n}]", x) for n, x in enumerate(lengths)], np.int64)
    if not sizes.size:
        raise ValueError("lengths must have a number of tokens or more, got none")
    if sizes.max() > tokens:
        raise ValueError(
            f"lengths[{int(sizes.argmax())}] is {sizes.max()}, and a row has at most tokens={tokens}: "
            f"give more, or a shorter sequence"
        )
    pairs = sizes * (sizes + 1.0) / 2
    work = pairs + float(_PAIRS_PER_TOKEN * hidden_size) * sizes
    steps = -(-int(sizes.sum()) // (rings * tokens))
    while (rows := _assigned(sizes, work, steps * rings, tokens)) is None:
        steps += 1
    rows.sort(key=lambda row: -float(work[row].sum()))
    # The first ring has the heaviest row of every other step, and the lightest of the others.
    return tuple(
        tuple(map(tuple, rows[step * rings : (step + 1) * rings][:: -1 if step % 2 else 1]))
        for step in range(steps)
    )


def _assigned(sizes: Ints, work: Floats, count: int, tokens: int) -> list[list[int]] | None:
    """Return the sequences of ``count`` rows; ``None`` if they do not fit."""
    rows: list[list[int]] = [[] for _ in range(count)]
    load, used = np.zeros(count), np.zeros(count, np.int64)
    for n in np.argsort(-work, kind="stable").tolist():
        row = int(np.where(used + sizes[n] <= tokens, load, np.inf).argmin())
        if used[row] + sizes[n] > tokens:
            return None
        rows[row].append(n)
        load[row] += work[n]
        used[row] += sizes[n]
    return [sorted(row) for row in rows]

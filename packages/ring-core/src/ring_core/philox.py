"""Draw dropout's random numbers: Philox-4x32-10, keyed by global indices.

Philox (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) maps a
128-bit counter and a 64-bit key to four 32-bit words, with no state: every kernel of every
framework can draw the word of one matrix element on its own, so the same elements drop at every
ring size.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ring_core.base.arguments import as_positions, numbers_as_python

Words = npt.NDArray[np.uint32]

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(
    counter: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike, npt.ArrayLike], key: tuple[int, int]
) -> tuple[Words, Words, Words, Words]:
    """Return four random 32-bit words for each counter ``(c0, c1, c2, c3)``.

    Args:
        counter: Four arrays of 32-bit numbers, which broadcast.
        key: Two 32-bit numbers.

    Returns:
        Four uint32 arrays of the broadcast shape.
    """
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(x).astype(np.uint64) for x in counter))
    k0, k1 = key
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(ROUNDS):
        a, b = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            (b >> half) ^ c1 ^ np.uint64(k0),
            b & low,
            (a >> half) ^ c3 ^ np.uint64(k1),
            a & low,
        )
        k0, k1 = (k0 + KEY_STEPS[0]) & 0xFFFFFFFF, (k1 + KEY_STEPS[1]) & 0xFFFFFFFF
    w0, w1, w2, w3 = (word.astype(np.uint32) for word in (c0, c1, c2, c3))
    return w0, w1, w2, w3


@numbers_as_python
def dropout_keep(
    p: float,
    seed: int,
    *,
    batch: npt.ArrayLike,
    heads: npt.ArrayLike,
    queries: npt.ArrayLike,
    keys: npt.ArrayLike,
) -> npt.NDArray[np.bool_]:
    """Return which softmax weights dropout keeps, ``[batch, heads, queries, keys]``; True is kept.

    The counter is ``(j >> 2, i, h, b)`` and the key the seed's low and high 32 bits; element ``j``
    takes word ``j & 3`` and is kept when ``word >= round(p * 2**32)``. So any part of the matrix
    can be drawn alone:

    >>> whole = dropout_keep(0.3, 7, batch=[0], heads=[0, 1], queries=range(8), keys=range(8))
    >>> part = dropout_keep(0.3, 7, batch=[0], heads=[1], queries=[5], keys=range(3, 8))
    >>> bool((part[0, 0, 0] == whole[0, 1, 5, 3:]).all())
    True

    Args:
        p: The probability to drop a weight.
        seed: The call's ``dropout_seed``.
        batch, heads, queries, keys: Global indices, one row of integers each.

    Raises:
        ValueError: ``p`` is not in ``[0, 1)``, ``seed`` not in ``[0, 2**64)``, or indices are no
            rows of integers.
    """
    if not isinstance(p, int | float) or isinstance(p, bool) or not 0 <= p < 1:
        raise ValueError(f"p must be in [0, 1), got {p!r}")
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**64:
        raise ValueError(f"seed must be an integer in [0, 2**64), got {seed!r}")
    b, h, i, j = (
        as_positions(name, x)
        for name, x in (("batch", batch), ("heads", heads), ("queries", queries), ("keys", keys))
    )
    counter = (j >> 2, i[:, None], h[:, None, None], b[:, None, None, None])
    words = np.stack(philox(counter, seed_key(seed)))
    word = np.take_along_axis(words, np.broadcast_to((j & 3), words.shape[1:])[None], axis=0)[0]
    kept: npt.NDArray[np.bool_] = word.astype(np.uint64) >= np.uint64(dropout_threshold(p))
    return kept


def seed_key(seed: int) -> tuple[int, int]:
    """Split a 64-bit seed into the two 32-bit words of a Philox key, the low word first."""
    return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF


def dropout_threshold(p: float) -> int:
    """Return the number below which a random 32-bit word drops its weight: ``round(p * 2**32)``."""
    return round(p * 2**32)

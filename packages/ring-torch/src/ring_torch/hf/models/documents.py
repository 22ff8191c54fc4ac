"""Documents of packed rows, as the data collators of transformers and TRL state them.

Results are segment ids: the number of each token's document, with -1 for padding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ring_core import UnsupportedError
from ring_core.base.arguments import Ints

#: Batch entries that state documents: for flash attention, and (``seq_idx``) for Mamba layers.
STATED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def stated_documents(batch: dict[str, Any], shape: tuple[int, int]) -> Ints | None:
    """Return the segment ids ``[B, T]`` of a batch that states its documents, else ``None``.

    They are stated by ``cu_seq_lens_q`` and ``cu_seq_lens_k``, by ``seq_idx``, or by an
    ``attention_mask`` that numbers documents from 1 and is 0 at padding. Entries that were read are
    removed from the batch. An ``attention_mask`` of ones alone says nothing, and is removed as
    well.

    Args:
        batch: The batch, from which entries are removed.
        shape: ``(B, T)``.

    Raises:
        ValueError: An entry is malformed, or two of them state different documents.
        UnsupportedError: ``cu_seq_lens_*`` beside several rows, or documents beside a mask of
            padding.
    """
    offsets = batch.pop("cu_seq_lens_q", None), batch.pop("cu_seq_lens_k", None)
    _check_longest(
        {name: batch.pop(name, None) for name in ("max_length_q", "max_length_k")}, offsets[0]
    )
    by_entry = {
        "cu_seq_lens_q": None if offsets == (None, None) else _of_offsets(*offsets, shape),
        "seq_idx": None if (ids := batch.pop("seq_idx", None)) is None else _of_ids(ids, shape),
        "attention_mask": _of_mask(batch, shape),
    }  # fmt: skip
    stated = {name: x for name, x in by_entry.items() if x is not None}
    if "attention_mask" in batch and stated:
        raise UnsupportedError(
            f"attention_mask with padding beside {' and '.join(stated)}: transformers reads such a row "
            f"as one document; leave the mask out"
        )
    for name, x in stated.items():
        if not np.array_equal(x, next(iter(stated.values()))):
            raise ValueError(
                f"{name} and {next(iter(stated))} state different documents; give one of them"
            )
    return next(iter(stated.values()), None)


def check_positions(segments: Ints, positions: Ints) -> None:
    """Refuse position ids that do not grow by one within a document.

    Raises:
        ValueError: Position ids start again inside a document.
    """
    same = np.diff(segments, axis=1) == 0
    if (np.diff(np.broadcast_to(positions, segments.shape), axis=1) != 1)[same].any():
        raise ValueError(
            "position_ids start again where no stated document begins; leave one of the two out"
        )


def _check_longest(longest: dict[str, Any], offsets: Any) -> None:
    """Check ``max_length_q`` and ``max_length_k``, which flash-attn needs; here offsets are enough.

    Raises:
        ValueError: They come without offsets, or a document is longer.
    """
    for name, length in longest.items():
        if length is None:
            continue
        if offsets is None:
            raise ValueError(
                f"{name} says nothing without cu_seq_lens_q and cu_seq_lens_k; give these, too"
            )
        cuts = offsets.detach().cpu() if isinstance(offsets, Tensor) else offsets
        if int(length) < int(np.diff(np.asarray(cuts)).max(initial=0)):
            raise ValueError(
                f"{name} is {int(length)}, and a document of cu_seq_lens_q is longer; give the longest length"
            )


def _of_mask(batch: dict[str, Any], shape: tuple[int, int]) -> Ints | None:
    """Return segment ids from an ``attention_mask`` that numbers documents; ``None`` for others.

    A mask that numbers documents, or that has only ones, is removed from the batch.
    """
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or tuple(mask.shape) != shape:
        return None
    values = mask.detach().cpu().numpy()
    # It hides nothing, and would keep documents from being found in position ids.
    if (values == 1).all():
        del batch["attention_mask"]
        return None
    if values.max(initial=0) <= 1 or values.min(initial=0) < 0 or mask.is_floating_point():
        return None
    # Padding may interrupt a document: fill it with the number before it, to find the documents.
    last_real = np.maximum.accumulate(np.where(values > 0, np.arange(shape[1]), 0), axis=1)
    segments = _run_numbers(np.take_along_axis(values, last_real, axis=1))
    segments[values == 0] = -1
    del batch["attention_mask"]
    return segments


def _of_offsets(q: Any, k: Any, shape: tuple[int, int]) -> Ints:
    """Return segment ids from cumulative lengths of documents, ``(0, ..., T)``, of a single row.

    Raises:
        ValueError: They are malformed, or those of queries and keys differ.
        UnsupportedError: The batch has several rows.
    """
    if q is None or k is None:
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k must be given both")
    if shape[0] != 1:
        raise UnsupportedError(
            f"cu_seq_lens_q beside {shape[0]} rows: they count tokens of all rows in one; give one "
            f"row, or position_ids that start again with each document"
        )
    # On the host: a plan is made of them, and the batch is compared there anyway.
    q, k = (np.asarray(x.detach().cpu() if isinstance(x, Tensor) else x) for x in (q, k))
    if not np.array_equal(q, k):
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k must be equal: a token sees its document")
    if q.ndim != 1 or len(q) < 2 or q[0] != 0 or q[-1] != shape[1] or (np.diff(q) < 0).any():
        raise ValueError(f"cu_seq_lens_q must be (0, ..., {shape[1]}), got {q.tolist()}")
    return _run_numbers(np.searchsorted(q, np.arange(shape[1]), side="right")[None])


def _of_ids(ids: Any, shape: tuple[int, int]) -> Ints:
    """Return segment ids from ``seq_idx [B, T]``, which changes where a document begins.

    Raises:
        ValueError: It has another shape.
    """
    if not isinstance(ids, Tensor) or tuple(ids.shape) != shape:
        shown = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"seq_idx must be a tensor [B, T] = {shape}, got {shown}")
    return _run_numbers(ids.detach().cpu().numpy())


def _run_numbers(values: npt.NDArray[Any]) -> Ints:
    """Return the number of each entry's run of equal values in its row, counted from 0."""
    segments = np.zeros(values.shape, np.int64)
    # Equal numbers in two places are two documents: only changes count.
    segments[:, 1:] = np.cumsum(np.diff(values, axis=1) != 0, axis=1)
    return segments

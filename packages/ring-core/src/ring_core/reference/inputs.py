"""Check the arrays of a call of the oracle or a simulator, widen them, and cut padding off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ring_core import checks
from ring_core.base.arguments import Floats, Ints, as_floats, as_ints, check_size

SegmentIds = npt.ArrayLike | tuple[npt.ArrayLike, npt.ArrayLike]
_DEVICE = "cpu"


class Inputs(NamedTuple):
    """The arrays of a call without padding, as float64 and int64, and their sizes."""

    sizes: checks.Sizes
    q: Floats  # [B, T_q, H, D]
    k: Floats  # [B, T_kv, K, D]
    v: Floats  # [B, T_kv, K, Dv]
    q_ids: Ints | None  # [B, T_q]
    k_ids: Ints | None  # [B, T_kv]
    sinks: Floats | None  # [H] or [H, n]
    bias: Floats | None  # [B or 1, H or 1, T_q, T_kv]; only its rows are given with padding
    slopes: Floats | None  # [1 or B, H]
    padding: tuple[int, int] = (0, 0)  # tokens cut off behind queries, and behind keys

    def upstream(self, dout: Any, dlse: Any) -> tuple[Floats, Floats | None]:
        """Check the gradients that reach ``out`` and ``lse``, and return them as float64.

        Args:
            dout: ``[B, T_q, H, Dv]``, with padding, which is cut off.
            dlse: ``[B, H, T_q]``, likewise, or ``None``.

        Raises:
            ValueError: They have other shapes.
        """
        n, length = self.sizes, self.sizes.q_len + self.padding[0]
        dout = as_floats("dout", dout, (n.batch, length, n.q_heads, n.v_head_dim))[:, : n.q_len]
        if dlse is not None:
            dlse = as_floats("dlse", dlse, (n.batch, n.q_heads, length))[:, :, : n.q_len]
        return dout, dlse


def check_inputs(
    q: Any, k: Any, v: Any, segment_ids: Any, sinks: Any, bias: Any, alibi_slopes: Any,
    seq_len: Any = None,
) -> Inputs:  # fmt: skip
    """Check the arrays of a call, and return them as float64 and int64, without padding.

    ``seq_len`` is the number of tokens that are no padding, or a pair of it for queries and keys;
    ``None`` if there is no padding.

    Raises:
        ValueError: One is no array of numbers, or they do not fit together.
    """
    q, k, v = (as_floats(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    sizes = checks.check_qkv(*(checks.Tensor(x.shape, "float64", _DEVICE) for x in (q, k, v)))
    sinks, bias, slopes = (
        None if x is None else as_floats(name, x)
        for name, x in (("sinks", sinks), ("bias", bias), ("alibi_slopes", alibi_slopes))
    )
    checks.check_sinks(_record(sinks), sizes, _DEVICE)
    q_len, k_len = _lengths(seq_len, sizes)
    checks.check_bias(_record(bias), sizes, k_len, _DEVICE)
    checks.check_alibi_slopes(_record(slopes), sizes, _DEVICE)
    q_ids = k_ids = None
    if segment_ids is not None:
        q_ids, k_ids = (
            _ids(ids, sizes, side)
            for ids, side in zip(
                checks.check_pair(segment_ids, sizes), ("queries", "keys"), strict=True
            )
        )
        q_ids, k_ids = q_ids[:, :q_len], k_ids[:, :k_len]
    return Inputs(
        replace(sizes, q_len=q_len, k_len=k_len), q[:, :q_len], k[:, :k_len], v[:, :k_len], q_ids,
        k_ids, sinks, None if bias is None else bias[:, :, :q_len],
        None if slopes is None else np.atleast_2d(slopes),
        (sizes.q_len - q_len, sizes.k_len - k_len),
    )  # fmt: skip


def _lengths(seq_len: Any, sizes: checks.Sizes) -> tuple[int, int]:
    """Return the numbers of queries and keys without padding.

    Raises:
        ValueError: ``seq_len`` is no such number, nor a pair of them.
    """
    if seq_len is None:
        return sizes.q_len, sizes.k_len
    lengths = tuple(seq_len) if isinstance(seq_len, tuple | list) else (seq_len, seq_len)
    if len(lengths) != 2:
        raise ValueError(f"seq_len must be an integer or a pair (queries', keys'), got {seq_len!r}")
    q_len, k_len = (
        check_size("seq_len", length, high=stop + 1)
        for length, stop in zip(lengths, (sizes.q_len, sizes.k_len), strict=True)
    )
    return q_len, k_len


def _record(x: Floats | None) -> checks.Tensor | None:
    """Describe an optional array to the checks that all frameworks share."""
    return None if x is None else checks.Tensor(x.shape, "float64", _DEVICE)


def _ids(ids: Any, sizes: checks.Sizes, side: str) -> Ints:
    """Check the segment ids of ``queries`` or ``keys``, and return them as int64 ``[B, T]``.

    They are those of all tokens, padding included.

    Raises:
        ValueError: They have another shape, or are no integers that fit into int32.
    """
    array = as_ints("segment_ids", ids)
    checks.check_segment_ids(checks.Tensor(array.shape, "int32", _DEVICE), sizes, side, _DEVICE)
    if array.size and not -(2**31) <= array.min() <= array.max() < 2**31:
        raise ValueError(f"segment_ids of the {side} must fit into int32")
    return array

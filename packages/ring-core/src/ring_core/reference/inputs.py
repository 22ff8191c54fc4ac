"""What the oracle and the simulator take: global arrays, checked as backends check tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ring_core import checks
from ring_core.base.arguments import Floats, Ints, as_floats, as_ints

SegmentIds = npt.ArrayLike | tuple[npt.ArrayLike, npt.ArrayLike]
_INT32 = np.iinfo(np.int32)


class Inputs(NamedTuple):
    """The arrays of a call, float64 and int64, and their sizes."""

    sizes: checks.Sizes
    q: Floats  # [B, T_q, H, D]
    k: Floats  # [B, T_kv, K, D]
    v: Floats  # [B, T_kv, K, Dv]
    q_ids: Ints | None  # [B, T_q]
    k_ids: Ints | None  # [B, T_kv]
    sinks: Floats | None  # [H] or [H, n]
    bias: Floats | None  # [B or 1, H or 1, T_q, T_kv]
    slopes: Floats | None  # [1 or B, H]

    def upstream(self, dout: Any, dlse: Any) -> tuple[Floats, Floats | None]:
        """Gradients that reach ``out [B, T_q, H, Dv]`` and ``lse [B, H, T_q]``.

        Raises:
            ValueError: They have other shapes.
        """
        n = self.sizes
        dout = as_floats("dout", dout, (n.batch, n.q_len, n.q_heads, n.v_head_dim))
        if dlse is None:
            return dout, None
        return dout, as_floats("dlse", dlse, (n.batch, n.q_heads, n.q_len))


def check_inputs(
    q: Any, k: Any, v: Any, segment_ids: Any, sinks: Any, bias: Any, alibi_slopes: Any
) -> Inputs:
    """Arrays of a call.

    Raises:
        ValueError: One is no array of numbers, or they do not fit together.
    """
    q, k, v = (as_floats(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    sizes = checks.check_qkv(*(_described(x) for x in (q, k, v)))
    sinks, bias, slopes = (
        None if x is None else as_floats(name, x)
        for name, x in (("sinks", sinks), ("bias", bias), ("alibi_slopes", alibi_slopes))
    )
    checks.check_sinks(_optional(sinks), sizes, _DEVICE)
    checks.check_bias(_optional(bias), sizes, sizes.k_len, _DEVICE)
    checks.check_alibi_slopes(_optional(slopes), sizes, _DEVICE)
    q_ids = k_ids = None
    if segment_ids is not None:
        q_ids, k_ids = (
            _ids(ids, sizes, side)
            for ids, side in zip(
                checks.check_pair(segment_ids, sizes), ("queries", "keys"), strict=True
            )
        )
    return Inputs(
        sizes, q, k, v, q_ids, k_ids, sinks, bias, None if slopes is None else np.atleast_2d(slopes)
    )


_DEVICE = "cpu"


def _described(x: Floats) -> checks.Tensor:
    return checks.Tensor(x.shape, "float64", _DEVICE)


def _optional(x: Floats | None) -> checks.Tensor | None:
    return None if x is None else _described(x)


def _ids(ids: Any, sizes: checks.Sizes, side: str) -> Ints:
    found = as_ints("segment_ids", ids)
    checks.check_segment_ids(checks.Tensor(found.shape, "int32", _DEVICE), sizes, side, _DEVICE)
    if found.size and not _INT32.min <= found.min() <= found.max() <= _INT32.max:
        raise ValueError(f"segment_ids of the {side} must fit into int32")
    return found

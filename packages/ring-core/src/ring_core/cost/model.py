"""Sizes of a call."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ring_core.base.arguments import check_size, numbers_as_python
from ring_core.plan.plan import Plan

BACKWARD_FLOPS = 2.5  # matmul FLOPs of the backward over those of the forward
FLOAT32_BYTES = 4  # bytes of an accumulator, lse or delta


@numbers_as_python
@dataclass(frozen=True)
class Model:
    """The sizes of an attention layer.

    >>> from ring_core.cost import Model
    >>> Model(num_q_heads=32, num_kv_heads=8, head_dim=128).flops_per_pair
    16384

    Attributes:
        num_q_heads: Number of query heads ``H``.
        num_kv_heads: Number of key/value heads ``K``, a divisor of ``H``.
        head_dim: Head dim ``D`` of Q and K.
        v_head_dim: Head dim ``Dv`` of V; ``None`` means that of Q and K.
        batch: Batch size ``B``.
        bytes_per_element: Bytes per element ``e`` of the inputs; 2 for bfloat16.

    Raises:
        ValueError: A size is no positive integer, or ``K`` does not divide ``H``.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    batch: int = 1
    bytes_per_element: int = 2

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "v_head_dim" or self.v_head_dim is not None:
                check_size(field.name, getattr(self, field.name))
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads must be a multiple of num_kv_heads, got {self.num_q_heads} and "
                f"{self.num_kv_heads}"
            )

    @property
    def value_dim(self) -> int:
        """Head dim ``Dv`` of V."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def flops_per_pair(self) -> int:
        """Forward FLOPs of one visible (query, key) pair: ``2 * B * H * (D + Dv)``."""
        return 2 * self.batch * self.num_q_heads * (self.head_dim + self.value_dim)


def rows_and_keys(plan: Plan, model: Model) -> tuple[int, int]:
    """Return a rank's rows of Q, ``B * Tq * H``, and numbers in K/V, ``B * Tk * K * (D + Dv)``."""
    rows = model.batch * plan.q_layout.local_len * model.num_q_heads
    keys = model.batch * plan.k_layout.local_len * model.num_kv_heads
    return rows, keys * (model.head_dim + model.value_dim)

"""Sizes of a call, rates of hardware, and the bytes of a ring's messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import NamedTuple

from ring_core.base.arguments import check_rate, check_size, check_text, numbers_as_python
from ring_core.plan.plan import Plan

BACKWARD_FLOPS = 2.5  # matmul FLOPs of the backward over those of the forward
FLOAT32_BYTES = 4  # bytes of an accumulator, lse or delta


@numbers_as_python
@dataclass(frozen=True)
class Hardware:
    """The rates that a device and its link achieve.

    >>> from ring_core.cost import Hardware
    >>> mine = Hardware("mine", 400, 350, link_gb_s=40, hop_us=20, source="measured here")

    Attributes:
        name: The name for ``--hardware`` and tables.
        matmul_tflops: Achievable bf16 attention TFLOP/s per device, forward.
        backward_tflops: Achievable bf16 attention TFLOP/s per device, backward.
        link_gb_s: Rate at which a device sends in one direction, GB/s (1e9 bytes).
        hop_us: Latency of a message, microseconds; the same for a hop of any distance, as on a
            switched network (on a torus, far hops cost more than this says).
        source: The origin of the figures, in words.

    Raises:
        ValueError: A rate is no finite number above 0, ``hop_us`` is none from 0 on, or a text is
            no ``str``.
    """

    name: str
    matmul_tflops: float
    backward_tflops: float
    link_gb_s: float
    hop_us: float
    source: str

    def __post_init__(self) -> None:
        for name in ("name", "source"):
            check_text(name, getattr(self, name))
        for rate in ("matmul_tflops", "backward_tflops", "link_gb_s"):
            check_rate(rate, getattr(self, rate))
        check_rate("hop_us", self.hop_us, zero=True)


_TPU = (
    "a planning figure, not a measurement: {mfu}% of the {peak} TFLOP/s bf16 peak in both passes; "
    "ICI one way on one link as published; 1 us a hop assumed"
)
HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        h.name: h
        for h in (
            Hardware(
                "h200-nvlink", 649, 588, 370, 30,
                "measured on 4x H200: flash-attn-4, 16k causal, head dim 128; copy-engine pulls of "
                "16 to 256 MiB over NVLink (18 links) take about 30 us plus bytes over 370 GB/s",
            ),
            Hardware(
                "h200-400gbit", 649, 588, 45, 30,
                "kernels as h200-nvlink; one 400 Gbit/s port a GPU, 45 of its 50 GB/s and 30 us a "
                "message assumed",
            ),
            Hardware("tpu-v5e", 98.5, 98.5, 45, 1, _TPU.format(mfu=50, peak=197)),
            Hardware("tpu-v5p", 229.5, 229.5, 90, 1, _TPU.format(mfu=50, peak=459)),
            Hardware("tpu-v6e", 367.2, 367.2, 90, 1, _TPU.format(mfu=40, peak=918)),
        )
    }
)  # fmt: skip


def hardware(name: str) -> Hardware:
    """Return the preset of a name, one of ``HARDWARE``.

    >>> from ring_core.cost import hardware
    >>> hardware("h200-nvlink").link_gb_s
    370

    Raises:
        ValueError: No such preset.
    """
    if not isinstance(name, str) or name not in HARDWARE:
        raise ValueError(
            f"unknown hardware {name!r}; known: {', '.join(HARDWARE)}; or describe yours as "
            f"ring_core.cost.Hardware(...)"
        )
    return HARDWARE[name]


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


class MessageBytes(NamedTuple):
    """Bytes of one message of each kind, in one pass."""

    kv: int
    grad: int  # dK/dV
    ship: int  # queries, to the helper; in the backward also dout, lse and delta
    results: int  # of offloaded queries, back home: (out, lse) or dQ, in float32


def message_bytes(plan: Plan, model: Model) -> tuple[MessageBytes, MessageBytes]:
    """Return the bytes of messages of the forward, and of the backward.

    They are those of one rank's shard, padding included.
    """
    rows, kv = rows_and_keys(plan, model)
    d, dv, e = model.head_dim, model.value_dim, model.bytes_per_element
    return (
        MessageBytes(kv * e, 0, ship=rows * d * e, results=rows * (dv + 1) * FLOAT32_BYTES),
        MessageBytes(
            kv * e,
            kv * FLOAT32_BYTES,
            ship=rows * ((d + dv) * e + 2 * FLOAT32_BYTES),  # lse and delta, too
            results=rows * d * FLOAT32_BYTES,
        ),
    )


def rows_and_keys(plan: Plan, model: Model) -> tuple[int, int]:
    """Return a rank's rows of Q, ``B * Tq * H``, and numbers in K/V, ``B * Tk * K * (D + Dv)``."""
    rows = model.batch * plan.q_layout.local_len * model.num_q_heads
    keys = model.batch * plan.k_layout.local_len * model.num_kv_heads
    return rows, keys * (model.head_dim + model.value_dim)

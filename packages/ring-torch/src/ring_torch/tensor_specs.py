"""Static properties of a call's tensors: their checks, and those of an inner call's tensors.

A strategy that trades tokens for heads makes the inner call, for a rank's part of the heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ring_core import HeadPlan, checks
from ring_torch.records import Inputs


class TensorSpec(NamedTuple):
    """Static properties of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def described(self) -> checks.Tensor:
        """Return the properties in the form that the checks of ``ring_core`` take."""
        return checks.Tensor(self.shape, str(self.dtype).removeprefix("torch."), str(self.device))


def check_local(name: str, x: object, *, has_numbers: bool = False) -> Tensor:
    """Return an argument that is a dense tensor of this rank's own, and refuse any other.

    Args:
        name: Name of the argument.
        x: Its value.
        has_numbers: True to refuse tensors on the meta device, too.

    Raises:
        ValueError: It is no tensor, one of several ranks or not dense.
    """
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if isinstance(x, DTensor):
        raise ValueError(
            f"{name} must be this rank's own tensor, got a DTensor; pass {name}.to_local()"
        )
    if x.layout is not torch.strided or x.is_nested or (has_numbers and x.is_meta):
        layout = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        layout = "meta" if layout == "strided" else layout
        raise ValueError(f"{name} must be a dense tensor, got a {layout} one")
    return x


def head_parallel_specs(
    specs: tuple[TensorSpec | None, ...], heads: HeadPlan
) -> tuple[TensorSpec | None, ...]:
    """Return the specs of the inner call's tensors, which hold all tokens of a rank's heads.

    ``specs`` are in the order of :class:`Inputs`, ``None`` for a tensor that is not given.
    """
    (ranks, q_heads), kv_heads = heads.q.shape, heads.kv.shape[1]
    shapes: dict[str, Callable[..., tuple[int, ...]]] = {
        "q": lambda batch, length, _, dim: (batch, ranks * length, q_heads, dim),
        "k": lambda batch, length, _, dim: (batch, ranks * length, kv_heads, dim),
        "v": lambda batch, length, _, dim: (batch, ranks * length, kv_heads, dim),
        "q_ids": lambda batch, length: (batch, ranks * length),
        "k_ids": lambda batch, length: (batch, ranks * length),
        "sinks": lambda _, *per_head: (q_heads, *per_head),
        "bias": lambda batch, shared, length, keys: (
            batch, 1 if shared == 1 else q_heads, ranks * length, keys
        ),
        "alibi_slopes": lambda *shape: (*shape[:-1], q_heads),
    }  # fmt: skip
    return tuple(
        [
            None if spec is None else spec._replace(shape=shapes[name](*spec.shape))
            for name, spec in zip(Inputs._fields, specs, strict=False)
        ]
    )


#: Descriptions of the tensors that a call has, by the names of :class:`Inputs`.
Described = Mapping[str, checks.Tensor]


def check_tensors(specs: tuple[TensorSpec | None, ...]) -> tuple[checks.Sizes, Described]:
    """Check all tensors but the bias; return the call's sizes, and the tensors' descriptions.

    ``specs`` are in the order of :class:`Inputs`. The bias is checked later: its width is the
    number of all keys, which the plan knows.

    Raises:
        ValueError: A tensor is malformed, q is on the meta device, or ``alibi_slopes`` require a
            gradient.
    """
    named = zip(Inputs._fields, specs, strict=False)
    tensors = {name: spec.described() for name, spec in named if spec is not None}
    sizes, device = checks.check_qkv(*[tensors[name] for name in "qkv"]), tensors["q"].device
    if device == "meta":
        raise ValueError("q, k and v are on the meta device, where tensors hold no numbers")
    checks.check_sinks(tensors.get("sinks"), sizes, device)
    checks.check_alibi_slopes(tensors.get("alibi_slopes"), sizes, device)
    if specs[-1] is not None and specs[-1].requires_grad:
        raise ValueError(
            "alibi_slopes have no gradient; pass alibi_slopes.detach(), or add a bias that has one"
        )
    for side, name in (("queries", "q_ids"), ("keys", "k_ids")):
        if name in tensors:
            checks.check_segment_ids(tensors[name], sizes, side, device)
    return sizes, tensors

"""One call, checked: what the loops need to know, and the tensors they work on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_core import KernelConfig as KernelConfig
from ring_core import Mask, Plan, Request, ScheduleName, checks, make_plan
from ring_torch._comm import Packing, Ring
from ring_torch.kernels import KERNEL_NAMES, Choice, choose
from ring_torch.kernels._api import Columns, Kernel, Params, Rows

TRANSPORTS = ("auto", "p2p")


class Inputs(NamedTuple):
    """The tensors of a call, as given (local shards)."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_ids: Tensor | None
    k_ids: Tensor | None
    sinks: Tensor | None
    bias: Tensor | None
    slopes: Tensor | None


@dataclass(frozen=True)
class Call:
    """Everything static about a call."""

    ring: Ring
    plan: Plan
    params: Params
    kernel: Kernel
    choice: Choice
    dtype: torch.dtype  # of the inputs
    wide: torch.dtype  # of accumulators
    device: torch.device
    needs_index: bool  # some option asks for global positions
    facts: dict[str, Any]  # what must be equal on all ranks

    def positions(self, rank: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Query indices, query positions, key positions of a rank, where an option needs them."""
        if not self.needs_index:
            return None, None, None
        arrays = (
            self.plan.positions(rank),
            self.plan.q_positions(rank),
            self.plan.k_positions(rank),
        )
        index, q_pos, k_pos = (torch.as_tensor(x, device=self.device) for x in arrays)
        return index, q_pos, k_pos

    def rows(self, inputs: Inputs) -> Rows:
        """This rank's queries."""
        index, position, _ = self.positions(self.ring.rank)
        slopes = None if inputs.slopes is None else torch.atleast_2d(inputs.slopes)
        return Rows(inputs.q, index, position, inputs.q_ids, inputs.bias, slopes)

    def columns(self, rank: int, tensors: Sequence[Tensor]) -> Columns:
        """The keys of a rank from ``k``, ``v`` and, where there are any, segment ids."""
        segments = tensors[2] if len(tensors) > 2 else None
        return Columns(tensors[0], tensors[1], self.positions(rank)[2], segments)


def keys_of(inputs: Inputs) -> list[Tensor]:
    """What travels round the ring."""
    return [inputs.k, inputs.v, *([] if inputs.k_ids is None else [inputs.k_ids])]


def packing_of(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Packing:
    """One message that holds tensors like these, in another dtype if one is given."""
    return Packing.of(*((x.shape, dtype or x.dtype) for x in tensors))


def check_call(
    ring: Ring,
    number: int,
    schedule: ScheduleName,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    chunk_size: int | None,
    cu_seqlens: Sequence[int] | None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None,
    mask: Mask | None,
    softmax_scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_p: float,
    dropout_seed: int | None,
    deterministic: bool,
    return_lse: bool,
    kernel: str | KernelConfig,
    transport: str,
) -> tuple[Call, Inputs]:
    """Check all arguments of a call, plan it and choose its kernel; nothing is sent.

    ``number`` is the call's, from :meth:`Ring.next_call`.

    Raises:
        ValueError: An argument is malformed.
        UnsupportedError: No kernel, or not the one named, can do the call.
    """
    tensors = {"q": q, "k": k, "v": v}
    described = [_described(x, name) for name, x in tensors.items()]
    sizes = checks.check_qkv(*described)
    device = described[0].device
    rule = checks.check_mask(
        mask, causal=causal, window=window, chunk_size=chunk_size, cu_seqlens=cu_seqlens
    )
    plan = make_plan(
        rule, seq_len=sizes.q_len * ring.size, cp_size=ring.size, schedule=schedule,
        kv_seq_len=sizes.k_len * ring.size,
    )  # fmt: skip
    scale, cap = checks.check_scale(softmax_scale, sizes.head_dim), checks.check_softcap(softcap)
    checks.check_dropout(dropout_p, dropout_seed)
    checks.check_seed(dropout_seed)
    for name, flag in (("deterministic", deterministic), ("return_lse", return_lse)):
        checks.check_flag(name, flag)
    checks.check_choice("transport", transport, TRANSPORTS)
    checks.check_sinks(_optional(sinks, "sinks"), sizes, device)
    checks.check_bias(_optional(bias, "bias"), sizes, plan.kv_seq_len, device)
    checks.check_alibi_slopes(_optional(alibi_slopes, "alibi_slopes"), sizes, device)
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise ValueError(
            "alibi_slopes have no gradient; pass alibi_slopes.detach(), or add a bias that has one"
        )
    q_ids, k_ids = (None, None) if segment_ids is None else checks.check_pair(segment_ids, sizes)
    for side, ids in (("queries", q_ids), ("keys", k_ids)):
        if ids is not None:
            checks.check_segment_ids(_described(ids, "segment_ids"), sizes, side, device)
    config = KernelConfig(kernel) if isinstance(kernel, str) else kernel
    if not isinstance(config, KernelConfig):
        raise ValueError(f"kernel must be a name or a KernelConfig, got {type(kernel).__name__}")
    checks.check_choice("kernel", config.name, KERNEL_NAMES)

    inputs = Inputs(q, k, v, q_ids, k_ids, sinks, bias, alibi_slopes)
    grad = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, k, v, sinks, bias)
    )
    request = Request(
        device=q.device.type, dtype=described[0].dtype, head_dim=sizes.head_dim,
        v_head_dim=sizes.v_head_dim,
        segment_ids=segment_ids is not None, softcap=cap is not None, bias=bias is not None,
        alibi=alibi_slopes is not None, dropout=dropout_p > 0, deterministic=deterministic,
        grad=grad,
        lse_grad=grad and return_lse,
    )  # fmt: skip
    choice = choose(config, request, plan)
    params = Params(
        rule, scale, cap, float(dropout_p), dropout_seed or 0, config.block_q, config.block_k,
        _boundaries(plan, q.device),
    )  # fmt: skip
    optional = {"sinks": sinks, "bias": bias, "alibi_slopes": alibi_slopes}
    facts = {
        "call": number,
        "q": list(q.shape), "k": list(k.shape), "v": list(v.shape), "dtype": described[0].dtype, "schedule": schedule,
        "mask": rule.describe(), "plan": plan.digest.hex(), "softmax_scale": scale, "softcap": cap,
        "dropout": [float(dropout_p), dropout_seed], "deterministic": deterministic, "return_lse": return_lse,
        "segment_ids": segment_ids is not None, "needs_grad": grad, "kernel": choice.kernel.capabilities.name,
        **{name: None if x is None else [*x.shape, str(x.dtype)] for name, x in optional.items()},
    }  # fmt: skip
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    needs_index = (
        bias is not None or alibi_slopes is not None or dropout_p > 0 or rule.predicate is not None
    )
    return (
        Call(
            ring, plan, params, choice.kernel, choice, q.dtype, wide, q.device, needs_index, facts
        ),
        inputs,
    )


def _boundaries(plan: Plan, device: torch.device) -> Tensor | None:
    if plan.mask.predicate is None or plan.boundaries is None:
        return None
    return torch.as_tensor(plan.boundaries, device=device)


def _described(x: object, name: str) -> checks.Tensor:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    return checks.Tensor(tuple(x.shape), str(x.dtype).removeprefix("torch."), str(x.device))


def _optional(x: object, name: str) -> checks.Tensor | None:
    return None if x is None else _described(x, name)

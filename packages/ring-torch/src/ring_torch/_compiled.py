"""The ring in the graphs of ``torch.compile``: two operations, which the compiler cannot look into.

What is static about a call goes into them as text; tensors, and the seed of dropout, which may
change from call to call, as themselves. Arguments are checked when a graph is traced.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from ring_core import Dealt, KernelConfig, Mask, Schedule
from ring_torch._autograd import backward_pass, forward_pass
from ring_torch._call import Call, Inputs, Options, check_call, keys_of, packing_of
from ring_torch._comm import Ring, ring_of
from ring_torch._gathered import keeps_gathered
from ring_torch._keys import Keys
from ring_torch._transport import ask_peers

#: What of :class:`Options` is written as it is.
PLAIN = (
    "causal", "window", "chunk_size", "cu_seqlens", "softmax_scale", "softcap", "dropout_p",
    "deterministic", "return_lse", "transport",
)  # fmt: skip
_OTHER_GROUP = (
    "the process group that this graph was compiled for is gone, or another one is the default "
    "group by now; compile it anew (torch.compiler.reset())"
)
MASK_FIELDS = ("causal", "window", "chunk_size", "cu_seqlens")


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]  # noqa: SLF001
def static_text(
    group: Any,
    schedule: Schedule,
    mask: Mask | None,
    kernel: str | KernelConfig,
    plain: tuple[Any, ...],
    grad: bool,
) -> str:
    """What is static about a call, as text, which the compiler takes for a constant."""
    ring = ring_of(group)
    ask_peers(ring)  # operations may not, while they are traced
    facts = {
        "group": None if ring.group is None else ring.group.group_name,
        "ranks": [ring.rank, ring.size],
        "schedule": schedule.chunks if isinstance(schedule, Dealt) else schedule,
        "grad": grad,
        "mask": None if mask is None else {name: getattr(mask, name) for name in MASK_FIELDS},
        "kernel": asdict(kernel) if isinstance(kernel, KernelConfig) else kernel,
        **dict(zip(PLAIN, plain, strict=True)),
    }
    return json.dumps(facts)


def _group(name: str) -> Any:
    """The process group of a name, which has no public way to it."""
    return distributed_c10d._resolve_process_group(distributed_c10d.GroupName(name))  # type: ignore[attr-defined] # noqa: SLF001


class _Static(NamedTuple):
    """The text, read."""

    group: str | None
    ranks: tuple[int, int]  # this one and how many, when the graph was traced
    schedule: Schedule
    grad: bool
    options: Options

    @property
    def ring(self) -> Ring:
        """The ranks; asked for anew, for a group may be gone and another have its name.

        Raises:
            ValueError: It is gone, or has other ranks.
        """
        try:
            ring = ring_of(None if self.group is None else _group(self.group))
        except RuntimeError as error:
            raise ValueError(f"{_OTHER_GROUP}: {error}") from error
        if (ring.rank, ring.size) != self.ranks:
            raise ValueError(_OTHER_GROUP)
        return ring


@lru_cache(maxsize=256)
def _read(text: str) -> _Static:
    facts: dict[str, Any] = _tuples(json.loads(text))
    name, ranks, schedule, grad = (facts.pop(x) for x in ("group", "ranks", "schedule", "grad"))
    mask, kernel = facts.pop("mask"), facts.pop("kernel")
    if mask is not None:
        mask = Mask(**_tuples(mask))
    if isinstance(schedule, tuple):
        schedule = Dealt(schedule)
    config = KernelConfig(**kernel) if isinstance(kernel, dict) else kernel
    return _Static(
        name, ranks, schedule, grad, Options(mask=mask, kernel=config, dropout_seed=None, **facts)
    )


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    """As they were before JSON made lists of them."""
    return {name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}


def _call(text: str, inputs: Inputs, seed: int | None, number: int) -> tuple[Call, Inputs]:
    """The call of an operation; segment ids have been told apart before."""
    static = _read(text)
    ids = None if inputs.q_ids is None or inputs.k_ids is None else (inputs.q_ids, inputs.k_ids)
    return check_call(
        static.ring, number, static.schedule, inputs.q, inputs.k, inputs.v,
        static.options._replace(dropout_seed=seed), segment_ids=ids, sinks=inputs.sinks,
        bias=inputs.bias, alibi_slopes=inputs.slopes, grad=static.grad,
    )  # fmt: skip


def attend_in_graph(
    group: Any,
    schedule: Schedule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    *,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``(out, lse)``, of an operation in the graph that is being traced."""
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise ValueError("alibi_slopes have no gradient; pass alibi_slopes.detach()")
    grad = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, k, v, sinks, bias)
    )
    q_ids, k_ids = (
        (segment_ids[0], segment_ids[1])
        if isinstance(segment_ids, (tuple, list))
        else (segment_ids, segment_ids)
    )
    static = (
        options.causal, options.window, options.chunk_size, options.cu_seqlens,
        options.softmax_scale, options.softcap, options.dropout_p, options.deterministic,
        options.return_lse, options.transport,
    )  # fmt: skip
    text = static_text(group, schedule, options.mask, options.kernel, static, grad)
    out, lse, _ = attention(
        q, k, v, q_ids, k_ids, sinks, bias, alibi_slopes, text, options.dropout_seed
    )
    return out, lse


@torch.library.custom_op("ring_torch::attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, q_ids: Tensor | None, k_ids: Tensor | None,
    sinks: Tensor | None, bias: Tensor | None, slopes: Tensor | None, text: str, seed: int | None,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """``(out, lse)`` of a call, and what its backward starts from."""
    given = Inputs(q, k, v, q_ids, k_ids, sinks, bias, slopes)
    call, inputs = _call(text, given, seed, _read(text).ring.next_call())
    out, lse, kept = forward_pass(call, inputs)
    return _owned(out), _owned(lse), [_owned(x) for x in kept]


def _owned(x: Tensor) -> Tensor:
    """A tensor that shares no memory, as operations have to return."""
    shared = x.untyped_storage().nbytes() > x.nbytes
    return x.clone() if shared else x


@attention.register_fake
def _attention_like(
    q: Tensor, k: Tensor, v: Tensor, q_ids: Tensor | None, k_ids: Tensor | None,
    sinks: Tensor | None, bias: Tensor | None, slopes: Tensor | None, text: str, seed: int | None,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Tensors of those shapes; what cannot be done is refused here."""
    given = Inputs(q, k, v, q_ids, k_ids, sinks, bias, slopes)
    call, inputs = _call(text, given, 0 if seed is not None else None, number=1)
    batch, length, heads, _ = q.shape
    out = q.new_empty(batch, length, heads, v.shape[3])
    lse = q.new_empty(batch, heads, length, dtype=call.wide)
    return out, lse, _kept_like(call, inputs)


def _kept_like(call: Call, inputs: Inputs) -> list[Tensor]:
    """Tensors like those that the forward leaves to the backward."""
    if call.transport == "p2p":
        travels = call.plan.num_steps > 1
        return [packing_of(keys_of(inputs)).buffer(call.device)] if travels else []
    groups = call.groups.forward
    keys = Keys.of(inputs, groups)
    if not keeps_gathered(call, keys):
        return []
    length = call.plan.gather(call.ring.rank).length
    both = [inputs.k.new_empty(keys.batch, length, keys.width) for _ in range(groups)]
    ids = [] if inputs.k_ids is None else [inputs.k_ids.new_empty(keys.batch, length)]
    return [*both, *ids]


@torch.library.custom_op("ring_torch::attention_backward", mutates_args=())
def attention_backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    q_ids: Tensor | None, k_ids: Tensor | None, sinks: Tensor | None, bias: Tensor | None,
    slopes: Tensor | None, out: Tensor, lse: Tensor, kept: list[Tensor], text: str,
    seed: int | None,
) -> list[Tensor]:  # fmt: skip
    """``[dq, dk, dv]``, and ``dsinks`` and ``dbias`` where there are sinks and a bias."""
    given = Inputs(q, k, v, q_ids, k_ids, sinks, bias, slopes)
    call, inputs = _call(text, given, seed, _read(text).ring.next_call())
    grads = backward_pass(call, inputs, (out, lse), kept, (dout, dlse))
    return [_owned(grad) for grad in grads if grad is not None]


@attention_backward.register_fake
def _attention_backward_like(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    q_ids: Tensor | None, k_ids: Tensor | None, sinks: Tensor | None, bias: Tensor | None,
    slopes: Tensor | None, out: Tensor, lse: Tensor, kept: list[Tensor], text: str,
    seed: int | None,
) -> list[Tensor]:  # fmt: skip
    """Tensors like the inputs."""
    del dout, dlse, q_ids, k_ids, slopes, out, lse, kept, text, seed
    return [x.new_empty(x.shape) for x in (q, k, v, sinks, bias) if x is not None]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    *tensors, ctx.text, ctx.seed = inputs
    out, lse, kept = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, out, lse, *kept)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # read once: checkpointing asks for it
    count = len(Inputs._fields)
    inputs, (out, lse, *kept) = Inputs(*saved[:count]), saved[count:]
    found = iter(attention_backward(dout, dlse, *inputs, out, lse, kept, ctx.text, ctx.seed))
    dq, dk, dv = next(found), next(found), next(found)
    dsinks = None if inputs.sinks is None else next(found)
    dbias = None if inputs.bias is None else next(found)
    return dq, dk, dv, None, None, dsinks, dbias, None, None, None


attention.register_autograd(_backward, setup_context=_setup)

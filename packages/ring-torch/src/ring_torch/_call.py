"""One call, checked: what the loops need to know, and the tensors they work on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ring_core import Dealt, Mask, Plan, Request, Schedule, UnsupportedError, checks, make_plan
from ring_core import KernelConfig as KernelConfig
from ring_core.choose.rates import default as rates_in_use
from ring_core.triton.tile_sizes import come_in_eights
from ring_torch._comm import Packing, Ring
from ring_torch._groups import ONE_GROUP, Groups, groups_of
from ring_torch._handshake import CallSignature
from ring_torch._held import is_capturing, on_device
from ring_torch._positions import key_runs, positions_of, query_runs
from ring_torch._transport import GATHERED, TRANSPORTS, choose_transport
from ring_torch.kernels import KERNEL_NAMES, Choice, choose
from ring_torch.kernels._api import Columns, Kernel, Params, Rows, head_group, wide

_LONGEST = 48  # characters of numbers in a message


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

    def share(self, n: int, groups: int) -> Inputs:
        """The same for the ``n``-th of so many groups of heads; without bias and slopes only."""
        assert groups == 1 or (self.bias is None and self.slopes is None)
        q, k, v = (head_group(x, n, groups, dim=2) for x in (self.q, self.k, self.v))
        return self._replace(q=q, k=k, v=v)


class Call(NamedTuple):
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
    needs_grad: bool
    transport: str
    groups: Groups  # of heads, over gathered keys
    number: int  # of the calls on this group
    forward_signature: CallSignature
    backward_signature: CallSignature
    prepare_lse_grad: Callable[[], Call] | None = None  # this call, if ``lse`` has a gradient

    @property
    def seed(self) -> int:
        """The seed of dropout, or 0."""
        return self.params.dropout_seed

    def with_lse_grad(self) -> Call:
        """The call whose backward takes a gradient of ``lse``: maybe with another kernel.

        Raises:
            UnsupportedError: The kernel that was named has none.
        """
        if self.kernel.capabilities.lse_grad or self.prepare_lse_grad is None:
            return self
        call = self.prepare_lse_grad()
        if self.transport == "p2p":  # what is sent does not depend on kernels
            call = call._replace(backward_signature=self.backward_signature)
        params = replace(call.params, dropout_seed=self.seed)
        return call._replace(number=self.number, params=params)

    def positions(self, rank: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Query indices, query positions, key positions of a rank, where an option needs them."""
        if not self.needs_index:
            return None, None, None
        return positions_of(self.plan, rank, self.device)

    def rows(self, inputs: Inputs) -> Rows:
        """This rank's queries."""
        index, position, _ = self.positions(self.ring.rank)
        slopes = None if inputs.slopes is None else torch.atleast_2d(inputs.slopes)
        runs = query_runs(self.plan, self.ring.rank) if self.needs_index else ()
        return Rows(inputs.q, index, position, inputs.q_ids, inputs.bias, slopes, runs)

    def columns(self, rank: int, tensors: Sequence[Tensor]) -> Columns:
        """The keys of a rank from ``k``, ``v`` and, where there are any, segment ids."""
        segments = tensors[2] if len(tensors) > 2 else None
        eights = self.needs_index and _come_in_eights(self.plan, rank)
        runs = key_runs(self.plan, rank) if self.needs_index else ()
        return Columns(tensors[0], tensors[1], self.positions(rank)[2], segments, eights, runs)


def keys_of(inputs: Inputs) -> list[Tensor]:
    """What travels round the ring."""
    return [inputs.k, inputs.v, *([] if inputs.k_ids is None else [inputs.k_ids])]


def packing_of(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Packing:
    """One message that holds tensors like these, in another dtype if one is given."""
    return Packing.of(*((x.shape, dtype or x.dtype) for x in tensors))


class Options(NamedTuple):
    """A call's options beside tensors, as given."""

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    chunk_size: int | None = None
    cu_seqlens: Sequence[int] | None = None
    mask: Mask | Tensor | None = None  # no tensor once the bias says it
    softmax_scale: float | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    dropout_seed: int | None = None
    deterministic: bool = False
    return_lse: bool = False
    kernel: str | KernelConfig = "auto"
    transport: str = "auto"
    bias_masks: bool = False  # the bias says a mask that was a tensor


def check_call(
    ring: Ring,
    number: int,
    schedule: Schedule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    *,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    grad: bool | None = None,
) -> tuple[Call, Inputs]:
    """Check all arguments of a call, plan it and choose its kernel; nothing is sent.

    ``number`` is the call's, from :meth:`Ring.next_call`. ``grad`` says whether there will be a
    backward; ``None`` asks the tensors.

    Raises:
        ValueError: An argument is malformed.
        UnsupportedError: No kernel, or not the one named, can do the call, or it is captured into a
            CUDA graph with an option or a kernel that a graph cannot hold.
    """
    q_ids, k_ids = None, None
    if segment_ids is not None:
        sizes = checks.check_qkv(
            *(_fact(x, name).described() for x, name in zip((q, k, v), "qkv", strict=True))
        )
        q_ids, k_ids = checks.check_pair(segment_ids, sizes)
        for ids in (q_ids, k_ids):
            _fact(ids, "segment_ids")
    inputs = Inputs(q, k, v, q_ids, k_ids, sinks, bias, alibi_slopes)
    names = ("segment_ids", "segment_ids", "sinks", "bias", "alibi_slopes")
    if grad is None:
        grad = torch.is_grad_enabled() and any(
            isinstance(x, Tensor) and x.requires_grad for x in (q, k, v, sinks, bias)
        )
        bias_grad = grad and isinstance(bias, Tensor) and bias.requires_grad
    else:
        bias_grad = grad and bias is not None
    seed, options = options.dropout_seed, _keyed(options)
    facts = (
        *(_fact(x, name) for x, name in zip((q, k, v), "qkv", strict=True)),
        *(None if x is None else _fact(x, name) for x, name in zip(inputs[3:], names, strict=True)),
    )
    types = tuple(map(type, options))
    given = (ring, schedule, facts, options, types, (grad, bias_grad), number > 0)
    try:
        hash(given)
    except TypeError:
        prepare = _prepare.__wrapped__
    else:
        prepare = _prepare
    with on_device(q.device):
        call = prepare(*given)
    if grad and options.return_lse:
        call = call._replace(prepare_lse_grad=partial(prepare, *given, lse_grad=True))
    if is_capturing():
        _check_capture(call)
    if call.params.dropout_p > 0 and seed is not None:
        call = call._replace(params=replace(call.params, dropout_seed=seed))
    return call._replace(number=number), inputs


def _keyed(options: Options) -> Options:
    """Options as calls are known again by: one mask, whatever gave it, and no seed.

    Raises:
        ValueError: One of these is malformed.
    """
    given: Any = options.mask  # whatever else it is is refused
    mask = checks.check_mask(
        given, causal=options.causal, window=options.window, chunk_size=options.chunk_size,
        cu_seqlens=options.cu_seqlens,
    )  # fmt: skip
    checks.check_dropout(options.dropout_p, options.dropout_seed)
    checks.check_seed(options.dropout_seed)
    return options._replace(
        causal=False, window=None, chunk_size=None, cu_seqlens=None, mask=mask, dropout_seed=None
    )


def _check_capture(call: Call) -> None:
    """Refuse what a CUDA graph cannot hold.

    Raises:
        UnsupportedError: Positions come from the host, where a seed would be frozen, too, or the
            kernel looks at numbers there.
    """
    if call.needs_index:
        raise UnsupportedError(
            "bias, masks that are tensors or predicates, alibi_slopes and dropout_p cannot be "
            "captured into a CUDA graph. Instead: leave the call out of the graph, or the option out of the call"
        )
    if call.kernel.capabilities.name == "eager":
        raise UnsupportedError(
            "kernel 'eager' looks at numbers on the host, so it cannot be captured into a CUDA "
            "graph. Instead: leave the call out of the graph, or use kernel='triton'"
        )


class Fact(NamedTuple):
    """What is static about a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def described(self) -> checks.Tensor:
        """As the checks take it."""
        return checks.Tensor(self.shape, str(self.dtype).removeprefix("torch."), str(self.device))


@lru_cache(maxsize=256)
def _prepare(
    ring: Ring,
    schedule: Schedule,
    facts: tuple[Fact | None, ...],
    options: Options,
    types: tuple[type, ...],
    grads: tuple[bool, bool],
    probe: bool,
    *,
    lse_grad: bool = False,
) -> Call:
    """Check what is static about a call, plan it and choose its kernel: once for equal calls."""
    del types  # it only tells calls apart: equal options of unlike types are not the same
    grad, bias_grad = grads  # of anything, and of the bias
    q, *rest = (None if fact is None else fact.described() for fact in facts)
    k, v, q_ids, k_ids, sinks, bias, slopes = rest
    assert q is not None and k is not None and v is not None and facts[0] is not None
    sizes, device = checks.check_qkv(q, k, v), facts[0].device
    if device.type == "meta":
        raise ValueError("q, k and v are on the meta device, where tensors hold no numbers")
    assert isinstance(options.mask, Mask)
    plan = make_plan(
        options.mask, seq_len=sizes.q_len * ring.size, cp_size=ring.size, schedule=schedule,
        kv_seq_len=sizes.k_len * ring.size,
    )  # fmt: skip
    scale = checks.check_scale(options.softmax_scale, sizes.head_dim)
    cap = checks.check_softcap(options.softcap)
    for name in ("deterministic", "return_lse"):
        checks.check_flag(name, getattr(options, name))
    checks.check_choice("transport", options.transport, TRANSPORTS)
    checks.check_sinks(sinks, sizes, q.device)
    checks.check_bias(bias, sizes, plan.kv_seq_len, q.device)
    checks.check_alibi_slopes(slopes, sizes, q.device)
    if facts[-1] is not None and facts[-1].requires_grad:
        raise ValueError(
            "alibi_slopes have no gradient; pass alibi_slopes.detach(), or add a bias that has one"
        )
    for side, ids in (("queries", q_ids), ("keys", k_ids)):
        if ids is not None:
            checks.check_segment_ids(ids, sizes, side, q.device)
    config = _config(options.kernel)
    request = Request(
        device=device.type, dtype=q.dtype, head_dim=sizes.head_dim, v_head_dim=sizes.v_head_dim,
        segment_ids=q_ids is not None, softcap=cap is not None, bias=bias is not None,
        alibi=slopes is not None, dropout=options.dropout_p > 0,
        deterministic=options.deterministic, any_scale=scale <= 0,
        grad=grad, lse_grad=lse_grad,
        batch=sizes.batch, q_heads=sizes.q_heads, kv_heads=sizes.kv_heads,
    )  # fmt: skip
    choice = choose(config, request, plan)
    widths = (
        sizes.q_heads * sizes.head_dim, sizes.kv_heads * (sizes.head_dim + sizes.v_head_dim),
        facts[0].dtype.itemsize,
    )  # fmt: skip
    transport = choose_transport(options.transport, ring, plan, device, widths=widths, probe=probe)
    params = Params(
        plan.mask, scale, cap, float(options.dropout_p), 0, config.block_q,
        config.block_k, bool(config.fused_backward), _boundaries(plan, device), plan.blocks,
        options.deterministic, bias_grad, options.bias_masks,
    )  # fmt: skip
    shapes = zip(
        ("q", "k", "v", "sinks", "bias", "alibi_slopes"),
        (q, k, v, sinks, bias, slopes),
        strict=True,
    )
    fields = {
        "schedule": str(schedule), "mask": plan.mask.describe(), "plan": plan.digest.hex(),
        "cu_seqlens": _in_words(plan.mask.cu_seqlens),
        "chunks": _in_words(schedule.chunks) if isinstance(schedule, Dealt) else None,
        "softmax_scale": scale, "softcap": cap,
        "dropout_p": float(options.dropout_p),
        "deterministic": options.deterministic, "return_lse": options.return_lse,
        "segment_ids": q_ids is not None, "needs_grad": grad, "bias_grad": bias_grad,
        "kernel": choice.kernel.capabilities.name, "rates": rates_in_use().digest,
        "transport": transport,
        **{name: None if x is None else [*x.shape, x.dtype] for name, x in shapes},
    }  # fmt: skip
    needs_index = (
        bias is not None or slopes is not None or options.dropout_p > 0
        or plan.mask.predicate is not None
    )  # fmt: skip
    groups = ONE_GROUP
    if (
        transport in GATHERED and choice.kernel.capabilities.bands == "any"
        and not needs_index and q_ids is None
    ):  # fmt: skip
        groups = groups_of(plan, sizes, facts[0].dtype.itemsize)
    return Call(
        ring, plan, params, choice.kernel, choice, facts[0].dtype, wide(facts[0].dtype), device,
        needs_index, grad, transport, groups, 0, CallSignature.of(fields, "forward"),
        CallSignature.of(fields, "backward"),
    )  # fmt: skip


def _in_words(numbers: tuple[object, ...] | None) -> str | None:
    """Numbers that differ between ranks, short enough for a message: the first, and a digest."""
    if numbers is None:
        return None
    text = str(numbers)
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... (all: {digest})"


def _config(kernel: str | KernelConfig) -> KernelConfig:
    config = KernelConfig(kernel) if isinstance(kernel, str) else kernel
    if not isinstance(config, KernelConfig):
        raise ValueError(f"kernel must be a name or a KernelConfig, got {type(kernel).__name__}")
    checks.check_choice("kernel", config.name, KERNEL_NAMES)
    return config


@lru_cache(maxsize=256)
def _come_in_eights(plan: Plan, rank: int) -> bool:
    return come_in_eights(plan.k_positions(rank))


def _boundaries(plan: Plan, device: torch.device) -> Tensor | None:
    if plan.mask.predicate is None or plan.boundaries is None:
        return None
    with torch.inference_mode(mode=False):  # calls that train share them
        return torch.as_tensor(plan.boundaries, device=device)


def _fact(x: object, name: str) -> Fact:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise ValueError(f"{name} must be a dense tensor, got a {kind} one")
    if isinstance(x, DTensor):
        raise ValueError(f"{name} must be this rank's shard, got a DTensor; pass {name}.to_local()")
    return Fact(tuple(map(int, x.shape)), x.dtype, x.device, x.requires_grad)

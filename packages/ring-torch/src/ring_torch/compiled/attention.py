"""Attention in the graphs of ``torch.compile``: operations that the compiler cannot look into.

An operation takes a call's tensors as a list, numbers that may change from call to call (windows,
chunks, documents, seeds) as another, and all the rest as one text: a graph is compiled once for
all numbers. What these cannot change is checked when a graph is traced, the rest when it runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ring_core import LayoutSpec, Mask, checks
from ring_core.base.config import strategy_config
from ring_torch.autograd import backward_pass, forward_pass, saved_shapes
from ring_torch.call import Call
from ring_torch.capture import as_own
from ring_torch.comm.ranks import Ranks, ranks_of
from ring_torch.compiled.static import group_fields, ranks_named, read, written
from ring_torch.derivatives import check_backward, refuse_batch
from ring_torch.options import CallOptions
from ring_torch.prepare import check_call
from ring_torch.records import Inputs
from ring_torch.strategies import ask_ranks, strategy_names

_LOW = (1 << 32) - 1

#: Options whose numbers may change without compiling anew: what a plan depends on, and the seed.
_VARYING = ("window", "chunk_size", "cu_seqlens", "dropout_seed")


def attend_in_graph(
    q: Tensor, k: Tensor, v: Tensor, group: Any, layout: LayoutSpec, options: CallOptions
) -> tuple[Tensor, Tensor]:
    """``(out, lse)``, of an operation in the graph that is being traced."""
    slopes = options.alibi_slopes
    if slopes is not None and slopes.requires_grad:
        raise ValueError("alibi_slopes have no gradient; pass alibi_slopes.detach()")
    if q.ndim == k.ndim == 4:  # else refused for that
        checks.check_causal(options.causal, q.shape[1], k.shape[1])
    grad = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, k, v, options.sinks, options.bias)
    )
    tensors: list[Tensor] = [q, k, v]
    numbers: list[int] = []
    fields = [
        written(x, tensors, numbers if name in _VARYING else None)
        for name, x in zip(CallOptions._fields, _as_operands(options), strict=True)
    ]
    text = static_text(group, written(layout), fields, grad)
    out, lse, _ = attention(tensors, numbers, text)
    return out, lse


def _as_operands(options: CallOptions) -> CallOptions:
    """Options whose numbers an operation can take; traced, so there is no look at a number.

    A mask is its four options, documents in an array are a tensor of their own, and a seed is two
    numbers of 32 bits, for as one it may exceed an int64.
    """
    if isinstance(options.mask, Mask):
        mask = options.mask
        if options.causal or any(
            x is not None for x in (options.window, options.chunk_size, options.cu_seqlens)
        ):
            raise ValueError(
                "mask was given together with options that it has, too; put them there"
            )
        options = options._replace(
            mask=None, causal=mask.causal, window=mask.window, chunk_size=mask.chunk_size,
            cu_seqlens=mask.cu_seqlens,
        )  # fmt: skip
    window, documents, seed = options.window, options.cu_seqlens, options.dropout_seed
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise ValueError(
                "window must be a pair (left, right); for the last W tokens, (W - 1, 0)"
            )
        if window[0] is None and window[1] is None:
            options = options._replace(window=None)
    is_sequence = isinstance(documents, (tuple, list))
    offsets: Any = documents
    if is_sequence and any(isinstance(x, (np.ndarray, np.generic, Tensor)) for x in offsets):
        offsets, is_sequence = torch.stack([torch.as_tensor(x) for x in offsets]), False
    if offsets is not None and not is_sequence:
        array = torch.as_tensor(offsets)
        if array.device.type != "cpu":
            raise ValueError(
                "cu_seqlens must be known on the host: pass cu_seqlens.cpu(), or segment_ids"
            )
        own: Any = array.clone()  # the given one may be refilled
        options = options._replace(cu_seqlens=own)
    if isinstance(seed, int) and not isinstance(seed, bool):  # which is refused for that
        halves: Any = (seed & _LOW, seed >> 32)
        options = options._replace(dropout_seed=halves)
    return options


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]  # noqa: SLF001
def static_text(group: Any, layout: Any, options: list[Any], grad: bool) -> str:
    """Write down what is static about a call, as text, which the compiler takes for a constant.

    The layout and the options have been written for that (:mod:`ring_torch.compiled.static`).
    """
    ranks = ranks_of(group)
    ask_ranks(ranks)  # operations may not, while they are traced
    facts = {**group_fields(ranks), "layout": layout, "options": options, "grad": grad}
    return json.dumps(facts)


class _Static(NamedTuple):
    """The text, read."""

    group: str | None
    place: tuple[int, int]  # this rank and how many, when the graph was traced
    layout: LayoutSpec
    fields: list[Any]  # of the options, as written
    grad: bool

    @property
    def ranks(self) -> Ranks:
        """The ranks; asked for anew, for a group may be gone and another have its name.

        Raises:
            ValueError: It is gone, or has other ranks.
        """
        return ranks_named(self.group, self.place)

    def options(self, tensors: Sequence[Any], numbers: Sequence[int] | None) -> CallOptions:
        """Return the options, with their tensors and numbers, or zeros for numbers not known."""
        options = CallOptions(*[read(x, tensors, numbers) for x in self.fields])
        halves: Any = options.dropout_seed
        if isinstance(halves, tuple):
            options = options._replace(dropout_seed=halves[1] << 32 | halves[0])
        return options

    @property
    def plan_known(self) -> bool:
        """Whether there are no numbers that the plan depends on, which no compiler knows."""
        fields = CallOptions(*self.fields)
        return fields.window is None and fields.chunk_size is None and fields.cu_seqlens is None

    def differentiable(self, tensors: Sequence[Tensor]) -> list[int]:
        """Return the places of the tensors that get gradients: q, k, v, sinks and the bias."""
        places: Any = self.options(range(len(tensors)), None)
        return [0, 1, 2, *(n for n in (places.sinks, places.bias) if n is not None)]


@lru_cache(maxsize=256)
def _read(text: str) -> _Static:
    facts: dict[str, Any] = json.loads(text)
    return _Static(
        facts["group"], tuple(facts["ranks"]), read(facts["layout"]), facts["options"],
        facts["grad"],
    )  # fmt: skip


class _Identity(NamedTuple):
    """Numbers that a forward leaves to its backward: which call it is, and how it is checked."""

    number: int
    every: int  # as ring_torch.check said when the forward ran
    checked: int

    @classmethod
    def of(cls, call: Call) -> _Identity:
        return cls(call.number, call.check_every, call.checked)


def _call(
    text: str, tensors: Sequence[Tensor], numbers: Sequence[int] | None, number: int,
    check: tuple[int, int] | None = None,
) -> tuple[Call, Inputs]:  # fmt: skip
    """The call of an operation; ``check`` is that of the forward, in its backward.

    Where numbers are not known, while a graph is traced, it is the call that shows most.

    How keys travel may not depend on numbers that the compiler does not know, for what the forward
    leaves to the backward does: ``auto`` decides as if there were none.
    """
    static, (q, k, v) = _read(text), tensors[:3]
    options = static.options(tensors, numbers)

    def checked(options: CallOptions) -> tuple[Call, Inputs]:
        given: Any = options.mask  # whatever it is is refused, for the trace has read a Mask
        mask = checks.check_mask(
            given, causal=options.causal, window=options.window,
            chunk_size=options.chunk_size, cu_seqlens=options.cu_seqlens,
        )  # fmt: skip
        options = _widest(options)._replace(causal=False, mask=mask)
        return check_call(
            static.ranks, number, static.layout, q, k, v, options, grad=static.grad, check=check
        )

    if numbers is None:
        return checked(_widest(options))
    named = (strategy_config(options.strategy, strategy_names()).name, options.transport)
    if not static.plan_known and "auto" in named:
        widest = checked(_widest(options))[0]
        options = options._replace(strategy=widest.strategy.name, transport=widest.transport.name)
    return checked(options)


def _widest(options: CallOptions) -> CallOptions:
    """The same without numbers that the plan depends on, which show more then."""
    return options._replace(window=None, chunk_size=None, cu_seqlens=None)


@torch.library.custom_op("ring_torch::attention", mutates_args=())
def attention(
    tensors: Sequence[Tensor], numbers: Sequence[int], text: str
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """``(out, lse)`` of a call, and what its backward starts from."""
    static = _read(text)
    call, inputs = _call(text, tensors, numbers, static.ranks.next_call())
    out, lse, saved = forward_pass(call, inputs)
    shapes = saved_shapes(call, inputs, plan_known=static.plan_known)
    rest = [inputs.q.new_empty(shape, dtype=dtype) for shape, dtype in shapes[len(saved) :]]
    if call.needs_grad:
        rest.append(torch.tensor(_Identity.of(call), dtype=torch.int64, device="cpu"))
    # Operations return as many tensors each time, which share no memory.
    return as_own(out), as_own(lse), [*(as_own(x) for x in saved[: len(shapes)]), *rest]


@attention.register_fake
def _attention_like(
    tensors: Sequence[Tensor], numbers: Sequence[int], text: str
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Tensors of those shapes; what no number can make right is refused here."""
    del numbers
    call, inputs = _call(text, tensors, None, number=1)
    q, _, v, *_ = inputs
    batch, length, heads, _ = q.shape
    out = q.new_empty(batch, length, heads, v.shape[3])
    lse = q.new_empty(batch, heads, length, dtype=call.acc_dtype)
    shapes = saved_shapes(call, inputs, plan_known=_read(text).plan_known)
    saved = [q.new_empty(shape, dtype=dtype) for shape, dtype in shapes]
    if call.needs_grad:
        saved.append(torch.empty(len(_Identity._fields), dtype=torch.int64, device="cpu"))
    return out, lse, saved


@torch.library.custom_op("ring_torch::attention_backward", mutates_args=())
def attention_backward(
    grads: Sequence[Tensor | None], results: Sequence[Tensor], tensors: Sequence[Tensor],
    numbers: Sequence[int], text: str,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, and of sinks and bias where there are any.

    ``grads`` are those of ``out`` and ``lse``, with which ``results`` begins; what the forward left
    follows.
    """
    check_backward()  # AOTAutograd does not refuse where it has saved nothing that needs a gradient
    (dout, dlse), (out, lse, *saved, identity) = grads, results
    forward = _Identity(*identity.tolist())
    call, inputs = _call(text, tensors, numbers, forward.number, (forward.every, forward.checked))
    found = backward_pass(call, inputs, (out, lse), tuple(saved), (dout, dlse))
    return [as_own(grad) for grad in found if grad is not None]


@attention_backward.register_fake
def _attention_backward_like(
    grads: Sequence[Tensor | None], results: Sequence[Tensor], tensors: Sequence[Tensor],
    numbers: Sequence[int], text: str,
) -> list[Tensor]:  # fmt: skip
    del grads, results, numbers
    places = _read(text).differentiable(tensors)
    return [tensors[n].new_empty(tensors[n].shape) for n in places]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    tensors, ctx.numbers, ctx.text = inputs
    out, lse, saved = output
    ctx.count = len(tensors)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, out, lse, *saved)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any) -> tuple[Any, ...]:
    check_backward(dout, dlse)
    saved = ctx.saved_tensors  # read once: checkpointing asks for it
    tensors, results = list(saved[: ctx.count]), list(saved[ctx.count :])
    found = attention_backward([dout, dlse], results, tensors, ctx.numbers, ctx.text)
    grads: list[Tensor | None] = [None] * ctx.count
    for place, grad in zip(_read(ctx.text).differentiable(tensors), found, strict=True):
        grads[place] = grad
    return grads, None if ctx.numbers else [], None  # torch takes an empty list for one of tensors


attention.register_autograd(_backward, setup_context=_setup)

attention.register_vmap(refuse_batch)
attention_backward.register_vmap(refuse_batch)
# The vmap of is_grads_batched=True is another one, with a dispatch key of its own.
_LIBRARY = torch.library.Library("ring_torch", "FRAGMENT")
_LIBRARY.impl("attention_backward", refuse_batch, "Batched")

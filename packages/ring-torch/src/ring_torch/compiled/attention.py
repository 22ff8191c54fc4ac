"""Attention in the graphs of ``torch.compile``: operations that the compiler cannot look into.

What is static about a call goes into them as text; tensors, and numbers that may change from call
to call (windows, chunks, documents, seeds), as themselves: a graph is compiled once for all of
them. What these numbers cannot change is checked when a graph is traced, the rest when it runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_core import (
    KernelConfig,
    LayoutSpec,
    Mask,
    StrategyConfig,
    checks,
)
from ring_core.base.config import strategy_config
from ring_torch.autograd import backward_pass, forward_pass, saved_shapes
from ring_torch.call import Call, Operands, Options
from ring_torch.capture import as_own
from ring_torch.comm.ranks import Ranks, ranks_of
from ring_torch.compiled.static import fields_of, group_fields, layout_of, ring_of
from ring_torch.derivatives import check_backward, refuse_batch
from ring_torch.prepare import check_call
from ring_torch.records import GIVEN, Inputs
from ring_torch.strategies import ask_ranks, strategy_names

_LOW = (1 << 32) - 1

#: What of :class:`Options` is static, and written as it is.
PLAIN = ("causal", "deterministic", "return_lse", "transport", "bias_masks", "bias_adds")


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]  # noqa: SLF001
def static_text(
    group: Any,
    layout: str | list[list[int]],
    kernel: str | list[Any],
    strategy: str | list[Any],
    plain: tuple[Any, ...],
    grad: bool,
) -> str:
    """Write down what is static about a call, as text, which the compiler takes for a constant.

    Layout, kernel and strategy are names, or what :func:`fields_of` reads of their records.
    """
    ring = ranks_of(group)
    ask_ranks(ring)  # operations may not, while they are traced
    return json.dumps({
        **group_fields(ring),
        "layout": layout,
        "grad": grad,
        "kernel": kernel,
        "strategy": strategy,
        **dict(zip(PLAIN, plain, strict=True)),
    })  # fmt: skip


class Numbers(NamedTuple):
    """What may change from call to call without compiling anew, but for the floats."""

    left: int | None
    right: int | None
    chunk_size: int | None
    offsets: Sequence[int] | None
    documents: Tensor | None  # the same, of a tensor
    softmax_scale: float | None
    softcap: float | None
    dropout_p: float
    seed_low: int | None  # 32 bits: as one number it may exceed an int64
    seed_high: int

    @property
    def has_plan_numbers(self) -> bool:
        """Whether there are numbers that the plan depends on, and no compiler knows."""
        return any(x is not None for x in self[:5])

    @property
    def seed(self) -> int | None:
        """The seed of dropout."""
        return None if self.seed_low is None else self.seed_high << 32 | self.seed_low


class _Static(NamedTuple):
    """The text, read."""

    group: str | None
    ranks: tuple[int, int]  # this one and how many, when the graph was traced
    layout: LayoutSpec
    grad: bool
    kernel: str | KernelConfig
    strategy: str | StrategyConfig
    plain: dict[str, Any]

    @property
    def ring(self) -> Ranks:
        """The ranks; asked for anew, for a group may be gone and another have its name.

        Raises:
            ValueError: It is gone, or has other ranks.
        """
        return ring_of(self.group, self.ranks)

    def options(self, numbers: Numbers) -> Options:
        window = (numbers.left, numbers.right)
        documents: Any = numbers.offsets if numbers.documents is None else numbers.documents
        plain = dict(self.plain)
        mask = checks.check_mask(
            None, causal=plain.pop("causal"), window=None if window == (None, None) else window,
            chunk_size=numbers.chunk_size, cu_seqlens=documents,
        )  # fmt: skip
        return Options(
            mask=mask, softmax_scale=numbers.softmax_scale,
            softcap=numbers.softcap, dropout_p=numbers.dropout_p, dropout_seed=numbers.seed,
            kernel=self.kernel, strategy=self.strategy, **plain,
        )  # fmt: skip


@lru_cache(maxsize=256)
def _read(text: str) -> _Static:
    facts: dict[str, Any] = json.loads(text)
    kernel, strategy = facts["kernel"], facts["strategy"]
    config = KernelConfig(*kernel) if isinstance(kernel, list) else kernel
    strategy = StrategyConfig(*strategy) if isinstance(strategy, list) else strategy
    return _Static(
        facts["group"], tuple(facts["ranks"]), layout_of(facts["layout"]), facts["grad"], config, strategy,
        {name: facts[name] for name in PLAIN},
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
    text: str, inputs: Inputs, numbers: Numbers, number: int, check: tuple[int, int] | None = None
) -> tuple[Call, Inputs]:
    """The call of an operation; segment ids have been told apart before.

    ``check`` is that of the forward, in its backward.

    How keys travel may not depend on numbers that the compiler does not know, for what the forward
    leaves to the backward does: ``auto`` decides as if there were none.
    """
    static = _read(text)
    q, k, v, q_ids, k_ids, sinks, bias, slopes, _ = inputs
    ids = None if q_ids is None or k_ids is None else (q_ids, k_ids)
    x = Operands(q, k, v, ids, sinks, bias, slopes)

    def checked(options: Options) -> tuple[Call, Inputs]:
        return check_call(
            static.ring, number, static.layout, x, options, grad=static.grad, check=check
        )

    options = static.options(numbers)
    named = (strategy_config(options.strategy, strategy_names()).name, options.transport)
    if numbers.has_plan_numbers and "auto" in named:
        widest = checked(static.options(_widest(numbers)))[0]
        options = options._replace(strategy=widest.strategy.name, transport=widest.transport.name)
    return checked(options)


def _widest(numbers: Numbers) -> Numbers:
    """The same without those that the plan depends on, which show more then."""
    return numbers._replace(left=None, right=None, chunk_size=None, offsets=None, documents=None)


def attend_in_graph(
    group: Any, layout: LayoutSpec, x: Operands, options: Options
) -> tuple[Tensor, Tensor]:
    """``(out, lse)``, of an operation in the graph that is being traced."""
    q, k, v, segment_ids, sinks, bias, alibi_slopes = x
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise ValueError("alibi_slopes have no gradient; pass alibi_slopes.detach()")
    grad = torch.is_grad_enabled() and any(
        y is not None and y.requires_grad for y in (q, k, v, sinks, bias)
    )
    q_ids, k_ids = (
        (segment_ids[0], segment_ids[1])
        if isinstance(segment_ids, (tuple, list))
        else (segment_ids, segment_ids)
    )
    if q.ndim == k.ndim == 4:  # else refused for that
        checks.check_causal(options.causal, q.shape[1], k.shape[1])
    causal, numbers = _numbers(options)
    plain = (
        causal, options.deterministic, options.return_lse, options.transport, options.bias_masks,
        options.bias_adds,
    )  # fmt: skip
    text = static_text(
        group, fields_of(layout), fields_of(options.kernel), fields_of(options.strategy), plain,
        grad,
    )  # fmt: skip
    out, lse, _ = attention(q, k, v, q_ids, k_ids, sinks, bias, alibi_slopes, text, *numbers)
    return out, lse


def _numbers(options: Options) -> tuple[bool, Numbers]:
    """Whether a call is causal, and what may change; traced, so there is no look at a number."""
    rule: Options | Mask = options
    if isinstance(options.mask, Mask):
        if options.causal or any(
            x is not None for x in (options.window, options.chunk_size, options.cu_seqlens)
        ):
            raise ValueError(
                "mask was given together with options that it has, too; put them there"
            )
        rule = options.mask
    window = (None, None) if rule.window is None else rule.window
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError("window must be a pair (left, right); for the last W tokens, (W - 1, 0)")
    offsets: Any = rule.cu_seqlens
    documents = None
    if offsets is not None and not isinstance(offsets, (tuple, list)):
        documents = torch.as_tensor(offsets)
        if documents.device.type != "cpu":
            raise ValueError(
                "cu_seqlens must be known on the host: pass cu_seqlens.cpu(), or segment_ids"
            )
        offsets, documents = None, documents.clone()  # the given one may be refilled
    seed = options.dropout_seed
    return rule.causal, Numbers(
        window[0], window[1], rule.chunk_size, None if offsets is None else list(offsets),
        documents, options.softmax_scale, options.softcap, options.dropout_p,
        None if seed is None else seed & _LOW, 0 if seed is None else seed >> 32,
    )  # fmt: skip


@torch.library.custom_op("ring_torch::attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, q_ids: Tensor | None, k_ids: Tensor | None,
    sinks: Tensor | None, bias: Tensor | None, slopes: Tensor | None, text: str, left: int | None,
    right: int | None, chunk_size: int | None, offsets: Sequence[int] | None,
    documents: Tensor | None, scale: float | None, softcap: float | None, dropout_p: float,
    seed_low: int | None, seed_high: int,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """``(out, lse)`` of a call, and what its backward starts from."""
    numbers = Numbers(
        left, right, chunk_size, offsets, documents, scale, softcap, dropout_p, seed_low, seed_high
    )
    call, inputs = _call(
        text, Inputs(q, k, v, q_ids, k_ids, sinks, bias, slopes), numbers,
        _read(text).ring.next_call(),
    )  # fmt: skip
    out, lse, saved = forward_pass(call, inputs)
    shapes = saved_shapes(call, inputs, plan_known=not numbers.has_plan_numbers)
    rest = [q.new_empty(shape, dtype=dtype) for shape, dtype in shapes[len(saved) :]]
    if call.needs_grad:
        rest.append(torch.tensor(_Identity.of(call), dtype=torch.int64, device="cpu"))
    # Operations return as many tensors each time, which share no memory.
    return as_own(out), as_own(lse), [*(as_own(x) for x in saved[: len(shapes)]), *rest]


@attention.register_fake
def _attention_like(
    q: Tensor, k: Tensor, v: Tensor, q_ids: Tensor | None, k_ids: Tensor | None,
    sinks: Tensor | None, bias: Tensor | None, slopes: Tensor | None, text: str, left: int | None,
    right: int | None, chunk_size: int | None, offsets: Sequence[int] | None,
    documents: Tensor | None, scale: float | None, softcap: float | None, dropout_p: float,
    seed_low: int | None, seed_high: int,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Tensors of those shapes; what no number can make right is refused here."""
    del seed_high
    numbers = Numbers(
        left, right, chunk_size, offsets, documents, scale, softcap, dropout_p,
        None if seed_low is None else 0, 0,
    )  # fmt: skip
    call, inputs = _call(
        text, Inputs(q, k, v, q_ids, k_ids, sinks, bias, slopes), _widest(numbers), number=1
    )
    batch, length, heads, _ = q.shape
    out = q.new_empty(batch, length, heads, v.shape[3])
    lse = q.new_empty(batch, heads, length, dtype=call.acc_dtype)
    shapes = saved_shapes(call, inputs, plan_known=not numbers.has_plan_numbers)
    saved = [q.new_empty(shape, dtype=dtype) for shape, dtype in shapes]
    if call.needs_grad:
        saved.append(torch.empty(len(_Identity._fields), dtype=torch.int64, device="cpu"))
    return out, lse, saved


@torch.library.custom_op("ring_torch::attention_backward", mutates_args=())
def attention_backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    q_ids: Tensor | None, k_ids: Tensor | None, sinks: Tensor | None, bias: Tensor | None,
    slopes: Tensor | None, out: Tensor, lse: Tensor, saved: list[Tensor], text: str,
    left: int | None, right: int | None, chunk_size: int | None, offsets: Sequence[int] | None,
    documents: Tensor | None, scale: float | None, softcap: float | None, dropout_p: float,
    seed_low: int | None, seed_high: int,
) -> list[Tensor]:  # fmt: skip
    """``[dq, dk, dv]``, and ``dsinks`` and ``dbias`` where there are sinks and a bias."""
    check_backward()  # AOTAutograd does not refuse where it has saved nothing that needs a gradient
    *saved, numbers_of_forward = saved
    forward = _Identity(*numbers_of_forward.tolist())
    call, inputs = _call(
        text, Inputs(q, k, v, q_ids, k_ids, sinks, bias, slopes),
        Numbers(
            left, right, chunk_size, offsets, documents, scale, softcap, dropout_p, seed_low, seed_high
        ),
        forward.number, (forward.every, forward.checked),
    )  # fmt: skip
    grads = backward_pass(call, inputs, (out, lse), tuple(saved), (dout, dlse))
    return [as_own(grad) for grad in grads if grad is not None]


@attention_backward.register_fake
def _attention_backward_like(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    q_ids: Tensor | None, k_ids: Tensor | None, sinks: Tensor | None, bias: Tensor | None,
    slopes: Tensor | None, out: Tensor, lse: Tensor, saved: list[Tensor], text: str,
    *numbers: Any,
) -> list[Tensor]:  # fmt: skip
    del dout, dlse, q_ids, k_ids, slopes, out, lse, saved, text, numbers
    return [x.new_empty(x.shape) for x in (q, k, v, sinks, bias) if x is not None]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    ctx.text, numbers = inputs[GIVEN], Numbers(*inputs[GIVEN + 1 :])
    ctx.numbers = numbers._replace(documents=None)
    out, lse, saved = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:GIVEN], numbers.documents, out, lse, *saved)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any) -> tuple[Any, ...]:
    check_backward(dout, dlse)
    tensors = ctx.saved_tensors  # read once: checkpointing asks for it
    inputs, (documents, out, lse, *saved) = Inputs(*tensors[:GIVEN]), tensors[GIVEN:]
    numbers = ctx.numbers._replace(documents=documents)
    found = iter(
        attention_backward(dout, dlse, *inputs[:GIVEN], out, lse, saved, ctx.text, *numbers)
    )
    dq, dk, dv = next(found), next(found), next(found)
    dsinks = None if inputs.sinks is None else next(found)
    dbias = None if inputs.bias is None else next(found)
    rest = (None,) * (1 + len(numbers))  # the text and the numbers
    return dq, dk, dv, None, None, dsinks, dbias, None, *rest


attention.register_autograd(_backward, setup_context=_setup)

attention.register_vmap(refuse_batch)
attention_backward.register_vmap(refuse_batch)
# The vmap of is_grads_batched=True is another one, with a dispatch key of its own.
_LIBRARY = torch.library.Library("ring_torch", "FRAGMENT")
_LIBRARY.impl("attention_backward", refuse_batch, "Batched")

"""Attention as an operation in the graphs of ``torch.compile``, which does not trace into it.

The operation has three arguments: a list of the call's tensors; a list of numbers that may change
from call to call (windows, chunks, documents, seeds); and all else as one JSON text, a constant of
the graph. So a graph is compiled once for all numbers, and for all batch sizes and lengths where
the compiler has symbols for these: the plan is made when the operation runs. Faults that no number
can make right are refused while the graph is traced, all others when it runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import has_static_value

from ring_core import LayoutSpec, Mask, checks
from ring_core.base.arguments import as_python
from ring_core.base.config import strategy_config
from ring_torch.autograd import backward_pass, forward_pass, saved_shapes
from ring_torch.call import Call
from ring_torch.capture import as_own, constant_in_graphs, fake_mode
from ring_torch.comm.ranks import Ranks, ranks_of
from ring_torch.compiled.static import (
    as_documents,
    from_json,
    group_fields,
    ranks_named,
    to_json,
)
from ring_torch.derivatives import check_backward, refuse_batch, refuse_batches
from ring_torch.options import CallOptions
from ring_torch.prepare import check_call
from ring_torch.records import Inputs
from ring_torch.strategies import ask_ranks, strategy_names, without_trade

_LOW_WORD = (1 << 32) - 1
# How many numbers of its call a forward leaves to its backward: number, check_every, checked.
_IDENTITY = 3

#: Options whose numbers may change without recompilation: those a plan depends on, and the seed.
_VARYING = ("seq_len", "window", "chunk_size", "cu_seqlens", "dropout_seed")


def attend_in_graph(
    q: Tensor, k: Tensor, v: Tensor, group: Any, layout: LayoutSpec, options: CallOptions
) -> tuple[Tensor, Tensor]:
    """Add the attention operation to the graph that is being traced, and return ``(out, lse)``.

    Raises:
        ValueError: An argument is malformed, as far as the trace can see.
    """
    if _requires_grad(options.alibi_slopes):
        raise ValueError("alibi_slopes have no gradient; pass alibi_slopes.detach()")
    if q.ndim == k.ndim == 4 and options.seq_len is None:  # any other is refused later
        checks.check_causal(options.causal, q.shape[1], k.shape[1])
    bias_grad = torch.is_grad_enabled() and _requires_grad(options.bias)
    grad = bias_grad or (
        torch.is_grad_enabled() and any(_requires_grad(x) for x in (q, k, v, options.sinks))
    )
    # The operation takes tensors, numbers that may change from call to call, and a text that the
    # graph holds as a constant.
    tensors: list[Tensor] = [q, k, v]
    numbers: list[int] = []
    fields = [
        to_json(x, tensors, numbers if name in _VARYING else None)
        for name, x in zip(CallOptions._fields, _as_operands(options), strict=True)
    ]
    text = static_text(
        group, to_json(layout), fields, grad, bias_grad, _lengths_vary(q, k, options)
    )
    out, lse, _ = attention(tensors, numbers, text)
    return out, lse


def _lengths_vary(q: Tensor, k: Tensor, options: CallOptions) -> bool:
    """Return True if the compiler has a symbol for the batch size or a length, which may change.

    Where ``auto`` may choose another strategy for other lengths, which saves other tensors for the
    backward, the graph is of the lengths at hand: of other keys than queries, and of a bias that
    has no columns for padding.
    """
    if q.ndim != 4 or k.ndim != 4 or all(map(has_static_value, (*q.shape[:2], k.shape[1]))):
        return False
    if getattr(options.strategy, "name", options.strategy) != "auto":
        return True
    is_padded = options.bias is not None and options.seq_len is not None
    if is_padded or q.shape[1] != k.shape[1]:  # noqa: SIM103 - symbols make no constant
        return False
    return True


def _requires_grad(x: object) -> bool:
    """Return True for a tensor that requires a gradient; other objects are refused later."""
    return isinstance(x, Tensor) and x.requires_grad


def _as_operands(options: CallOptions) -> CallOptions:
    """Return the options in a form whose numbers an operation can take.

    It is traced, so it must not look at the value of a number. A mask is replaced by its four
    options. Documents in an array become a tensor of their own. A seed becomes two numbers of 32
    bits, as it may exceed an int64.

    Raises:
        ValueError: An option is malformed, as far as the trace can see.
    """
    if isinstance(options.mask, Mask):
        mask = options.mask
        if options.causal or any(
            x is not None for x in (options.window, options.chunk_size, options.cu_seqlens)
        ):
            raise ValueError(
                "mask was given together with causal, window, chunk_size or cu_seqlens; put them into the "
                "Mask instead"
            )
        options = options._replace(
            mask=None,
            causal=mask.causal,
            window=mask.window,
            chunk_size=mask.chunk_size,
            cu_seqlens=mask.cu_seqlens,
        )
    window, documents, seed = options.window, options.cu_seqlens, options.dropout_seed
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise ValueError(
                "window must be a pair (left, right); for the last W tokens, (W - 1, 0)"
            )
        if window[0] is None and window[1] is None:
            options = options._replace(window=None)
    if documents is not None:
        options = options._replace(cu_seqlens=as_documents(documents))
    if isinstance(seed, int) and not isinstance(seed, bool):  # which is refused for that
        halves: Any = (seed & _LOW_WORD, seed >> 32)
        options = options._replace(dropout_seed=halves)
    elif isinstance(seed, (np.ndarray, np.generic, Tensor)):  # JSON cannot hold these
        raise ValueError(
            "dropout_seed must be an integer in [0, 2**64), got an array or a tensor; pass int(seed)"
        )
    return options


@constant_in_graphs
def static_text(
    group: Any, layout: Any, options: list[Any], grad: bool, bias_grad: bool, varies: bool
) -> str:
    """Return the constant part of a call as JSON; the compiler takes the result for a constant.

    Args:
        group: Process group of the call.
        layout: Layout, as :func:`ring_torch.compiled.static.to_json` returns it.
        options: Options, likewise.
        grad: True if the call needs gradients.
        bias_grad: True if the bias needs one.
        varies: True if the graph serves other batch sizes and lengths.
    """
    ranks, probe = ranks_of(group), fake_mode() is None
    # Ranks exchange here what transports need to know of their machines: an operation must not
    # communicate while it is traced. Where tensors have no numbers, nobody can.
    if probe:
        ask_ranks(ranks)
    facts = {
        **group_fields(ranks), "layout": layout, "options": options, "grad": grad,
        "bias_grad": bias_grad, "varies": varies, "probe": probe,
    }  # fmt: skip
    return json.dumps(facts, default=as_python)


class _StaticCall(NamedTuple):
    """Constant part of a call, read from its text.

    Attributes:
        group: Facts of the process group when the graph was traced.
        layout: Layout of the call.
        fields: Options, as they were written.
        grad: True if the call needs gradients.
        bias_grad: True if the bias needs one.
        varies: True if the graph serves other batch sizes and lengths.
        probe: True if ranks know of each other what transports need.
        choices: Strategy and transport that ``auto`` has chosen for all lengths, by the other
            facts of tensors.
    """

    group: Mapping[str, Any]
    layout: LayoutSpec
    fields: list[Any]
    grad: bool
    bias_grad: bool
    varies: bool
    probe: bool
    choices: dict[Any, tuple[str, str]]

    @property
    def ranks(self) -> Ranks:
        """Ranks of the group, looked up each time: it may be gone, and another have its name.

        Raises:
            ValueError: The group is gone, or has other ranks.
        """
        return ranks_named(self.group)

    def options(self, tensors: Sequence[Any], numbers: Sequence[int] | None) -> CallOptions:
        """Return the options with their tensors and numbers; ``numbers=None`` makes each one 0."""
        options = CallOptions(*[from_json(x, tensors, numbers) for x in self.fields])
        halves: Any = options.dropout_seed
        if isinstance(halves, tuple):
            options = options._replace(dropout_seed=halves[1] << 32 | halves[0])
        return options

    @property
    def plan_known(self) -> bool:
        """True if the plan depends on no size and no number that changes from call to call."""
        fields = CallOptions(*self.fields)
        varying = fields.seq_len, fields.window, fields.chunk_size, fields.cu_seqlens
        return not self.varies and all(x is None for x in varying)

    @property
    def mask_varies(self) -> bool:
        """True if how many keys queries see depends on numbers that change from call to call."""
        fields = CallOptions(*self.fields)
        return (fields.window, fields.chunk_size, fields.cu_seqlens) != (None, None, None)

    def differentiable(self, tensors: Sequence[Tensor]) -> list[int]:
        """Return the indices of the tensors that get gradients: q, k, v, sinks, a trained bias."""
        indices: Any = self.options(range(len(tensors)), None)
        bias = indices.bias if self.bias_grad else None
        return [0, 1, 2, *(n for n in (indices.sinks, bias) if n is not None)]


@lru_cache(maxsize=256)
def _static_call(text: str) -> _StaticCall:
    """Return the constant part of a call from its text; cached."""
    facts: dict[str, Any] = json.loads(text)
    return _StaticCall(
        facts,
        from_json(facts["layout"]),
        facts["options"],
        facts["grad"],
        facts["bias_grad"],
        facts["varies"],
        facts["probe"],
        {},
    )


def _call(
    text: str,
    tensors: Sequence[Tensor],
    numbers: Sequence[int] | None,
    number: int,
    check: tuple[int, int] | None = None,
) -> tuple[Call, Inputs]:
    """Return the checked call of an operation, and its inputs.

    While a graph is traced the numbers are not known. Then it is the call that computes the most
    pairs: without window, chunks and documents.

    The shapes of the tensors that a forward leaves to its backward depend on strategy and
    transport, and must not depend on numbers that the compiler does not know. So ``auto`` chooses
    as if there were no such numbers. It does not trade tokens for heads where they may hide keys:
    a gather leaves those out, and a trade moves all tokens.

    Args:
        text: Constant part of the call.
        tensors: Tensors of the operation.
        numbers: Numbers of the operation; ``None`` if they are not known.
        number: Number of the call on its group.
        check: In a backward, ``check_every`` and ``checked`` of its forward.
    """
    static, (q, k, v) = _static_call(text), tensors[:3]
    options = static.options(tensors, numbers)

    def checked(options: CallOptions) -> tuple[Call, Inputs]:
        """Return the checked call with these options."""
        # The trace has taken a Mask apart, so any other object here is refused.
        mask_option: Any = options.mask
        mask = checks.check_mask(
            mask_option,
            causal=options.causal,
            window=options.window,
            chunk_size=options.chunk_size,
            cu_seqlens=options.cu_seqlens,
        )
        if options.seq_len is not None:  # otherwise it is checked in the trace
            lengths = checks.check_seq_len(
                options.seq_len, int(q.shape[1]), int(k.shape[1]), static.layout, static.ranks.size
            )
            checks.check_causal(options.causal, *lengths)
        options = options._replace(
            causal=False, window=None, chunk_size=None, cu_seqlens=None, mask=mask
        )
        return check_call(
            static.ranks,
            number,
            static.layout,
            q,
            k,
            v,
            options,
            grad=static.grad,
            bias_grad=static.bias_grad,
            check=check,
        )

    widest = _widest(options, q, k, static.ranks.size)
    is_chosen = strategy_config(options.strategy, strategy_names()).name == "auto"
    if not static.plan_known and (is_chosen or options.transport == "auto"):
        # One choice for all lengths of a graph, so that a new one is not planned twice.
        key = static.ranks, *[(x.shape[2:], x.dtype, x.device) for x in (q, k, v)]
        choice = static.choices.get(key)
        if choice is None:
            call = checked(widest)[0]
            choice = call.strategy.name, call.transport.name
            if is_chosen and static.mask_varies:
                choice = without_trade(call, options.transport)
            if static.varies:
                static.choices[key] = choice
        # A strategy that is named keeps its parameters.
        ways = (choice[0] if is_chosen else options.strategy), choice[1]
        options, widest = (
            x._replace(strategy=ways[0], transport=ways[1]) for x in (options, widest)
        )
    return checked(widest if numbers is None else options)


def _widest(options: CallOptions, q: Tensor, k: Tensor, cp_size: int) -> CallOptions:
    """Return the options without numbers that a plan depends on, so that queries see most keys.

    Without ``seq_len`` padding counts as tokens. But a bias has no columns for padding, so where it
    is given with ``seq_len`` its width stays the number of keys.
    """
    seq_len = None
    if options.seq_len is not None and options.bias is not None and options.bias.ndim == 4:
        keys, q_len, k_len = int(options.bias.shape[-1]), int(q.shape[1]), int(k.shape[1])
        # Equal numbers of queries and keys a rank are one sequence with one length.
        seq_len = (keys if q_len == k_len else cp_size * q_len, keys)
    return options._replace(seq_len=seq_len, window=None, chunk_size=None, cu_seqlens=None)


@torch.library.custom_op("ring_torch::attention", mutates_args=())
def attention(
    tensors: Sequence[Tensor], numbers: Sequence[int], text: str
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Compute a call's ``(out, lse)``, and the tensors that its backward needs."""
    static = _static_call(text)
    ranks = ranks_named(static.group, is_forward=True)
    call, inputs = _call(text, tensors, numbers, ranks.next_call())
    out, lse, saved = forward_pass(call, inputs)
    # The trace has promised tensors for every plan that the graph serves.
    shapes = saved_shapes(call, inputs, plan_known=static.plan_known)
    # This call may save fewer tensors than the trace has promised: add empty ones.
    extra = [inputs.q.new_empty(shape, dtype=dtype) for shape, dtype in shapes[len(saved) :]]
    # The backward has to be the same call on all ranks, and checked if the forward was.
    if call.needs_grad:
        identity = call.number, call.check_every, call.checked
        assert len(identity) == _IDENTITY
        extra.append(torch.tensor(identity, dtype=torch.int64, device="cpu"))
    # torch requires that results share no memory with each other or with inputs.
    return as_own(out), as_own(lse), [*(as_own(x) for x in saved[: len(shapes)]), *extra]


@attention.register_fake
def _attention_like(
    tensors: Sequence[Tensor], _numbers: Sequence[int], text: str
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return tensors of the results' shapes and dtypes, while a graph is traced.

    Raises:
        ValueError: The call is malformed, whatever its numbers are.
        UnsupportedError: No kernel can do it, whatever its numbers are.
    """
    # Where the compiler has symbols, the call is checked and planned for the sizes at hand. In a
    # graph for one length these become constants, in others only heads and their size.
    static = _static_call(text)
    concrete = [
        x
        if x.ndim == 1  # offsets of documents: one graph serves any number of them
        else x.new_empty(
            [
                _at_hand(size) if static.varies and (m > 2 or n < 2) else int(size)
                for n, size in enumerate(x.shape)
            ]
        )
        for m, x in enumerate(tensors)
    ]
    call, inputs = _call(text, concrete, None, number=int(static.probe))
    if static.varies:  # shapes of results are made of the symbols
        symbol_of = {id(x): y for x, y in zip(concrete, tensors, strict=True)}
        symbolic: list[Any] = [symbol_of.get(id(x)) for x in inputs]
        inputs = Inputs(*symbolic)
    q, _, v, *_ = inputs
    batch, length, heads, _ = q.shape
    out = q.new_empty(batch, length, heads, v.shape[3])
    lse = q.new_empty(batch, heads, length, dtype=call.acc_dtype)
    shapes = saved_shapes(call, inputs, plan_known=static.plan_known)
    # As many as the real operation returns, whatever it will save.
    saved = [q.new_empty(shape, dtype=dtype) for shape, dtype in shapes]
    if call.needs_grad:
        saved.append(torch.empty(_IDENTITY, dtype=torch.int64, device="cpu"))
    return out, lse, saved


def _at_hand(size: Any) -> int:
    """Return the number that a size has in this trace, without making it a constant of the graph.

    Raises:
        RuntimeError: The compiler does not know it, as it depends on numbers in a tensor.
    """
    return int(size if isinstance(size, int) or size.node.hint is None else size.node.hint)


@torch.library.custom_op("ring_torch::attention_backward", mutates_args=())
def attention_backward(
    grads: Sequence[Tensor | None],
    results: Sequence[Tensor],
    tensors: Sequence[Tensor],
    numbers: Sequence[int],
    text: str,
) -> list[Tensor]:
    """Compute the gradients of q, k, v, and of sinks and bias if there are any.

    Args:
        grads: Gradients of ``out`` and ``lse``; ``None`` for zeros.
        results: ``out``, ``lse``, and the tensors that the forward has left.
        tensors: Tensors of the forward.
        numbers: Numbers of the forward.
        text: Constant part of the call.
    """
    # AOTAutograd itself refuses create_graph=True only if a saved tensor needs a gradient.
    check_backward()
    (dout, dlse), (out, lse, *saved, identity) = grads, results
    # Read on the host: it is a CPU tensor, so nobody waits for the GPU.
    number, every, checked = identity.tolist()
    call, inputs = _call(text, tensors, numbers, number, (every, checked))
    input_grads = backward_pass(call, inputs, (out, lse), saved, (dout, dlse))
    return [as_own(grad) for grad in input_grads if grad is not None]


@attention_backward.register_fake
def _attention_backward_like(
    _grads: Sequence[Tensor | None],
    _results: Sequence[Tensor],
    tensors: Sequence[Tensor],
    _numbers: Sequence[int],
    text: str,
) -> list[Tensor]:
    """Return tensors of the gradients' shapes and dtypes, while a graph is traced."""
    indices = _static_call(text).differentiable(tensors)
    return [tensors[n].new_empty(tensors[n].shape) for n in indices]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    """Save the inputs and results of the forward for its backward."""
    tensors, ctx.numbers, ctx.text = inputs
    out, lse, saved = output
    ctx.count = len(tensors)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, out, lse, *saved)


def _backward_of_attention(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any
) -> tuple[Any, ...]:
    """Run the backward operation, and assign its gradients to the tensors they belong to."""
    check_backward(dout, dlse)
    saved = ctx.saved_tensors  # read once, as activation checkpointing requires
    tensors, results = list(saved[: ctx.count]), list(saved[ctx.count :])
    input_grads = attention_backward([dout, dlse], results, tensors, ctx.numbers, ctx.text)
    grads: list[Tensor | None] = [None] * ctx.count
    for index, grad in zip(
        _static_call(ctx.text).differentiable(tensors), input_grads, strict=True
    ):
        # Tensors without a gradient, as segment ids, keep None.
        grads[index] = grad
    # torch takes an empty list of numbers for a list of tensors, and asks for a list of gradients.
    return grads, None if ctx.numbers else [], None


attention.register_autograd(_backward_of_attention, setup_context=_setup)

attention.register_vmap(refuse_batch)
refuse_batches("attention_backward", attention_backward)

"""Answers to calls of ``flex_attention``, by ring attention or by torch.

It is a function in Python, which no mode sees, and models import it by name and compile it. So
while a module is replaced its code is another, which asks at each call whether a mode of ours is
active; compiled forms of it are of its code.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch._C import DisableTorchFunction  # torch has no public name for it, nor for these
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention import flex_attention as flex
from torch.overrides import _get_current_function_mode_stack

from ring_core import Mask
from ring_torch.capture import constant_in_graphs
from ring_torch.options import AttentionOptions
from ring_torch.replaced.calls import (
    Call,
    Replacement,
    Scope,
    attend_on_ring,
    checked,
    documents_of,
    module_of,
    refuse,
    refuse_padding,
    scopes,
)
from ring_torch.replaced.flex_graph import (
    Template,
    attend_in_graph,
    check_mods,
    collect,
    is_full_graph,
    remember,
)
from ring_torch.replaced.mode import RingMode, refuse_hidden
from ring_torch.replaced.mods import (
    ModError,
    Scores,
    Trace,
    check_blocks,
    identity_of,
    listed,
    mask_of,
    options_of,
)

_MOST_SCORES = 1 << 24  # that are computed together
_NO_BLOCKS = 1 << 30  # size of the blocks of a block mask that has none
_FLEX: types.FunctionType = flex.flex_attention  # type: ignore[assignment]
_TORCHS_CODE = _FLEX.__code__
#: Torch's function under another name.
_by_torch = types.FunctionType(
    _TORCHS_CODE, _FLEX.__globals__, "flex_attention", _FLEX.__defaults__
)
_by_torch.__kwdefaults__ = _FLEX.__kwdefaults__


def _flex_attention(
    query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None,
    scale: Any = None, enable_gqa: Any = False, return_lse: Any = False,
    kernel_options: Any = None, *, return_aux: Any = None,
) -> Any:  # fmt: skip
    """Ask who answers; it runs with the globals of torch's function."""
    from ring_torch.replaced.flex import flex_attention

    return flex_attention(
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
        return_aux,
    )  # fmt: skip


_ARGUMENTS = _flex_attention.__code__.co_varnames[:10]
# The compiler looks at the name of a file to decide what it traces into.
_CODE = _flex_attention.__code__.replace(co_filename=_TORCHS_CODE.co_filename)
_ADVICE = {
    "mask_mod": "Give one of whole numbers, compared, and of tensors read by place, that is alike for all rows "
    "and heads, over the whole sequence",
    "score_mod": "Known are c * tanh(score / c), and sums of it or of the score with ALiBi or a bias that is "
    "computed from places and read from tensors",
}
#: Masks of block masks, with what they were made of.
_known: WeakKeyDictionary[Any, tuple[Any, Mask]] = WeakKeyDictionary()
_replacements: WeakSet[Replacement] = WeakSet()


def intercept(state: Replacement) -> None:
    """Let calls of ``flex_attention`` ask for a mode, until all replacements are released.

    A function of other arguments than are known is left alone: its operator is refused.
    """
    _replacements.add(state)
    if _TORCHS_CODE.co_varnames[:10] == _ARGUMENTS:
        _FLEX.__code__ = _CODE


def release(state: Replacement) -> None:
    """Let torch answer alone once the last replacement is released."""
    _replacements.discard(state)
    if not _replacements:
        _FLEX.__code__ = _TORCHS_CODE


def flex_attention(*arguments: Any) -> Any:
    """Answer a call of torch's function, in the order of its arguments.

    Raises:
        ValueError: Arguments are malformed.
        UnsupportedError: They cannot be honoured exactly on a split sequence; nothing was sent.
    """
    modes = [x for x in _get_current_function_mode_stack() if isinstance(x, RingMode)]
    if not modes:
        return _by_torch(*arguments[:-1], return_aux=arguments[-1])
    operator, scope = modes[-1].operator, modes[-1].scope
    if torch.compiler.is_compiling() and scope.is_split and not operator and is_full_graph():
        return _attend_in_graph(scope, *arguments)
    return _attend(operator, scope, *arguments)


def _attend_in_graph(
    scope: Scope, query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any,
    scale: float | None, enable_gqa: bool, return_lse: bool, kernel_options: Any, return_aux: Any,
) -> Any:  # fmt: skip
    """Answer a call on the ring in a graph that may not break; it is traced."""
    del kernel_options  # of torch's kernel
    _check_returns(return_lse, return_aux)
    words = ["block_mask"] * (block_mask is not None) + ["score_mod"] * (score_mod is not None)
    module = module_of(scope, query, key, words)
    tensors: list[Tensor] = [query, key, value]
    mask_mod, numbers = None, [0] * 4
    if block_mask is not None:
        mask_mod = block_mask.mask_mod
        numbers = [*block_mask.BLOCK_SIZE, *block_mask.seq_lengths]
        tensors += [block_mask.kv_num_blocks, block_mask.kv_indices]
        if block_mask.full_kv_num_blocks is not None:
            tensors += [block_mask.full_kv_num_blocks, block_mask.full_kv_indices]
    lists = len(tensors) - 3
    constants: list[Any] = []
    unknown: list[str] = []
    collect(score_mod, tensors, numbers, constants, unknown)
    collect(mask_mod, tensors, numbers, constants, unknown)
    most = return_aux is not None and return_aux.max_scores
    name = _remember(
        scope.number, module, score_mod, mask_mod, tuple(constants), tuple(unknown), lists, scale,
        enable_gqa, most,
    )  # fmt: skip
    out, lse, max_scores = attend_in_graph(name, tensors, numbers)
    if return_aux is not None:
        aux = return_aux
        return out, flex.AuxOutput(lse if aux.lse else None, max_scores if most else None)
    return (out, lse) if return_lse else out


@constant_in_graphs
def _remember(
    number: str, module: str, score_mod: Any, mask_mod: Any, constants: Any, unknown: Any,
    lists: int, scale: float | None, enable_gqa: bool, has_most: bool,
) -> str:  # fmt: skip
    """Keep a call that is traced by a name; the graph is for these constants alone."""
    del constants
    check_mods((score_mod, mask_mod), unknown)
    attend = partial(_attend_traced, number, module, scale, enable_gqa, has_most)
    return remember(Template(attend, (score_mod, mask_mod), lists, has_most))


def _attend_traced(
    number: str, module: str, scale: float | None, enable_gqa: bool, has_most: bool, query: Tensor,
    key: Tensor, value: Tensor, score_mod: Any, blocks: Any,
) -> Any:  # fmt: skip
    """Answer a call that a graph holds, when it runs."""
    call = Call(query, key, value, None, 0.0, False, scale, enable_gqa, module)
    return _on_ring(scopes[number], call, score_mod, blocks, has_lse=True, has_most=has_most)


def _on_ring(
    scope: Scope, call: Call, score_mod: Any, block_mask: Any, *, has_lse: bool, has_most: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return ``out``, ``lse`` and the largest scores of a call on the ring."""
    state, is_own = scope.state, scope.keys == "own"
    if any(x.ndim != 4 for x in call[:3] if isinstance(x, Tensor)):
        raise ValueError(
            f"replace_sdpa: {call.module}: flex_attention takes [B, H, T_local, D], got {tuple(call.query.shape)}"
        )
    call = checked(scope, call)
    options = _options(state, call, score_mod, block_mask, is_own=is_own)
    result = attend_on_ring(state, call, options, return_lse=has_lse)
    out, lse = result if has_lse else (result, None)
    arguments = state, call, score_mod, block_mask, options, is_own
    return out, lse, _max_scores(*arguments) if has_most else None


def _check_returns(return_lse: bool, return_aux: Any) -> None:
    """Refuse both ``return_lse`` and ``return_aux``, as torch does."""
    if return_lse and return_aux is not None:
        raise ValueError(
            "replace_sdpa: flex_attention takes return_lse=True or return_aux, not both"
        )


@partial(
    torch.compiler.disable,
    reason="replace_sdpa looks at the functions that flex_attention is given in eager code; "
    "compile without fullgraph=True",
)
def _attend(
    operator: str, scope: Scope, query: Tensor, key: Tensor, value: Tensor, score_mod: Any,
    block_mask: Any, scale: float | None, enable_gqa: bool, return_lse: bool, kernel_options: Any,
    return_aux: Any,
) -> Any:  # fmt: skip
    """Answer a call in a mode of ours."""
    if operator:
        refuse_hidden(operator)
    _check_returns(return_lse, return_aux)
    words = ["block_mask"] * (block_mask is not None) + ["score_mod"] * (score_mod is not None)
    module = module_of(scope, query, key, words)
    call = Call(query, key, value, None, 0.0, False, scale, enable_gqa, module)
    state = scope.state
    if state.computes == "shards" and scope.keys in ("own", "sharded"):
        has_aux = return_aux is not None
        out, lse, most = _on_ring(
            scope, call, score_mod, block_mask, has_lse=return_lse or (has_aux and return_aux.lse),
            has_most=has_aux and return_aux.max_scores,
        )  # fmt: skip
        if has_aux:
            return out, flex.AuxOutput(lse=lse, max_scores=most)
        return (out, lse) if return_lse else out
    state.watch.call(0, 0, on_ring=False)
    if state.computes == "shards" and scope.keys == "whole" and words:
        refuse(
            module,
            f"{words[0]} with keys that every rank holds whole: the places of this rank's queries are "
            f"not its rows",
        )
    documents = state.documents if state.computes == "whole" and scope.keys == "own" else None
    has_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if documents is None and not (has_grad and query.device.type == "cpu"):
        with DisableTorchFunction():
            return _by_torch(
                *call[:3],
                score_mod,
                block_mask,
                scale,
                enable_gqa,
                return_lse,
                kernel_options,
                return_aux=return_aux,
            )
    out, lse, most = _plainly(call, score_mod, block_mask, documents)
    if return_aux is not None:
        aux = return_aux
        return out, flex.AuxOutput(lse if aux.lse else None, most if aux.max_scores else None)
    return (out, lse) if return_lse else out


def _options(
    state: Replacement, call: Call, score_mod: Any, block_mask: Any, *, is_own: bool
) -> AttentionOptions | None:
    """Return the options of ring attention that a call comes to; ``None`` for those of plain SDPA.

    Raises:
        ValueError: The block mask has another length than the sequence.
        UnsupportedError: A function cannot be honoured.
    """
    if block_mask is None and score_mod is None:
        return None
    if not is_own:
        refuse(
            call.module, "flex_attention with block_mask or score_mod over keys of another sequence"
        )
    batch, heads, length, _ = call.query.shape
    tokens = length * state.ranks
    seq_len, is_whole = _length_of(state, call, block_mask, length, tokens)
    documents = documents_of(state, call, seq_len)
    rules: list[tuple[Trace, Any]] = []
    if block_mask is not None:
        mask_mod = block_mask.mask_mod
        with _named(call, "mask_mod", mask_mod):
            if mask_mod is flex._sliced_mask_mod_error:  # noqa: SLF001 - torch has no public name for it
                raise ModError("is that of a part of a block mask, which has forgotten its own")
            trace = Trace.of(mask_mod, call.query.device)
            rules.append((trace, trace.root))
            if not is_whole:
                trace.check_local(length, may_read=False)
    if score_mod is not None:
        is_double = call.query.dtype == torch.float64
        with _named(call, "score_mod", score_mod):
            score = Trace.of(
                score_mod, call.query.device, torch.float64 if is_double else torch.float32
            )
            scores = Scores.of(score)
            rules += [(score, scores.shown)] if scores.shown is not None else []
            if not is_whole:
                score.check_local(length, may_read=True)
    sizes = seq_len, batch, heads, documents
    with _named(
        call, *(("score_mod", score_mod) if block_mask is None else ("mask_mod", mask_mod))
    ):
        mask = _mask_of(rules, block_mask, seq_len if is_whole else length, *sizes)
    options: AttentionOptions = {} if mask == Mask() else {"mask": mask}
    if score_mod is not None:
        q = state.cp.positions(seq_len, device=call.query.device).clamp(max=seq_len - 1)
        with _named(call, "score_mod", score_mod):
            options |= options_of(score, scores, mask, batch, heads, q, seq_len)  # type: ignore[typeddict-item]
    if seq_len != tokens:
        options["seq_len"] = seq_len
    elif not is_whole and mask.band[1] != 0 and documents is None:
        refuse_padding(state, call)
    return options


@contextmanager
def _named(call: Call, kind: str, mod: Any) -> Iterator[None]:
    """Refuse what is wrong with a function by its name, and that of the module."""
    try:
        yield
    except ModError as error:
        name = getattr(mod, "__name__", type(mod).__name__)
        refuse(call.module, f"the {kind} {name} {error}. {_ADVICE[kind]}")


def _mask_of(rules: list[tuple[Trace, Any]], block_mask: Any, block_len: int, *sizes: Any) -> Mask:
    """Return the mask of rules, the first of which is the block mask's, whose blocks are checked.

    It is kept with the block mask, as layers share one. Errors are those of ``mask_of``.
    """
    if block_mask is None or block_mask.BLOCK_SIZE == (_NO_BLOCKS, _NO_BLOCKS):
        return mask_of(rules, *sizes)
    lists = [x for x in block_mask.as_tuple() if isinstance(x, Tensor)]
    key = (sizes, block_len, [trace.key for trace, _ in rules], identity_of(lists))
    known = _known.get(block_mask)
    if known is None or known[0] != key:
        check_blocks(block_mask, mask_of(rules[:1], *sizes[:3]), block_len, block_len)
        _known[block_mask] = known = key, mask_of(rules, *sizes)
    return known[1]


def _length_of(
    state: Replacement, call: Call, block_mask: Any, length: int, tokens: int
) -> tuple[int, bool]:
    """Return the number of tokens without padding, and True if the block mask is over all of them.

    Raises:
        ValueError: The block mask has another length.
    """
    if state.ranks == 1:
        return length, True
    if block_mask is None or block_mask.BLOCK_SIZE == (_NO_BLOCKS, _NO_BLOCKS):
        return tokens, False
    q_len, k_len = map(int, block_mask.seq_lengths)
    if q_len == k_len == length:
        return tokens, False
    if (
        q_len != k_len
        or not 0 < q_len <= tokens
        or state.sharding.layout_of(q_len, pad=True).padded_len != tokens
    ):
        raise ValueError(
            f"replace_sdpa: {call.module}: a block mask over {q_len} queries and {k_len} keys, where a rank has {length} "
            f"tokens of {tokens}: make it with create_block_mask for [T, T], T the length of the whole sequence"
        )
    return q_len, True


def _plainly(
    call: Call, score_mod: Any, block_mask: Any, documents: tuple[int, ...] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``out``, ``lse`` and the largest scores of a whole sequence.

    Torch cannot differentiate it on a CPU.
    """
    places = [
        torch.arange(n, device=call.query.device)
        for n in (*call.query.shape[:3], call.key.shape[2])
    ]
    mask_mod = None if block_mask is None else block_mask.mask_mod
    shown = _shown_by(mask_mod, documents, places)
    if block_mask is not None:
        sizes, lengths = block_mask.BLOCK_SIZE, block_mask.seq_lengths
        number = -(-lengths[1] // sizes[1])
        blocks = [
            (block_mask.kv_num_blocks, block_mask.kv_indices),
            (block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
        ]
        partial_blocks, full = [
            False
            if counts is None
            else torch.from_numpy(listed(counts, columns, number))
            .to(call.query.device)
            .repeat_interleave(sizes[0], 2)
            .repeat_interleave(sizes[1], 3)[..., : len(places[2]), : len(places[3])]
            for counts, columns in blocks
        ]
        shown = partial_blocks & shown | full & _shown_by(None, documents, places)
    scores = _scores(call, score_mod, shown, places)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    value = call.value.repeat_interleave(call.query.shape[1] // call.value.shape[1], 1)
    return weights.to(value.dtype) @ value, lse, scores.detach().amax(-1)


@torch.no_grad()
def _max_scores(
    state: Replacement, call: Call, score_mod: Any, block_mask: Any,
    options: AttentionOptions | None, is_own: bool,
) -> Tensor:  # fmt: skip
    """Return the largest score of each of this rank's queries ``[B, H, T_local]``, over all keys.

    The keys of all ranks are gathered for that. ``options`` are those of the call.
    """
    length, own_keys = call.query.shape[2], call.key.shape[2]
    # Of another sequence all keys are seen, in any order.
    keys = (state.cp if is_own else state.unordered).unshard(call.key, dim=2)
    seq_len = (options or {}).get("seq_len", own_keys * state.ranks)
    assert isinstance(seq_len, int)
    documents = documents_of(state, call, seq_len) if is_own else None
    device = call.query.device
    q_at = (
        state.cp.positions(length * state.ranks, device=device)
        if is_own
        else torch.arange(length, device=device)
    )
    at = [torch.arange(n, device=device) for n in call.query.shape[:2]]
    mask_mod = None if block_mask is None else block_mask.mask_mod
    largest = []
    for rows in torch.arange(length, device=device).split(
        max(1, _MOST_SCORES // (seq_len * call.query.shape[1]))
    ):
        places = [*at, q_at[rows].clamp(max=seq_len - 1), torch.arange(seq_len, device=device)]
        part = call._replace(query=call.query[:, :, rows], key=keys[:, :, :seq_len])
        shown = _shown_by(mask_mod, documents, places)
        largest.append(_scores(part, score_mod, shown, places).amax(-1))
    return torch.cat(largest, -1)


def _scores(call: Call, score_mod: Any, shown: Tensor, places: list[Tensor]) -> Tensor:
    """Return scores ``[B, H, T_q, T_k]`` behind ``score_mod``, ``-inf`` where not shown."""
    query, key = call.query, call.key
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
    scores = (query @ key.mT).to(torch.promote_types(query.dtype, torch.float32)) * scale
    if score_mod is not None:
        scores = _over_pairs(score_mod, scores, *places)
    return scores.masked_fill(~shown, -torch.inf)


def _shown_by(mask_mod: Any, documents: tuple[int, ...] | None, places: list[Tensor]) -> Tensor:
    """Return where keys are seen by a function and in documents, ``[B, H, T_q, T_k]`` or ones."""
    shown = places[2].new_ones(1, 1, 1, 1, dtype=torch.bool)
    if mask_mod is not None:
        scores = shown.expand([len(x) for x in places])
        shown = _over_pairs(lambda _, *at: mask_mod(*at), scores, *places)
    if documents is not None:
        ends = torch.tensor(documents[1:], device=places[2].device)
        q, k = (torch.bucketize(x, ends, right=True) for x in places[2:])
        shown = shown & (q[:, None] == k)
    return shown


def _over_pairs(function: Callable[..., Tensor], scores: Tensor, *places: Tensor) -> Tensor:
    """Return a function of a score, a row, a head and two positions, for all of them."""
    for axis in (4, 3, 2, 1):
        function = torch.vmap(
            function, in_dims=tuple(0 if n in (0, axis) else None for n in range(5))
        )
    with TransformGetItemToIndex():
        return function(scores, *places)

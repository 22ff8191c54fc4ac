"""Answers to single calls of ``scaled_dot_product_attention``, by ring attention or by torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Never, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction, _autograd  # torch has no public name for them
from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr
from torch.distributed.tensor import DTensor
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ring_core import KernelConfig, StrategyConfig, UnsupportedError
from ring_core.base.arguments import not_none
from ring_torch.capture import constant_in_graphs, untraced
from ring_torch.comm.ranks import OneRank
from ring_torch.compiled.static import size_of
from ring_torch.options import AttentionOptions
from ring_torch.replaced.callers import Caller, caller
from ring_torch.replaced.watch import Watch, sizes_are_known
from ring_torch.sharding import Sharding, padded_of

#: Holders of a module's keys: ranks hold parts of the queries' own sequence, or of another one;
#: every rank holds all keys; or the rank's own tokens are all that its queries attend to.
Keys = Literal["own", "sharded", "whole", "local"]


_numbers = itertools.count()
#: All scopes by their number.
scopes: WeakValueDictionary[str, Scope] = WeakValueDictionary()


class _Context(Protocol):
    """The methods of a :class:`ring_torch.ContextParallel` that calls need."""

    @property
    def group(self) -> Any: ...

    @property
    def cp_size(self) -> int: ...

    @property
    def cp_rank(self) -> int: ...

    @property
    def attention(self) -> Any: ...

    def shard(self, x: Tensor, *, dim: int = 1) -> Tensor: ...

    def unshard(self, x: Tensor, *, dim: int = 1, grad: Any = None) -> Tensor: ...

    def positions(self, seq_len: int, *, device: Any = None) -> Tensor: ...

    def whole(self) -> AbstractContextManager[None]: ...


@dataclass(eq=False)
class Replacement:
    """State of one call of ``replace_sdpa``, which its modules share.

    Attributes:
        cp: Ranks of the ring, and their layout.
        sharding: The sharding of ``cp``.
        unordered: The same ranks in a layout that divides every length, for calls without a rule
            over positions: any order of tokens gives the same result.
        root: The module that was given.
        kernel: Kernel of each call, as in :func:`ring_torch.ring_attention`.
        strategy: Strategy of each call.
        transport: Transport of each call.
        deterministic: True for gradients that are equal bit by bit in every run.
        watch: Finds modules that attend to a rank's keys alone.
        mode_of: Returns a new mode that answers calls in a scope.
        documents: Offsets ``(0, ..., T)`` of packed documents; ``None`` for one.
        removed: True once torch answers all calls again.
        names: Name of each module by its ``id``.
        modules: Modules that have called attention, by name, with a description.
    """

    cp: _Context
    sharding: Sharding
    unordered: _Context
    root: nn.Module
    kernel: str | KernelConfig
    strategy: str | StrategyConfig
    transport: str
    deterministic: bool
    watch: Watch
    mode_of: Callable[[Scope], TorchFunctionMode]
    documents: tuple[int, ...] | None = None
    removed: bool = False
    names: dict[int, str] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)

    def __deepcopy__(self, _: object) -> Replacement:
        """Return self: a copy of the module attends over the same ranks."""
        return self

    @contextmanager
    def collecting_padding(self, *inputs: Any) -> Iterator[None]:
        """Collect, within a root forward, which of its sequences are padded: given or sharded."""
        before = self.sharding.thread.padded
        self.sharding.thread.padded = {
            padded[1]: padded[2]
            for x in tree_leaves(inputs)
            if isinstance(x, Tensor) and (padded := padded_of(x, self.ranks)) is not None
        }
        try:
            yield
        finally:
            self.sharding.thread.padded = before

    @property
    def computes(self) -> Literal["shards", "whole", "off"]:
        """Who answers calls: all ranks, of their shards; ``"off"`` for torch.

        ``"whole"`` inside of ``cp.whole()``: torch, of whole sequences, of which ``documents`` are
        kept apart.
        """
        if self.removed:
            return "off"
        return "whole" if self.cp.group is OneRank.WHOLE else "shards"

    @property
    def ranks(self) -> int:
        """Number of ranks that hold a sequence; a constant while a graph is traced."""
        return size_of(self.cp.group) if torch.compiler.is_compiling() else self.cp.cp_size

    @constant_in_graphs
    def note_traced(self) -> None:
        """Remember, while a graph is traced, that a module has called attention."""
        self.modules["(compiled)"] = "modules in graphs of torch.compile, whose names are not kept"

    @constant_in_graphs
    def may_repeat(self) -> bool:
        """Return True if code outside of the graph that is traced may run it again in a backward.

        Then the graph is to break, so that the call is seen each time. Functions that are a part of
        the graph are differentiated with it.
        """
        if not torch_function_mode_stack_state_mgr.stack:  # no mode was entered before the graph
            return False
        is_in_function = self.watch.has_grad() and not torch.is_grad_enabled()
        return is_in_function or caller().may_repeat or _hooks_of_user() is not None


@dataclass(frozen=True, eq=False)
class Scope:
    """Meaning of the attention calls of some modules.

    Attributes:
        state: State that all modules share.
        keys: Holder of their keys.
        others: Another name of the module, and the holder of keys that it stands for.
        number: Name by which graphs know it.
    """

    state: Replacement
    keys: Keys
    others: str = ""
    number: str = field(default_factory=lambda: str(next(_numbers)))

    def __post_init__(self) -> None:
        scopes[self.number] = self

    @property
    def is_split(self) -> bool:
        """True if calls attend over the ring now."""
        return self.keys in ("own", "sharded") and self.state.computes == "shards"


class Call(NamedTuple):
    """Arguments of a call of torch's function, by its names, and the module that makes the call."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    module: str


def scaled_dot_product_attention(
    scope: Scope,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Answer a call of torch's function; arguments and results are its own, of this rank's tokens.

    Raises:
        ValueError: Arguments are malformed.
        UnsupportedError: They cannot be honoured exactly on a split sequence; nothing was sent but,
            where ring attention itself refuses the call, the ranks' parts of ``attn_mask``.
    """
    words = ["causal"] * is_causal + ["attn_mask"] * (attn_mask is not None)
    module = module_of(scope, query, key, words)
    call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, module)
    if scope.state.computes == "shards":
        if scope.keys in ("own", "sharded"):
            out: Tensor = attend_on_ring(scope.state, checked(scope, call))
            return out.reshape(*query.shape[:-1], value.shape[-1])
        scope.state.watch.call(0, 0, on_ring=False)
        if scope.keys == "whole":
            if is_causal:
                refuse(
                    module,
                    "is_causal=True with keys that every rank holds whole: which of them a "
                    "query may see depends on its place in the whole sequence. Give attn_mask with a "
                    "row for each of this rank's queries",
                )
            if dropout_p:
                return _with_dropout_of_rank(scope.state.cp.cp_rank, call)
    elif scope.state.documents is not None and scope.keys == "own":
        call = call._replace(attn_mask=_within_documents(scope.state, call), is_causal=False)
    return _by_torch(call)


def _by_torch(call: Call) -> Tensor:
    """Call torch's own attention, below the functions and modes by which Ring replaces it."""
    if call.is_causal and call.attn_mask is not None:  # as of heads, with padding
        rows, columns = call.query.shape[-2], call.key.shape[-2]
        seen = torch.ones(rows, columns, dtype=torch.bool, device=call.query.device).tril()
        call = call._replace(attn_mask=_hidden(call.attn_mask, seen), is_causal=False)
    *arguments, scale, enable_gqa, _ = call
    attend: Callable[..., Tensor] = torch.nn.functional.scaled_dot_product_attention
    with DisableTorchFunction():
        out: Tensor = attend(*arguments, scale=scale, enable_gqa=enable_gqa)
    return out


def _hidden(mask: Tensor, seen: Tensor) -> Tensor:
    """Return a mask, boolean or added, that also hides what is not ``seen``."""
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)


def attend_on_ring(
    state: Replacement,
    call: Call,
    flex: AttentionOptions | None = None,
    *,
    return_lse: bool = False,
) -> Any:
    """Compute a checked call on the ring.

    Args:
        state: State of the replacement.
        call: The call.
        flex: Options that a call of ``flex_attention`` comes to, documents among them.
        return_lse: True to return ``lse`` ``[B, H, T_local]``, too.

    Returns:
        ``out`` ``[B, H, T_local, Dv]``, or ``(out, lse)``.
    """
    batch, _, length, _ = call.query.shape
    are_known = sizes_are_known(batch, length)
    if (
        reason := state.watch.call(*(batch, length) if are_known else (0, 0), on_ring=True)
    ) is not None:
        refuse(call.module, reason)
    sent = state.watch.sent()
    options: AttentionOptions = {
        "causal": call.is_causal, "softmax_scale": call.scale, "kernel": state.kernel,
        "strategy": state.strategy, "transport": state.transport,
        "deterministic": state.deterministic,
    }  # fmt: skip
    if flex is None:
        documents = documents_of(state, call, length * state.ranks)
        if documents is not None:
            options["cu_seqlens"] = documents
        elif (
            not call.is_causal and call.attn_mask is None
        ):  # else no token sees the padding behind it
            refuse_padding(state, call)
        ordered = call.is_causal or documents is not None
    else:
        options |= flex
        ordered = True
    if call.dropout_p:
        options["dropout_p"], options["dropout_seed"] = call.dropout_p, _draw_seed()
    if call.attn_mask is not None:
        ordered = _add_mask(state, options, call, call.attn_mask, ordered=ordered)
    q, k, v = (x.transpose(1, 2) for x in (call.query, call.key, call.value))
    cp = state.cp if ordered else state.unordered
    result = cp.attention(q, k, v, return_lse=return_lse, **options)
    state.watch.answered(sent)
    return (result[0].transpose(1, 2), result[1]) if return_lse else result.transpose(1, 2)


def documents_of(state: Replacement, call: Call, tokens: int) -> tuple[int, ...] | None:
    """Return the handle's documents, with padding up to ``tokens`` as one of its own.

    Raises:
        ValueError: They end behind ``tokens``.
    """
    documents = state.documents
    if documents is None or documents[-1] == tokens:
        return documents
    if documents[-1] > tokens:
        raise ValueError(
            f"replace_sdpa: {call.module}: documents end at {documents[-1]}, and the ranks hold {tokens} "
            f"tokens: set the handle's documents to those of this batch"
        )
    return (*documents, tokens)


def refuse_padding(state: Replacement, call: Call) -> None:
    """Refuse a call that sees the padding of a sequence that ``shard(pad=True)`` made.

    Raises:
        UnsupportedError: Its keys are as many as those of such a sequence on this rank.
    """
    keys = call.key.shape[2]
    if (length := (state.sharding.thread.padded or {}).get(keys)) is not None:
        refuse(
            call.module,
            f"{keys} keys of this rank, of a sequence of {length} tokens that shard(pad=True) padded to "
            f"{keys * state.ranks}: the call would see the padding. Set the handle's documents = (0, "
            f"{length}), or give attn_mask [B, 1, 1, T_local], false for padding; if a rank's tokens "
            f"attend to these keys alone, name the module in local=",
        )


def _add_mask(
    state: Replacement, options: AttentionOptions, call: Call, mask: Tensor, *, ordered: bool
) -> bool:
    """Add a mask ``[B or 1, H or 1, rows, columns]`` to the options.

    Returns:
        True if the call depends on the order of tokens.

    Raises:
        UnsupportedError: The mask says nothing of other ranks' keys.
        ValueError: Its dtype is wrong, or its shape fits neither this rank's tokens nor the whole
            sequence.
    """
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"replace_sdpa: {call.module}: attn_mask must be boolean, true where a key is seen, or floating point, "
            f"added to the scores; got {mask.dtype}"
        )
    batch, heads, queries = call.query.shape[:3]
    own_keys = call.key.shape[2]
    keys = own_keys * state.ranks
    if mask.ndim != 4 or not all(map(_is_one_or, mask.shape[:2], (batch, heads))):
        _wrong_shape(call, mask, keys)
    rows, columns = mask.shape[2:]
    is_alike, is_square = rows == 1 or mask.stride(2) == 0, rows == keys and queries == own_keys
    # One row for a rank's only query is of that query; rows of [T_local, T] may differ by rank.
    if is_alike and columns == keys != own_keys and (is_square or rows == 1 != queries):
        mask, rows, columns = state.cp.shard(mask[:, :, :1], dim=3), 1, own_keys
    # Padding, alike for all queries.
    if is_alike and columns == own_keys and _is_one_or(rows, queries):
        mask = mask[:, :, :1]
        if mask.dtype == torch.bool and mask.shape[1] == 1:
            # Queries and visible keys are of one segment, hidden keys of none.
            ids = torch.where(mask[:, 0, 0], 0, -1).int().expand(call.key.shape[0], -1)
            options["segment_ids"] = (ids.new_zeros(ids.shape[0], queries), ids)
            return ordered
        # Every rank's part of the mask is gathered, in the order that the call's tokens have.
        cp = state.cp if ordered else state.unordered
        grad: Any = "sum" if mask.requires_grad and torch.is_grad_enabled() else None
        mask = cp.unshard(mask, dim=3, grad=grad).expand(-1, -1, queries, -1)
    else:
        if (rows, columns) == (queries, own_keys) != (queries, keys):
            refuse(
                call.module,
                f"attn_mask {tuple(mask.shape)} has a row for each "
                f"of this rank's queries and a column for each of its own keys, and says nothing of the "
                f"{keys} keys of all ranks. Give a column for each of those, in natural order; for "
                f"padding one row, [B, 1, 1, T_local]; for causal attention is_causal=True; for "
                f"packed documents documents=(0, ..., T)",
            )
        if is_square and columns == keys:
            mask = state.cp.shard(mask, dim=2)
        elif (rows, columns) != (queries, keys):
            _wrong_shape(call, mask, keys)
        ordered = True
    options["mask" if mask.dtype == torch.bool else "bias"] = mask
    return ordered


def _is_one_or(size: int, other: int) -> bool:
    """Return True if a size is 1 or another size, in graphs, too."""
    return size == 1 or size == other  # noqa: PLR1714 - torch 2.11 finds no symbolic size in a tuple


def _wrong_shape(call: Call, mask: Tensor, keys: int) -> Never:
    """Raise a ``ValueError`` for a mask of a shape that nothing explains."""
    raise ValueError(
        f"replace_sdpa: {call.module}: attn_mask of {tuple(mask.shape)} for {call.query.shape[2]} queries and "
        f"{call.key.shape[2]} keys of this rank, of {keys} keys: give [..., 1, T_local] or [..., "
        f"1, T] of keys alike for all queries, or [..., T_local, T] of this rank's queries, of 1 or "
        f"{call.query.shape[0]} sequences and 1 or {call.query.shape[1]} heads"
    )


def checked(scope: Scope, call: Call) -> Call:
    """Check a call and return it with tensors of four dimensions, ``[B, H, T_local, D]``.

    Raises:
        ValueError: It is malformed.
        UnsupportedError: It cannot be exact on split sequences.
    """
    query, key, value, mask = call[:4]
    module, is_sharded = call.module, scope.keys == "sharded"
    for name, x in zip(Call._fields, call[:4], strict=False):
        if isinstance(x, DTensor | CausalBias) or (isinstance(x, Tensor) and x.is_nested):
            refuse(
                module,
                f"{name} is a {type(x).__name__ if not x.is_nested else 'nested tensor'}. Give plain "
                f"tensors, of a DTensor its to_local(); for causal attention is_causal=True",
            )
    if not query.ndim == key.ndim == value.ndim or query.ndim not in (3, 4):
        refuse(
            module,
            f"query {tuple(query.shape)} and key {tuple(key.shape)}: [B, H, T_local, D] or "
            f"[B, T_local, D] is needed. If a dimension before H holds frames or windows that attend "
            f"within themselves, name the module in local=",
        )
    if query.ndim == 3:  # heads are a part of the batch, or there is one
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        mask = mask.unsqueeze(1) if mask is not None and mask.ndim == 3 else mask
    if mask is not None and mask.ndim < 4:
        mask = mask[(None,) * (4 - mask.ndim)]
    if query.shape[1] != key.shape[1] and not call.enable_gqa:
        raise ValueError(
            f"replace_sdpa: {module}: {query.shape[1]} query heads and {key.shape[1]} key heads "
            f"need enable_gqa=True"
        )
    if scope.keys == "own" and query.shape[2] != key.shape[2]:
        refuse(
            module,
            f"{query.shape[2]} queries and {key.shape[2]} keys of this rank. Name the module in whole_keys= "
            f"if every rank holds all these keys (text), in sharded_keys= if they are a rank's part of "
            f"another sequence, or in local= if a rank's tokens attend to these alone. A KV cache is not "
            f"supported: generate on one device",
        )
    if is_sharded and call.is_causal:
        refuse(module, "is_causal=True over keys of another sequence")
    if is_sharded and scope.state.documents is not None:
        refuse(module, "documents= with keys of another sequence, whose documents are not known")
    return call._replace(query=query, key=key, value=value, attn_mask=mask)


def refuse(module: str, reason: str) -> Never:
    """Raise an ``UnsupportedError`` that names the module."""
    raise UnsupportedError(f"replace_sdpa: {module}: {reason}")


def _within_documents(state: Replacement, call: Call) -> Tensor:
    """Return a mask of a whole sequence in which documents see themselves alone.

    The call's own mask, and its causality, are part of it.
    """
    device, mask = call.query.device, call.attn_mask
    ends = torch.tensor(not_none(state.documents)[1:], device=device)
    index = torch.arange(call.query.shape[-2], device=device)
    document = torch.searchsorted(ends, index, right=True)
    visible = document[:, None] == document
    if call.is_causal:
        visible &= index[:, None] >= index
    return visible if mask is None else _hidden(mask, visible)


@untraced
def _draw_seed() -> int:
    """Draw a dropout seed from torch's generator of the CPU, which checkpointing restores.

    Ranks compare their seeds, so those that are seeded unlike end in a ``RankMismatchError``.
    """
    return int(torch.randint(1 << 62, (), dtype=torch.int64, device="cpu"))


@untraced
def _with_dropout_of_rank(rank: int, call: Call) -> Tensor:
    """Attend to keys that every rank holds, dropping other weights than the other ranks.

    Generators of ranks are alike, and their queries are not: the same draws would repeat.
    """
    seed, device = (_draw_seed() + rank) % (1 << 62), call.query.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)
        return _by_torch(call)


def module_of(scope: Scope, query: Tensor, key: Tensor, words: Sequence[str]) -> str:
    """Return the name of the module that makes the call, and note it in ``state.modules``.

    The note has ``words`` on the call.

    An ``autograd.Function`` between the call and the module may compute the call again in its
    backward: that runs in the scope's mode, too.

    Raises:
        UnsupportedError: A checkpoint lies between the call and the module: it would compute the
            call again outside of every module's forward, where nobody replaces it.
    """
    state, name, made_by = scope.state, "a compiled module", Caller()
    if torch.compiler.is_compiling():
        state.note_traced()
        if state.may_repeat():
            torch._dynamo.graph_break()  # noqa: SLF001 - torch has no public name for it
    else:
        made_by = caller()
        name = state.names.get(id(made_by.module)) or type(made_by.module or state.root).__name__
        if state.computes == "shards":
            _follow_into_backward(scope, name, made_by)
    if scope.others and state.computes == "shards":
        refuse(
            name,
            f"it is also {scope.others}: give the options all of its names, or make two modules of it",
        )
    if made_by.module is not None and name not in state.modules:
        sizes = f"{query.shape[-2]} queries, {key.shape[-2]} keys of this rank"
        state.modules[name] = ", ".join([f"{scope.keys} keys", *words, sizes])
    return name


def _follow_into_backward(scope: Scope, name: str, made_by: Caller) -> None:
    """Let functions that may compute a call again in their backward do it in the scope's mode.

    Raises:
        UnsupportedError: They cannot.
    """
    if made_by.is_checkpointed and made_by.module is not None:
        refuse(
            name,
            "it calls attention inside torch.utils.checkpoint within its own forward, which would compute "
            "it again outside of the module. Checkpoint a module's call instead: checkpoint(block, x)",
        )
    if made_by.has_setup_context and scope.state.watch.has_grad():
        refuse(
            name,
            "it calls attention inside an autograd.Function with setup_context within its own forward, whose "
            "backward would compute it again outside of the module. Call a module there, or give the "
            "function a forward(ctx, ...)",
        )
    for node in made_by.nodes:
        if not hasattr(node, "_is_on_ring"):
            node._is_on_ring = True  # noqa: SLF001 - a user's node, which lets us note this
            modes = [scope.state.mode_of(scope)]
            node.register_prehook(lambda _, modes=modes: modes[0].__enter__() and None)
            node.register_hook(lambda *_, modes=modes: modes[0].__exit__(None, None, None))
    _unpack_in_mode(scope)


def _unpack_in_mode(scope: Scope) -> None:
    """Let hooks of a user that may compute saved tensors again do it in the scope's mode."""
    if (hooks := _hooks_of_user()) is None:
        return
    pack, unpack = hooks

    def unpack_in_mode(packed: Any) -> Any:
        with scope.state.mode_of(scope):
            return unpack(packed)

    _autograd._pop_saved_tensors_default_hooks()  # noqa: SLF001
    _autograd._push_saved_tensors_default_hooks(pack, unpack_in_mode)  # noqa: SLF001


def _hooks_of_user() -> tuple[Any, Any] | None:
    """Return the functions that pack and unpack saved tensors, unless they are torch's or ours."""
    hooks = _autograd._top_saved_tensors_default_hooks(True)  # noqa: SLF001
    is_known = str(getattr(hooks and hooks[1], "__module__", "")).startswith(("torch.", __name__))
    return None if is_known else hooks

"""Rules of ``flex_attention``: a ``mask_mod`` as a mask, a ``score_mod`` as options of a call.

Both are functions of single numbers, so tracing one shows every operation that it makes. What
depends on one position alone is computed for all positions, as a table. What depends on both is
compared with what ring attention has: bands, documents, a soft cap, ALiBi. All else of a mask
becomes a predicate, all else that is added to a score a bias: nothing is approximated.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ring_core import Mask
from ring_core.base.arguments import not_none

Ints = npt.NDArray[np.int64]
_aten = torch.ops.aten
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
#: Operations on single numbers, by their names in :mod:`operator` or numpy.
_NAMES: dict[Any, str] = {
    **{getattr(_aten, name): name for name in ("add", "sub", "mul", "neg", "abs", "where", "rsub")},
    **{getattr(_aten, name): name for name in (*_COMPARISONS, "index")},
    **{getattr(_aten, f"{kind}_{x}"): f"{x}_" for kind in ("bitwise", "logical") for x in ("and", "or")},
    _aten.bitwise_not: "invert", _aten.logical_not: "invert", _aten.bitwise_xor: "xor",
    _aten.logical_xor: "xor", _aten.floor_divide: "floordiv", _aten.remainder: "mod",
    _aten.minimum: "minimum", _aten.maximum: "maximum",
}  # fmt: skip
_CAST = _aten._to_copy  # noqa: SLF001 - its name
#: Operations that return their argument; those of whose argument the dtype and device count alone.
_SAME = {_aten.lift_fresh_copy, _aten.lift_fresh, _aten.clone, _aten.alias, _aten.detach}
_MADE = {
    _aten.new_ones, _aten.new_zeros, _aten.new_full, _aten.ones_like, _aten.zeros_like,
    _aten.full_like,
}  # fmt: skip
_MOST_PAIRS = 1 << 24  # pairs of positions that are looked at together


class ModError(Exception):
    """A function that cannot be honoured on a split sequence; the message says what it does."""


# Traces -------------------------------------------------------------------------------------------


class Trace(NamedTuple):
    """A ``mask_mod`` or ``score_mod`` as a graph of operations on single numbers.

    Attributes:
        module: The graph, with the tensors that it reads.
        root: Its result.
        names: Names of its inputs: ``score``, ``b``, ``h``, ``q`` and ``k``.
        device: Device of its numbers.
    """

    module: GraphModule
    root: Any
    names: dict[Node, str]
    device: torch.device

    @classmethod
    def of(
        cls, mod: Callable[..., Any], device: torch.device, score: torch.dtype | None = None
    ) -> Trace:
        """Trace a ``mask_mod``, or a ``score_mod`` if the dtype of a score is given.

        Raises:
            ModError: It looks at its numbers while it is traced.
        """
        names = [*(["score"] if score else []), "b", "h", "q", "k"]
        zero = torch.zeros((), dtype=torch.int64, device=device)
        numbers = [zero.to(score) if x == "score" else zero.clone() for x in names]

        def call(*args: Any) -> Any:
            with TransformGetItemToIndex():  # as flex_attention calls it
                return mod(*args)

        try:
            module = make_fx(call)(*numbers)
        except Exception as error:  # a function may fail in any way
            text = str(error).partition("\n")[0]
            raise ModError(f"cannot be traced: {type(error).__name__}: {text}") from error
        root = next(iter(module.graph.find_nodes(op="output"))).args[0]
        if not isinstance(root, Node):
            raise ModError(f"returns {root!r}, and no tensor made of its arguments")
        inputs = module.graph.find_nodes(op="placeholder")
        return cls(module, root, dict(zip(inputs, names, strict=True)), device)

    def constant(self, node: Node) -> Tensor:
        """Return a tensor that the function reads."""
        tensor: Tensor = operator.attrgetter(str(node.target))(self.module)
        return tensor

    @property
    def key(self) -> tuple[Any, ...]:
        """Its operations and tensors, which are equal for traces that compute the same."""
        tensors = (self.constant(x) for x in self.module.graph.find_nodes(op="get_attr"))
        return self.module.code, identity_of(tensors)

    def nodes(self, root: Any) -> list[Node]:
        """Return the nodes that a node's value depends on, itself the last."""
        needed: set[Node] = set()
        pending = [root]
        while pending:
            node = pending.pop()
            if isinstance(node, Node) and node not in needed:
                needed.add(node)
                pending += [] if _packet(node) in _MADE else node.all_input_nodes
        return [x for x in self.module.graph.nodes if x in needed]

    def reads(self, root: Any) -> set[str]:
        """Return the names of the inputs that a node's value depends on."""
        return {self.names[x] for x in self.nodes(root) if x in self.names}

    def check_local(self, tokens: int, *, may_read: bool) -> None:
        """Check that it can be meant for the whole sequence, where a rank has ``tokens`` of it.

        Raises:
            ModError: It reads their number, or unless ``may_read`` a tensor of several numbers.
        """
        for node in self.nodes(self.root):
            constant = self.constant(node) if node.op == "get_attr" else None
            if constant is not None and constant.numel() > 1:
                if not may_read:
                    raise ModError(
                        f"reads a tensor of {tuple(constant.shape)} and was given for this rank's tokens"
                    )
                continue
            for x in tree_leaves(node.args) if constant is None else (constant.item(),):
                if not isinstance(x, Node | bool) and x in (
                    tokens,
                    -tokens,
                    tokens - 1,
                    1 - tokens,
                ):
                    raise ModError(f"reads the number {x}, that of this rank's tokens or one less")


def identity_of(tensors: Iterable[Tensor]) -> list[Any]:
    """Return a key of tensors, which is equal as long as none is changed in place."""
    # Changes of inference tensors are not counted, so they are equal to nothing.
    return [(id(x), object() if x.is_inference() else x._version, x) for x in tensors]  # noqa: SLF001


def _packet(node: Any) -> Any:
    """Return the operation of a node without its overload; ``None`` for what is none."""
    return getattr(getattr(node, "target", None), "overloadpacket", None)


def _filled(args: Any, known: Mapping[Node, Any]) -> Any:
    """Return arguments of a node with values in the place of nodes."""
    filled: Any = map_arg(args, known.get)
    return filled


def _dtype(node: Any) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _check_index(table: Tensor, indices: Sequence[Any], node: Node) -> None:
    """Check what is looked up in a table: a GPU would end the process.

    Raises:
        ModError: There is no such place, or it is no single number.
    """
    if len(indices) != table.ndim or any(x is None or x.dtype == torch.bool for x in indices):
        raise ModError(f"computes {node.target} of a part of a tensor of {tuple(table.shape)}")
    for size, index in zip(table.shape, indices, strict=True):
        if index.numel() and not -size <= int(index.min()) <= int(index.max()) < size:
            raise ModError(
                f"reads places {int(index.min())} to {int(index.max())} of a tensor of {tuple(table.shape)}"
            )


# Masks --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Rule:
    """A predicate over positions: nested tuples of an operation's name and its operands.

    Operands are ``"q"``, ``"k"``, numbers and, behind ``"index"``, an array.
    """

    tree: Any

    def __call__(self, q: Any, k: Any) -> Any:
        """Return where a query at ``q`` sees a key at ``k``."""
        return _evaluated(self.tree, q, k)


def _evaluated(tree: Any, q: Any, k: Any) -> Any:
    """Evaluate a rule at positions of numpy, or of what ring_core traces predicates with."""
    if not isinstance(tree, tuple):
        return {"q": q, "k": k}[tree] if isinstance(tree, str) else tree
    name, *operands = tree
    if name == "index":
        return operands[0][tuple(_evaluated(x, q, k) for x in operands[1:])]
    values = [_evaluated(x, q, k) for x in operands]
    if name == "rsub":
        return values[1] - values[0]
    return getattr(operator if hasattr(operator, name) else np, name)(*values)


@dataclass(frozen=True, eq=False)
class _Value:
    """Value of a node, for one row of the batch and one head.

    Attributes:
        on: Positions that it depends on: ``""``, ``"q"``, ``"k"`` or ``"qk"``.
        table: The value, ``[...]``; of one position those of all, ``[T, ...]``; of both ``None``.
        dtype: Its dtype.
        packet: The operation that computes it; ``None`` for an input or a constant.
        args: Arguments of the operation, nodes as their values.
    """

    on: str
    table: Any
    dtype: torch.dtype
    packet: Any = None
    args: tuple[Any, ...] = ()

    @property
    def array(self) -> npt.NDArray[Any]:
        """The table as an array."""
        array: npt.NDArray[Any] = self.table.detach().cpu().numpy()
        return array

    @property
    def is_number(self) -> bool:
        """True if it is one number for a position, a pair, or in all."""
        return self.table is None or self.table.ndim == bool(self.on)

    @property
    def is_whole(self) -> bool:
        """True for integers."""
        return not (self.dtype == torch.bool or self.dtype.is_floating_point)


def _value_of(trace: Trace, root: Node, tokens: int, row: int, head: int) -> _Value:
    """Return the value of a node at positions ``0 .. tokens - 1`` for one row and head.

    Raises:
        ModError: An operation is not known, or reads a tensor beyond its end.
    """
    device = trace.device
    at = torch.arange(tokens, device=device)
    inputs = {"q": _Value("q", at, at.dtype), "k": _Value("k", at, at.dtype)}
    for name, number in (("b", row), ("h", head)):
        inputs[name] = _Value("", torch.tensor(number, device=device), at.dtype)
    known: dict[Node, _Value] = {}
    for node in trace.nodes(root):
        if node in trace.names:
            known[node] = inputs[trace.names[node]]
        elif node.op == "get_attr":
            known[node] = _Value("", trace.constant(node), _dtype(node))
        else:
            known[node] = _computed(node, _filled(node.args, known), device)
    return known[root]


def _computed(node: Node, args: Any, device: torch.device) -> _Value:
    """Return the value of a node whose arguments are known; errors as of :func:`_value_of`."""
    packet, target = _packet(node), node.target
    if packet in _MADE:
        like = torch.zeros((), dtype=_dtype(node.args[0]), device=device)
        return _Value("", target(like, *args[1:], **node.kwargs), _dtype(node))  # type: ignore[operator]
    leaves, spec = tree_flatten(args)
    values = [x for x in leaves if isinstance(x, _Value)]
    on = "".join(sorted({*"".join(x.on for x in values)}, reverse=True))
    if on == "qk":
        if packet in _SAME or (
            packet is _CAST and values[0].is_whole and _Value(on, None, _dtype(node)).is_whole
        ):
            return values[0]
        if (
            packet not in _NAMES
            or node.kwargs
            or not all(x.is_number or packet is _aten.index for x in values)
        ):
            raise ModError(f"computes {target} of a query's and a key's position")
        return _Value(on, None, _dtype(node), packet, tuple(args))
    tables = [x.table if isinstance(x, _Value) else x for x in leaves]
    if packet is _aten.index and on:
        _check_index(tables[0], tables[1:], node)
    if not on:
        return _Value(on, target(*tree_unflatten(tables, spec), **node.kwargs), _dtype(node))  # type: ignore[operator]
    dims = tuple(0 if isinstance(x, _Value) and x.on else None for x in leaves)
    compute = torch.vmap(lambda *x: target(*tree_unflatten(x, spec), **node.kwargs), in_dims=dims)  # type: ignore[operator]
    return _Value(on, compute(*tables), _dtype(node), packet, tuple(args))


def _tree(value: Any) -> Any:
    """Return a value as the tree of a :class:`Rule`.

    Raises:
        ModError: It mixes fractions with whole numbers of the other position.
    """
    if not isinstance(value, _Value):
        return value
    if not value.on and value.table.ndim == 0:
        return value.array.item()
    if value.on != "qk":
        return (
            value.on if value.packet is None else _plain(value) or ("index", value.array, value.on)
        )
    if value.packet is _aten.index:
        array, places = value.args
        return ("index", array.array, *map(_tree, places))
    name, values = _NAMES[value.packet], [x for x in value.args if isinstance(x, _Value)]
    if any(x.dtype.is_floating_point for x in values):
        if name not in _COMPARISONS or any(x.on == "qk" for x in values) or len(values) < 2:
            raise ModError("computes with fractions of a query's and a key's position")
        dtype = torch.promote_types(values[0].dtype, values[1].dtype)  # as torch compares them
        values = [replace(x, table=x.table.to(dtype), packet=_CAST, dtype=dtype) for x in values]
        return (name, *map(_tree, values))
    return (name, *map(_tree, value.args))


def _plain(value: Any) -> Any:
    """Return a tree without arrays, or ``None``."""
    if isinstance(value, int):  # or a truth value
        return value
    if not isinstance(value, _Value) or value.dtype.is_floating_point:
        return None
    if value.packet is None:
        return value.on or (value.array.item() if value.table.ndim == 0 else None)
    operands = [_plain(x) for x in value.args]
    known = value.packet in _NAMES and value.packet is not _aten.index
    return (_NAMES[value.packet], *operands) if known and None not in operands else None


def mask_of(
    rules: Sequence[tuple[Trace, Node]], tokens: int, rows: int, heads: int,
    documents: Sequence[int] | None = None,
) -> Mask:  # fmt: skip
    """Return the mask of traced rules over ``tokens`` positions, the same for all rows and heads.

    Args:
        rules: Traces of functions, each with the node that is true where a query sees a key.
        tokens: Length of the whole sequence.
        rows: Rows of the batch.
        heads: Query heads.
        documents: Further offsets ``(0, ..., tokens)`` of documents.

    Raises:
        ModError: They depend on the row or the head, or compute what no mask has.
    """
    reads = {name for trace, root in rules for name in trace.reads(root)}
    first: Mask | None = None
    for row in range(rows if "b" in reads else 1):
        for head in range(heads if "h" in reads else 1):
            values = [_value_of(trace, root, tokens, row, head) for trace, root in rules]
            mask = _mask_of([x for value in values for x in _terms(value)], tokens, documents)
            first = first or mask
            if mask != first:
                axis, name, number = ("head", "h", head) if head else ("batch", "b", row)
                raise ModError(
                    f"depends on the {axis}: it differs between {name} = 0 and {name} = {number}"
                )
    assert first is not None
    return first


def _mask_of(terms: Sequence[_Value], tokens: int, documents: Sequence[int] | None) -> Mask:
    """Return the mask of what shows a pair if all terms do; errors as of :func:`mask_of`."""
    cells: list[Ints] = [np.asarray(documents or (0, tokens), dtype=np.int64)]
    comparisons: list[tuple[_Linear, _Value]] = []
    others: dict[int, _Value] = {}
    for term in terms:
        if (offsets := _documents_of(term, tokens)) is not None:
            cells.append(offsets)
            continue
        sums = [*_at_most_zero(term)]
        comparisons += [(x, term) for x in sums]
        if not sums:
            others[id(term)] = term
    offsets = np.unique(np.concatenate(cells))
    sides: dict[int, int] = {1: tokens, -1: tokens}
    for linear, term in comparisons:
        if (side := _band(linear, offsets, tokens)) is None:
            others[id(term)] = term
        else:
            sides[side[0]] = min(sides[side[0]], side[1])
    left, right = (None if x >= tokens - 1 else x for x in (sides[1], sides[-1]))
    options: dict[str, Any] = {"causal": right == 0} if tokens > 1 else {}
    if (left, right or None) != (None, None):
        options["window"] = (left, right or None)
    if len(offsets) > 2:
        options |= _cells(offsets)
    if others:
        # A rule that looks at both positions, whichever of them the terms read.
        tree: Any = ("ge", ("sub", "q", "k"), -tokens)
        for term in map(_tree, others.values()):
            tree = (
                "and_",
                tree,
                ("ge", "q", 0 if term else tokens) if isinstance(term, bool) else term,
            )
        options["predicate"] = Rule(tree)
    return Mask(**options)


def _cells(offsets: Ints) -> dict[str, Any]:
    """Return the option for ranges of positions that do not see each other."""
    sizes = np.diff(offsets)
    if (sizes[:-1] == sizes[0]).all() and sizes[-1] <= sizes[0]:
        return {"chunk_size": int(sizes[0])}
    return {"cu_seqlens": tuple(offsets.tolist())}


def _terms(value: _Value) -> Iterator[_Value]:
    """Yield values that are all true where a value is, but those that are always true.

    Raises:
        ModError: It is no truth value.
    """
    if value.dtype != torch.bool:
        raise ModError(f"returns {value.dtype}, and no truth value")
    if value.packet in (_aten.bitwise_and, _aten.logical_and) and all(
        isinstance(x, _Value) for x in value.args
    ):
        for x in value.args:
            yield from _terms(x)
    elif value.on == "qk" or not value.table.all():
        yield value


class _Linear(NamedTuple):
    """The number ``on_q[q] + on_k[k] + rest``; the parts are ``[T]``, or 0 for none."""

    on_q: Any = 0
    on_k: Any = 0
    rest: int = 0

    def plus(self, other: _Linear, sign: int = 1) -> _Linear:
        """Return the sum with another number, or with ``sign`` -1 the difference."""
        return _Linear(*(a + sign * b for a, b in zip(self, other, strict=True)))


def _linear(value: Any) -> _Linear | None:
    """Return a whole number, or a truth value, as a sum of parts that depend on one position."""
    if isinstance(value, int):
        return _Linear(rest=int(value))
    if not isinstance(value, _Value) or value.dtype.is_floating_point or not value.is_number:
        return None
    if value.on != "qk":
        table: Any = value.array.astype(np.int64)
        return _Linear(**{{"": "rest", "q": "on_q", "k": "on_k"}[value.on]: table})
    name, parts = _NAMES[value.packet], [_linear(x) for x in value.args]
    signs = {"neg": (-1,), "add": (1, 1), "sub": (1, -1), "rsub": (-1, 1)}.get(name)
    if value.dtype == torch.bool or signs is None or any(x is None for x in parts):
        return None
    total = _Linear()
    for part, sign in zip(parts, signs, strict=True):
        total = total.plus(not_none(part), sign)
    return total


def _at_most_zero(term: _Value) -> Iterator[_Linear]:
    """Yield numbers that are all at most 0 just where a comparison is true, or nothing."""
    name = _NAMES.get(term.packet)
    if name not in ("le", "lt", "ge", "gt", "eq"):
        return
    a, b = term.args if name not in ("ge", "gt") else term.args[::-1]
    strict = _Linear(rest=int(name in ("lt", "gt")))
    right = _linear(b)
    is_distance = isinstance(a, _Value) and a.on == "qk" and a.packet is _aten.abs and name != "eq"
    left = _linear(a.args[0] if is_distance else a)
    if left is None or right is None:
        return
    yield left.plus(right, -1).plus(strict)
    if is_distance:
        yield strict.plus(left, -1).plus(right, -1)
    elif name == "eq":
        yield right.plus(left, -1)


def _documents_of(term: _Value, tokens: int) -> Ints | None:
    """Return offsets ``(0, ..., T)`` of ranges that see themselves alone, if a term says that."""
    sums = [*_at_most_zero(term)] if term.packet is _aten.eq else []
    if not sums or any(np.ndim(x) == 0 for x in sums[0][:2]):
        return None
    numbers = sums[0].on_q + sums[0].rest
    starts = np.flatnonzero(np.diff(numbers)) + 1
    are_ranges = len(np.unique(numbers)) == len(starts) + 1 < max(tokens, 2)
    if not np.array_equal(numbers, -sums[0].on_k) or not are_ranges:
        return None
    return np.concatenate([[0], starts, [tokens]])


def _band(linear: _Linear, offsets: Ints, tokens: int) -> tuple[int, int] | None:
    """Return ``(1, n)`` for ``q - k <= n``, ``(-1, n)`` for ``k - q <= n``, in all cells alike.

    ``None`` for another number, or a side that does not show a token itself.
    """
    if any(np.ndim(x) == 0 for x in linear[:2]):
        return None
    at, starts = np.arange(tokens), offsets[:-1]
    is_inner = np.ones(tokens, dtype=bool)
    is_inner[starts] = False
    for sign in (1, -1):
        rests = linear.on_q - sign * at, linear.on_k + sign * at
        if any(np.diff(x, prepend=x[:1])[is_inner].any() for x in rests):
            continue
        limits = -(rests[0] + rests[1] + linear.rest)[starts]
        if (limits == limits[0]).all() and limits[0] >= 0:
            return sign, int(limits[0])
    return None


def check_blocks(block_mask: Any, mask: Mask, q_len: int, k_len: int) -> None:
    """Check that a block mask's blocks show what its function does, which ``mask`` is.

    ``flex_attention`` calls the function in partial blocks alone, so blocks made by hand may show
    something else.

    Raises:
        ModError: They do.
    """
    q_size, k_size = block_mask.BLOCK_SIZE
    q_starts, k_starts = np.arange(0, q_len, q_size), np.arange(0, k_len, k_size)
    partial = listed(block_mask.kv_num_blocks, block_mask.kv_indices, len(k_starts))
    full = np.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None:
        full = listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, len(k_starts))
    some, every = _shown(mask, q_starts, k_starts, q_len, k_len)
    wrong = (full & ~every) | (~full & ~partial & some)
    if wrong.any():
        row, head, a, b = np.argwhere(wrong)[0].tolist()
        raise ModError(
            f"does not show what the block mask's blocks show: in that of queries from {q_starts[a]} and keys "
            f"from {k_starts[b]} (b = {row}, h = {head}) it shows {'some' if some[a, b] else 'none'}, which the "
            f"block is {'full' if full[row, head, a, b] else 'empty'}"
        )


def listed(counts: Tensor, columns: Tensor, number: int) -> npt.NDArray[np.bool_]:
    """Return which blocks are in the lists of a block mask, ``[B, H, rows, number]``."""
    counts, columns = counts.cpu(), columns.cpu().long()
    found = torch.zeros(
        *columns.shape[:-1], max(number, columns.shape[-1]) + 1, dtype=torch.bool, device="cpu"
    )
    is_used = torch.arange(columns.shape[-1], device="cpu") < counts[..., None]
    found.scatter_(-1, torch.where(is_used, columns, found.shape[-1] - 1), value=True)
    array: npt.NDArray[np.bool_] = found[..., :number].numpy()
    return array


def _shown(
    mask: Mask, q_starts: Ints, k_starts: Ints, q_len: int, k_len: int
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return for blocks whether a mask shows some of their pairs, and whether all of them."""
    q_last, k_last = np.append(q_starts[1:], q_len) - 1, np.append(k_starts[1:], k_len) - 1
    if mask.predicate is not None:
        keys = np.arange(k_len)
        counts = np.stack([
            np.add.reduceat(mask.dense(np.arange(a, b + 1), keys).sum(0), k_starts)
            for a, b in zip(q_starts, q_last, strict=True)
        ])  # fmt: skip
        sizes = (q_last - q_starts + 1)[:, None] * (k_last - k_starts + 1)
        return counts > 0, counts == sizes
    q0, q1, k0, k1 = q_starts[:, None], q_last[:, None], k_starts, k_last
    left, right = (q_len + k_len if x is None else x for x in mask.band)
    some = (q0 - k1 <= left) & (k0 - q1 <= right)
    every = (q1 - k0 <= left) & (k1 - q0 <= right)
    if (offsets := mask.boundaries(0, max(q_len, k_len))) is not None:
        cell = [np.searchsorted(offsets, x, side="right") for x in (q0, q1, k0, k1)]
        some &= (cell[0] <= cell[3]) & (cell[2] <= cell[1])
        every &= (cell[0] == cell[3]) & (cell[2] == cell[1])
    return some, every


# Scores -------------------------------------------------------------------------------------------


class Scores(NamedTuple):
    """Parts of a traced ``score_mod``: ``cap * tanh(score / cap) + terms`` where it is not hidden.

    Attributes:
        softcap: The cap; ``None`` for none.
        terms: What is added to that, each with a factor of 1 or -1.
        shown: Node that is true where the result is not ``-inf``; ``None`` for everywhere.
    """

    softcap: float | None
    terms: tuple[tuple[int, Any], ...]
    shown: Node | None

    @classmethod
    def of(cls, trace: Trace) -> Scores:
        """Return the parts of a traced ``score_mod``.

        Raises:
            ModError: It does something else with the score.
        """

        def has_score(x: Any) -> bool:
            return "score" in trace.reads(x)

        node, shown, terms = trace.root, None, []
        if _packet(node) is _aten.where:
            visible, kept, hidden = node.args
            if not has_score(visible) and _number(trace, hidden) == -torch.inf:
                node, shown = kept, visible
        while _packet(node) in (_aten.add, _aten.sub) and not node.kwargs:
            a, b = node.args
            if has_score(a) == has_score(b) or (has_score(b) and _packet(node) is _aten.sub):
                break
            terms.append((-1 if _packet(node) is _aten.sub else 1, b if has_score(a) else a))
            node = a if has_score(a) else b
        return cls(_softcap_of(trace, node), tuple(terms), shown)


def _number(trace: Trace, x: Any) -> float | None:
    """Return a number, or a tensor of one that depends on nothing and has no gradient."""
    if isinstance(x, int | float):
        return float(x)
    if not isinstance(x, Node) or trace.reads(x):
        return None
    table = _value_of(trace, x, 1, 0, 0).table
    return None if table.requires_grad or table.ndim else float(table)


def _softcap_of(trace: Trace, node: Any) -> float | None:
    """Return the cap of a score, or ``None`` for the score itself.

    Raises:
        ModError: It is neither.
    """

    def factors(x: Any) -> Iterator[tuple[Any, float]]:
        """Yield a node and a number whose product, or quotient, another node is."""
        for a, b in (x.args, x.args[::-1]) if _packet(x) is _aten.mul else ():
            if (number := _number(trace, b)) is not None:
                yield a, number

    if trace.names.get(node) == "score":
        return None
    for bounded, cap in factors(node):
        if _packet(bounded) is not _aten.tanh or cap <= 0:
            continue
        inner = bounded.args[0]
        if (
            _packet(inner) is _aten.div
            and not inner.kwargs
            and _number(trace, inner.args[1]) == cap
        ):
            inner = inner.args[0]
        else:
            inner = next((x for x, factor in factors(inner) if factor == 1 / cap), None)
        if trace.names.get(inner) == "score":
            return cap
    raise ModError(
        f"ends in {getattr(node, 'target', node)} of the score, which is no soft cap, c * tanh(score / c), and no sum "
        f"of one, or of the score, with what does not depend on it"
    )


def options_of(
    trace: Trace, scores: Scores, mask: Mask | None, rows: int, heads: int, q: Tensor, tokens: int
) -> dict[str, Any]:
    """Return options of :func:`ring_torch.ring_attention` that do what a ``score_mod`` does.

    Args:
        trace: Trace of the function.
        scores: Its parts.
        mask: Mask of the call.
        rows: Rows of the batch.
        heads: Query heads.
        q: Positions of this rank's queries.
        tokens: Number of keys of all ranks.

    Raises:
        ModError: An operation is not known, or reads a tensor beyond its end, for a query of any
            rank.
    """
    options: dict[str, Any] = {} if scores.softcap is None else {"softcap": scores.softcap}
    device = trace.device
    at = torch.arange(tokens, device=device)
    grids = {
        "b": torch.arange(rows, device=device)[:, None, None, None],
        "h": torch.arange(heads, device=device)[None, :, None, None],
        "q": q[None, None, :, None], "k": at[None, None, None],
    }  # fmt: skip
    for _, term in scores.terms:
        _check_reads(trace, term, grids, at)
    is_causal = mask is not None and mask.band[1] == 0
    bias: Tensor | None = None
    for sign, term in scores.terms:
        slopes = _slopes_of(trace, sign, term, grids, is_causal=is_causal)
        if slopes is not None and "alibi_slopes" not in options:
            options["alibi_slopes"] = slopes
            continue
        value = sign * _on_grid(trace, term, grids)
        bias = value if bias is None else bias + value
    if bias is not None:
        dtype = next(_dtype(x) for x, name in trace.names.items() if name == "score")
        options["bias"] = bias.to(dtype).expand(-1, -1, len(q), tokens)
    return options


def _check_reads(trace: Trace, root: Any, grids: dict[str, Tensor], at: Tensor) -> None:
    """Check what a node reads for the queries of all ranks, so that no rank is alone in refusing.

    Raises:
        ModError: It reads a tensor beyond its end.
    """
    for node in trace.nodes(root):
        if _packet(node) is not _aten.index:
            continue
        table, indices = cast("tuple[Node, list[Any]]", node.args)
        is_by_query = any("q" in trace.reads(x) for x in indices)
        for queries in at.split(max(1, _MOST_PAIRS // len(at)) if is_by_query else len(at)):
            here = grids | {"q": queries[None, None, :, None]}
            values = [None if x is None else _on_grid(trace, x, here) for x in indices]
            _check_index(table.meta["val"], values, node)


def _on_grid(trace: Trace, root: Any, grids: dict[str, Tensor]) -> Tensor:
    """Return what a node is at all rows, heads and positions, ``[B, H, T_local, T]`` or ones.

    Raises:
        ModError: An operation is not known, or reads a tensor beyond its end.
    """
    if not isinstance(root, Node):
        return torch.full((1, 1, 1, 1), root, device=trace.device)
    known: dict[Node, Tensor] = {}
    for node in trace.nodes(root):
        if node in trace.names:
            known[node] = grids[trace.names[node]]
            continue
        if node.op == "get_attr":
            x = trace.constant(node)
            known[node] = x if x.ndim else x[None, None, None, None]
            continue
        packet, args, target = _packet(node), _filled(node.args, known), node.target
        is_by_number = (
            packet in _NAMES
            or packet in _SAME
            or torch.Tag.pointwise in getattr(target, "tags", ())
        )
        if packet is _aten.index:
            _check_index(args[0], args[1], node)
        elif packet in _MADE:
            args = (
                torch.zeros((1,) * 4, dtype=_dtype(node.args[0]), device=trace.device),
                *args[1:],
            )
        elif not (is_by_number or packet in (_CAST, _aten.scalar_tensor)):
            raise ModError(f"computes {target}, which is no operation on single numbers")
        if node.meta["val"].ndim:
            raise ModError(f"computes {target} of several numbers at once")
        known[node] = target(*args, **node.kwargs)  # type: ignore[operator]
    value = known[root]
    return value if value.ndim else value[None, None, None, None]


def _slopes_of(
    trace: Trace, sign: int, term: Any, grids: dict[str, Tensor], *, is_causal: bool
) -> Tensor | None:
    """Return slopes ``[H]`` or ``[B, H]`` if a term is ``-slope * abs(q - k)`` where it is seen."""
    while _packet(term) in (_aten.neg, *_SAME):
        sign, term = -sign if _packet(term) is _aten.neg else sign, term.args[0]
    for factor, distance in (term.args, term.args[::-1]) if _packet(term) is _aten.mul else ():
        turn = _distance(trace, distance, is_causal=is_causal)
        if turn is None or trace.reads(factor) - {"b", "h"}:
            continue
        slopes = _on_grid(trace, factor, grids)
        if slopes.requires_grad:
            return None
        slopes = (-sign * turn * slopes[..., 0, 0]).float().expand(-1, grids["h"].shape[1])
        return slopes[0].contiguous() if len(slopes) == 1 else slopes.contiguous()
    return None


def _distance(trace: Trace, node: Any, *, is_causal: bool, is_abs: bool = False) -> int | None:
    """Return 1 for ``abs(q - k)``, -1 for its negative, of the pairs that are seen, or ``None``."""
    packet = _packet(node)
    if packet is _CAST or packet in _SAME:
        return _distance(trace, node.args[0], is_causal=is_causal, is_abs=is_abs)
    if packet is _aten.neg:
        turn = _distance(trace, node.args[0], is_causal=is_causal, is_abs=is_abs)
        return turn if is_abs or turn is None else -turn
    if packet is _aten.abs:
        turn = _distance(trace, node.args[0], is_causal=is_causal, is_abs=True)
        return None if turn is None else 1
    if packet is _aten.sub and not node.kwargs and (is_causal or is_abs):
        return {"qk": 1, "kq": -1}.get("".join(trace.names.get(x, "") for x in node.args))
    return None

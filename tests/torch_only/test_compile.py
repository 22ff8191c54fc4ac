"""``torch.compile``: calls are in the graph, without breaks, and results equal the eager ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from dense import numbers, sdpa
from on_ranks import on_ranks
from refused import refused
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from views import VIEWS

from ring_core import ChunkLayout, Mask, StrategyConfig, UnsupportedError
from ring_torch import ContextParallel, KernelConfig, cross_entropy, ring_attention
from ring_torch.compiled import attention as _compiled
from ring_torch.local import LocalRanks
from ring_torch.options import CallOptions

LENGTH = 64
DENSE = Mask(causal=True, window=(20, 0))

#: Options of calls; a tuple of sizes stands for a tensor.
CALLS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "gather": {"causal": True, "window": (9, 3), "strategy": "gather"},
    "documents": {"causal": True, "cu_seqlens": (0, 13, 40, LENGTH), "softcap": 3.0},
    "mask": {"mask": DENSE, "kernel": KernelConfig("eager", block_q=16), "deterministic": True},
    "segments": {"segment_ids": True, "strategy": "gather"},
    "hybrid": {"causal": True, "window": (5, 0), "strategy": StrategyConfig("hybrid", ulysses_size=2)},
    "strategy": {
        "cu_seqlens": (0, 20, LENGTH), "strategy": StrategyConfig("hybrid", ulysses_size=1, outer="gather"),
    },
    "sinks": {
        "causal": True, "sinks": True, "chunk_size": 24, "return_lse": True, "softmax_scale": 0.3,
    },
    "bias": {"bias": True, "alibi_slopes": True, "dropout_p": 0.2, "dropout_seed": 5},
    "ulysses": {
        "causal": True, "segment_ids": True, "bias": True, "dropout_p": 0.3, "dropout_seed": 2**40,
        "strategy": "ulysses",
    },
    "array and more": {
        "mask": True, "bias": True, "sinks": True, "causal": True, "cu_seqlens": (0, 13, LENGTH),
        "strategy": "gather",
    },
}  # fmt: skip


def tensors(cp: ContextParallel, options: dict[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
    """Return this rank's leaf tensors, with q, k and v first, and all options."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    leaves = [cp.shard(random(1, LENGTH, h, 8)) for h in (4, 2, 2)]
    made: dict[str, Tensor] = {}
    if options.get("sinks"):
        made["sinks"] = random(4)
    if options.get("bias"):
        made["bias"] = cp.shard(random(1, 4, LENGTH, LENGTH), dim=2)
    leaves += made.values()
    if options.get("alibi_slopes"):
        made["alibi_slopes"] = random(4).abs()
    if options.get("segment_ids"):
        made["segment_ids"] = cp.shard((torch.arange(LENGTH) // 23).int()[None])
    if options.get("mask") is True:
        made["mask"] = cp.shard(random(LENGTH, LENGTH) > -0.5, dim=-2)
    for leaf in leaves:
        leaf.requires_grad_()
    return leaves, options | made


def outcome(call: Any, leaves: Sequence[Tensor], *rest: Any, others: Any = ()) -> list[Tensor]:
    """Return outputs of a call on leaves, and gradients of these and of others that it reads."""
    out = call(*leaves, *rest)
    outs = out if isinstance(out, tuple) else (out,)
    loss = sum((x.sin().sum() for x in outs), start=torch.zeros(()))
    return [*outs, *torch.autograd.grad(loss, (*leaves, *others))]


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function into one graph, anew."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


CHUNKS = ChunkLayout(((0, 3, 5, 6), (1, 2, 4, 7)))


@pytest.mark.parametrize(
    ("name", "layout", "strategy"),
    [
        *((name, "zigzag", None) for name in CALLS), ("causal", "contiguous", "balanced"),
        ("documents", CHUNKS, None), ("gather", CHUNKS, None),
    ],
)  # fmt: skip
@on_ranks
def test_in_one_graph(name: str, layout: Any, strategy: str | None) -> None:
    """Each input is a view of another kind: a graph expects strides of what a call returns."""
    cp, options = ContextParallel(layout=layout), CALLS[name]
    leaves, options = tensors(cp, options if strategy is None else options | {"strategy": strategy})
    first = [*CALLS].index(name)
    for n, x in enumerate(leaves[:3]):
        view = [*VIEWS.values()][(first + n) % len(VIEWS)]
        leaves[n] = view(x.detach()).requires_grad_()

    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        outputs = cp.attention(q, k, v, **options)
        out, *lse = outputs if isinstance(outputs, tuple) else (outputs,)
        # A model's output projection flattens the heads like this.
        return (out.flatten(2) * 1.5, *lse)

    calls = function, compiled(function)
    same_bits(*(outcome(call, leaves[:3], others=leaves[3:]) for call in calls))


def same_bits(actual: object, expected: object) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@on_ranks
def test_other_chunks_and_blocks_are_other_graphs() -> None:
    def function(cp: ContextParallel, config: KernelConfig, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return cp.attention(q, k, v, causal=True, kernel=config)

    call = compiled(function)
    for chunks, block in (
        (((0, 3), (1, 2)), 16), (((0, 2), (1, 3)), 16), (((0, 3), (1, 2)), 16),
        (((0, 3), (1, 2)), 32),
    ):  # fmt: skip
        cp, config = (
            ContextParallel(layout=ChunkLayout(chunks)),
            KernelConfig("eager", block_q=block),
        )
        qkv = [x.detach() for x in tensors(cp, {})[0]]
        with patch.object(_compiled, "_static_call", wraps=_compiled._static_call) as read:
            out = call(cp, config, *qkv)
        same_bits(out, function(cp, config, *qkv))
        texts = [json.loads(call.args[0])["options"] for call in read.call_args_list]
        kernels: list[Any] = [CallOptions(*options).kernel for options in texts]
        assert kernels and all(kernel["kernel"][:2] == ["eager", block] for kernel in kernels)


@pytest.mark.parametrize("name", ["gather", "segments", "sinks", "documents", "bias"])
@on_ranks
def test_operations_are_sound(name: str) -> None:
    """Check with ``opcheck`` that fake tensors predict what the custom operators return."""
    cp = ContextParallel()
    leaves, options = tensors(cp, CALLS[name])
    arguments: list[Any] = []

    def seen(*args: Any) -> Any:
        arguments.extend(args)
        return operation(*args)

    operation = _compiled.attention
    with patch.object(_compiled, "attention", seen):
        q, k, v = leaves[:3]
        _compiled.attend_in_graph(q, k, v, None, "zigzag", CallOptions(**options))
    torch.library.opcheck(
        operation, tuple(arguments),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )  # fmt: skip


def test_a_predicate_breaks_the_graph_and_is_right() -> None:
    torch._dynamo.reset()
    mask, graphs = Mask(predicate=lambda i, j: (i + j) % 3 != 0), []

    def function(x: Tensor) -> Tensor:
        return ring_attention(x * 2, x, x, mask=mask) * 2

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    x = torch.randn(1, 16, 2, 8)
    torch.testing.assert_close(torch.compile(function, backend=backend)(x), function(x))
    assert len(graphs) == 2


@pytest.mark.nightly(unless=["ring-zigzag-cu", "gather-chunks-cu"])
@pytest.mark.parametrize(
    ("strategy", "layout", "packed", "dtype"),
    [
        pytest.param("ring", "zigzag", "cu_seqlens", torch.float64, id="ring-zigzag-cu"),
        ("ring", "contiguous", "", torch.bfloat16), ("gather", "zigzag", "", torch.float64),
        pytest.param("gather", CHUNKS, "cu_seqlens", torch.float32, id="gather-chunks-cu"),
        ("ulysses", "zigzag", "segment_ids", torch.float32),
        ("auto", "striped", "segment_ids", torch.float64),
    ],
)  # fmt: skip
@on_ranks
def test_few_graphs_for_all_lengths(
    strategy: str, layout: Any, packed: str, dtype: torch.dtype
) -> None:
    """Six batches of other lengths, documents and padding make at most three graphs."""
    torch._dynamo.utils.counters.clear()
    cp, weight = ContextParallel(layout=layout), numbers(0, 8, 48).requires_grad_()

    def qkv(x: Tensor) -> Any:
        return (x @ weight).to(dtype).unflatten(2, (3, 2, 8)).unbind(2)

    def step(x: Tensor, labels: Tensor, length: int, options: dict[str, Any]) -> Tensor:
        out = cp.attention(*qkv(x), causal=True, strategy=strategy, seq_len=length, **options)
        return cross_entropy(cp, out.flatten(2).double(), labels, seq_len=length)

    def with_gradient(loss: Tensor) -> Tensor:
        return torch.cat([loss.detach()[None], torch.autograd.grad(loss, weight)[0].flatten()])

    calls: tuple[Any, ...] = (compiled(step), step)
    for n in range(6):
        length = 48 + 16 * (5 * n % 12) - n % 3
        x, position = numbers(n, 1, length, 8), torch.arange(length)
        labels = position[None] % 16
        ends = np.random.default_rng(n).choice(range(1, length), n % 5 + 1, replace=False)
        offsets = torch.tensor([0, *sorted(ends), length] if packed else [0, length])
        document = torch.bucketize(position, offsets, right=True).int()
        given = {"segment_ids": cp.shard(document[None], pad=True), "cu_seqlens": offsets}
        options = {packed: given[packed]} if packed else {}
        shards = cp.shard(x, pad=True), cp.shard(labels, pad=True)
        results = [with_gradient(call(*shards, length, options)) for call in calls]
        same_bits(*results)
        if dtype == torch.float64:
            visible = (position[:, None] >= position) & (document[:, None] == document)
            logits = sdpa(*qkv(x), attn_mask=visible).flatten(2)[0]
            expected = with_gradient(torch.nn.functional.cross_entropy(logits, labels[0]))
            dist.all_reduce(results[0])
            torch.testing.assert_close(results[0], expected, rtol=1e-9, atol=1e-12)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 1 + MOST


@pytest.mark.parametrize(
    ("options", "heads", "keys", "graphs"),
    [
        ({"causal": True}, (4, 2), 1, 2), ({"strategy": "gather"}, (4, 2), 2, 2),
        ({"return_lse": True, "strategy": "ulysses"}, (5, 1), 1, 2),  # with padded heads
        ({}, (4, 2), 2, 4),  # `auto` may choose by how many keys there are for a query
    ],
)  # fmt: skip
@on_ranks
def test_other_sizes(
    options: dict[str, Any], heads: tuple[int, int], keys: int, graphs: int
) -> None:
    """Batch size, lengths of queries and keys, and sizes of a bias are symbols of one graph."""
    torch._dynamo.utils.counters.clear()
    cp = ContextParallel()

    def step(q: Tensor, k: Tensor, bias: Tensor, ids: Tensor | None) -> Any:
        return cp.attention(q, k, k * 2, bias=bias, segment_ids=ids, **options)

    calls = compiled(step), step
    for batch, length in ((2, 8), (3, 12), (5, 16), (4, 20)):
        q, k = ((batch, n * length, h, 8) for n, h in zip((1, keys), heads, strict=True))
        shapes = q, k, (1, heads[0], length, keys * length * cp.cp_size)
        ids = None if keys > 1 else (torch.arange(length) // 5).int().expand(batch, -1)
        leaves = [numbers(n, *shape).requires_grad_() for n, shape in enumerate(shapes)]
        same_bits(*(outcome(call, leaves, ids) for call in calls))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@on_ranks
def test_tensors_without_numbers_send_nothing(rank: int) -> None:
    """Calls on fake tensors leave the group usable."""
    cp, x = ContextParallel(), torch.randn(1, 8, 2, 8)
    with FakeTensorMode() as mode:
        q = mode.from_tensor(x).requires_grad_()
        out, lse = cp.attention(q, q, q, causal=True, cu_seqlens=(0, 3, 16), return_lse=True)
        (out.sum() + lse.sum()).backward()
        assert isinstance(out, FakeTensor)
        assert q.grad is not None
        assert out.shape == q.grad.shape == cp.shift(q, 1).shape == x.shape
        assert cp.unshard(out.detach()).shape == (1, 16, 2, 8)
        layer = torch.nn.Linear(1, 1)
        refused("FakeTensorMode", cp.reduce_gradients, layer, error=UnsupportedError)
    refused("a FakeTensor", cp.reduce_gradients, layer, error=UnsupportedError)
    q = q.detach()
    for args in ((q, q, q), (x, x, q)):
        refused("outside of its FakeTensorMode", cp.attention, *args)
    # Only one rank makes these calls, so they must send nothing for tensors without data.
    if rank == 0:
        assert cp.unshard(q).shape == (1, 16, 2, 8)
        assert cp.shift(q, 1).shape == cp.relayout(q, to="striped").shape == q.shape
        rows = cp.halo(q, 1, 0)
        assert rows.positions.shape == (2, 5) and cp.join(rows.rows[:, 1:]).shape == q.shape
        for call in (cp.unshard, lambda x: cp.attention(x, x, x)):
            refused(r"torch\.compile", torch.jit.trace, call, (x,), error=UnsupportedError)
    # Creating the object inside a compiled function breaks the graph, or is refused.

    def made_inside(x: Tensor) -> Tensor:
        return ContextParallel().shift(x, 1)

    in_graph = torch.compile(made_inside, backend="eager", fullgraph=True)
    refused("make it once, outside", in_graph, x, error=Exception)
    torch.testing.assert_close(torch.compile(made_inside, backend="eager")(x), cp.shift(x, 1))
    graph = make_fx(lambda x: cp.attention(x, x, x, causal=True))(x)
    torch.testing.assert_close(graph(x), cp.attention(x, x, x, causal=True), rtol=0, atol=0)


T = 32
MOST = 2  # most recompilations of a graph
BIG = 0x9E3779B97F4A7C15


def _offsets(n: int, documents: int) -> tuple[int, ...]:
    inner = np.random.default_rng(n).integers(1, T, documents - 1)
    return (0, *sorted(inner.tolist()), T)


#: Containers that are filled anew for each call.
_REFILLED: tuple[Any, ...] = ([0] * 6, np.zeros(6, int), torch.zeros(6, dtype=torch.int32))


def _refilled(n: int, kind: int) -> Any:
    for place, offset in enumerate(_offsets(n, 5)):
        _REFILLED[kind][place] = offset
    return _REFILLED[kind]


VARIED: dict[str, Callable[[int], dict[str, Any]]] = {
    "chunk_size": lambda n: {"chunk_size": 2 + n % 29},
    "tuple": lambda n: {"causal": True, "cu_seqlens": _offsets(n, 5)},
    "refilled list": lambda n: {"causal": True, "cu_seqlens": _refilled(n, 0)},
    "refilled ndarray": lambda n: {"cu_seqlens": _refilled(n, 1)},
    "refilled tensor": lambda n: {"cu_seqlens": _refilled(n, 2)},
    "mask": lambda n: {"mask": Mask(window=(2 + n % 23, 0), cu_seqlens=_offsets(n, 5))},
    "all": lambda n: {
        "window": (3 + n % 11, n % 2), "cu_seqlens": torch.tensor(_offsets(n, 2 + n % 9)),
        "dropout_p": 0.3, "dropout_seed": n * BIG % 2**64,
    },
    "softcap": lambda n: {"softcap": 2.0 + n},
}  # fmt: skip
#: How often each is called, if not five times. A float has a graph for each of its values.
TIMES = {"all": 10, "softcap": 1 + MOST}


def _graphs(_: int, name: str, strategy: str, times: int) -> int:
    """Compare compiled and eager results and gradients; return the number of graphs compiled."""
    torch._dynamo.utils.counters.clear()
    cp = ContextParallel()
    torch.manual_seed(0)
    leaves = [cp.shard(torch.randn(1, T, 2, 8)).requires_grad_() for _ in range(3)]

    def attend(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Any:
        return cp.attention(q, k, v, strategy=strategy, **options) * 2.0

    calls = compiled(attend), attend
    for n in range(times):
        same_bits(*(outcome(call, leaves, VARIED[name](n)) for call in calls))
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


#: Per change each case runs one strategy, in turn.
PER_CHANGE = [f"{name}-{('auto', 'gather')[n % 2]}" for n, name in enumerate(VARIED)]


@pytest.mark.nightly(unless=PER_CHANGE)
@pytest.mark.parametrize("strategy", ["auto", "gather"])
@pytest.mark.parametrize("name", VARIED)
def test_one_graph_for_all(name: str, strategy: str, pool: LocalRanks) -> None:
    # Dynamo gives up after 8 graphs.
    assert max(pool.run(_graphs, name, strategy, TIMES.get(name, 5))) <= 1 + MOST


TOKENS, TWO_HEADS = 8, 2
#: Options that a graph refuses, and the error; dynamo may add words around it.
WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"softcap": -1.0}, "softcap must be"), ({"window": 3}, "window must be"),
    ({"window": (-1, 0)}, "window"), ({"chunk_size": 0}, "chunk_size must be"),
    ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens must end"),
    ({"mask": Mask(causal=True), "causal": True}, "mask was given"),
    ({"mask": "causal"}, "mask must be"), ({"dropout_p": 0.1}, "dropout_p.* needs"),
    ({"sinks": [0.0] * TWO_HEADS}, "sinks must be a"),
    ({"alibi_slopes": [0.5] * TWO_HEADS}, "alibi_slopes must be a"),
    ({"alibi_slopes": (0.5,) * TWO_HEADS}, "alibi_slopes must be a"),
    ({"bias": [[[[0.0] * TOKENS] * TOKENS]]}, "bias must be a"),
    # The compiler takes numpy's numbers for tensors, whose value the host does not know.
    *(
        ({"dropout_p": 0.1, "dropout_seed": seed}, "dropout_seed must be an integer")
        for seed in (3.0, True, np.int64(3), np.uint64(3))
    ),
)  # fmt: skip


def _attend_once(*qkv: Tensor, **options: Any) -> Tensor:
    out: Tensor = ring_attention(*qkv, **options)
    return out


def test_what_is_wrong_is_refused_in_words() -> None:
    qkv = torch.randn(3, 1, TOKENS, TWO_HEADS, 8)
    for options, message in WRONG:
        with pytest.raises(Exception, match=message) as caught:
            compiled(_attend_once)(*qkv, **options)
        assert isinstance(caught.value, ValueError) or "ValueError" in str(caught.value)

"""``torch.compile``: calls are in the graph, without breaks, and results equal the eager ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from ring_core import ChunkLayout, Mask, StrategyConfig, UnsupportedError
from ring_torch import ContextParallel, KernelConfig, ring_attention
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
    "strategy": {"cu_seqlens": (0, 20, LENGTH), "strategy": StrategyConfig("auto")},
    "lse": {"causal": True, "return_lse": True, "softmax_scale": 0.3},
    "sinks": {"causal": True, "sinks": True, "chunk_size": 24},
    "bias": {"bias": True, "alibi_slopes": True},
    "dropout": {"causal": True, "dropout_p": 0.2, "dropout_seed": 5},
}


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalRanks]:
    """Start two ranks."""
    ranks = LocalRanks(2)
    yield ranks
    ranks.close()


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
    for leaf in leaves:
        leaf.requires_grad_()
    return leaves, options | made


def results(
    cp: ContextParallel, options: dict[str, Any], wrap: Callable[[Any], Any]
) -> list[Tensor]:
    """Return outputs and gradients of a function that calls attention."""
    leaves, options_of_call = tensors(cp, options)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out = cp.attention(q * 1.5, k, v, **options_of_call)
        return out if isinstance(out, tuple) else (out,)

    out = wrap(function)(*leaves[:3])
    loss = sum((x.sin().sum() for x in out), start=torch.zeros(()))
    return [*out, *torch.autograd.grad(loss, leaves)]


def _in_one_graph(_: int, name: str, layout: Any, strategy: str | None = None) -> None:
    cp, options = ContextParallel(layout=layout), CALLS[name]
    options = options if strategy is None else options | {"strategy": strategy}
    torch._dynamo.reset()
    expected = results(cp, options, lambda f: f)
    compiled_results = results(
        cp, options, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")
    )
    for x, y in zip(compiled_results, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize("name", CALLS)
def test_in_one_graph(name: str, pool: LocalRanks) -> None:
    pool.run(_in_one_graph, name, "zigzag")


def test_on_shards(pool: LocalRanks) -> None:
    pool.run(_in_one_graph, "causal", "contiguous", "balanced")


@pytest.mark.parametrize("name", ["documents", "gather"])
def test_on_chunks(name: str, pool: LocalRanks) -> None:
    pool.run(_in_one_graph, name, ChunkLayout(((0, 3, 5, 6), (1, 2, 4, 7))))


def _other_chunks_are_another_graph(_: int) -> None:
    """Check that a function compiles again for a ``ContextParallel`` with other chunks."""
    torch._dynamo.reset()

    def function(cp: ContextParallel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cp.attention(q, k, v, causal=True)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for chunks in (((0, 3), (1, 2)), ((0, 2), (1, 3)), ((0, 3), (1, 2))):
        cp = ContextParallel(layout=ChunkLayout(chunks))
        q, k, v = (x.detach() for x in tensors(cp, {})[0])
        torch.testing.assert_close(compiled(cp, q, k, v), function(cp, q, k, v), rtol=0, atol=0)


def test_other_chunks_are_another_graph(pool: LocalRanks) -> None:
    pool.run(_other_chunks_are_another_graph)


def _other_blocks_are_another_graph(_: int) -> None:
    torch._dynamo.reset()
    cp = ContextParallel()
    q, k, v = (x.detach() for x in tensors(cp, {})[0])

    def function(config: KernelConfig, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cp.attention(q, k, v, causal=True, kernel=config)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for block in (16, 32, 48):
        config = KernelConfig("eager", block_q=block)
        with patch.object(_compiled, "_static_call", wraps=_compiled._static_call) as read:
            out = compiled(config, q, k, v)
        torch.testing.assert_close(out, function(config, q, k, v), rtol=0, atol=0)
        texts = [json.loads(call.args[0])["options"] for call in read.call_args_list]
        kernels: list[Any] = [CallOptions(*options).kernel for options in texts]
        assert kernels and all(kernel["kernel"][:2] == ["eager", block] for kernel in kernels)


def test_other_blocks_are_another_graph(pool: LocalRanks) -> None:
    pool.run(_other_blocks_are_another_graph)


def _operations_are_sound(_: int, name: str) -> None:
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


@pytest.mark.parametrize("name", ["gather", "segments", "sinks", "documents", "dropout", "bias"])
def test_operations_are_sound(name: str, pool: LocalRanks) -> None:
    pool.run(_operations_are_sound, name)


def _checkpointed(_: int) -> None:
    cp, options = ContextParallel(), CALLS["causal"]
    expected = results(cp, options, lambda f: f)
    checkpointed = results(
        cp, options,
        lambda f: torch.compile(
            lambda *x: checkpoint(f, *x, use_reentrant=False), backend="aot_eager", fullgraph=True
        ),
    )  # fmt: skip
    for x, y in zip(checkpointed, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_checkpointed(pool: LocalRanks) -> None:
    pool.run(_checkpointed)


def counted(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """Return a compiled function, and a list with one item for each graph compiled of it."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(1)
        return graph.forward

    return torch.compile(function, backend=backend), graphs


def test_a_new_seed_needs_no_new_graph() -> None:
    torch._dynamo.reset()
    x = torch.randn(1, 16, 2, 8)

    def function(x: Tensor, seed: int) -> Tensor:
        return ring_attention(x, x, x, dropout_p=0.5, dropout_seed=seed) * 2

    compiled, graphs = counted(function)
    for seed in range(2, 7):
        torch.testing.assert_close(compiled(x, seed), function(x, seed))
    assert len(graphs) <= 2  # one for the first seed, one for any seed


def test_a_predicate_breaks_the_graph_and_is_right() -> None:
    torch._dynamo.reset()
    x = torch.randn(1, 16, 2, 8)
    mask = Mask(predicate=lambda i, j: (i + j) % 3 != 0)

    def function(x: Tensor) -> Tensor:
        return ring_attention(x * 2, x, x, mask=mask) * 2

    compiled, graphs = counted(function)
    torch.testing.assert_close(compiled(x), function(x))
    assert len(graphs) == 2


def test_what_cannot_be_done_is_refused_when_the_graph_is_traced() -> None:
    torch._dynamo.reset()
    x = torch.randn(1, 16, 2, 8)
    compiled = torch.compile(
        lambda x: ring_attention(x, x, x, softcap=-1.0), backend="eager", fullgraph=True
    )
    with pytest.raises(Exception, match="softcap must be"):
        compiled(x)


def _other_lengths_are_other_graphs(_: int) -> None:
    """Check that other lengths compile again, also where dynamo would make the length dynamic."""
    cp = ContextParallel()

    def step(q: Tensor, ids: Tensor, bias: Tensor) -> Tensor:
        return cp.attention(q, q, q, causal=True, segment_ids=ids, bias=bias)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for length in (8, 12, 16):
        ids = (torch.arange(length) // 5).int()[None]
        args = torch.randn(1, length, 2, 8), ids, torch.randn(1, 1, length, cp.cp_size * length)
        torch.testing.assert_close(compiled(*args), step(*args), rtol=0, atol=0)


def test_other_lengths_are_other_graphs(pool: LocalRanks) -> None:
    pool.run(_other_lengths_are_other_graphs)


def _without_numbers(rank: int) -> None:
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
        with pytest.raises(UnsupportedError, match="FakeTensorMode"):
            cp.reduce_gradients(layer)
    with pytest.raises(UnsupportedError, match="a FakeTensor"):
        cp.reduce_gradients(layer)
    q = q.detach()
    for args in ((q, q, q), (x, x, q)):
        with pytest.raises(ValueError, match="outside of its FakeTensorMode"):
            cp.attention(*args)
    # Only one rank makes these calls, so they must send nothing for tensors without data.
    if rank == 0:
        assert cp.unshard(q).shape == (1, 16, 2, 8)
        assert cp.shift(q, 1).shape == cp.relayout(q, to="striped").shape == q.shape
        rows = cp.halo(q, 1, 0)
        assert rows.positions.shape == (2, 5) and cp.join(rows.rows[:, 1:]).shape == q.shape
        for call in (cp.unshard, lambda x: cp.attention(x, x, x)):
            with pytest.raises(UnsupportedError, match=r"torch\.compile"):
                torch.jit.trace(call, (x,))
    # Creating the object inside a compiled function breaks the graph, or is refused.

    def made_inside(x: Tensor) -> Tensor:
        return ContextParallel().shift(x, 1)

    with pytest.raises(Exception, match="make it once, outside"):
        torch.compile(made_inside, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(torch.compile(made_inside, backend="eager")(x), cp.shift(x, 1))
    graph = make_fx(lambda x: cp.attention(x, x, x, causal=True))(x)
    torch.testing.assert_close(graph(x), cp.attention(x, x, x, causal=True), rtol=0, atol=0)


def test_tensors_without_numbers_send_nothing(pool: LocalRanks) -> None:
    """Calls on fake tensors leave the group usable."""
    pool.run(_without_numbers)

"""Numbers that change from call to call share one graph, with the results of eager calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ring_core import Mask
from ring_torch import ContextParallel, compat
from ring_torch.local import LocalRanks

T = 32
MOST = 2  # most recompilations of a graph
BIG = 0x9E3779B97F4A7C15


def _offsets(n: int, documents: int) -> tuple[int, ...]:
    inner = np.random.default_rng(n).integers(1, T, documents - 1)
    return (0, *sorted(inner.tolist()), T)


def _refilled(n: int) -> Tensor:
    return _BUFFER.copy_(torch.tensor(_offsets(n, 5)))


_BUFFER = torch.zeros(6, dtype=torch.int32)

VARIED: dict[str, Callable[[int], dict[str, Any]]] = {
    "window": lambda n: {"causal": True, "window": (2 + n % 23, 0)},
    "two-sided window": lambda n: {"window": (2 + n % 7, 3 + n % 5)},
    "chunk_size": lambda n: {"chunk_size": 2 + n % 29},
    "tuple": lambda n: {"causal": True, "cu_seqlens": _offsets(n, 5)},
    "list": lambda n: {"causal": True, "cu_seqlens": list(_offsets(n, 5))},
    "tensor": lambda n: {"causal": True, "cu_seqlens": torch.tensor(_offsets(n, 2 + n % 9))},
    "refilled tensor": lambda n: {"cu_seqlens": _refilled(n)},
    "ndarray": lambda n: {"cu_seqlens": np.array(_offsets(n, 2 + n % 9))},
    "mask": lambda n: {"mask": Mask(window=(2 + n % 23, 0), cu_seqlens=_offsets(n, 5))},
    "seed": lambda n: {"dropout_p": 0.3, "dropout_seed": n * BIG % 2**64},
    "all": lambda n: {
        "window": (3 + n % 11, 0), "cu_seqlens": torch.tensor(_offsets(n, 2 + n % 9)),
        "dropout_p": 0.3, "dropout_seed": n * BIG % 2**64,
    },
}  # fmt: skip
FLOATS: dict[str, Callable[[int], dict[str, Any]]] = {
    "softmax_scale": lambda n: {"softmax_scale": 0.1 + n / 16},
    "softcap": lambda n: {"softcap": 2.0 + n},
    "dropout_p": lambda n: {"dropout_p": n / 16, "dropout_seed": 1},
}


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalRanks]:
    with LocalRanks(2) as ranks:
        yield ranks


def _graphs(_: int, name: str, strategy: str, calls: int) -> int:
    """Compare compiled and eager results and gradients; return the number of graphs compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    cp = ContextParallel()
    torch.manual_seed(0)
    shards = [cp.shard(torch.randn(1, T, 2, 8)) for _ in range(3)]

    def attend(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Any:
        return cp.attention(q, k, v, strategy=strategy, **options) * 2.0

    compiled: Any = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for n in range(calls):
        messages = []
        functions: tuple[Any, ...] = (compiled, attend)
        for function in functions:
            leaves = [x.clone().requires_grad_() for x in shards]
            out = function(*leaves, (VARIED | FLOATS)[name](n))
            out.square().sum().backward()
            messages.append((out, *(x.grad for x in leaves)))
        torch.testing.assert_close(*messages, rtol=0, atol=0)
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


#: Per change each case runs one strategy, in turn. Left out are a list, which is read as a tuple,
#: a two-sided window, which is read like a one-sided one, and what `all` has: window, tensor, seed.
PER_CHANGE = [
    f"{name}-{('auto', 'gather')[n % 2]}"
    for n, name in enumerate(VARIED)
    if name not in ("list", "window", "two-sided window", "tensor", "seed")
]


@pytest.mark.nightly(unless=PER_CHANGE)
@pytest.mark.parametrize("strategy", ["auto", "gather"])
@pytest.mark.parametrize("name", VARIED)
def test_one_graph_for_all(name: str, strategy: str, pool: LocalRanks) -> None:
    calls = 20 if name == "all" else 6  # dynamo gives up after 8 graphs
    assert max(pool.run(_graphs, name, strategy, calls)) <= 1 + MOST


@pytest.mark.nightly(unless=["softcap"])
@pytest.mark.parametrize("name", FLOATS)
def test_every_float_has_its_graph(name: str, pool: LocalRanks) -> None:
    assert set(pool.run(_graphs, name, "auto", 3)) == {3}


def _refused(_: int) -> list[str]:
    torch._dynamo.reset()
    x = torch.ones(1, 8, 2, 8)
    texts = []
    for options in (
        {"window": 3}, {"window": (-1, 0)}, {"chunk_size": 0}, {"cu_seqlens": torch.tensor([0, 5])},
        {"mask": Mask(causal=True), "causal": True}, {"dropout_p": 0.1}, {"mask": "causal"},
    ):  # fmt: skip
        cp = ContextParallel()
        compiled = torch.compile(
            lambda o=options: cp.attention(x, x, x, **o),  # noqa: B023 - called before the next
            fullgraph=True, backend="aot_eager",
        )  # fmt: skip
        with pytest.raises(Exception, match=r"must be|must end|mask was given|needs") as error:
            compiled()
        texts.append(str(error.value))
    return texts


def test_what_is_wrong_is_refused_in_words(pool: LocalRanks) -> None:
    for expected_message in pool.run(_refused):
        for message, name in zip(
            expected_message,
            ["window", "window", "chunk_size", "cu_seqlens", "mask", "dropout_p", "mask"],
            strict=True,
        ):
            assert name in message


def _prepared(rank: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.randn(T // 2, 2, 8)

    function: Any = compat.llama3_flash_attn_varlen_func

    def attend(offsets: Tensor) -> Tensor:
        *cu, most_q, most_k, part = compat.llama3_flash_attn_prepare_cu_seqlens(
            offsets, True, rank, 2
        )
        out: Tensor = function(
            x, x, x, *cu, most_q, most_k, heads_k_stride=1, local_k_slice=part, causal=True
        )
        return out * 2.0

    compiled = torch.compile(attend, backend="aot_eager")
    for n in range(4):
        offsets = torch.tensor(_offsets(n, 4), dtype=torch.int32)
        torch.testing.assert_close(compiled(offsets), attend(offsets), rtol=0, atol=0)


def test_prepared_documents(pool: LocalRanks) -> None:
    pool.run(_prepared)


def test_a_flag_is_no_seed() -> None:
    """A bool as dropout seed is refused when compiled, too; dynamo adds words around the error."""
    torch._dynamo.reset()
    x = torch.randn(1, 8, 1, 8)
    call: Any = torch.compile(ContextParallel().attention, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="dropout_seed must be an integer"):
        call(x, x, x, dropout_p=0.1, dropout_seed=True)

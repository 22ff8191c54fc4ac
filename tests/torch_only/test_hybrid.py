"""The hybrid strategy: Ulysses within groups of ranks, a ring or a gather between the groups."""

from __future__ import annotations

from contextlib import nullcontext
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cases import Case
from on_ranks import on_four_ranks
from patched import replaced
from tolerances import assert_close
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import ring_torch
from ring_core import Mask, RankMismatchError, StrategyConfig, UnsupportedError
from ring_torch.kernels.eager import EagerKernel
from ring_torch.local import LocalRanks

OUTER: tuple[Any, ...] = ("ring", "gather")


def hybrid(outer: Any, size: int | None = 2) -> StrategyConfig:
    """Return the hybrid strategy with groups of ``size`` ranks."""
    return StrategyConfig("hybrid", ulysses_size=size, outer=outer)


@pytest.mark.nightly(unless=["1-gather", "2-ring", "None-ring"])
@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("size", [1, 2, 4, None])
def test_groups_of_every_size(size: int | None, outer: Any, backend: Any) -> None:
    case = Case("hybrid", Mask(causal=True), "zigzag", 4, 32, heads=(8, 4))
    assert_close(case, backend.run(case, strategy=hybrid(outer, size)))


#: Query and K/V heads of a case with all options: divided, copied, padded, both.
HEADS = [(8, 4), (4, 1), (7, 7), (9, 3), (6, 2)]


@pytest.mark.nightly(unless=["7-7-gather", "9-3-ring"])
@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: "-".join(map(str, heads)))
def test_all_options_go_together(heads: tuple[int, int], outer: Any, backend: Any) -> None:
    case = Case(
        f"hybrid-{heads[0]}-{heads[1]}", Mask(causal=True), "zigzag", 4, 16, 24, 2, heads, (8, 6),
        softcap=3.0, sinks=2, bias="full" if heads[0] % 2 else "shared", alibi=2, dropout_p=0.2,
        segments="pair", lse_grad=True,
    )  # fmt: skip
    assert_close(case, backend.run(case, strategy=hybrid(outer)))


def _prefix(q_pos: Any, k_pos: Any) -> Any:
    return (k_pos <= q_pos) | (k_pos < 6)


PREFIX = Mask(predicate=_prefix)


def attend(rank: int, strategy: Any = None, layout: Any = "zigzag", **options: Any) -> list[Tensor]:
    """Return results and gradients of a call on this rank's own random numbers."""
    torch.manual_seed(rank)
    *qkv, dout = (torch.randn(1, 8, heads, 16) for heads in (4, 2, 2, 4))
    leaves = [x.requires_grad_() for x in qkv]
    out = ring_torch.ring_attention(
        *leaves,
        causal="mask" not in options,
        layout=layout,
        strategy=strategy or hybrid("ring"),
        **options,
    )
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layout": "striped"}, "layout 'striped' gives a group of ranks tokens that outer='ring'"),
        ({"strategy": hybrid("gather", 3)}, "ulysses_size=3: it does not divide 4 ranks"),
        ({"strategy": hybrid("ring", 8)}, "ulysses_size=8: q has 4 heads"),
        ({"transport": "symm_mem"}, "strategy 'hybrid' sends messages"),
        ({"strategy": hybrid("gather"), "mask": PREFIX}, "outer='gather': strategy 'gather' over "),
    ],
    ids=["striped", "divides", "heads", "transport", "predicate"],
)  # fmt: skip
@on_four_ranks
def test_what_is_refused(rank: int, options: dict[str, Any], words: str) -> None:
    """Nothing is sent before."""
    with pytest.raises(UnsupportedError, match=words):
        attend(rank, **options)


def differ(rank: int, on_last: dict[str, Any]) -> str:
    """Return the error of each rank when the last rank makes another call."""
    with pytest.raises(RankMismatchError) as error:
        attend(rank, **(on_last if rank == 3 else {}))
    return str(error.value)


@pytest.mark.parametrize(
    ("on_last", "words"),
    [
        ({"strategy": "ring"}, "strategy is 'ring' there and 'hybrid' here"),
        ({"strategy": hybrid("ring", 4)}, "ulysses_size is 4 there and 2 here"),
        ({"strategy": hybrid("gather")}, "outer is 'gather' there and 'ring' here"),
    ],
    ids=["strategy", "ulysses_size", "outer"],
)
def test_unlike_calls_are_named(on_last: dict[str, Any], words: str) -> None:
    with LocalRanks(4, timeout=10) as pool:
        texts = pool.run(differ, on_last)
    assert any(words in text for text in texts)
    assert all("ranks 2 and 3" in x or "ranks 3 and 0" in x for x in texts)


def on_hosts(rank: int, hosts: str) -> str:
    """Return the plan of a call without a group size, or its error, on ranks with these hosts."""
    with patch("platform.node", lambda: hosts[rank]):
        try:
            attend(rank, hybrid("gather", None))
        except UnsupportedError as error:
            return str(error)
        q, k, v = (torch.ones(1, 8, heads, 16) for heads in (4, 2, 2))
        return ring_torch.ContextParallel().explain(q, k, v, strategy=hybrid("gather", None))


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ("aabb", ["heads with ranks 0, 1", "then gather with ranks 0, 2"]),
        ("aaab", ["hosts have unlike numbers of ranks: a 3, b 1", "by ulysses_size"]),
        ("abab", ["ranks of one host are not consecutive", "by ulysses_size"]),
    ],
)
def test_hosts_are_found(hosts: str, words: list[str]) -> None:
    with LocalRanks(4, timeout=30) as pool:
        texts = pool.run(on_hosts, hosts)
    for text in words:
        assert text in texts[0]


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("bias_heads", [1, 4])
@on_four_ranks
def test_right_calls_pass_the_check(rank: int, bias_heads: int, outer: str) -> None:
    """Calls with every option under the check of bytes and results."""
    torch.manual_seed(rank)
    bias = torch.randn(1, bias_heads, 8, 32).requires_grad_()
    ids = (torch.arange(8).expand(1, 8) // 5).int()
    with ring_torch.check():
        attend(rank, hybrid(outer))
        attend(
            rank, hybrid(outer), sinks=torch.zeros(4), bias=bias, segment_ids=ids, dropout_p=0.2,
            dropout_seed=5,
        )  # fmt: skip


def compiled_and_not(rank: int, outer: str, options: dict[str, Any]) -> list[float]:
    """Return differences from eager of compiled calls, and of calls recomputed in the backward."""
    torch.manual_seed(rank)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return ring_torch.ring_attention(
            q, k, v, causal=True, layout="zigzag", strategy=hybrid(outer), **options
        )

    def again(*x: Tensor) -> Any:
        return checkpoint(run, *x, use_reentrant=False)

    graphs = CompileCounterWithBackend("aot_eager")
    compiled, differences = torch.compile(run, backend=graphs, fullgraph=True), []
    for _call in range(2):  # new inputs, the same graph
        qkv = [torch.randn(1, 8, heads, 16).requires_grad_() for heads in (4, 2, 2)]
        results = []
        for function in (run, compiled, again):
            out = function(*qkv)
            results.append([out.detach(), *torch.autograd.grad(out.square().sum(), qkv)])
        differences += [
            float((a - b).abs().max())
            for other in results[1:]
            for a, b in zip(results[0], other, strict=True)
        ]
    assert graphs.frame_count == 1
    with pytest.raises(UnsupportedError, match="no second derivative"):
        torch.autograd.grad(run(*qkv).sum(), qkv, create_graph=True)
    return differences


@pytest.mark.nightly(unless=["window-ring"])
@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("options", [{}, {"window": (5, 0)}], ids=["plain", "window"])
def test_compiled_and_checkpointed(options: dict[str, Any], outer: str, backend: Any) -> None:
    for differences in backend.pool(4).run(compiled_and_not, outer, options):
        assert len(differences) == 16 and max(differences) == 0


def lost(rank: int) -> str:
    """Return the error of each rank when the last one does not make the second call."""
    attend(rank)
    if rank == 3:
        return ""
    with pytest.raises(RuntimeError) as error:
        attend(rank)
    return str(error.value)


def test_a_rank_that_does_not_come_is_an_error_on_all() -> None:
    with LocalRanks(4, timeout=4) as pool:
        texts = pool.run(lost)
    assert all("waited in vain" in text for text in texts[:3])


def failed(rank: int, method: str, outer: str) -> str:
    """Return the error of each rank when the kernel of rank 1 fails in a pass."""

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("played: out of memory")

    attend(rank, hybrid(outer), kernel="eager")
    with (
        replaced(EagerKernel, **{method: no_memory}) if rank == 1 else nullcontext(),
        pytest.raises(RuntimeError) as error,
    ):
        attend(rank, hybrid(outer), kernel="eager")
    return str(error.value)


@pytest.mark.nightly(unless=["ring-differentiate"])
@pytest.mark.parametrize("method", ["attend", "differentiate"])
@pytest.mark.parametrize("outer", OUTER)
def test_a_kernel_that_fails_ends_the_pass_on_all(outer: str, method: str) -> None:
    with LocalRanks(4, timeout=4) as pool:
        texts = pool.run(failed, method, outer)
    assert all("played: out of memory" in text for text in texts)
    assert all("failed on rank 1 of the group" in text for n, text in enumerate(texts) if n != 1)


def on_three_groups(rank: int) -> list[float]:
    """Return differences from a ring of calls in three threads, each on its own group."""
    groups = [dist.new_group([0, 1, 2, 3]), dist.new_group([0, 1, 2, 3]), None]
    differences: list[float] = []

    def run(group: Any, outer: str) -> None:
        numbers = torch.Generator().manual_seed(rank)
        for _ in range(5):
            x = [torch.randn(1, 8, heads, 16, generator=numbers) for heads in (4, 2, 2)]
            given: dict[str, Any] = {"group": group, "layout": "zigzag", "causal": True}
            out, expected = (
                ring_torch.ring_attention(*x, strategy=way, **given)
                for way in (hybrid(outer), "ring")
            )
            differences.append(float((out - expected).abs().max()))

    threads = [
        Thread(target=run, args=(group, OUTER[n % 2])) for n, group in enumerate(groups)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return differences


def test_threads_on_groups_of_their_own(backend: Any) -> None:
    for differences in backend.pool(4).run(on_three_groups):
        assert len(differences) == 15 and max(differences) < 1e-5


def test_one_rank_has_no_groups_of_two() -> None:
    with pytest.raises(UnsupportedError, match="ulysses_size=2: it does not divide 1 ranks"):
        attend(0)
    assert attend(0, hybrid("ring", None))[0].shape == (1, 8, 4, 16)

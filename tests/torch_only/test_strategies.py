"""Every strategy is right with each option; Ulysses and hybrid with the whole case table.

Per change each strategy runs each option once. ``nox -s conformance`` runs all cases of the table
under ``ulysses`` and ``hybrid``. Ulysses exchanges tokens for heads; hybrid does within groups of
ranks, with a ring or a gather between them.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cases import CASES, Case
from mutants import BUFFER_MUTANTS, GATHERED_MUTANTS, GROUP_MUTANTS, HEAD_MUTANTS
from on_ranks import on_four_ranks
from tolerances import assert_close
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import ring_torch
from ring_core import (
    Mask,
    RankMismatchError,
    StrategyConfig,
    UnsupportedError,
    gather_refusals,
)
from ring_core.base.config import OUTER_NAMES
from ring_core.programs.grid import ulysses_sizes
from ring_torch.local import LocalRanks


def hybrid(outer: Any, size: int | None = 2) -> StrategyConfig:
    """Return the hybrid strategy with groups of ``size`` ranks."""
    return StrategyConfig("hybrid", ulysses_size=size, outer=outer)


WAYS: dict[str, str | StrategyConfig] = {
    "ulysses": "ulysses", **{f"hybrid-{outer}": hybrid(outer) for outer in OUTER_NAMES}
}  # fmt: skip
PLAIN = Case("", Mask())
#: Cases of a plain ring; the ``balanced`` ones repeat them over contiguous shards.
RING_CASES = [case for case in CASES.values() if case.strategy == "ring"]
#: Cases that groups of ranks support: ``striped`` is refused.
GROUP_CASES = [case for case in RING_CASES if case.layout != "striped"]


GATHERED = [case for case in CASES.values() if case.cp_size > 1 and not gather_refusals(case.plan)]
UNDER = {
    f"{strategy}-{case.name}": (strategy, case)
    for strategy, cases in (("gather", GATHERED), ("ulysses", RING_CASES), ("hybrid", GROUP_CASES))
    for case in cases
}


#: Cases that run per change under strategies with groups of heads, too: some of each option.
PER_CHANGE = (
    "everything-zigzag", "v-dim-zigzag", "shown-sinks-zigzag", "shown-bias-zigzag", "segments-pair-zigzag",
    "alibi-batch-zigzag", "dropout-zigzag", "keys80-causal-zigzag", "views3-zigzag", "views4-few-zigzag",
    "window-both-zigzag-cp4", "chunks-zigzag-cp4", "documents-window-zigzag-cp4",
    "predicate-zigzag-cp4", "documents-zigzag-cp4",
)  # fmt: skip


def test_each_option_of_a_case_runs_per_change() -> None:
    options, rules = set[str](), set[str]()
    for case in (CASES[name] for name in PER_CHANGE):
        options |= {x.name for x in fields(Case) if getattr(case, x.name) != getattr(PLAIN, x.name)}
        rules |= {x.name for x in fields(Mask) if x.init and getattr(case.mask, x.name)}
    values = {"dtype", "strategy", "spread", "poison", "numbers"}
    assert options | values == {x.name for x in fields(Case)}
    assert rules == {x.name for x in fields(Mask) if x.init}


@pytest.mark.nightly(unless=[
    *(f"gather-{x.name}" for x in GATHERED if "again" not in x.nightly),
    *(f"{strategy}-{name}" for strategy in ("ulysses", "hybrid") for name in PER_CHANGE),
])  # fmt: skip
@pytest.mark.parametrize("name", UNDER)
def test_case(name: str, backend: Any, request: pytest.FixtureRequest) -> None:
    """Group sizes are divisors of the number of ranks if it has any; ring and gather alternate."""
    way: str | StrategyConfig
    way, case = UNDER[name]
    ranks = case.cp_size
    if way == "hybrid":
        n, sizes = GROUP_CASES.index(case), ulysses_sizes(ranks, ranks)
        sizes = sizes[1:-1] or sizes
        ranks = sizes[n // 2 % len(sizes)]
        way = hybrid("ring" if case.mask.predicate else OUTER_NAMES[n % 2], ranks)
    if way != "gather":  # enough query heads for all ranks
        heads, kv_heads = case.heads
        case = replace(case, heads=(heads * -(-ranks // heads), kv_heads))
    mutant = request.config.getoption("--mutant")
    assert_close(case, backend.run(case, mutant=mutant, strategy=way))


#: Cases that run in groups of heads, if they have enough of them.
IN_GROUPS = (
    "causal-zigzag-cp4", "window-both-contiguous-cp3", "documents-window-chunks-cp3", "keys80-causal-zigzag",
    "v-dim-zigzag", "sinks-zigzag",
)  # fmt: skip


@pytest.mark.parametrize("name", IN_GROUPS)
def test_heads_in_groups(name: str, backend: Any) -> None:
    case = replace(CASES[name], heads=(8, 4))
    assert_close(case, backend.run(case, mutant="in-groups", strategy="gather"))


BESIDE_KERNELS = "grads-beside-kernels-dropped"  # there are none in one launch
#: Cases, their options and mutants that they show: padded query heads, a copied K/V head and all
#: options that are per head; one launch per run of queries, and two stages; heads in groups.
WITNESSES: dict[str, tuple[Case, dict[str, Any], tuple[str, ...]]] = {
    "heads": (
        Case(
            "witness", Mask(causal=True), "zigzag", 4, 24, 40, heads=(5, 1), sinks=2, bias="shared",
            alibi=1, dropout_p=0.2, segments="pair",
        ), {"strategy": WAYS["hybrid-gather"]}, (*HEAD_MUTANTS, *BUFFER_MUTANTS),
    ),
    "runs": (
        CASES["window-both-zigzag-cp4"], {"strategy": "gather", "kernel": "eager"},
        (*(x for x in GATHERED_MUTANTS if x != BESIDE_KERNELS), "window-off-by-one"),
    ),
    "two stages": (
        CASES["causal-zigzag-cp4"], {"strategy": "gather", "kernel": "sdpa"},
        (BESIDE_KERNELS, "gathered-grads-not-sent-home"),
    ),
    "groups": (
        replace(CASES["causal-zigzag-cp4"], heads=(8, 4)), {"strategy": "gather", "kernel": "eager"},
        (*GROUP_MUTANTS,),
    ),
}  # fmt: skip


@pytest.mark.nightly(only=[
    f"heads-{x}" for x in (*HEAD_MUTANTS, *BUFFER_MUTANTS)
    if x not in ("groups-interleaved", "indices-inverted", "padding-has-gradients", "rounded-down")
])  # fmt: skip
@pytest.mark.parametrize(
    ("witness", "mutant"), [(name, x) for name, row in WITNESSES.items() for x in (*row[2], None)]
)
def test_a_witness_is_wrong_with_each_mutant_and_right_without(
    witness: str, mutant: str | None, backend: Any
) -> None:
    case, options, _ = WITNESSES[witness]
    try:
        assert_close(case, backend.run(case, mutant, **options))
    except (AssertionError, *backend.failures):
        assert mutant
    else:
        assert not mutant


#: Query and K/V heads on four ranks: divided, copied, padded, both, or no range of heads.
HEADS = [(8, 4), (4, 1), (7, 7), (12, 3), (14, 2), (15, 5), (5, 1), (6, 3), (4, 4), (9, 3), (6, 2)]


@pytest.mark.nightly(unless=[
    *(f"ulysses-{x}" for x in ("7-7", "12-3", "14-2", "6-3")), "hybrid-gather-7-7", "hybrid-ring-9-3",
])  # fmt: skip
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: "-".join(map(str, heads)))
@pytest.mark.parametrize("way", ["ulysses", "hybrid-ring", "hybrid-gather"])
def test_heads(way: str, heads: tuple[int, int], backend: Any) -> None:
    case = Case(
        f"{way}-{heads[0]}-{heads[1]}", Mask(causal=True), "zigzag", 4, 16, 24, 2, heads, (8, 6),
        softcap=3.0, sinks=2, bias="full" if heads[0] % 2 else "heads", alibi=2, dropout_p=0.2,
        segments="pair", lse_grad=True,
    )  # fmt: skip
    assert_close(case, backend.run(case, strategy=WAYS[way]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_gradients_of_copies_are_rounded_once(dtype: str, backend: Any) -> None:
    """dK/dV of a K/V head that all four ranks use are summed, then rounded once."""
    case = Case(
        f"ulysses-copies-{dtype}", Mask(causal=True), "striped", 4, 64, heads=(16, 1), dtype=dtype
    )
    assert_close(case, backend.run(case, strategy="ulysses"))


@on_four_ranks
def test_explain_shows_padding_and_copies() -> None:
    for heads, shown in (((14, 2), True), ((8, 4), False)):
        q, k, v = (torch.ones(1, 4, n, 8) for n in (heads[0], heads[1], heads[1]))
        text = ring_torch.ContextParallel().explain(q, k, v, strategy="ulysses")
        words = "14 query heads in 16 places (12% padding), 2 K/V heads in 4"
        assert (words in text) == ("places" in text) == shown


@pytest.mark.nightly(unless=["1-gather", "2-ring", "None-ring"])
@pytest.mark.parametrize("outer", OUTER_NAMES)
@pytest.mark.parametrize("size", [1, 2, 4, None])
def test_groups_of_every_size(size: int | None, outer: Any, backend: Any) -> None:
    case = Case("hybrid", Mask(causal=True), "zigzag", 4, 32, heads=(8, 4))
    assert_close(case, backend.run(case, strategy=hybrid(outer, size)))


def _prefix(q_pos: Any, k_pos: Any) -> Any:
    return (k_pos <= q_pos) | (k_pos < 6)


PREFIX = Mask(predicate=_prefix)


def attend(
    rank: int, strategy: Any = None, *, heads: tuple[int, int] = (4, 2), length: int = 8, **options: Any
) -> list[Tensor]:  # fmt: skip
    """Return results and gradients of a call on this rank's own random numbers."""
    torch.manual_seed(rank)
    *qkv, dout = (torch.randn(1, length, n, 16) for n in (heads[0], heads[1], heads[1], heads[0]))
    leaves = [x.requires_grad_() for x in qkv]
    options = {"causal": "mask" not in options, "layout": "zigzag"} | options
    call: Any = ring_torch.ring_attention
    out = call(*leaves, strategy=strategy or hybrid("ring"), **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


#: A bias of 4 ranks with 5,120 tokens each: all numbers are one in memory.
BIAS = torch.zeros(1, 1, 1, 1).expand(1, 1, 5120, 20480)
#: Calls that are refused before anything is sent, and words of the error.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "striped": (
        {"layout": "striped"}, "layout 'striped' gives a group of ranks tokens that outer='ring'"
    ),
    "divides": (
        {"strategy": hybrid("gather", 3)}, "ulysses_size=3: it does not divide 4 ranks"
    ),
    "heads": ({"strategy": hybrid("ring", 8)}, "ulysses_size=8: q has 4 heads"),
    "transport": ({"transport": "symm_mem"}, "strategy 'hybrid' sends messages"),
    "predicate": (
        {"strategy": hybrid("gather"), "mask": PREFIX}, "outer='gather': strategy 'gather' over "
    ),
    "few heads": (
        {"strategy": "ulysses", "heads": (3, 1)},
        "at most 3 ranks can split them, not 4; groups of 2 can(.|\n)*'hybrid', ulysses_size=2",
    ),
    "bias": (
        {"strategy": "ulysses", "length": 5120, "bias": BIAS},
        r"each rank would gather a bias of 1.6 GiB(.|\n)*at most 1 GiB",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@on_four_ranks
def test_what_is_refused(rank: int, name: str) -> None:
    options, words = WRONG[name]
    with pytest.raises(UnsupportedError, match=words):
        attend(rank, **options)


def test_one_rank_has_no_groups_of_two() -> None:
    with pytest.raises(UnsupportedError, match="ulysses_size=2: it does not divide 1 ranks"):
        attend(0)
    assert attend(0, hybrid("ring", None))[0].shape == (1, 8, 4, 16)


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
        ({"heads": (6, 2)}, "q is [1, 8, 6, 16, 'float32'] there and [1, 8, 4, 16"),
    ],
    ids=["strategy", "ulysses_size", "outer", "heads"],
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


@pytest.mark.parametrize("outer", OUTER_NAMES)
@on_four_ranks
def test_right_calls_pass_the_check(rank: int, outer: str) -> None:
    ids = (torch.arange(8).expand(1, 8) // 5).int()
    options: dict[str, Any] = {"segment_ids": ids, "dropout_p": 0.2, "dropout_seed": 5}
    with ring_torch.check():
        attend(rank, hybrid(outer))
        for heads in (1, 4):
            bias = torch.randn(1, heads, 8, 32).requires_grad_()
            attend(rank, hybrid(outer), sinks=torch.zeros(4), bias=bias, **options)


@pytest.mark.nightly(unless=["window-ring"])
@pytest.mark.parametrize("outer", OUTER_NAMES)
@pytest.mark.parametrize("options", [{}, {"window": (5, 0)}], ids=["plain", "window"])
@on_four_ranks
def test_compiled_and_checkpointed(rank: int, options: dict[str, Any], outer: str) -> None:
    torch.manual_seed(rank)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return ring_torch.ring_attention(
            q, k, v, causal=True, layout="zigzag", strategy=hybrid(outer), **options
        )

    def again(*x: Tensor) -> Any:
        return checkpoint(run, *x, use_reentrant=False)

    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, backend=graphs, fullgraph=True)
    for _call in range(2):  # new inputs, the same graph
        qkv = [torch.randn(1, 8, heads, 16).requires_grad_() for heads in (4, 2, 2)]
        results = []
        for function in (run, compiled, again):
            out = function(*qkv)
            results.append([out.detach(), *torch.autograd.grad(out.square().sum(), qkv)])
        for other in results[1:]:
            torch.testing.assert_close(other, results[0], rtol=0, atol=0)
    assert graphs.frame_count == 1
    with pytest.raises(UnsupportedError, match="no second derivative"):
        torch.autograd.grad(run(*qkv).sum(), qkv, create_graph=True)

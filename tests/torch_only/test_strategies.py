"""Every strategy is right with each option; Ulysses and hybrid with the whole case table.

Per change each strategy runs each option once. ``nox -s conformance`` runs all cases of the table
under ``ulysses`` and ``hybrid``. Ulysses exchanges tokens for heads; hybrid does within groups of
ranks, with a ring or a gather between them.
"""

from __future__ import annotations

import re
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cases import CASES, Case, prefix
from mutants import BUFFER_MUTANTS, GATHERED_MUTANTS, GROUP_MUTANTS, HEAD_MUTANTS
from on_ranks import on_four_ranks
from refused import refused
from tolerances import assert_close
from torch import Tensor

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


GATHERED = [x for x in RING_CASES if x.cp_size > 1 and not gather_refusals(x.plan)]
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
    # Low biases are a table of their own, of all kernels: `blocks.NEGATIVE`.
    values = {"dtype", "strategy", "spread", "poison", "numbers", "low", "region"}
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
#: Calls that are refused before anything is sent, and words of the error; other groups are refused
#: in the tests of core.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "divides": ({"strategy": hybrid("gather", 3)}, "ulysses_size=3: it does not divide 4 ranks"),
    "transport": ({"transport": "symm_mem"}, "strategy 'hybrid' sends messages"),
    "predicate": (
        {"strategy": hybrid("gather"), "mask": Mask(predicate=prefix)}, "outer='gather': strategy 'gather' over "
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
    refused(words, attend, rank, **options, error=UnsupportedError)


@pytest.mark.parametrize(
    ("on_last", "words"),
    [
        ({"strategy": "ring"}, "strategy is '(ring|hybrid)'"),
        ({"strategy": hybrid("ring", 4)}, "ulysses_size is [24]"),
        ({"strategy": hybrid("gather")}, "outer is '(gather|ring)'"), ({"heads": (6, 2)}, r"q is \[1, 8, [64], 16"),
    ],
)  # fmt: skip
@on_four_ranks
def test_unlike_calls_are_named(rank: int, on_last: dict[str, Any], words: str) -> None:
    group = dist.new_group(timeout=timedelta(seconds=10))
    with pytest.raises(RankMismatchError, match=rf"(?s)(?=.*ranks (2 and 3|3 and 0)).*{words}"):
        attend(rank, group=group, **(on_last if rank == 3 else {}))


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ("aabb", r"heads with ranks 0, 1(.|\n)*then gather with ranks 0, 2"),
        ("aaab", r"hosts have unlike numbers of ranks: a 3, b 1(.|\n)*by ulysses_size"),
    ],
)
@on_four_ranks
def test_hosts_are_found(rank: int, hosts: str, words: str) -> None:
    """They are the groups of a call without a size, or the error says why they are not."""
    group: Any = dist.new_group()
    strategy = hybrid("gather", None)
    with patch("platform.node", lambda: hosts[rank]):
        try:
            attend(rank, strategy, group=group)
            q, k = (torch.ones(1, 8, heads, 16) for heads in (4, 2))
            said = ring_torch.ContextParallel(group).explain(q, k, k, strategy=strategy)
        except UnsupportedError as error:
            said = str(error)
    assert rank or re.search(words, said), said

"""Every strategy is right with each option; Ulysses and hybrid with the whole case table.

Per change each strategy runs each option once. ``nox -s conformance`` runs all cases of the table
under ``ulysses`` and ``hybrid``. Ulysses exchanges tokens for heads; hybrid does within groups of
ranks, with a ring or a gather between them.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cases import CASES, Case, diagonals
from mutants import BUFFER_MUTANTS, GATHERED_MUTANTS, GROUP_MUTANTS, HEAD_MUTANTS
from on_ranks import on_four_ranks, on_ranks
from patched import replaced
from tolerances import assert_close
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import ring_torch
from ring_core import (
    STRATEGIES,
    Mask,
    RankMismatchError,
    StrategyConfig,
    UnsupportedError,
    gather_refusals,
)
from ring_core.base.config import OUTER_NAMES
from ring_core.programs.grid import ulysses_sizes
from ring_torch.kernels.eager import EagerKernel
from ring_torch.local import LocalRankError, LocalRanks

CAUSAL = Mask(causal=True)

#: Fields of a case for each option; options that share a call share a key, which names the case.
OPTIONS: dict[str, dict[str, Any]] = {
    "window-sinks-lse_grad-views": {
        "mask": Mask(causal=True, window=(9, 0)), "sinks": 2, "lse_grad": True, "views": 3,
    },
    "cu_seqlens-softcap": {"mask": Mask(causal=True, cu_seqlens=(0, 13, 30, 48)), "softcap": 3.0},
    "chunk_size-softmax_scale": {"mask": Mask(causal=True, chunk_size=15), "softmax_scale": 0.4},
    "predicate-dims": {"mask": Mask(causal=True, predicate=diagonals), "dims": (8, 6)},
    "bias-segments-kv_seq_len": {
        "mask": CAUSAL, "bias": "full", "segments": "pair", "kv_seq_len": 64, "batch": 2,
    },
    "shown": {"mask": CAUSAL, "shown": "by-sequence", "batch": 2, "bias": "full"},
    "alibi-dropout_p-heads": {"mask": CAUSAL, "alibi": 2, "dropout_p": 0.2, "heads": (9, 3)},
}  # fmt: skip

#: Strategies by their names in test ids.
WAYS: dict[str, str | StrategyConfig] = {
    **{name: name for name in STRATEGIES if name != "hybrid"},
    **{
        f"hybrid-{outer}": StrategyConfig("hybrid", ulysses_size=2, outer=outer)
        for outer in OUTER_NAMES
    },
}

#: Pairs of option and strategy that are refused.
REFUSED = {("predicate-dims", "gather"), ("predicate-dims", "hybrid-gather")}


def case_of(option: str) -> Case:
    """Return the case of an option, on four ranks in zigzag."""
    defaults: dict[str, Any] = {"layout": "zigzag", "cp_size": 4, "seq_len": 48, "heads": (6, 2)}
    return Case(f"by-strategy-{option}", **defaults | OPTIONS[option])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("option", OPTIONS)
def test_option(option: str, way: str, backend: Any) -> None:
    case = case_of(option)
    if way == "balanced":
        case = replace(case, layout="contiguous", strategy="balanced")
    if (option, way) in REFUSED:
        with pytest.raises(LocalRankError, match=r"UnsupportedError.*'gather'"):
            backend.run(case, strategy=WAYS[way])
        return
    assert_close(case, backend.run(case, strategy=WAYS[way]))


def test_each_option_of_a_case_is_in_the_table() -> None:
    plain = {"name", "mask", "layout", "cp_size", "seq_len", "dtype", "nightly", "strategy"}
    numbers = {"spread", "poison", "numbers"}  # values, not options
    named = {field for fields_of in OPTIONS.values() for field in fields_of}
    assert {field.name for field in fields(Case)} - plain - numbers == named - plain
    rules = {
        rule.name
        for fields_of in OPTIONS.values()
        for rule in fields(Mask)
        if rule.init and getattr(fields_of["mask"], rule.name)
    }
    assert rules == {rule.name for rule in fields(Mask) if rule.init}


#: Cases of a plain ring; the ``balanced`` ones repeat them over contiguous shards.
RING_CASES = [case for case in CASES.values() if case.strategy == "ring"]
#: Cases that groups of ranks support: ``striped`` is refused.
GROUP_CASES = [case for case in RING_CASES if case.layout != "striped"]


def _with_heads(case: Case, ranks: int) -> Case:
    """Return the case with enough query heads for all ranks."""
    heads, kv_heads = case.heads
    return replace(case, heads=(heads * -(-ranks // heads), kv_heads))


@pytest.mark.nightly
@pytest.mark.parametrize("case", RING_CASES, ids=[case.name for case in RING_CASES])
def test_case_under_ulysses(case: Case, backend: Any) -> None:
    case = _with_heads(case, case.cp_size)
    assert_close(case, backend.run(case, strategy="ulysses"))


@pytest.mark.nightly
@pytest.mark.parametrize("case", GROUP_CASES, ids=[case.name for case in GROUP_CASES])
def test_case_under_hybrid(case: Case, backend: Any) -> None:
    """Group sizes are divisors of the number of ranks if it has any; ring and gather alternate."""
    n, sizes = GROUP_CASES.index(case), ulysses_sizes(case.cp_size, case.cp_size)
    sizes = sizes[1:-1] or sizes
    size = sizes[n // 2 % len(sizes)]
    outer = "ring" if case.mask.predicate else OUTER_NAMES[n % 2]
    way = StrategyConfig("hybrid", ulysses_size=size, outer=outer)
    case = _with_heads(case, size)
    assert_close(case, backend.run(case, strategy=way))


GATHERED = [case for case in CASES.values() if case.cp_size > 1 and not gather_refusals(case.plan)]


@pytest.mark.nightly(only=[case.name for case in GATHERED if "again" in case.nightly])
@pytest.mark.parametrize("case", GATHERED, ids=[case.name for case in GATHERED])
def test_case_under_gather(case: Case, backend: Any, request: pytest.FixtureRequest) -> None:
    mutant = request.config.getoption("--mutant")
    assert_close(case, backend.run(case, mutant=mutant, strategy="gather"))


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


@pytest.mark.parametrize("sinks", [0, 3], ids=["one a head", "several a head"])
def test_sinks_go_with_their_heads(sinks: int, backend: Any) -> None:
    case = replace(CASES["causal-zigzag-cp2"], heads=(8, 4), sinks=sinks, lse_grad=True)
    assert_close(case, backend.run(case, strategy="ulysses"))


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
def test_too_few_heads_are_refused() -> None:
    q, k, v = (torch.ones(1, 4, n, 8) for n in (3, 1, 1))
    with pytest.raises(UnsupportedError) as error:
        ring_torch.ring_attention(q, k, v, strategy="ulysses")
    text = str(error.value)
    assert "q has 3 heads, so at most 3 ranks can split them, not 4; groups of 2 can" in text
    assert "StrategyConfig('hybrid', ulysses_size=2)" in text


@on_four_ranks
def test_a_bias_that_is_too_large_to_gather_is_refused() -> None:
    keys = 20480
    q = torch.ones(1, 1, 1, 1).expand(1, keys // 4, 4, 8)
    bias = torch.zeros(1, 1, 1, 1).expand(1, 1, keys // 4, keys)
    message = r"each rank would gather a bias of 1.6 GiB(.|\n)*at most 1 GiB"
    with pytest.raises(UnsupportedError, match=message):
        ring_torch.ring_attention(q, q, q, strategy="ulysses", bias=bias)


@on_ranks
def test_unlike_numbers_of_heads_are_named(rank: int) -> None:
    q, k, v = (torch.ones(1, 4, heads, 8) for heads in (4 + 2 * rank, 2, 2))
    with pytest.raises(RankMismatchError) as error:
        ring_torch.ring_attention(q, k, v, strategy="ulysses")
    there, here = ("4", "6") if rank else ("6", "4")
    assert f"q is [1, 4, {there}, 8, 'float32'] there and [1, 4, {here}, 8" in str(error.value)


@on_four_ranks
def test_explain_shows_padding_and_copies() -> None:
    for heads, shown in (((14, 2), True), ((8, 4), False)):
        q, k, v = (torch.ones(1, 4, n, 8) for n in (heads[0], heads[1], heads[1]))
        text = ring_torch.ContextParallel().explain(q, k, v, strategy="ulysses")
        words = "14 query heads in 16 places (12% padding), 2 K/V heads in 4"
        assert (words in text) == ("places" in text) == shown


@on_ranks
def test_compiled_for_any_length(rank: int) -> None:
    """A graph of dynamic length, with a bias for padded heads."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, b: torch.Tensor) -> Any:
        ids = torch.arange(q.shape[1])[None].int() // 5
        return ring_torch.ring_attention(q, k, v, strategy="ulysses", bias=b, segment_ids=ids)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (6, 8):
        torch.manual_seed(rank)
        leaves = [torch.randn(1, length, heads, 16).requires_grad_() for heads in (5, 1, 1)]
        leaves.append(torch.randn(1, 5, length, 2 * length).requires_grad_())
        outs = [function(*leaves) for function in (attend, compiled)]
        grads = [torch.autograd.grad(out.square().sum(), leaves) for out in outs]
        torch.testing.assert_close(*zip(outs, grads, strict=True), rtol=0, atol=0)


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
    torch.manual_seed(rank)
    bias = torch.randn(1, bias_heads, 8, 32).requires_grad_()
    ids = (torch.arange(8).expand(1, 8) // 5).int()
    with ring_torch.check():
        attend(rank, hybrid(outer))
        attend(
            rank, hybrid(outer), sinks=torch.zeros(4), bias=bias, segment_ids=ids, dropout_p=0.2,
            dropout_seed=5,
        )  # fmt: skip


@pytest.mark.nightly(unless=["window-ring"])
@pytest.mark.parametrize("outer", OUTER)
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


def test_one_rank_has_no_groups_of_two() -> None:
    with pytest.raises(UnsupportedError, match="ulysses_size=2: it does not divide 1 ranks"):
        attend(0)
    assert attend(0, hybrid("ring", None))[0].shape == (1, 8, 4, 16)

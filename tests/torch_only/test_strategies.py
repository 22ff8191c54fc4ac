"""Every strategy is right with each option; Ulysses and hybrid with the whole case table.

Per change each strategy runs each option once. ``nox -s conformance`` runs all cases of the table
under ``ulysses`` and ``hybrid``.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from cases import CASES, Case, diagonals
from mutants import BUFFER_MUTANTS, GATHERED_MUTANTS, GROUP_MUTANTS, HEAD_MUTANTS
from tolerances import assert_close

from ring_core import STRATEGIES, Mask, StrategyConfig, gather_refusals
from ring_core.base.config import OUTER_NAMES
from ring_core.programs.grid import ulysses_sizes
from ring_torch.local import LocalRankError

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


#: Padded query heads, a copied K/V head, and all options that are per head.
WITNESS = Case(
    "witness", Mask(causal=True), "zigzag", 4, 24, 40, heads=(5, 1), sinks=2, bias="shared", alibi=1,
    dropout_p=0.2, segments="pair",
)  # fmt: skip


@pytest.mark.nightly(
    unless=["groups-interleaved", "indices-inverted", "padding-has-gradients", "rounded-down"]
)
@pytest.mark.parametrize("mutant", [*HEAD_MUTANTS, *BUFFER_MUTANTS])
def test_wrong_groups_are_found_out(mutant: str, backend: Any) -> None:
    assert _is_wrong(mutant, backend)


def test_the_witness_is_right_otherwise(backend: Any) -> None:
    assert not _is_wrong(None, backend)


def _is_wrong(mutant: str | None, backend: Any) -> bool:
    try:
        assert_close(WITNESS, backend.run(WITNESS, mutant, strategy=WAYS["hybrid-gather"]))
    except (AssertionError, LocalRankError):
        return True
    return False


GATHERED = [case for case in CASES.values() if case.cp_size > 1 and not gather_refusals(case.plan)]


@pytest.mark.nightly(only=[case.name for case in GATHERED if "again" in case.nightly])
@pytest.mark.parametrize("case", GATHERED, ids=[case.name for case in GATHERED])
def test_case_under_gather(case: Case, backend: Any, request: pytest.FixtureRequest) -> None:
    mutant = request.config.getoption("--mutant")
    assert_close(case, backend.run(case, mutant=mutant, strategy="gather"))


# One launch per run of queries, and two stages: for kernels with and without band masks.
WITNESSES = (("window-both-zigzag-cp4", "eager"), ("causal-zigzag-cp4", "sdpa"))


@pytest.mark.parametrize("mutant", [*GATHERED_MUTANTS, "window-off-by-one"])
def test_suite_goes_red(mutant: str, backend: Any) -> None:
    """A mutant fails at least one case of the table."""
    assert any(_fails(*witness, mutant, backend) for witness in WITNESSES)


@pytest.mark.parametrize(("name", "kernel"), WITNESSES)
def test_witnesses_are_green_otherwise(name: str, kernel: str, backend: Any) -> None:
    """Without a mutant the same cases pass."""
    assert not _fails(name, kernel, None, backend)


#: Cases that run in groups of heads, if they have enough of them.
IN_GROUPS = (
    "causal-zigzag-cp4", "window-both-contiguous-cp3", "documents-window-chunks-cp3", "keys80-causal-zigzag",
    "v-dim-zigzag", "sinks-zigzag",
)  # fmt: skip


@pytest.mark.parametrize("name", IN_GROUPS)
def test_heads_in_groups(name: str, backend: Any) -> None:
    """Two groups of heads forward and four backward give the results of one launch."""
    case = replace(CASES[name], heads=(8, 4))
    assert_close(case, backend.run(case, mutant="in-groups", strategy="gather"))


@pytest.mark.parametrize("mutant", GROUP_MUTANTS)
def test_wrong_groups_of_gathered_heads_are_found_out(mutant: str, backend: Any) -> None:
    case = replace(CASES["causal-zigzag-cp4"], heads=(8, 4))
    results = backend.run(case, mutant=mutant, kernel="eager", strategy="gather")
    with pytest.raises(AssertionError):
        assert_close(case, results)


def _fails(name: str, kernel: str, mutant: str | None, backend: Any) -> bool:
    case = CASES[name]
    try:
        results = backend.run(case, mutant=mutant, kernel=kernel, strategy="gather")
        assert_close(case, results)
    except (AssertionError, *backend.failures):
        return True
    return False

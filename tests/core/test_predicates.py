"""Predicates: a plan is of what the function reads now, and says what devices compute.

The classes: a plan, or a program, that is kept for a function whose result has changed since, by
whatever that reads; numbers that a device has in 32 bits where the plan has them in 64; and hashes
of plans that do not see all of a mask.
"""

from __future__ import annotations

import functools
import operator
import random
import time
import types
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from cases import Lattice, crossed, diagonals, prefix

from ring_core import Mask, Plan, UnsupportedError, make_plan
from ring_core.base.arguments import check_dropout, not_none
from ring_core.masks.expression import evaluated
from ring_core.masks.mask import rule_of
from ring_core.plan.tile_mask import BlockGeometry

T, WIDTH = 24, 3
SETTINGS = types.ModuleType("settings")


@dataclass(slots=True)
class Slotted:
    width: int = 3


class Holder:
    width = 3

    def rule(self, i: Any, j: Any) -> Any:
        return abs(i - j) < self.width

    def by_helper(self, i: Any, j: Any) -> Any:
        return _within(self, i, j)

    @property
    def doubled(self) -> int:
        return 2 * self.width

    def by_property(self, i: Any, j: Any) -> Any:
        return abs(i - j) < self.doubled

    def __getitem__(self, _: int) -> int:
        return self.width


def _within(holder: Any, i: Any, j: Any) -> Any:
    return abs(i - j) < holder.width


def by_global(i: Any, j: Any) -> Any:
    return abs(i - j) < WIDTH


def _by_another(i: Any, j: Any) -> Any:
    def inner() -> Any:
        return by_global(i, j)

    return inner()


def _changing() -> dict[str, tuple[Any, Any]]:
    """Return predicates of a band 3 wide by what they read, and what makes it another width."""
    holder, slotted, values, array = Holder(), Slotted(), [3], np.array([3])
    names, width = types.SimpleNamespace(width=3), 3
    table = np.arange(T) // 3

    def set_cell(n: int) -> None:
        nonlocal width
        width = n

    def by_default(i: Any, j: Any, limits: Any = values, *, scale: int = 1) -> Any:
        return abs(i - j) < limits[0] * scale

    def of(owner: Any) -> Any:
        return lambda n: setattr(owner, "width", n)

    def first(owner: Any) -> Any:
        return lambda n: owner.__setitem__(0, n)

    def set_global(n: int) -> None:
        globals().update(WIDTH=n)

    return {
        "a cell": (lambda i, j: abs(i - j) < width, set_cell),
        "a slot": (lambda i, j: abs(i - j) < slotted.width, of(slotted)),
        "a list": (lambda i, j: abs(i - j) < values[0], first(values)),
        "a default": (by_default, first(values)),
        "a keyword's default": (by_default, lambda n: not_none(by_default.__kwdefaults__).update(scale=n)),
        "an array": (lambda i, j: abs(i - j) < array[0], first(array)),
        "a table": (lambda i, j: table[i] == table[j], lambda n: np.copyto(table, np.arange(T) // n)),
        "a global": (by_global, set_global),
        "a global of a function that it calls": (functools.partial(_by_another), set_global),
        "a method's object": (holder.rule, of(holder)),
        "a method's class": (holder.rule, of(Holder)),
        "an object that a function gets": (holder.by_helper, of(holder)),
        "a property": (holder.by_property, of(holder)),
        "an attribute by name": (lambda i, j: abs(i - j) < getattr(holder, "width"), of(holder)),  # noqa: B009 - that is the test
        "a subscript": (lambda i, j: abs(i - j) < holder[0], of(holder)),
        "a namespace": (lambda i, j: abs(i - j) < names.width, of(names)),
        "a module": (lambda i, j: abs(i - j) < SETTINGS.width, of(SETTINGS)),
    }  # fmt: skip


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "WIDTH", 3)
    monkeypatch.setattr(Holder, "width", 3)
    vars(SETTINGS).update(width=3)


@pytest.mark.parametrize("kind", _changing())
def test_plans_are_of_what_predicates_read_now(kind: str) -> None:
    predicate, change = _changing()[kind]
    mask, pairs = Mask(predicate=predicate), []
    for width in (3, 5, 3):
        change(width)
        plans = [make_plan(m, seq_len=T, cp_size=2) for m in (mask, Mask(predicate=predicate))]
        assert plans[0] is plans[1]
        i = np.arange(T)
        assert plans[0].blocks is not None
        assert plans[0].blocks.pairs.sum() == mask.dense(i, i).sum()
        pairs.append(plans[0].digest)
    assert pairs[0] == pairs[2] != pairs[1]


def test_functions_that_read_the_same_share_a_plan() -> None:
    def band(width: int) -> Mask:
        return Mask(predicate=lambda i, j: abs(i - j) < width)

    plans = [make_plan(band(n), seq_len=T, cp_size=2) for n in (3, 3, 4)]
    assert plans[0] is plans[1] is not plans[2]
    frozen = [Mask(predicate=Lattice(7, 3, 16, 5)) for _ in range(2)]
    objects = [make_plan(mask, seq_len=T, cp_size=2) for mask in frozen]
    assert objects[0] is objects[1]
    assert band(3) == band(3) != band(4) != frozen[0]


def test_a_plan_is_used_for_what_it_was_made_for() -> None:
    """An expression stays; a function is not evaluated again once it reads something else."""
    changing = (_changing()[kind] for kind in ("a cell", "a table"))
    masks, changes = zip(
        *((Mask(predicate=rule), change) for rule, change in changing), strict=True
    )
    traced, looked_up = (make_plan(mask, seq_len=T - 2, cp_size=2) for mask in masks)
    before = traced.rule.expression
    for change in changes:
        change(7)
    again = make_plan(masks[0], seq_len=T - 2, cp_size=2)
    assert traced.rule.expression == before != again.rule.expression
    assert looked_up.blocks is not None
    with pytest.raises(UnsupportedError, match="has changed since the call was planned"):
        _ = looked_up.blocks.tiles


_GENERATOR = (n for n in range(1))
OPAQUE: dict[str, tuple[Any, str]] = {
    "a generator": (lambda i, j: i - j < next(_GENERATOR), "a builtins.generator as '_GENERATOR'"),
    "random numbers": (lambda i, j: i * random.random() < j, "as 'random.random'"),
    "random numbers of numpy": (lambda i, j: i * np.random.rand() < j, "RandomState as 'np.random.rand'"),  # noqa: NPY002
    "the time": (lambda i, j: i + time.time() < j, "as 'time.time'"),
    "a file": (lambda i, _: i < len(open("a file").read()), "what a builtin finds as 'open'"),  # noqa: SIM115, PTH123
    "names that it makes": (lambda i, j: i - j < globals()["WIDTH"], "as 'globals'"),
    "a function in an object of numpy's": (np.vectorize(operator.lt), "a numpy.vectorize"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPAQUE)
def test_what_cannot_be_seen_is_refused_by_name(name: str) -> None:
    predicate, message = OPAQUE[name]
    with pytest.raises(UnsupportedError, match=r"mask: the predicate reads .* Instead: ") as error:
        Mask(predicate=predicate)
    assert message in str(error.value)


def test_other_packages_are_not_looked_into() -> None:
    """Assertions of tests, and decorators, call functions that hold all sorts of things."""

    def checked(i: Any, j: Any) -> Any:
        pytest.importorskip("numpy")
        assert np.ndim(i) == 2, f"{i}"
        return np.less_equal(j, i)

    assert Mask(predicate=checked) == Mask(predicate=checked)


@pytest.mark.parametrize("counts", [1, 2])
def test_hashes_of_plans_see_each_pair(counts: int) -> None:
    """Predicates that show equally many pairs of each tile are told apart."""

    def plan_without(n: int) -> Plan:
        mask = Mask(predicate=lambda i, j: (i - j) % 4 != n)
        return make_plan(mask, seq_len=16 * counts, cp_size=counts)

    one, other = plan_without(1), plan_without(3)
    assert one.blocks is not None and other.blocks is not None
    assert (one.blocks.pairs == other.blocks.pairs).all()
    assert one.digest != other.digest


@pytest.mark.parametrize("p", [1 - 1e-11, 1 - 2**-33, float(np.nextafter(1, 0))])
def test_dropout_that_drops_all_is_refused(p: float) -> None:
    """Kernels compare 32-bit words with ``round(p * 2**32)``, which these cannot reach."""
    with pytest.raises(ValueError, match=r"dropout_p=0\.9+.* the largest is 1 - 2\*\*-32"):
        check_dropout(p, 1)
    check_dropout(1 - 2**-32, 1)


Q, K = (-7, 900), (0, 1000)
TABLE = np.arange(4096) % 3 == 0

RULES: dict[str, Any] = {
    "diagonals": diagonals,
    "prefix": prefix,
    "lattice": Lattice(7, 3, 16, 5),
    "stripes": lambda i, j: (i >= j) & ((i - j < 512) | (j % 512 < 64)),
    "reversed": lambda i, j: (3 - i < j) | (j < 5) ^ (2 * i == -j),
    "odd": lambda i, j: ((i - 2 * j) // 7 - (j - i) % 12 != 3) & ~(abs(i - j) <= 4),
    "known": lambda i, j: (i >= j) & True | False,
    "numpy": lambda i, j: (i % np.int64(5) == j % np.int32(3)) ^ np.True_,
}


def again(i: Any, j: Any) -> Any:
    """Rule whose subexpressions stay shared: written out it has 2^60 operators."""
    return functools.reduce(lambda far, n: abs(far - n), range(60), i - j) < 5


NONE: dict[str, Any] = {
    "an if": lambda i, j: 0 <= i - j < 30 if np.ndim(i) == 0 else (i >= j) & (i - j < 30),
    "another thing of arrays": lambda i, j: i >= j if isinstance(i, np.ndarray) else i > j,
    "the same again and again": again,
    "table": lambda i, j: TABLE[i] & TABLE[j],
    "where": lambda i, j: np.where(i > j, i % 2 == 0, j % 2 == 0),
    "a sum of truths": lambda i, j: (i > j) + (j > 3),
    "a divisor that varies": lambda i, j: i % (j + 1) == 0,
    "large": lambda i, j: i * j * 10_000 > 5,
    "64 bits": lambda i, j: ((i * 73856093) ^ (j * 19349663)) % 7 < 3,
    "fractions": lambda i, j: (j >= 0.6 * i) & (j <= i),
    "nothing": lambda i, j: np.logical_and(i < 0, j < 0),
    "bits": crossed,
}


@pytest.mark.parametrize("name", RULES)
def test_says_what_the_mask_says(name: str) -> None:
    for mask in (
        Mask(predicate=RULES[name]),
        Mask(causal=True, window=(90, None), chunk_size=48, predicate=RULES[name]),
    ):
        expression = rule_of(mask, Q, K).short
        assert expression is not None
        q, k = np.arange(*Q), np.arange(*K)
        assert np.array_equal(evaluated(expression, q[:, None], k), mask.dense(q, k))


@pytest.mark.parametrize("name", NONE)
def test_has_none(name: str) -> None:
    assert rule_of(Mask(predicate=NONE[name]), Q, K).short is None


@pytest.mark.parametrize("span", [(0, 2**31 + 1), (4, 4)])
def test_spans_that_do_not_fit_have_none(span: tuple[int, int]) -> None:
    assert rule_of(Mask(causal=True), span, K).short is None


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("name", ["table", "fractions", "64 bits", "nothing"])
def test_tiles_say_what_the_predicate_says(name: str, layout: Any) -> None:
    for q_len, k_len, pad in ((512, 512, None), (300, 700, (512, 768))):
        mask = Mask(predicate=NONE[name], cu_seqlens=(0, 130, 512) if pad is None else None)
        plan = make_plan(
            mask, seq_len=q_len, cp_size=2, layout=layout, kv_seq_len=k_len, pad_to=pad
        )
        assert plan.rule.expression is None and plan.blocks is not None
        lookup, i, j = plan.blocks.lookup, np.arange(q_len), np.arange(k_len)
        assert lookup is not None
        dense = mask.dense(i + plan.q_offset, j)
        np.testing.assert_array_equal(lookup.shown(i[:, None], j[None]), dense)
        assert lookup.shown(np.array([[q_len + 5]]), j[None]).shape == (1, k_len)  # padding


def test_kernels_evaluate_no_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """With too many tiles a predicate is still what its expression says, or it has none."""
    monkeypatch.setattr(BlockGeometry, "tiles", None)
    plan = make_plan(Mask(predicate=NONE["fractions"]), seq_len=16, cp_size=2)
    assert plan.blocks is not None and plan.blocks.lookup is None
    assert plan.rule.reason == "computes with fractions, which devices round differently"

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

from ring_core import Mask, Plan, UnsupportedError, make_plan
from ring_core.base.arguments import check_dropout, not_none
from ring_core.plan.tile_mask import BlockGeometry

T, WIDTH = 24, 3
SETTINGS = types.ModuleType("settings")


@dataclass(frozen=True)
class Frozen:
    width: int

    def __call__(self, i: Any, j: Any) -> Any:
        return abs(i - j) < self.width


class Slotted:
    __slots__ = ("width",)

    def __init__(self) -> None:
        self.width = 3


class Holder:
    width = 3
    limits: Any

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


def _changing(kind: str) -> Any:
    """Return a predicate of a band 3 wide, and what makes it another width."""
    holder, slotted, values, array = Holder(), Slotted(), [3], np.array([3])
    names, width = types.SimpleNamespace(width=3), 3
    table = np.arange(T) // 3

    def set_cell(n: int) -> None:
        nonlocal width
        width = n

    def set_table(n: int) -> None:
        table[:] = np.arange(T) // n

    def by_default(i: Any, j: Any, limits: Any = values, *, scale: int = 1) -> Any:
        return abs(i - j) < limits[0] * scale

    return {
        "a cell": (lambda i, j: abs(i - j) < width, set_cell),
        "a slot": (
            lambda i, j: abs(i - j) < slotted.width, lambda n: setattr(slotted, "width", n)
        ),
        "a list": (lambda i, j: abs(i - j) < values[0], lambda n: values.__setitem__(0, n)),
        "a default": (by_default, lambda n: values.__setitem__(0, n)),
        "a keyword's default": (by_default, lambda n: not_none(by_default.__kwdefaults__).update(scale=n)),
        "an array": (lambda i, j: abs(i - j) < array[0], lambda n: array.__setitem__(0, n)),
        "a table": (lambda i, j: table[i] == table[j], set_table),
        "a global": (by_global, lambda n: globals().update(WIDTH=n)),
        "a global of a function that it calls": (
            functools.partial(_by_another), lambda n: globals().update(WIDTH=n)
        ),
        "a method's object": (holder.rule, lambda n: setattr(holder, "width", n)),
        "a method's class": (holder.rule, lambda n: setattr(Holder, "width", n)),
        "an object that a function gets": (
            holder.by_helper, lambda n: setattr(holder, "width", n)
        ),
        "a property": (holder.by_property, lambda n: setattr(holder, "width", n)),
        "an attribute by name": (
            lambda i, j: abs(i - j) < getattr(holder, "width"),  # noqa: B009 - that is the test
            lambda n: setattr(holder, "width", n),
        ),
        "a subscript": (lambda i, j: abs(i - j) < holder[0], lambda n: setattr(holder, "width", n)),
        "a namespace": (lambda i, j: abs(i - j) < names.width, lambda n: vars(names).update(width=n)),
        "a module": (lambda i, j: abs(i - j) < SETTINGS.width, lambda n: vars(SETTINGS).update(width=n)),
    }[kind]  # fmt: skip


KINDS = (
    "a cell", "a slot", "a list", "a default", "a keyword's default", "an array", "a table", "a global",
    "a global of a function that it calls", "a method's object", "a method's class",
    "an object that a function gets", "a property", "an attribute by name", "a subscript",
    "a namespace", "a module",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "WIDTH", 3)
    monkeypatch.setattr(Holder, "width", 3)
    vars(SETTINGS).update(width=3)


@pytest.mark.parametrize("kind", KINDS)
def test_plans_are_of_what_predicates_read_now(kind: str) -> None:
    predicate, change = _changing(kind)
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
    objects = [make_plan(Mask(predicate=Frozen(3)), seq_len=T, cp_size=2) for _ in range(2)]
    assert objects[0] is objects[1]
    assert band(3) == band(3) != band(4) != Mask(predicate=Frozen(4))


def test_a_plan_is_used_for_what_it_was_made_for() -> None:
    """An expression stays; a function is not evaluated again once it reads something else."""
    (plain, widen), (table, change) = _changing("a cell"), _changing("a table")

    def plan_of(predicate: Any) -> Plan:
        return make_plan(Mask(predicate=predicate), seq_len=T - 2, cp_size=2)

    traced, looked_up = plan_of(plain), plan_of(table)
    before = traced.rule.expression
    widen(7)
    change(7)
    assert traced.rule.expression == before != plan_of(plain).rule.expression
    assert looked_up.blocks is not None
    with pytest.raises(UnsupportedError, match="has changed since the call was planned"):
        _ = looked_up.blocks.tiles


def _endless() -> Any:
    yield from iter(int, 1)


_GENERATOR = _endless()
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


SPOTS = np.random.default_rng(0).integers(0, 3, 1000)
SHOWN: dict[str, Any] = {
    "a table": lambda i, j: SPOTS[i] == SPOTS[j],
    "fractions": lambda i, j: (j >= 0.6 * i) & (j <= i),
    "64 bits": lambda i, j: ((i * 73856093) ^ (j * 19349663)) % 7 < 3,
    "nothing": lambda i, j: np.logical_and(i < 0, j < 0),
}


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("name", SHOWN)
def test_tiles_say_what_the_predicate_says(name: str, layout: Any) -> None:
    for q_len, k_len, pad in ((512, 512, None), (300, 700, (512, 768))):
        mask = Mask(predicate=SHOWN[name], cu_seqlens=(0, 130, 512) if pad is None else None)
        plan = make_plan(
            mask, seq_len=q_len, cp_size=2, layout=layout, kv_seq_len=k_len, pad_to=pad
        )
        assert plan.rule.expression is None and plan.blocks is not None
        lookup, i, j = plan.blocks.lookup, np.arange(q_len), np.arange(k_len)
        assert lookup is not None
        dense = mask.dense(i + plan.q_offset, j)
        np.testing.assert_array_equal(lookup.shown(i[:, None], j[None]), dense)
        assert lookup.shown(np.array([[q_len + 5]]), j[None]).shape == (1, k_len)  # padding


@pytest.mark.parametrize("counts", [1, 2])
def test_hashes_of_plans_see_each_pair(counts: int) -> None:
    """Predicates that show equally many pairs of each tile are told apart."""
    one, other = (
        make_plan(Mask(predicate=Lattice(n)), seq_len=16 * counts, cp_size=counts) for n in (1, 3)
    )
    assert one.blocks is not None and other.blocks is not None
    assert (one.blocks.pairs == other.blocks.pairs).all()
    assert one.digest != other.digest


@dataclass(frozen=True)
class Lattice:
    without: int

    def __call__(self, i: Any, j: Any) -> Any:
        return (i - j) % 4 != self.without


def test_kernels_evaluate_no_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """With too many tiles a predicate is still what its expression says, or it has none."""
    monkeypatch.setattr(BlockGeometry, "tiles", None)
    plan = make_plan(Mask(predicate=SHOWN["fractions"]), seq_len=16, cp_size=2)
    assert plan.blocks is not None and plan.blocks.lookup is None
    assert plan.rule.reason == "computes with fractions, which devices round differently"


@pytest.mark.parametrize("p", [1 - 1e-11, 1 - 2**-33, float(np.nextafter(1, 0))])
def test_dropout_that_drops_all_is_refused(p: float) -> None:
    """Kernels compare 32-bit words with ``round(p * 2**32)``, which these cannot reach."""
    with pytest.raises(ValueError, match=r"dropout_p=0\.9+.* the largest is 1 - 2\*\*-32"):
        check_dropout(p, 1)
    check_dropout(1 - 2**-32, 1)

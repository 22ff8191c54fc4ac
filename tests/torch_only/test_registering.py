"""A new strategy, transport or kernel is one class and one entry of a table.

Each dummy here is registered for a call that runs on one rank and on two, is checked by the
tripwire, and compared with dense attention.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import pytest
import torch
from dense import is_exact
from refused import refused

import ring_torch
from ring_core import Mask, Request, StrategyName, make_plan, ring_program
from ring_torch import kernels, strategies, transports
from ring_torch.call import StrategySpec
from ring_torch.comm.ranks import Ranks
from ring_torch.kernels.eager import EagerKernel
from ring_torch.options import AttentionOptions, CallOptions
from ring_torch.prepare import _prepare
from ring_torch.strategies import STRATEGIES, choose_strategy
from ring_torch.strategies.gather import GATHER
from ring_torch.strategies.ring import Ring
from ring_torch.transports import TRANSPORTS
from ring_torch.transports.p2p import P2P

LENGTH, DIM = 16, 8


@dataclass(frozen=True, kw_only=True)
class Everywhere(Ring):
    """A ring that nothing knows by its name or its class."""

    name: str = "everywhere"


EVERYWHERE = StrategySpec(
    "everywhere", Everywhere.of, lambda _, request: ("it has no bias",) if request.bias else ()
)
#: Another name for messages; ``tests/alone.py`` has a session of its own.
LETTERS = replace(P2P, name="letters")


class Dense(EagerKernel):
    """Another name for launches; docs/adding-a-kernel.md writes a kernel out."""

    capabilities = replace(EagerKernel.capabilities, name="dense")


#: What is registered of each kind: where, and the options that name it.
KINDS: dict[str, tuple[Any, str, Any, dict[str, str]]] = {
    "strategy": (strategies, "STRATEGIES", EVERYWHERE, {"strategy": "everywhere"}),
    "transport": (transports, "TRANSPORTS", LETTERS, {"transport": "letters", "strategy": "gather"}),
    "kernel": (kernels, "KERNELS", Dense(), {"kernel": "dense"}),
}  # fmt: skip


def register(patch: pytest.MonkeyPatch, kind: str) -> dict[str, Any]:
    """Register what is new, and return the options that name it."""
    module, table, new, options = KINDS[kind]
    patch.setattr(module, table, (*getattr(module, table), new))
    return options


def _check_calls(_: int, kind: str) -> None:
    """Check calls that name what is registered, and the names that are known."""
    with pytest.MonkeyPatch.context() as patch:
        _prepare.cache_clear()
        options = register(patch, kind)
        cp, x = ring_torch.ContextParallel(), torch.zeros(1, LENGTH, 2, DIM)
        with ring_torch.check():  # the bytes that it says are those that it moves
            assert is_exact(cp, **options)
        assert options[kind] in cp.explain(x, x, x, causal=True, **options) or cp.cp_size == 1
        wrong: Any = {**options, kind: "rdma"}
        attend = partial(ring_torch.ring_attention, **wrong)
        refused(f"known: auto, .*{options[kind]}$", attend, x, x, x)
    _prepare.cache_clear()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_one_entry_of_a_table_is_enough(kind: str, size: int, backend: Any) -> None:
    backend.pool(size).run(_check_calls, kind)


def choose(strategy: str, **more: Any) -> Any:
    """Return the choice of two ranks."""
    program = ring_program(make_plan(Mask(), seq_len=LENGTH, cp_size=2))
    return choose_strategy(
        strategy, "auto", Ranks(None, 0, 2), program, torch.device("cpu"),
        request=Request("cpu", "float32", DIM, DIM, **more), probe=False,
    )  # fmt: skip


def test_what_is_registered_is_chosen_and_refuses_by_its_own_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Type checkers complete the names of static typing; a strategy need not be among them."""
    assert set(get_args(StrategyName)) <= {spec.name for spec in STRATEGIES}
    first = replace(P2P, name="first", sends_messages=False)
    monkeypatch.setattr(transports, "TRANSPORTS", (first, *TRANSPORTS))
    assert choose("auto") == (GATHER, first)
    monkeypatch.undo()
    register(monkeypatch, "strategy")
    message = "'everywhere' over transport 'p2p': it has no bias"
    refused(message, choose, "everywhere", error=ring_torch.UnsupportedError, bias=True)


def test_spellings_of_an_option_are_one() -> None:
    """The signature, the TypedDict and the record agree in names, order, types and defaults."""
    signature = inspect.signature(ring_torch.ring_attention).parameters.values()
    given = [x for x in signature if x.kind is x.KEYWORD_ONLY and x.name not in ("group", "layout")]
    record, typed = (
        [(name, kind.__forward_arg__) for name, kind in x.__annotations__.items()]
        for x in (CallOptions, AttentionOptions)
    )
    # Overloads of the signature have `return_lse`, which decides the type of the result.
    assert typed == [x for x in record if x[0] not in ("bias_role", "return_lse")]
    assert [(x.name, x.annotation) for x in given] == [x for x in record if x[0] != "bias_role"]
    defaults = {x.name: x.default for x in given} | {"bias_role": "added"}
    assert defaults == CallOptions._field_defaults

"""A new strategy, transport or kernel is one class and one entry of a table.

Each dummy here is registered for a call that runs on one rank and on two, is checked by the
tripwire, and compared with dense attention.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from dense import sdpa

import ring_torch
from ring_core import Mask, Request, StrategyName, make_plan, ring_program
from ring_core.cost import Model, StrategyBytes, bytes_sent
from ring_core.cost.counts.ring import RING as RING_BYTES
from ring_torch import kernels, strategies, transports
from ring_torch.call import StrategySpec
from ring_torch.comm.ranks import Ranks
from ring_torch.kernels import KERNELS
from ring_torch.kernels.eager import EagerKernel
from ring_torch.options import AttentionOptions, CallOptions
from ring_torch.prepare import _prepare, check_call
from ring_torch.strategies import STRATEGIES, choose_strategy
from ring_torch.strategies.gather import GATHER
from ring_torch.strategies.ring import Ring
from ring_torch.transports import TRANSPORTS
from ring_torch.transports.p2p import P2P

LENGTH, HEADS, DIM = 16, (4, 2, 2), 8  # tokens of the sequence, heads of q, k and v


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


def errors_of_a_call(_: int, kind: str) -> list[float]:
    """Return the largest errors of a checked call and its gradients, and of the names known."""
    with pytest.MonkeyPatch.context() as patch:
        _prepare.cache_clear()
        options = register(patch, kind)
        cp = ring_torch.ContextParallel()
        torch.manual_seed(0)
        whole = [torch.randn(1, LENGTH, heads, DIM).requires_grad_() for heads in HEADS]
        dout = torch.randn(1, LENGTH, HEADS[0], DIM)
        local = [cp.shard(x.detach(), dim=1).requires_grad_() for x in whole]
        with ring_torch.check():  # the bytes that it says are those that it moves
            out = cp.attention(*local, causal=True, **options)
            grads = torch.autograd.grad(out, local, cp.shard(dout, dim=1))
        assert options[kind] in cp.explain(*local, causal=True, **options) or cp.cp_size == 1
        with pytest.raises(ValueError, match=f"known: auto, .*{options[kind]}$"):
            ring_torch.ring_attention(*local, **{**options, kind: "rdma"})
    _prepare.cache_clear()
    dense = sdpa(*whole, is_causal=True)
    expected = [dense, *torch.autograd.grad(dense, whole, dout)]
    pairs = zip((out, *grads), expected, strict=True)
    return [float((x - cp.shard(y, dim=1)).detach().abs().max()) for x, y in pairs]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_one_entry_of_a_table_is_enough(kind: str, size: int, backend: Any) -> None:
    for errors in backend.pool(size).run(errors_of_a_call, kind):
        assert max(errors) < 1e-5, errors


def choose(strategy: str, **more: Any) -> Any:
    """Return the choice of two ranks."""
    program = ring_program(make_plan(Mask(), seq_len=LENGTH, cp_size=2))
    return choose_strategy(
        strategy, "auto", Ranks(None, 0, 2), program, torch.device("cpu"),
        request=Request("cpu", "float32", DIM, DIM, **more), probe=False,
    )  # fmt: skip


def test_a_strategys_refusals_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "strategy")
    message = "'everywhere' over transport 'p2p': it has no bias"
    with pytest.raises(ring_torch.UnsupportedError, match=message):
        choose("everywhere", bias=True)


def test_auto_takes_a_transport_that_is_registered_first(monkeypatch: pytest.MonkeyPatch) -> None:
    first = replace(P2P, name="first", sends_messages=False)
    monkeypatch.setattr(transports, "TRANSPORTS", (first, *TRANSPORTS))
    assert choose("auto") == (GATHER, first)


def test_names_for_static_typing_are_in_the_table() -> None:
    """Type checkers complete them; a strategy need not be among them."""
    assert set(get_args(StrategyName)) <= {spec.name for spec in STRATEGIES}


def test_a_strategy_brings_its_own_count_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    own = StrategyBytes("everywhere", RING_BYTES.sent)
    options = CallOptions(causal=True, **register(monkeypatch, "strategy"))
    q, k, v = (torch.zeros(1, LENGTH // 2, heads, DIM, requires_grad=True) for heads in HEADS)
    for rank in range(2):
        call, inputs = check_call(Ranks(None, rank, 2), 0, "zigzag", q, k, v, options)
        traffic = [
            call.strategy.traffic(call, inputs, forward=forward, saved=False).sent
            for forward in (True, False)
        ]
        model = Model(*HEADS[:2], DIM, bytes_per_element=4)
        assert sum(traffic) == bytes_sent(call.plan, model, own)[rank]


PACKAGES = Path(__file__).parents[2] / "packages"
#: A name stands in its own file; ``logits="gather"`` is an option of models.
OWN_FILES = {
    "gather": ("gather.py",), "fa3": ("flash_attn.py",), "fa2": ("flash_attn.py",),
    "cudnn": ("cudnn.py", "sdpa.py"), "pallas": ("kernel.py",),
}  # fmt: skip
OTHERS = {"logits"}
NAMES = {*(x.name for x in STRATEGIES), *(x.name for x in TRANSPORTS)}
KERNEL_NAMES = {*(x.capabilities.name for x in KERNELS), "xla", "pallas"}  # JAX's own, too
#: Methods by which a name decides.
METHODS = {"get", "pop", "index", "count", "startswith", "endswith", "removeprefix"}
#: Where else a name decides, and why.
ALLOWED = {
    (f"{path}.py", name)
    for path, names in {
        "ring_jax/maxtext": "ring ulysses",  # values of MaxText's settings
        "ring_torch/hf/models/check": "hybrid",  # a name of transformers' layers
        # Values of transformers' argument, and the name under which attention is registered.
        "ring_torch/hf/register": "eager sdpa ring",
        "ring_torch/recurrent/layer": "eager triton",  # of recurrent layers
        "ring_torch/recurrent/libraries": "eager triton",
        "ring_torch/recurrent/calls": "triton",
        "ring_torch/recurrent/layer_call": "triton",
        "ring_torch/hf/rollouts": "gather",  # accelerate's function
        "ring_torch/optional": "triton",  # the package
        "ring_torch/tools/doctor": "triton",
        "ring_jax/tools/doctor": "triton ring",  # the package, and an axis of a mesh
        "ring_jax/tools/bench": "ring",
        "ring_jax/compat/calls": "ring",  # ejkernel's name of an operation
        # Which kernels a package brings has to be known before it is imported.
        "ring_jax/kernels/plugins": "triton cudnn pallas",
        "ring_jax/prepare": "xla",  # the names that `transport=` takes
        "ring_torch/serving/arguments": "symm_mem",  # which exchanges no partial results
        "ring_torch/serving/kernels": "eager triton fa4",  # those of pages
        "ring_torch/serving/flash_pages": "fa4",
        "ring_torch/serving/prefilling": "fa4",
    }.items()
    for name in names.split()
}


def _deciding(node: ast.AST) -> set[str]:
    """Return the constants, descriptions (``RING``) and classes by which a node decides."""
    parts: Sequence[ast.AST | None]
    match node:
        case ast.Compare():
            parts = [node.left, *node.comparators]
        case ast.Dict():
            parts = node.keys
        case ast.Tuple() | ast.List() | ast.Set():
            parts = [x for x in node.elts if isinstance(x, ast.Constant)]
        case ast.MatchValue():
            parts = [node.value]
        case ast.MatchClass():
            parts = [node.cls]
        case ast.Subscript(value=ast.Name(id=name)) if name != "Literal":
            parts = [node.slice]
        case ast.Call(func=ast.Attribute(attr=name)) if name in METHODS:
            parts = node.args
        case ast.Call(func=ast.Name(id="isinstance")):
            parts = node.args[1:]
        case _:
            parts = []
    inside = [x for part in parts if part is not None for x in ast.walk(part)]
    named = {getattr(x, "attr", getattr(x, "id", "")) for x in inside}
    if OTHERS & named:
        return set()
    constants = {str(x.value) for x in inside if isinstance(x, ast.Constant)}
    return constants | {name.lower() for name in named if name[:1].isupper()}


def _names_in(tree: ast.AST) -> set[str]:
    """Return the names of strategies, transports and kernels by which a module decides."""
    types = {
        id(x) for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "Literal"
        for x in ast.walk(node)
    }  # fmt: skip
    decides = {x for node in ast.walk(tree) if id(node) not in types for x in _deciding(node)}
    return {x for x in NAMES | KERNEL_NAMES if {x, x.replace("_", "")} & decides}


def test_no_file_but_its_own_branches_on_a_name() -> None:
    files = {
        (path.relative_to(source).as_posix(), name)
        for source in PACKAGES.glob("*/src")
        for path in source.rglob("*.py")
        for name in _names_in(ast.parse(path.read_text()))
        if path.name not in OWN_FILES.get(name, (f"{name}.py",))
    }
    assert files == ALLOWED
    for text in (
        'call.transport.name == "p2p"', 'name in ("ring", "gather")', '{"ulysses": 1}[name]',
        "isinstance(call.strategy, Ulysses)", 'match name:\n    case "balanced":\n        pass',
        "name != ULYSSES.name", "match x:\n    case ring.Hybrid(grid=None):\n        pass",
        "type(x) is SymmMem", 'table.get("gather")', 'name.startswith("ring")',
    ):  # fmt: skip
        assert _names_in(ast.parse(text)), text
    for text in ('StrategyConfig("ring")', 'self.logits == "gather"', 'Name = Literal["ring"]'):
        assert not _names_in(ast.parse(text)), text


def test_spellings_of_an_option_are_one() -> None:
    """The signature, the TypedDict and the record agree in names, order, types and defaults."""
    signature = inspect.signature(ring_torch.ring_attention).parameters.values()
    given = [x for x in signature if x.kind is x.KEYWORD_ONLY and x.name not in ("group", "layout")]
    record = {
        name: kind for name, kind in CallOptions.__annotations__.items() if name != "bias_role"
    }
    assert [x.name for x in given] == list(record)
    assert {x.name: x.default for x in given} | {
        "bias_role": "added"
    } == CallOptions._field_defaults
    spelled = {name: kind.__forward_arg__ for name, kind in record.items()}
    assert {x.name: x.annotation for x in given} == spelled
    # Overloads of the signature have `return_lse`, which decides the type of the result.
    del spelled["return_lse"]
    typed = {name: kind.__forward_arg__ for name, kind in AttentionOptions.__annotations__.items()}
    assert list(typed) == list(spelled) and typed == spelled

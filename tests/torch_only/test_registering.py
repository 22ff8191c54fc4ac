"""A new strategy, transport or kernel is one class and one entry of a table.

Each dummy here is registered for a call that runs on one rank and on two, is checked by the
tripwire, and compared with dense attention.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.distributed as dist
from dense import sdpa
from torch import Tensor

import ring_torch
from ring_core import (
    Mask,
    Request,
    StrategyName,
    make_plan,
    ring_program,
)
from ring_core.cost import CountedCall, Model, StrategyBytes, bytes_sent
from ring_core.cost.counts.api import BytesByRanks
from ring_core.programs.grid import RankGrid
from ring_torch import kernels, strategies, transports
from ring_torch.accumulate import Accumulator, Joins, Work, joins_of
from ring_torch.buffers import BufferSpec
from ring_torch.call import (
    Call,
    IndexMap,
    PendingGrads,
    PendingKV,
    Saved,
    SessionSpec,
    Strategy,
    StrategySpec,
    Traffic,
    Transport,
    nothing,
)
from ring_torch.comm.exchange import exchange
from ring_torch.comm.ranks import Ranks
from ring_torch.comm.store import CallSignature
from ring_torch.kernels import KERNELS
from ring_torch.kernels.eager import EagerKernel
from ring_torch.options import AttentionOptions, CallOptions
from ring_torch.prepare import _prepare, check_call
from ring_torch.records import (
    AttentionState,
    Backward,
    BackwardInputs,
    Grads,
    Inputs,
    KeyBlock,
    KeyGrads,
)
from ring_torch.strategies import STRATEGIES, choose_strategy
from ring_torch.strategies.gather import GATHER
from ring_torch.transports import TRANSPORTS
from ring_torch.transports.api import note_reads, program_of, requests_to
from ring_torch.transports.p2p import HeadMessages

LENGTH, HEADS, DIM = 16, (4, 2, 2), 8  # tokens of the sequence, heads of q, k and v


@dataclass(frozen=True)
class Everywhere(Strategy):
    """Every rank gets all keys and values in one exchange, and computes its items pair by pair."""

    work: tuple[Work, ...]
    joins: Joins
    backward_launches: tuple[Backward, ...]
    name: str = "everywhere"

    def forward(self, call: Call, inputs: Inputs) -> tuple[AttentionState, Saved]:
        """Attend to each rank's keys in turn, and merge."""
        call.agree(call.ranks, call.forward_signature)
        keys, rows = self._keys(call, inputs), call.rows(inputs)
        results = Accumulator(self.joins, rows.q, inputs.v.shape[3])
        for work, columns in zip(self.work, keys, strict=True):
            results.attend(work, rows, columns)
        return results.state, []

    def backward(
        self, call: Call, inputs: Inputs, upstream: BackwardInputs, _saved: Saved, /
    ) -> Grads:
        """Compute the gradients of all keys, and send each rank its own."""
        call.agree(call.ranks, call.backward_signature)
        keys, rows = self._keys(call, inputs), call.rows(inputs)
        row_sums = call.row_sums(rows, "add")
        sums = [
            KeyGrads(*(torch.zeros_like(x, dtype=call.acc_dtype) for x in (inputs.k, inputs.v)))
            for _ in keys
        ]
        for launch, columns, of_rank in zip(self.backward_launches, keys, sums, strict=True):
            launch.run(rows, [columns], upstream, row_sums, of_rank)
        came = exchange(call.ranks, [[x.dk for x in sums], [x.dv for x in sums]], call.device)
        dk, dv = (torch.stack(parts).sum(dim=0) for parts in came)
        return Grads(row_sums.whole(), dk, dv, None)

    def traffic(self, call: Call, inputs: Inputs, *, forward: bool, saved: bool) -> Traffic:
        """Keys to all others in both passes, and gradients back."""
        del saved
        shapes = [x.shape for x in (inputs.k, inputs.v)]
        size = BufferSpec.of(*((x, call.dtype) for x in shapes)).size
        if not forward:
            size += BufferSpec.of(*((x, call.acc_dtype) for x in shapes)).size
        return Traffic((call.ranks.size - 1) * size, (call.ranks.size - 1) * size)

    def _keys(self, call: Call, inputs: Inputs) -> list[KeyBlock]:
        ranks = call.ranks.size
        came = exchange(call.ranks, [[inputs.k] * ranks, [inputs.v] * ranks], call.device)
        return [call.columns(n, pair) for n, pair in enumerate(zip(*came, strict=True))]


def _resolve(call: Call, _inner: Call | None, _grid: RankGrid | None) -> Strategy:
    plan, kernel = call.plan, call.kernel
    by_rank = [plan.items(call.ranks.rank, kv_rank) for kv_rank in range(plan.cp_size)]
    launches = [[kernel.forward(item, call.params) for item in items] for items in by_rank]
    length = plan.q_layout.local_len
    joins = joins_of([x for some in launches for x in some], call.dtype, length)
    back = tuple(kernel.backward(some, call.params, adds=True) for some in by_rank)
    work = tuple(Work.of(some, length, call.keys.length) for some in launches)
    return Everywhere(work, joins, back)


def _refuse(_plan: object, request: Request) -> tuple[str, ...]:
    return ("it has no bias",) if request.bias else ()


EVERYWHERE = StrategySpec("everywhere", _resolve, _refuse)


@dataclass(frozen=True)
class Letters:
    """Ranks put tensors into the group's store, and read those of their peers there."""

    call: Call
    spec: SessionSpec
    pass_name: str

    def _shared(self, name: str, own: Tensor) -> list[Tensor]:
        """Put a tensor there, and return those of all ranks, which are of its dtype."""
        ranks, store = self.call.ranks, dist.distributed_c10d._get_default_store()
        name = f"letters/{self.call.number}/{self.pass_name}/{name}"
        store.set(f"{name}/{ranks.rank}", own.numpy().tobytes().hex())
        letters = [store.get(f"{name}/{rank}").decode() for rank in range(ranks.size)]
        return [torch.frombuffer(bytearray.fromhex(x), dtype=own.dtype) for x in letters]

    def fetch(
        self, inputs: Inputs, meanwhile: Callable[[], object] = nothing
    ) -> Iterator[PendingKV]:
        """Copy what is fetched out of each rank's K/V."""
        gather, keys, *_ = self.spec
        own = torch.cat([inputs.k.flatten(2), inputs.v.flatten(2)], dim=2)
        kv = own.new_empty(keys.batch, gather.length, keys.width)
        whole = [x.view(own.shape) for x in self._shared("keys", own.detach())]
        for fetch in gather.fetches:
            kv[:, fetch.target] = whole[fetch.rank][:, fetch.source]
            if fetch.rank != self.call.ranks.rank:
                note_reads([kv[:, fetch.target]])
        meanwhile()
        return iter([PendingKV([kv], None)])

    def accumulators(self, *, zero: bool) -> list[Tensor]:
        """Return a buffer for the only group of heads."""
        gather, sums = self.spec.gather, self.spec.sums
        return [(torch.zeros if zero else torch.empty)(sums.numel(gather.length))]

    def return_grads(
        self, grads: Tensor, group: int, *, overlapped: bool, before_last_item: bool | None = None
    ) -> PendingGrads:
        """Put all sums into the store; owners take theirs out of them."""
        del group, overlapped
        (gather, _, _, sums, _), plan, rank = self.spec, self.call.plan, self.call.ranks.rank
        by_rank = self._shared(f"grads/{before_last_item}", grads)
        requests = requests_to(plan, rank, like=gather, before_last_item=before_last_item)

        def add_to(total: Tensor, length: int, index_map: IndexMap) -> None:
            for peer, fetch in requests:
                peer_length = program_of(plan, peer, like=gather).length
                (theirs,) = sums.strided_views(by_rank[peer], peer_length, fetch.target)
                sums.strided_views(total, length, index_map(fetch.source))[0].add_(theirs)
                note_reads([theirs])

        return add_to


def _open(call: Call, spec: SessionSpec, signature: CallSignature) -> Letters:
    call.agree(call.ranks, signature)
    return Letters(call, spec, signature.fields["pass"])


LETTERS = Transport(
    "letters", _open, lambda _ranks, _device, _probe: (), HeadMessages.open, sends_messages=False,
    head_refusals=lambda _ranks: ("letters trade no heads",),
)  # fmt: skip


class Dense(EagerKernel):
    """Another name for launches; docs/adding-a-kernel.md writes a kernel out."""

    capabilities = replace(EagerKernel.capabilities, name="dense")


def a_strategy(patch: pytest.MonkeyPatch) -> dict[str, str]:
    """Register the strategy, and return the options that name it."""
    patch.setattr(strategies, "STRATEGIES", (*STRATEGIES, EVERYWHERE))
    return {"strategy": "everywhere"}


def a_transport(patch: pytest.MonkeyPatch) -> dict[str, str]:
    """Register the transport, and name it together with a strategy that opens sessions."""
    patch.setattr(transports, "TRANSPORTS", (*TRANSPORTS, LETTERS))
    return {"transport": "letters", "strategy": "gather"}


def a_kernel(patch: pytest.MonkeyPatch) -> dict[str, str]:
    """Register the kernel, and name it."""
    patch.setattr(kernels, "KERNELS", (*kernels.KERNELS, Dense()))
    return {"kernel": "dense"}


KINDS: dict[str, Callable[[pytest.MonkeyPatch], dict[str, str]]] = {
    "strategy": a_strategy, "transport": a_transport, "kernel": a_kernel,
}  # fmt: skip


def errors_of_a_call(_: int, kind: str) -> list[float]:
    """Return the largest errors of a checked call and its gradients, and of the names known."""
    with pytest.MonkeyPatch.context() as patch:
        _prepare.cache_clear()
        options: Any = KINDS[kind](patch)
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


def test_a_strategys_refusals_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    a_strategy(monkeypatch)
    program = ring_program(make_plan(Mask(), seq_len=LENGTH, cp_size=2))
    request = Request("cpu", "float32", DIM, DIM, bias=True)
    with pytest.raises(
        ring_torch.UnsupportedError, match="'everywhere' over transport 'p2p': it has no bias"
    ):
        choose_strategy(
            "everywhere", "auto", Ranks(None, 0, 2), program, torch.device("cpu"),
            request=request, probe=False,
        )  # fmt: skip


def test_auto_takes_a_transport_that_is_registered_first(monkeypatch: pytest.MonkeyPatch) -> None:
    first = replace(TRANSPORTS[-1], name="first", sends_messages=False)
    monkeypatch.setattr(transports, "TRANSPORTS", (first, *TRANSPORTS))
    program = ring_program(make_plan(Mask(), seq_len=LENGTH, cp_size=2))
    strategy = choose_strategy(
        "auto", "auto", Ranks(None, 0, 2), program, torch.device("cpu"),
        request=Request("cpu", "float32", DIM, DIM), probe=False,
    )  # fmt: skip
    assert strategy == (GATHER, first)


def test_names_for_static_typing_are_in_the_table() -> None:
    """Type checkers complete them; a strategy need not be among them."""
    assert set(get_args(StrategyName)) <= {spec.name for spec in STRATEGIES}


def test_a_strategy_brings_its_own_count_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def sent(call: CountedCall) -> BytesByRanks:
        """Own keys to each other rank in both passes, and float32 sums for the keys of each."""
        ranks, model = call.plan.cp_size, call.model
        tokens = call.plan.k_layout.local_len * model.num_kv_heads * 2 * model.head_dim
        passes = model.bytes_per_element * (1 + call.backward) + 4 * call.backward
        return (1 - np.eye(ranks, dtype=np.int64)) * tokens * passes

    own = StrategyBytes("everywhere", sent)
    options = CallOptions(causal=True, strategy=a_strategy(monkeypatch)["strategy"])
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
    *(("ring_jax/maxtext.py", x) for x in ("ring", "ulysses")),  # values of MaxText's settings
    ("ring_torch/hf/models/check.py", "hybrid"),  # a name of transformers' layers
    ("ring_torch/hf/register.py", "eager"),  # a value of transformers' argument
    ("ring_torch/hf/register.py", "sdpa"),  # likewise
    ("ring_torch/hf/register.py", "ring"),  # the name under which attention is registered
    *(
        (f"ring_torch/recurrent/{x}.py", "eager") for x in ("layer", "libraries")
    ),  # of recurrent layers
    *(
        (f"ring_torch/recurrent/{x}.py", "triton")
        for x in ("calls", "layer", "layer_call", "libraries")
    ),
    ("ring_torch/hf/rollouts.py", "gather"),  # accelerate's function
    ("ring_torch/optional.py", "triton"),  # the package
    ("ring_torch/tools/doctor.py", "triton"),  # likewise
    ("ring_jax/compat/calls.py", "ring"),  # ejkernel's name of an operation
    *((f"ring_jax/tools/{x}.py", "ring") for x in ("bench", "doctor")),  # an axis of a mesh
    ("ring_jax/tools/doctor.py", "triton"),  # the package
    # Which kernels a package brings has to be known before it is imported.
    *(("ring_jax/kernels/plugins.py", x) for x in ("triton", "cudnn", "pallas")),
    ("ring_jax/prepare.py", "xla"),  # the names that `transport=` takes
    ("ring_torch/serving/arguments.py", "symm_mem"),  # which exchanges no partial results
    *(("ring_torch/serving/kernels.py", x) for x in ("eager", "triton", "fa4")),  # those of pages
    *((f"ring_torch/serving/{x}.py", "fa4") for x in ("flash_pages", "prefilling")),  # likewise
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

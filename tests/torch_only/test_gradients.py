"""Gradients: of ``lse`` in each kernel that has it, in memory of their own, of the first order.

Those of weights are summed once, in the backward or after it, for any shards; ranks must agree.
"""

from __future__ import annotations

import copy
import gc
import math
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import permutations, product
from typing import Any, NamedTuple, cast
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from dense import is_exact, numbers, sdpa
from on_ranks import on_ranks, on_three_ranks, on_two_ranks
from refused import refused
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.autograd import functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ring_torch
from ring_core import RankMismatchError, UnsupportedError
from ring_torch import ContextParallel, compat, ring_attention
from ring_torch.comm.handshake import agree_in_part
from ring_torch.comm.ranks import ranks_of
from ring_torch.comm.store import CallSignature
from ring_torch.gradients.reduce import sum_over

T = 16
QKV = [numbers(seed, 1, T, 2, 8) for seed in range(3)]

#: Factors of the gradients of ``out``, and of those of ``lse`` on each rank.
UPSTREAM = {
    "out": (1, (0, 0)), "lse": (0, (1, 1)), "both": (1, (1, 1)), "lse on a rank": (1, (0, 1)),
}  # fmt: skip


@pytest.mark.nightly(only=[
    "ring-lse-True", "ring-both-True", "gather-lse-True", "gather-both-False",
])  # fmt: skip
@pytest.mark.parametrize(("strategy", "upstream", "compiled"), [
    *product(["ring", "gather"], ["out", "lse", "both"], [False, True]), ("ring", "lse on a rank", False),
])  # fmt: skip
@on_two_ranks
def test_lse_takes_fast_kernels_until_it_has_a_gradient(
    rank: int, strategy: str, upstream: str, compiled: bool
) -> None:
    torch._dynamo.reset()
    cp, (of_out, of_lse) = ContextParallel(layout="contiguous"), UPSTREAM[upstream]
    leaves = [cp.shard(x.float()).requires_grad_() for x in QKV]
    assert cp.explain(*leaves, return_lse=True).startswith("kernel sdpa")

    def attend(*qkv: Tensor) -> Any:
        return cp.attention(*qkv, return_lse=True, strategy=strategy)

    call: Any = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    out, lse = call(*leaves)
    positions = torch.arange(T).float()
    of_lse_here = (lse * cp.shard(positions, dim=0)).sum()
    torch.stack([out.square().sum()] * of_out + [of_lse_here] * of_lse[rank]).sum().backward()
    whole = [x.clone().requires_grad_() for x in QKV]
    scores = torch.einsum("bqhd,bkhd->bhqk", *whole[:2]) / 8**0.5
    weight = positions * torch.tensor(of_lse).repeat_interleave(T // 2)
    loss = of_out * sdpa(*whole).square().sum() + (scores.logsumexp(-1) * weight).sum()
    for leaf, x in zip(leaves, torch.autograd.grad(loss, whole), strict=True):
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        torch.testing.assert_close(grad.double(), cp.shard(x), rtol=1e-4, atol=1e-5)


def test_a_named_kernel_without_that_gradient_says_so() -> None:
    x = torch.ones(1, T, 2, 8, requires_grad=True)
    _, lse = ring_attention(x, x, x, kernel="sdpa", return_lse=True)
    refused("gradient through lse", lambda: lse.sum().backward(), error=UnsupportedError)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("strategy", ["ring", "gather"])
@on_two_ranks
def test_gradients_share_no_memory(strategy: str, dtype: torch.dtype) -> None:
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in QKV]
    ring_attention(*leaves, strategy=strategy).sum().backward()
    grads = [x.grad for x in leaves if x.grad is not None]
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in grads)
    assert len({x.untyped_storage().data_ptr() for x in grads}) == 3


Attend = Callable[[Tensor], Tensor]


class Way(NamedTuple):
    """The way a call is made, as a function of ``q``."""

    strategy: str = "ring"
    backend: str | None = None  # for torch.compile
    scale: float = 1.0  # multiplies q within the graph: of a product no leaf is saved

    def attend(self, q: Tensor, *kv: Tensor) -> Tensor:
        """Return this rank's part of causal attention."""
        k, v = kv or (ContextParallel().shard(x) for x in QKV[1:])
        if self.strategy == "compat":
            out: Tensor = compat.zigzag_ring_flash_attn_func(q, k, v, causal=True)
            return out
        strategy, scale = self.strategy, self.scale

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q = q if scale == 1 else q * scale
            return ring_attention(q, k, v, causal=True, layout="zigzag", strategy=strategy)

        if self.backend is not None:
            torch.compiler.reset()
            attend = torch.compile(attend, backend=self.backend, fullgraph=True)
        return attend(q, k, v)

    def check(self) -> None:
        """Check that a call and its gradient equal those of full attention."""
        attend = lambda *qkv, **_: self.attend(*qkv)  # noqa: E731 - one line
        assert is_exact(ContextParallel(), attend, softmax_scale=self.scale * 8**-0.5)


WAYS = {
    "ring": Way(), "gather": Way("gather"), "ulysses": Way("ulysses"), "compat": Way("compat"),
    "eager graph": Way(backend="eager"), "aot graph": Way(backend="aot_eager"),
    "eager graph of a product": Way(backend="eager", scale=2.0),
    "aot graph of a product": Way(backend="aot_eager", scale=2.0),
}  # fmt: skip


def _penalty(attend: Attend, q: Tensor) -> None:
    out = attend(q)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    (out.sum() + dq.pow(2).sum()).backward()


def _accumulated(attend: Attend, q: Tensor) -> None:
    torch.autograd.backward([attend(q).sum()], create_graph=True)
    assert q.grad is not None
    q.grad.pow(2).sum().backward()


def _by(transform: Any, *more: Any) -> Callable[[Attend, Tensor], Any]:
    """Return a derivative of the sum of squares by a function of torch.autograd.functional."""
    return lambda attend, q: transform(lambda x: attend(x).pow(2).sum(), q.detach(), *more)


ONES = torch.ones(1, T // 2, 2, 8, dtype=torch.float64)
SECOND: dict[str, Callable[[Attend, Tensor], Any]] = {
    "penalty": _penalty, "accumulated": _accumulated, "hvp": _by(functional.hvp, ONES),
    "vhp": _by(functional.vhp, ONES), "hessian": _by(functional.hessian),
    "jvp": lambda attend, q: functional.jvp(attend, q.detach(), ONES),
}  # fmt: skip


def _vmap(attend: Attend, q: Tensor) -> None:
    out, douts = attend(q), torch.stack([ONES, ONES])
    torch.func.vmap(lambda dout: torch.autograd.grad(out, q, dout))(douts)


BATCHED: dict[str, Callable[[Attend, Tensor], Any]] = {
    "is_grads_batched": lambda attend, q: torch.autograd.grad(attend(q), q, torch.stack([ONES, ONES]), is_grads_batched=True),
    "vmap": _vmap,
    "jacobian": lambda attend, q: functional.jacobian(attend, q.detach(), vectorize=True),
}  # fmt: skip


#: Errors of Ring, and of torch.
SECONDS = (
    "UnsupportedError: .*second derivative.*create_graph",
    "RuntimeError: torch.compile with aot_autograd does not .* double backward",
)
BATCHES = (
    "UnsupportedError: .*is_grads_batched",
    "RuntimeError: .*a compiled backward function within vmap",
)


def _pairs(kinds: Iterable[str]) -> list[tuple[str, str]]:
    """Return all ways with the first kind, and all kinds with a plain call and with a graph."""
    first, *rest = kinds
    return [*product(WAYS, [first]), *product(["ring", "aot graph of a product"], rest)]


@pytest.mark.nightly(only=[
    *(f"aot graph of a product-{x}" for x in ("hessian", "jvp", "hvp", "accumulated", "vhp", "jacobian", "vmap")),
    *(f"{graph} graph of a product-{x}" for graph in ("eager", "aot") for x in ("penalty", "is_grads_batched")),
])  # fmt: skip
@pytest.mark.parametrize(("way", "asked"), [*_pairs(SECOND), *_pairs(BATCHED)])
@on_two_ranks
def test_other_derivatives_are_refused(way: str, asked: str) -> None:
    """Second derivatives and batches of gradients are, and the next call is exact."""
    kinds, (match, by_torch) = (BATCHED, BATCHES) if asked in BATCHED else (SECOND, SECONDS)
    if way.startswith("aot"):  # torch is the first to refuse some there
        match += f"|{by_torch}"
    q = ContextParallel().shard(QKV[0]).requires_grad_()
    with pytest.raises((ValueError, RuntimeError)) as error:
        kinds[asked](WAYS[way].attend, q)
    message = f"{type(error.value).__name__}: {error.value}"
    assert re.search(match, message), message
    WAYS[way].check()


@on_two_ranks
def test_compiled_autograd_makes_one_graph_of_a_compiled_forward() -> None:
    """It refuses an eager forward; a compiled one is exact."""
    q, messages = ContextParallel().shard(QKV[0]).requires_grad_(), []
    for way in (Way(), Way(backend="aot_eager")):
        torch.compiler.reset()  # graphs of other tests have breaks, and would be reused
        out = way.attend(q)
        (expected,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
        compiler = torch.compile(backend="aot_eager", fullgraph=True)
        try:
            with compiled_autograd._enable(compiler):
                out.sum().backward()
        except RuntimeError as error:
            messages.append(str(error))
    torch.testing.assert_close(q.grad, expected, rtol=0, atol=0)
    (message,) = messages
    assert "With fullgraph=True compile what calls attention" in message


# Sums of gradients of weights.

RANKS, SIZE = 4, 2


class Step:
    """A small model and its optimizer; rank ``r`` adds ``r + 1`` times the same gradient."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.new_group()
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.x = torch.randn(5, 3)

    def new_group(self) -> None:
        """Sum over a new group of this rank and its neighbour."""
        self.cp = ContextParallel(dist.new_subgroups(SIZE)[0])

    @property
    def grads(self) -> list[Tensor]:
        return [x.grad for x in self.model.parameters() if x.grad is not None]

    def loss(self, run: Any = None) -> Tensor:
        part: Tensor = (run or self.model)(self.x).square().sum() * (self.cp.cp_rank + 1)
        return part

    def backward(self, **options: Any) -> None:
        self.loss().backward(**options)

    def fill(self, value: float) -> None:
        for weight in self.model.parameters():
            weight.grad = torch.full_like(weight, value)

    def reduce(self) -> None:
        self.cp.reduce_gradients(self.model)

    def check(self, times: float = 3) -> None:
        """Check that gradients are those of all ranks' losses: ``1 + 2`` times that of one."""
        twin = copy.deepcopy(self.model)  # no backward comes to the model's own parameters
        loss = twin(self.x).square().sum() * times
        whole = torch.autograd.grad(loss, list(twin.parameters()))
        torch.testing.assert_close(self.grads, list(whole))


#: Tensors that programs put in the place of a gradient, made of that.
MADE_OF: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda grad: grad, "scaled": lambda grad: grad * 0.5,
    "detached": lambda grad: grad.detach(), "cloned": lambda grad: grad.clone(), "copied": copy.deepcopy,
    "flat": lambda grad: torch.cat([grad.flatten()] * 2)[: grad.numel()].view_as(grad),
}  # fmt: skip


def _replace_by(step: Step, made: str) -> None:
    for weight in step.model.parameters():
        weight.grad = MADE_OF[made](weight.grad)  # type: ignore[arg-type]  # there after a backward


def _all(*changes: Callable[[Step], object]) -> Callable[[Step], object]:
    return lambda step: [change(step) for change in changes]


def _copy(step: Step) -> None:
    """Go on with a deep copy of the model, and of its gradients, which torch leaves out."""
    model = copy.deepcopy(step.model)
    for twin, weight in zip(model.parameters(), step.model.parameters(), strict=True):
        twin.grad = copy.deepcopy(weight.grad)
    step.model = model


#: Changes after which gradients are still sums, to which nothing may be added: what is summed is
#: known by parameter and backward, not by the tensor, its address or the object of the group.
STILL_SUMS: dict[str, Callable[[Step], Any]] = {
    "nothing": lambda _: None,
    "clipped": lambda step: nn.utils.clip_grad_norm_(step.model.parameters(), 1e-2),
    "unscaled": lambda step: [grad.mul_(0.5) for grad in step.grads],
    "stepped": lambda step: step.optimizer.step(),
    "summed over replicas": lambda step: dist.all_reduce(step.grads[0], group=step.cp.group),  # type: ignore[arg-type]  # there
    "over another group": Step.new_group,
    "in another dtype": lambda step: step.model.double().float(),
    "beside others": _all(
        partial(_replace_by, made="scaled"),
        lambda step: torch.autograd.grad(step.loss(), list(step.model.parameters())),
    ),
    "copied": _all(_copy, _copy),
    **{f"made {made}": partial(_replace_by, made=made) for made in MADE_OF},
}


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize(
    ("then", "options"),
    [
        *((then, {}) for then in STILL_SUMS),
        ("nothing", {"retain_graph": True}),
        ("nothing", {"create_graph": True}),  # torch adds gradients into a new tensor
    ],
)
@on_ranks
def test_a_sum_is_neither_added_to_nor_summed_again(then: str, options: dict[str, Any]) -> None:
    step = Step()
    for _ in range(2):
        step.backward()
    step.reduce()
    step.check(6)
    STILL_SUMS[then](step)
    again = ContextParallel(step.cp.group)  # the group counts, not the object
    summed = "the gradient of 0.weight is summed over the 2 ranks of the group already"
    adds = r"adds to the gradient of [02]\.(weight|bias), which reduce"
    calls: dict[str, Callable[[], Any]] = {summed: lambda: again.reduce_gradients(step.model)}
    if then != "copied":  # a copy's parameters have no history: the gradient itself bears a mark
        calls[adds] = lambda: step.backward(**options)
    way_out = re.escape("once a step, after the last backward; then step, then zero_grad()")
    for message, call in calls.items():
        refused(f"(?s){message}.*{way_out}", call)
    step.model.zero_grad()
    step.backward()
    step.reduce()
    step.check()


def _keep_elsewhere(step: Step, times: float, only: str = "") -> None:
    """Keep gradients in ``main_grad``, as libraries with fused or wide gradients do."""
    for name, weight in step.model.named_parameters():
        if only in name:
            weight.grad = None
            setattr(weight, "main_grad", torch.full_like(weight, times))  # noqa: B010 - torch's types have none


def _be(step: Step, model: nn.Module, *inputs: Tensor) -> None:
    """Let the step have another model, with gradients of these inputs, or of ones."""
    step.model = nn.Sequential(model)
    if inputs:
        step.model(*inputs).sum().backward()
    else:
        step.fill(1)


#: Models without a gradient to sum on any rank, or with one that cannot be, and words of the error.
NOTHING: dict[str, tuple[Callable[[Step], object], type[ValueError], str]] = {
    "no backward": (lambda _: None, ValueError, r"cp\.reduce_each_gradient\(model\)"),
    "main_grad": (lambda step: _keep_elsewhere(step, 1), UnsupportedError, "all_reduce.*main_grad"),
    "main_grad on one rank": (lambda step: _keep_elsewhere(step, step.cp.cp_rank), UnsupportedError, "main_grad"),
    "main_grad beside others": (_all(Step.backward, partial(_keep_elsewhere, times=1, only="2.weight")), UnsupportedError, "that of 2.weight is in main_grad"),
    "sparse": (lambda step: _be(step, nn.Embedding(4, 2, sparse=True), torch.tensor([1])), UnsupportedError, "sparse"),
    "of a device": (lambda step: _be(step, nn.Linear(2, 2, device="meta")), ValueError, "sends no tensors of device 'meta'"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTHING)
@on_ranks
def test_nothing_to_sum_is_an_error_on_all_ranks(name: str) -> None:
    """Gradients that are used up or kept elsewhere leave weights to drift apart in silence."""
    change, kind, words = NOTHING[name]
    step = Step()
    change(step)
    refused(words, step.reduce, error=kind)
    step = Step()  # nothing was sent but the kinds of gradients: a new group of these goes on
    _keep_elsewhere(step, 0, "2.weight")
    step.model.append(nn.Linear(2, 2, device="meta"))  # it has no gradient there
    (step.model[0](step.x).sum() * step.cp.cp_rank).backward()
    step.reduce()  # a parameter without any beside others with one
    assert step.model.get_parameter("2.weight").grad is None


def _replace(step: Step, every: int = 1) -> None:
    """Replace gradients by zeros; those between every so many by None."""
    for n, weight in enumerate(step.model.parameters()):
        weight.grad = None if n % every else torch.zeros_like(weight)


def _of_autograd(step: Step) -> None:
    """Replace gradients by those of ``torch.autograd.grad``, as some loops do without zeroing."""
    parts = torch.autograd.grad(step.loss(), list(step.model.parameters()))
    for weight, part in zip(step.model.parameters(), parts, strict=True):
        weight.grad = part
    step.reduce()
    step.check()
    step.model.zero_grad()


def _by_hand(value: Callable[[Step], float], total: float, times: int = 1) -> Any:
    """Set gradients that no backward has made."""

    def freshen(step: Step) -> None:
        for _ in range(times):
            step.fill(value(step))
            step.reduce()
        assert all(x.isnan().all() if math.isnan(total) else (x == total).all() for x in step.grads)
        step.model.zero_grad()

    return freshen


FRESH: dict[str, Callable[[Step], Any]] = {
    "set to none": lambda step: step.optimizer.zero_grad(set_to_none=True),
    "of autograd": _of_autograd, "by hand": _by_hand(lambda step: step.cp.cp_rank + 1, 1 + SIZE),
    "not finite": _by_hand(lambda _: math.nan, math.nan, times=2),
    "of master weights": _all(STILL_SUMS["stepped"], _by_hand(lambda _: 1, SIZE)),
    "clipped and zeroed": _all(STILL_SUMS["clipped"], STILL_SUMS["stepped"], lambda step: step.model.zero_grad(set_to_none=False)),
    "zeroed": lambda step: step.model.zero_grad(set_to_none=False),
    "zeroed by foreach": lambda step: torch.optim.SGD(step.model.parameters(), foreach=True).zero_grad(set_to_none=False),
    # Version counters do not notice what is written through ``.data``.
    "zeroed unseen": lambda step: [grad.data.zero_() for grad in step.grads],
    "replaced": _replace, "each other replaced": partial(_replace, every=2),
}  # fmt: skip


@pytest.mark.parametrize("freshen", FRESH)
@on_ranks
def test_steps_that_zero_or_replace_gradients_go_on(freshen: str) -> None:
    step = Step()
    for _ in range(3):
        step.backward()
        step.backward()  # micro-batches
        step.reduce()
        step.check(6)
        FRESH[freshen](step)
    if not step.grads:
        refused(r"no parameter .* has a gradient on any rank", step.reduce)
    else:
        step.reduce()  # sums of zeros
    assert not any(grad.any() for grad in step.grads)


@on_ranks
def test_buckets_of_ddp_are_no_sums_in_the_next_step() -> None:
    """Let DDP put views of its buckets, of which each step has the same, in gradients' places."""
    step = Step()
    ddp = DistributedDataParallel(
        step.model, process_group=dist.new_subgroups(1)[0], gradient_as_bucket_view=True
    )
    for to_none in (True, False, True):
        for _ in range(2):
            step.optimizer.zero_grad(set_to_none=to_none)
            for context in (ddp.no_sync(), nullcontext()):
                with context:
                    step.loss(ddp).backward()
            step.reduce()
            step.check(6)
    refused("already", step.reduce)


@on_ranks
def test_other_groups_and_gradients_of_other_things_are_free() -> None:
    step = Step()
    cross = [dist.new_group([0, 2]), dist.new_group([1, 3])]  # data parallel, beside the pairs
    other = ContextParallel(cross[step.cp.cp_rank])  # type: ignore[arg-type]  # there on its ranks
    step.backward()
    step.reduce()
    torch.autograd.grad(step.loss(), list(step.model.parameters()))
    x = step.x.clone().requires_grad_()
    step.model(x).sum().backward(inputs=[x])
    other.reduce_gradients(step.model)
    step.check(SIZE * 3)
    for cp in (step.cp, other):
        refused("over the 2 ranks of the group already", cp.reduce_gradients, step.model)
    message = "over 2 of the 4 ranks of the group already"
    refused(message, ContextParallel().reduce_gradients, step.model)


@on_ranks
def test_nothing_outlives_gradients_and_models() -> None:
    step = Step()
    step.backward()
    step.reduce()
    weight = step.model.get_parameter("0.weight")
    grad = ref(weight.grad)
    step.model.zero_grad()
    assert grad() is None
    step.backward()
    step.reduce()
    twin, read = copy.deepcopy(step.model), pickle.loads(pickle.dumps(step.model))
    assert all(not x._backward_hooks for model in (twin, read) for x in model.parameters())
    assert all(len(x._backward_hooks or {}) == 1 for x in step.model.parameters())  # of two steps
    kept = ref(weight)
    del weight, step, twin, read
    assert kept() is None


#: Gradients that programs may set, into which no sum can be written, for a weight ``[4, 3]``.
UNWRITABLE: tuple[Callable[[], Tensor], ...] = (
    lambda: torch.ones(()).expand(4, 3),
    lambda: torch.arange(6.0).unfold(0, 3, 1),
    torch.inference_mode()(lambda: torch.ones(4, 3)),
    lambda: torch.arange(12.0).view(3, 4).T,  # this one can be written to, and stays
)


@on_ranks
def test_gradients_that_cannot_be_written_are_replaced(rank: int) -> None:
    """And that of an expert that others do not use is summed; one that no rank has stays none."""
    cp, dtypes = ContextParallel(), (torch.float32, torch.float64, torch.float32)
    weight, expert, unused = (nn.Parameter(torch.zeros(4, 3, dtype=dtype)) for dtype in dtypes)
    given, model = UNWRITABLE[rank](), nn.ParameterList([weight, expert, unused])
    weight.grad, expert.grad = given, torch.ones_like(expert) if rank == 3 else None
    cp.reduce_gradients(model)
    torch.testing.assert_close(weight.grad, sum((make() for make in UNWRITABLE), torch.zeros(4, 3)))
    assert (weight.grad is given) == (rank == len(UNWRITABLE) - 1)
    assert not weight.grad.is_inference()
    torch.testing.assert_close(expert.grad, torch.ones_like(expert))
    assert unused.grad is None
    refused("already", cp.reduce_gradients, model)


#: Each rank's gradient. The first two sum to a tie, which rounds down to 1; the next breaks the
#: tie, but adds nothing to either of them in their dtype.
HALVES = {torch.bfloat16: (1.0, 2**-8, 2**-17), torch.float16: (1.0, 2**-11, 2**-23)}


@pytest.mark.parametrize("dtype", HALVES)
@on_three_ranks
def test_half_precision_gradients_are_summed_in_float32(rank: int, dtype: torch.dtype) -> None:
    """A sum in the own dtype is 1 in any order; in float32 it is the next larger number."""
    gradients = torch.tensor(HALVES[dtype], dtype=dtype)
    assert all(a + b + c == 1 for a, b, c in permutations(gradients))
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    model.weight.grad = torch.full((1, 1), HALVES[dtype][rank], dtype=dtype)
    ContextParallel().reduce_gradients(model)
    sums = 1 + torch.finfo(dtype).eps
    assert float(model.weight.grad) == sums
    grads: list[tuple[Any, float]] = [("sum", sums), ("slice", float(gradients[rank]))]
    for grad, expected in grads:
        x = torch.zeros(1, 2, dtype=dtype, requires_grad=True)
        (ContextParallel().unshard(x, grad=grad) * gradients[rank]).sum().backward()
        assert x.grad is not None and float(x.grad[0, 0]) == expected


@on_ranks
def test_compiled_models_are_compiled_once() -> None:
    torch._dynamo.reset()
    step = Step()
    run: Any = torch.compile(step.model, backend="aot_eager", fullgraph=True)
    for n in range(3):
        with torch.compiler.set_stance("fail_on_recompile" if n else "default"):
            step.loss(run).backward()
        step.reduce()
        step.check()
        if n < 2:
            step.model.zero_grad()
    refused("adds to the gradient", lambda: run(step.x).sum().backward())


WIDTH, DIM = 16, 4


def _heads() -> nn.Module:
    """Return projections, and a norm of heads whose weights tensor parallelism does not split."""
    torch.manual_seed(0)
    q, o, norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.RMSNorm(DIM)
    split, join = nn.Unflatten(-1, (-1, DIM)), nn.Flatten(2)
    return nn.Sequential(OrderedDict(q=q, split=split, norm=norm, join=join, o=o)).double()


_mesh = partial(init_device_mesh, "cpu", (2, 2))


def _whole() -> tuple[Tensor, nn.Module]:
    """Return tokens, and a model with their gradients."""
    x, whole = numbers(0, 2, 32, WIDTH), _heads()
    whole(x).square().sum().backward()
    return x, whole


def _full(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()


@pytest.mark.parametrize("names", [("cp", "tp"), ("tp", "cp")], ids=str)
@on_ranks
def test_shards_of_tensor_parallelism_are_summed_over_the_ring(names: tuple[str, str]) -> None:
    (x, whole), mesh, local = _whole(), _mesh(mesh_dim_names=names), _heads()
    cp = ContextParallel(mesh["cp"])
    parallelize_module(local, mesh["tp"], {"q": ColwiseParallel(), "o": RowwiseParallel()})
    for in_backward in (False, True):
        local.zero_grad()
        handle = cp.reduce_each_gradient(local) if in_backward else None
        local(cp.shard(x)).square().sum().backward()
        if handle is None:
            cp.reduce_gradients(local)
        else:
            handle.remove()
        like = dict(whole.named_parameters())
        for name, weight in local.named_parameters():
            grad = _full(weight.grad)
            if name == "norm.weight":  # each rank's heads contribute a part
                dist.all_reduce(grad, group=mesh["tp"].get_group())
            torch.testing.assert_close(grad, like[name].grad)
    refused("adds to the gradient", lambda: local(cp.shard(x)).sum().backward())


@on_ranks
def test_shards_over_other_ranks_are_summed_and_what_fsdp_reduces_is_refused() -> None:
    (x, whole), mesh, local = _whole(), _mesh(mesh_dim_names=("dp", "cp")), _heads()
    cp, size = ContextParallel(mesh["cp"]), mesh["dp"].size()
    fully_shard(local, mesh=mesh["dp"])
    local(cp.shard(x.chunk(size)[mesh["dp"].get_local_rank()])).square().sum().mul(size).backward()
    cp.reduce_gradients(local)
    for weight, like in zip(local.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(_full(weight.grad), like.grad)
    cpu, both = torch.device("cpu"), mesh["dp", "cp"]._flatten()
    wrapped: list[Any] = [FullyShardedDataParallel(_heads(), dist.group.WORLD, device_id=cpu)]
    for other in (*wrapped, fully_shard(_heads(), mesh=both)):
        other(cp.shard(x)).square().sum().backward()
        with pytest.raises(UnsupportedError, match="FSDP reduces such gradients itself") as error:
            cp.reduce_gradients(other)
        for words in ("as a mean", "multiply the loss by the number of ranks", "reduction='mean'"):
            assert words in str(error.value)


# Sums in the backward.

EXPERTS, LAYERS, VOCAB = 4, 2, 16


class Model(nn.Module):
    """A language model of attention and experts, of which a token takes the one of its number."""

    def __init__(self, attend: Callable[..., Tensor], kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        layers = [[nn.Linear(WIDTH, WIDTH) for _ in range(1 + EXPERTS)] for _ in range(LAYERS)]
        self.layers = nn.ModuleList(map(nn.ModuleList, layers[: 1 if kind == "shared" else None]))
        self.unused, self.attend, self.kind = nn.Linear(2, 2), attend, kind
        self.double()
        # Then the first gradient of a backward is an expert's, which other ranks may not have.
        self.head.requires_grad_(kind != "frozen head")

    def layer(self, x: Tensor, tokens: Tensor, n: int) -> Tensor:
        first, *experts = cast("nn.ModuleList", self.layers[n % len(self.layers)])
        x = x + self.attend(*(first(x).unflatten(-1, (2, -1)),) * 3).flatten(2)
        result = torch.zeros_like(x)
        for number, expert in enumerate(experts):
            if (chosen := tokens % EXPERTS == number).any():
                result[chosen] = expert(x[chosen])
        return x + result

    def forward(self, tokens: Tensor) -> Tensor:
        run: Any = self.layer
        x = self.embedding(tokens)
        if "checkpoint" in self.kind:
            run = partial(checkpoint, run, use_reentrant="reentrant" in self.kind)
        for n in range(LAYERS):
            x = run(x, tokens, n)
        logits: Tensor = self.head(x)
        return logits


def step_in_backward(model: nn.Module, steps: dict[str, int]) -> None:
    """Give each parameter an optimizer that steps as soon as its gradient is made."""

    def step(name: str, optimizer: torch.optim.Optimizer, _: Tensor) -> None:
        steps[name] = steps.get(name, 0) + 1
        optimizer.step()
        optimizer.zero_grad()

    for name, weight in model.named_parameters():
        if weight.requires_grad:
            made = torch.optim.SGD([weight], lr=0.1, momentum=0.9, weight_decay=0.1)
            weight.register_post_accumulate_grad_hook(partial(step, name, made))


@pytest.mark.nightly(only=["compiled", "two backwards"])
@pytest.mark.parametrize("kind", [
    "plain", "plain, optimizers first", "frozen head", "checkpoint",
    "reentrant checkpoint, optimizers first", "shared", "two backwards", "compiled",
])  # fmt: skip
@on_three_ranks
def test_optimizers_in_the_backward_are_those_of_one_rank(kind: str) -> None:
    cp = ContextParallel(layout="contiguous")
    whole = Model(partial(sdpa, is_causal=True), kind)
    model = Model(lambda *qkv: cp.attention(*qkv, causal=True), kind)
    counts: list[dict[str, int]] = [{}, {}]
    step_in_backward(whole, counts[0])
    makes: list[Callable[[], Any]] = [
        lambda: cp.reduce_each_gradient(model),
        lambda: step_in_backward(model, counts[1]),
    ]
    made = [make() for make in (makes[::-1] if "optimizers first" in kind else makes)]
    torch.manual_seed(1)
    tokens, labels = torch.randint(VOCAB, (2, 2, 36))
    expert = torch.arange(3).repeat_interleave(12)  # most get tokens of one rank alone
    expert[[0, -1]] = EXPERTS - 1  # of the first and the last
    tokens += expert - tokens % EXPERTS
    torch._dynamo.reset()
    run: Any = torch.compile(model, backend="aot_eager") if kind == "compiled" else model
    for _ in range(2):
        for part in range(2) if kind == "two backwards" else (0,):
            x, y = tokens.roll(part, 0), labels.roll(part, 0)
            cross_entropy(whole(x).flatten(0, 1), y.flatten()).backward()
            ring_torch.cross_entropy(cp, run(cp.shard(x)), cp.shard(y)).backward()
    assert counts[0] == counts[1]  # hooks ran as often as on one rank
    for (name, weight), like in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(weight, like, rtol=1e-9, atol=1e-11, msg=f"{name} of {kind}")
        ranks = cp.unshard(weight.detach()[None], dim=0)
        assert all(torch.equal(weight, x) for x in ranks)  # the same bits
        assert weight.grad is None
    refused("leave reduce_gradients out", cp.reduce_gradients, model)
    for handle in made:
        if handle is not None:
            handle.remove()
    assert not cp._sharding.ranks.state.before_passes
    refused(r"cp\.reduce_each_gradient", cp.reduce_gradients, model)


class Two(nn.Module):
    """Two layers beside each other, which some ranks compute in another order."""

    swapped = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.b, self.a) if self.swapped else (self.a, self.b)
        out: Tensor = first(x).tanh() + second(x).sin()
        return out


@pytest.mark.nightly(only=["True"])
@pytest.mark.parametrize("late", [False, True])
@on_three_ranks
def test_another_order_is_a_mismatch_on_all_ranks(rank: int, late: bool) -> None:
    group: Any = dist.new_group(timeout=timedelta(seconds=4))
    model = Two()
    ContextParallel(group).reduce_each_gradient(model)
    if late:  # after ranks have compared the same sums before
        model(torch.ones(2, 4)).sum().backward()
        model.zero_grad()
    model.swapped = rank == 2
    loss = model(torch.ones(2, 4)).sum()
    refused(r"reduce_each_gradient\[1\] [ab]\.", loss.backward, error=RankMismatchError)


@on_three_ranks
def test_ranks_that_sum_without_the_others_are_compared(rank: int) -> None:
    cp = ContextParallel(dist.new_group(timeout=timedelta(seconds=20)))  # type: ignore[arg-type]  # on all
    cp.unshard(torch.ones(1, 2, 1))  # ranks have agreed on the group
    if rank < 2:
        part = ranks_of(cp.group).part((0, 1))
        signature = CallSignature.of({"shape": [3 + rank]}, "sum")
        text = r"ranks [01] and [01] of the group make different calls: .*shape is \[[34]\] there"
        compare = partial(agree_in_part, part, 7, signature, torch.device("cpu"))
        refused(text, compare, error=RankMismatchError)


@on_three_ranks
def test_what_cannot_be_summed_is_refused(rank: int) -> None:
    cp, model, x = ContextParallel(), Two(), torch.ones(2, 4)
    each = cp.reduce_each_gradient

    def run() -> None:
        model(x).sum().backward()

    handle = each(model)
    run()  # nobody steps: gradients stay
    sums = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    refused("which is there already", run)
    torch.testing.assert_close([w.grad for w in model.parameters()], sums, rtol=0, atol=0)
    refused("already", cp.reduce_gradients, model)  # they are sums
    part = torch.autograd.grad(model(x).sum(), list(model.parameters()))  # adds to nothing
    torch.testing.assert_close([y / cp.cp_size for y in sums], list(part))
    model.zero_grad(set_to_none=False)
    run()
    torch.testing.assert_close([w.grad for w in model.parameters()], sums)
    model.zero_grad()
    refused("summed by such hooks already", each, model)
    model.c = nn.Linear(4, 4)
    refused(r"c\.weight requires a gradient and has no hook", run)
    handle.remove()
    handle.remove()
    each(model).remove()
    setattr(model.a.weight, "main_grad", torch.zeros(4, 4))  # noqa: B010 - torch's types have none
    refused("main_grad", each, model)
    alone = init_device_mesh("cpu", (3, 1), mesh_dim_names=("cp", "dp"))["dp"]
    for other in (DistributedDataParallel(Two()), fully_shard(Two(), mesh=alone)):
        refused("behind the hooks of parameters", each, other)
    handle = ContextParallel(alone).reduce_each_gradient(single := Two())  # it has nothing to sum
    assert not any(weight._post_accumulate_grad_hooks for weight in single.parameters())
    handle.remove()
    refused("sends no tensors of device 'meta'", each, nn.Linear(4, 4, device="meta"))
    sparse = nn.Embedding(4, 4, sparse=True)
    each(sparse)
    loss = sparse(torch.tensor([1])).sum()
    refused("sparse=False", loss.backward)
    kept = ref(unheld := Two())
    each(unheld)
    del unheld
    gc.collect()
    assert kept() is None
    group: Any = dist.new_group(timeout=timedelta(seconds=4))
    each = ContextParallel(group).reduce_each_gradient
    refused("weight", each, nn.Linear(4, 4 + rank), error=RankMismatchError)


@on_two_ranks
def test_numbers_with_gaps_between_rows_are_summed() -> None:
    """Backends reduce memory from the first number on, gaps included, and miss the last numbers."""
    x = numbers(0, 2, 3, 49)[..., :48].mT
    torch.testing.assert_close(sum_over(ranks_of(dist.group.WORLD), x), 2 * x)

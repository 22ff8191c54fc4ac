"""Gradients: of ``lse`` in each kernel that has it, in memory of their own, summed exactly."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from itertools import chain, permutations, product
from typing import Any, NamedTuple
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from dense import sdpa
from on_ranks import on_ranks, on_three_ranks, on_two_ranks
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.autograd import functional
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ring_torch
from ring_core import RankMismatchError, UnsupportedError
from ring_torch import ContextParallel, compat, ring_attention
from ring_torch.gradients import reduce
from ring_torch.local import LocalRanks

T = 16


def _whole() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, T, 2, 8) for _ in range(3)]


def _expected(of_out: bool, of_lse: bool) -> list[Tensor]:
    leaves = [x.double().requires_grad_() for x in _whole()]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    scores = q @ k.transpose(2, 3) * 8**-0.5
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ v
    loss = out.square().sum() * of_out + (lse * torch.arange(T)).sum() * of_lse
    return list(torch.autograd.grad(loss, leaves, materialize_grads=True))


@pytest.mark.nightly(only=[
    "ring-expected3-True", "ring-expected5-True", "gather-expected7-True", "gather-expected9-True",
])  # fmt: skip
@pytest.mark.parametrize(
    ("strategy", "expected", "compiled"),
    list(product(["ring", "gather"], [(True, False), (False, True), (True, True)], [False, True])),
)
@on_two_ranks
def test_lse_takes_fast_kernels_until_it_has_a_gradient(
    rank: int, strategy: str, expected: tuple[bool, bool], compiled: bool
) -> None:
    of_out, of_lse = expected
    torch._dynamo.reset()
    cp = ContextParallel(layout="contiguous")
    leaves = [cp.shard(x).requires_grad_() for x in _whole()]
    assert cp.explain(*leaves, return_lse=True).startswith("kernel sdpa")

    def attend(*qkv: Tensor) -> Any:
        return cp.attention(*qkv, return_lse=True, strategy=strategy)

    call: Any = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    out, lse = call(*leaves)
    positions = torch.arange(T)[rank * T // 2 :][: T // 2]
    loss: Any = (out.square().sum() if of_out else 0) + ((lse * positions).sum() if of_lse else 0)
    loss.backward()
    for leaf, x in zip(leaves, _expected(of_out, of_lse), strict=True):
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        torch.testing.assert_close(grad.double(), cp.shard(x), rtol=1e-4, atol=1e-5)


@on_two_ranks
def test_lse_may_have_a_gradient_on_some_ranks(rank: int) -> None:
    cp = ContextParallel(layout="contiguous")
    leaves = [cp.shard(x).requires_grad_() for x in _whole()]
    out, lse = cp.attention(*leaves, return_lse=True, strategy="ring")
    (out.square().sum() + (lse.sum() if rank else 0)).backward()
    reference = [x.double().requires_grad_() for x in _whole()]
    q, k, v = (x.transpose(1, 2) for x in reference)
    scores = q @ k.transpose(2, 3) * 8**-0.5
    whole = scores.softmax(-1) @ v
    (whole.square().sum() + scores.logsumexp(-1)[..., T // 2 :].sum()).backward()
    for leaf, x in zip(leaves, reference, strict=True):
        assert leaf.grad is not None
        assert x.grad is not None
        torch.testing.assert_close(leaf.grad.double(), cp.shard(x.grad), rtol=1e-4, atol=1e-5)


def test_a_named_kernel_without_that_gradient_says_so() -> None:
    x = torch.ones(1, T, 2, 8, requires_grad=True)
    _, lse = ring_attention(x, x, x, kernel="sdpa", return_lse=True)
    with pytest.raises(UnsupportedError, match="gradient through lse"):
        lse.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("strategy", ["ring", "gather"])
@on_two_ranks
def test_gradients_share_no_memory(strategy: str, dtype: torch.dtype) -> None:
    leaves = [x.to(dtype).requires_grad_() for x in _whole()]
    ring_attention(*leaves, strategy=strategy).sum().backward()
    grads = [x.grad for x in leaves if x.grad is not None]
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in grads)
    assert len({x.untyped_storage().data_ptr() for x in grads}) == 3


#: Each rank's gradient. The first two sum to a tie, which rounds down to 1; the last breaks the
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
    assert float(model.weight.grad) == 1 + torch.finfo(dtype).eps


def test_buckets_look_at_each_gradient_once() -> None:
    class Counted:
        dtype, device, looked = torch.float32, torch.device("cpu"), 0

        @property
        def nbytes(self) -> int:
            Counted.looked += 1
            return 4

    count = 2000
    buckets: Any = list(reduce._each_bucket([Counted() for _ in range(count)]))  # type: ignore[misc]  # stands in for a tensor
    assert [len(bucket) for bucket in buckets] == [count]
    assert Counted.looked <= 3 * count


Attend = Callable[[Tensor], Tensor]


def _qkv() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, T, 2, 4, dtype=torch.float64) for _ in range(3)]


class Way(NamedTuple):
    """The way a call is made, as a function of ``q``."""

    strategy: str = "ring"
    backend: str | None = None  # for torch.compile
    scale: float = 1.0  # multiplies q within the graph: of a product no leaf is saved

    def attend(self, q: Tensor) -> Tensor:
        """Return this rank's part of causal attention."""
        cp = ContextParallel()
        k, v = (cp.shard(x) for x in _qkv()[1:])
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

    def is_exact(self, kind: str = "plain") -> bool:
        """Return True if a call and its gradient equal those of full attention."""
        cp = ContextParallel()
        q, k, v = _qkv()
        q.requires_grad_()
        whole = sdpa(q * self.scale, k, v, is_causal=True)
        (dq,) = torch.autograd.grad(whole.sum(), q)
        shard = cp.shard(q.detach()).requires_grad_()
        out = ALLOWED[kind](self.attend, shard)
        assert shard.grad is not None
        return torch.allclose(out, cp.shard(whole), atol=1e-9) and torch.allclose(
            shard.grad, cp.shard(dq), atol=1e-9
        )


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


def _loss(attend: Attend) -> Callable[[Tensor], Tensor]:
    return lambda q: attend(q).pow(2).sum()


SECOND: dict[str, Callable[[Attend, Tensor], Any]] = {
    "penalty": _penalty,
    "accumulated": _accumulated,
    "hvp": lambda attend, q: functional.hvp(_loss(attend), q.detach(), torch.ones_like(q)),
    "vhp": lambda attend, q: functional.vhp(_loss(attend), q.detach(), torch.ones_like(q)),
    "jvp": lambda attend, q: functional.jvp(attend, q.detach(), torch.ones_like(q)),
    "hessian": lambda attend, q: functional.hessian(_loss(attend), q.detach()),
}


def _douts(q: Tensor) -> Tensor:
    return torch.stack([torch.ones_like(q), torch.zeros_like(q)])


def _vmap(attend: Attend, q: Tensor) -> None:
    out = attend(q)
    torch.func.vmap(lambda dout: torch.autograd.grad(out, q, dout))(_douts(q))


BATCHED: dict[str, Callable[[Attend, Tensor], Any]] = {
    "is_grads_batched": lambda attend, q: torch.autograd.grad(
        attend(q), q, _douts(q), is_grads_batched=True
    ),
    "jacobian": lambda attend, q: functional.jacobian(attend, q.detach(), vectorize=True),
    "vmap": _vmap,
}


def _backward(out: Tensor) -> Tensor:
    out.sum().backward()
    return out.detach()


def _checkpoint(attend: Attend, q: Tensor, *, reentrant: bool) -> Tensor:
    return _backward(checkpoint(attend, q, use_reentrant=reentrant))


def _compiled_autograd(attend: Attend, q: Tensor) -> Tensor:
    out = attend(q)
    with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="aot_eager")):
        return _backward(out)


def _twice(attend: Attend, q: Tensor) -> Tensor:
    out = attend(q)
    torch.autograd.grad(out.sum(), q, retain_graph=True)
    return _backward(out)


def _vjp(attend: Attend, q: Tensor) -> Tensor:
    out: Tensor
    out, q.grad = functional.vjp(attend, q.detach(), torch.ones_like(q))
    return out


def _rows(attend: Attend, q: Tensor) -> Tensor:
    rows = functional.jacobian(lambda q: attend(q).sum(dim=(0, 2, 3)), q.detach())
    q.grad = rows.sum(dim=0)
    return attend(q).detach()


ALLOWED: dict[str, Callable[[Attend, Tensor], Tensor]] = {
    "plain": lambda attend, q: _backward(attend(q)), "twice": _twice, "vjp": _vjp,
    "jacobian": _rows, "reentrant": lambda attend, q: _checkpoint(attend, q, reentrant=True),
    "checkpoint": lambda attend, q: _checkpoint(attend, q, reentrant=False),
    "compiled autograd": _compiled_autograd,
}  # fmt: skip


def _check_refused(way: str, asked: str, match: str) -> None:
    """Check that a derivative is refused, and that the next call is exact."""
    q = ContextParallel().shard(_qkv()[0]).requires_grad_()
    with pytest.raises((ValueError, RuntimeError)) as error:
        (SECOND | BATCHED)[asked](WAYS[way].attend, q)
    message = f"{type(error.value).__name__}: {error.value}"
    assert re.search(match, message), message
    assert WAYS[way].is_exact(), message


def _pairs(kinds: Iterable[str]) -> list[tuple[str, str]]:
    """Return all ways with the first kind, and all kinds with a plain call and with a graph."""
    first, *rest = kinds
    return [(way, first) for way in WAYS] + [
        (way, kind) for way in ("ring", "aot graph of a product") for kind in rest
    ]


@pytest.mark.nightly(
    only=[
        *(f"aot graph of a product-{x}" for x in ("hessian", "jvp", "hvp", "accumulated", "vhp")),
        *(f"{graph} graph of a product-penalty" for graph in ("eager", "aot")),
    ]
)
@pytest.mark.parametrize(("way", "asked"), _pairs(SECOND))
@on_two_ranks
def test_second_derivatives_are_refused(way: str, asked: str) -> None:
    match = "UnsupportedError: .*second derivative.*create_graph"
    if way.startswith("aot"):  # torch is the first to refuse a leaf's there
        match += "|RuntimeError: torch.compile with aot_autograd does not .* double backward"
    _check_refused(way, asked, match)


@pytest.mark.nightly(
    only=[
        *(f"aot graph of a product-{x}" for x in ("jacobian", "vmap")),
        *(f"{graph} graph of a product-is_grads_batched" for graph in ("eager", "aot")),
    ]
)
@pytest.mark.parametrize(("way", "asked"), _pairs(BATCHED))
@on_two_ranks
def test_batched_gradients_are_refused(way: str, asked: str) -> None:
    match = "UnsupportedError: .*is_grads_batched"
    if way.startswith("aot"):  # torch is the first to refuse torch.func's there
        match += "|RuntimeError: .*a compiled backward function within vmap"
    _check_refused(way, asked, match)


@pytest.mark.nightly(
    only=[
        f"aot graph of a product-{x}"
        for x in ("jacobian", "checkpoint", "reentrant", "vjp", "twice", "compiled autograd")
    ]
)
@pytest.mark.parametrize(("way", "kind"), _pairs(ALLOWED))
@on_two_ranks
def test_first_derivatives_are_exact(way: str, kind: str) -> None:
    assert WAYS[way].is_exact(kind)


@on_two_ranks
def test_compiled_autograd_makes_one_graph_of_a_compiled_forward() -> None:
    """It refuses an eager forward; a compiled one is exact."""
    q, messages = ContextParallel().shard(_qkv()[0]).requires_grad_(), []
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


WIDTH, EXPERTS, LAYERS, VOCAB = 16, 4, 2, 16


@pytest.fixture(scope="module", params=[2, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[LocalRanks]:
    with LocalRanks(request.param, timeout=20.0) as ranks:
        yield ranks


class Layer(nn.Module):
    """Attention and experts, of which a token takes the one of its number."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.attend = attend

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(2)
        x = x + self.out(self.attend(q, k, v).flatten(2))
        result = torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            if (chosen := tokens % EXPERTS == n).any():
                result[chosen] = expert(x[chosen])
        return x + result


class Model(nn.Module):
    """A language model; a layer may be computed again in the backward, or used twice."""

    def __init__(self, attend: Callable[..., Tensor], kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(Layer(attend) for _ in range(LAYERS))
        self.unused, self.kind = nn.Linear(2, 2), kind
        self.double()
        # Then the first gradient of a backward is an expert's, which other ranks may not have.
        self.head.requires_grad_(kind != "frozen head")

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in chain(self.layers, self.layers if self.kind == "shared" else ()):
            if "checkpoint" in self.kind:
                x = checkpoint(layer, x, tokens, use_reentrant="reentrant" in self.kind)
            else:
                x = layer(x, tokens)
        logits: Tensor = self.head(x)
        return logits


def step_in_backward(model: nn.Module, steps: dict[str, int], make: Any = None) -> None:
    """Give each parameter an optimizer that steps as soon as its gradient is made."""
    make = make or partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)

    def step(name: str, optimizer: torch.optim.Optimizer, _: Tensor) -> None:
        steps[name] = steps.get(name, 0) + 1
        optimizer.step()
        optimizer.zero_grad()

    for name, weight in model.named_parameters():
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(partial(step, name, make([weight])))


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Return tokens and labels ``[2, 12 * size]``; most experts get tokens of one rank alone."""
    numbers = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(VOCAB, (2, 2, 12 * size), generator=numbers)
    tokens -= tokens % EXPERTS
    tokens += torch.arange(size).repeat_interleave(12) % EXPERTS
    tokens[:, [0, -1]] += (
        EXPERTS - 1 - tokens[:, [0, -1]] % EXPERTS
    )  # one of the first and the last
    return tokens, labels


@pytest.mark.nightly(
    only=[
        "2-compiled-False", "2-checkpoint-False", "2-two backwards-False", "3-compiled-False",
        "3-two backwards-False", "3-plain-True", "3-reentrant checkpoint-True", "3-plain-False",
    ]
)  # fmt: skip
@pytest.mark.parametrize(
    ("kind", "optimizers_first"),
    [
        ("plain", False), ("plain", True), ("frozen head", False), ("checkpoint", False),
        ("reentrant checkpoint", True), ("shared", False), ("two backwards", False),
        ("compiled", False),
    ],
)  # fmt: skip
@on_ranks
def test_optimizers_in_the_backward_are_those_of_one_rank(
    kind: str, optimizers_first: bool
) -> None:
    cp = ContextParallel(layout="contiguous")
    whole = Model(partial(sdpa, is_causal=True), kind)
    model = Model(lambda *qkv: cp.attention(*qkv, causal=True), kind)
    counts: list[dict[str, int]] = [{}, {}]
    step_in_backward(whole, counts[0])
    if optimizers_first:
        step_in_backward(model, counts[1])
    handle = cp.reduce_each_gradient(model)
    if not optimizers_first:
        step_in_backward(model, counts[1])
    tokens, labels = batch(cp.cp_size)
    run: Any = model
    if kind == "compiled":
        torch._dynamo.reset()
        run = torch.compile(model, backend="aot_eager")
    for _ in range(3):
        for part in range(2) if kind == "two backwards" else (0,):
            x, y = tokens.roll(part, 0), labels.roll(part, 0)
            cross_entropy(whole(x).flatten(0, 1), y.flatten()).backward()
            ring_torch.cross_entropy(cp, run(cp.shard(x)), cp.shard(y)).backward()
    assert counts[0] == counts[1]  # hooks ran as often as on one rank
    for (name, weight), like in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(weight, like, rtol=1e-9, atol=1e-11, msg=lambda m: f"{name} {m}")  # noqa: B023 - used at once
        ranks = cp.unshard(weight.detach()[None], dim=0)
        assert all(torch.equal(weight, x) for x in ranks)  # the same bits
        assert weight.grad is None
    with pytest.raises(ValueError, match="leave reduce_gradients out"):
        cp.reduce_gradients(model)
    handle.remove()
    assert not cp._sharding.ranks.state.before_passes
    with pytest.raises(ValueError, match=r"cp\.reduce_each_gradient"):
        cp.reduce_gradients(model)


class Two(nn.Module):
    """Two layers beside each other, which some ranks compute in another order."""

    def __init__(self, *, swapped: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.swapped = swapped

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.b, self.a) if self.swapped else (self.a, self.b)
        out: Tensor = first(x).tanh() + second(x).sin()
        return out


@pytest.mark.nightly(only=["3-True"])
@pytest.mark.parametrize("late", [False, True])
@on_ranks
def test_another_order_is_a_mismatch_on_all_ranks(rank: int, late: bool) -> None:
    group: Any = dist.new_group(timeout=timedelta(seconds=4))
    cp = ContextParallel(group)
    model = Two()
    cp.reduce_each_gradient(model)
    if late:  # after ranks have compared the same sums before
        model(torch.ones(2, 4)).sum().backward()
        model.zero_grad()
    model.swapped = rank == cp.cp_size - 1
    with pytest.raises(RankMismatchError, match=r"reduce_each_gradient\[1\] [ab]\."):
        model(torch.ones(2, 4)).sum().backward()


@on_three_ranks
def test_another_order_in_a_part_is_a_mismatch(rank: int) -> None:
    """Run two layers in another order on one of the two ranks of three that use them."""
    group: Any = dist.new_group(timeout=timedelta(seconds=4))
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "part": Two(swapped=rank == 1)})
    ContextParallel(group).reduce_each_gradient(model)
    x = model["used"](torch.ones(2, 4))
    with pytest.raises(RankMismatchError if rank else RuntimeError, match=r"part\."):
        (model["part"](x) if rank else x).sum().backward()


def _alone() -> Any:
    """Return a mesh of this rank alone."""
    mesh = dist.device_mesh.init_device_mesh(
        "cpu", (dist.get_world_size(), 1), mesh_dim_names=("cp", "dp")
    )
    return mesh["dp"]


@on_ranks
def test_what_cannot_be_summed_is_refused() -> None:
    cp = ContextParallel()
    model = Two()
    x = torch.ones(2, 4)
    handle = cp.reduce_each_gradient(model)
    model(x).sum().backward()  # nobody steps: gradients stay
    sums = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    with pytest.raises(ValueError, match="which is there already"):
        model(x).sum().backward()
    assert all(torch.equal(y, w.grad) for y, w in zip(sums, model.parameters(), strict=True))  # type: ignore[arg-type]  # there
    with pytest.raises(ValueError, match="already"):  # they are sums
        cp.reduce_gradients(model)
    part = torch.autograd.grad(model(x).sum(), list(model.parameters()))  # adds to nothing
    torch.testing.assert_close([y / cp.cp_size for y in sums], list(part))
    model.zero_grad(set_to_none=False)
    model(x).sum().backward()
    torch.testing.assert_close([w.grad for w in model.parameters()], sums)
    model.zero_grad()
    with pytest.raises(UnsupportedError, match="summed by such hooks already"):
        cp.reduce_each_gradient(model)
    model.c = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"c\.weight requires a gradient and has no hook"):
        model(x).sum().backward()
    handle.remove()
    handle.remove()
    cp.reduce_each_gradient(model).remove()
    setattr(model.a.weight, "main_grad", torch.zeros(4, 4))  # noqa: B010 - torch's types have none
    with pytest.raises(UnsupportedError, match="main_grad"):
        cp.reduce_each_gradient(model)
    wrapped: Any
    for wrapped in (DistributedDataParallel(Two()), fully_shard(Two(), mesh=_alone())):
        with pytest.raises(UnsupportedError, match="behind the hooks of parameters"):
            cp.reduce_each_gradient(wrapped)
    with pytest.raises(ValueError, match="sends no tensors of device 'meta'"):
        cp.reduce_each_gradient(nn.Linear(4, 4, device="meta"))
    other = Two()
    kept = ref(other)
    cp.reduce_each_gradient(other)
    del other
    gc.collect()
    assert kept() is None
    sparse = nn.Embedding(4, 4, sparse=True)
    cp.reduce_each_gradient(sparse)
    with pytest.raises(UnsupportedError, match="sparse=False"):
        sparse(torch.tensor([1])).sum().backward()


@on_ranks
def test_unlike_models_are_a_mismatch(rank: int) -> None:
    group: Any = dist.new_group(timeout=timedelta(seconds=4))
    with pytest.raises(RankMismatchError, match="weight"):
        ContextParallel(group).reduce_each_gradient(nn.Linear(4, 4 + rank))


def test_one_rank_has_nothing_to_sum() -> None:
    model = Two()
    handle = ContextParallel().reduce_each_gradient(model)
    assert not any(weight._post_accumulate_grad_hooks for weight in model.parameters())
    handle.remove()

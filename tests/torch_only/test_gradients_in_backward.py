"""``reduce_each_gradient``: optimizers that step inside of the backward, exact on several ranks.

Each gradient is summed in a hook before the optimizer's. What could go wrong is that ranks wait for
each other in unlike places: at parameters that one of them does not use, in another order, in the
backward of attention. All of it ends in equal weights on all ranks, or in an error, never in a
wait.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from dense import sdpa
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ring_torch
from ring_core import RankMismatchError, UnsupportedError
from ring_torch import ContextParallel
from ring_torch.local import LocalRanks

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

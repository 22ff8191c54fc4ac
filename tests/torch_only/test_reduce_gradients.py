"""``reduce_gradients`` counts each gradient once, for any shards, and ranks must agree."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from dense import sdpa
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ring_core import RankMismatchError, UnsupportedError
from ring_torch import ContextParallel

RANKS = 4

SIZE = 2


def _pair(rank: int) -> Any:
    """Create a group of this rank and its neighbour."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return pairs[rank // SIZE]


class Step:
    """A small model and its optimizer; rank ``r`` adds ``r + 1`` times the same gradient."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.cp = ContextParallel(_pair(rank))
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.x = torch.randn(5, 3)

    @property
    def grads(self) -> list[Tensor]:
        grads_of_parameters = [weight.grad for weight in self.model.parameters()]
        return [x for x in grads_of_parameters if x is not None]

    def loss(self) -> Tensor:
        part: Tensor = self.model(self.x).square().sum() * (self.cp.cp_rank + 1)
        return part

    def backward(self, **options: Any) -> None:
        self.loss().backward(**options)

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
    "itself": lambda grad: grad,
    "scaled": lambda grad: grad * 0.5,
    "detached": lambda grad: grad.detach(),
    "cloned": lambda grad: grad.clone(),
    "copied": copy.deepcopy,
    "flat": lambda grad: torch.cat([grad.flatten()] * 2)[: grad.numel()].view_as(grad),
}


def _replace_by(step: Step, made: str) -> None:
    for weight in step.model.parameters():
        weight.grad = MADE_OF[made](weight.grad)  # type: ignore[arg-type]  # there after a backward


def _read_others(step: Step) -> None:
    """Look at other gradients of the parameters, after sums were scaled by new tensors."""
    _replace_by(step, "scaled")
    _read_gradients(step)


def _read_gradients(step: Step) -> None:
    torch.autograd.grad(step.loss(), list(step.model.parameters()))


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
    "over another group": lambda step: setattr(step, "cp", ContextParallel(_pair(step.rank))),
    "in another dtype": lambda step: step.model.double().float(),
    "beside others": _read_others,
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
def test_a_sum_is_neither_added_to_nor_summed_again(
    rank: int, then: str, options: dict[str, Any]
) -> None:
    step = Step(rank)
    for _ in range(2):  # micro-batches
        step.backward()
    step.reduce()
    step.check(6)
    STILL_SUMS[then](step)
    again = ContextParallel(step.cp.group)  # the group counts, not the object
    summed = "the gradient of 0.weight is summed over the 2 ranks of the group already"
    with pytest.raises(ValueError, match=summed) as twice:
        again.reduce_gradients(step.model)
    adds = r"adds to the gradient of [02]\.(weight|bias), which reduce"
    with pytest.raises(ValueError, match=adds) as added:
        step.backward(**options)
    for error in (twice, added):
        assert "once a step, after the last backward; then step, then zero_grad()" in str(
            error.value
        )
    step.model.zero_grad()
    step.backward()
    step.reduce()
    step.check()


@pytest.mark.parametrize(
    "changes",
    [(_copy, _copy), (_read_gradients, partial(_replace_by, made="scaled"))],
    ids=["copied", "replaced"],
)
@on_ranks
def test_sums_that_are_copied_or_replaced_are_sums(
    rank: int, changes: tuple[Callable[[Step], None], ...]
) -> None:
    """A copy's parameters have no history: the gradient itself bears a mark, which is copied."""
    step = Step(rank)
    step.backward()
    step.reduce()
    for change in changes:
        change(step)
        with pytest.raises(ValueError, match="already"):
            step.reduce()
    if changes[0] is _copy:
        step.backward()
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


def _keep_beside_others(step: Step) -> None:
    step.backward()
    _keep_elsewhere(step, 1, "2.weight")


#: Models without a gradient to sum on any rank, and a word of the way out.
NOTHING: dict[str, tuple[Callable[[Step], None], type[ValueError], str]] = {
    "no backward": (lambda _: None, ValueError, r"cp\.reduce_each_gradient\(model\)"),
    "main_grad": (lambda step: _keep_elsewhere(step, 1), UnsupportedError, "all_reduce.*main_grad"),
    "main_grad on one rank": (
        lambda step: _keep_elsewhere(step, step.cp.cp_rank), UnsupportedError, "main_grad",
    ),
    "main_grad beside others": (
        _keep_beside_others, UnsupportedError,
        "that of 2.weight is in main_grad",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTHING)
@on_ranks
def test_nothing_to_sum_is_an_error_on_all_ranks(rank: int, name: str) -> None:
    """Gradients that are used up or kept elsewhere leave weights to drift apart in silence."""
    change, kind, words = NOTHING[name]
    step = Step(rank)
    change(step)
    with pytest.raises(kind, match=words):
        step.reduce()
    step = Step(rank)  # nothing was sent but the kinds of gradients: a new group of these goes on
    _keep_elsewhere(step, 0, "2.weight")
    (step.model[0](step.x).sum() * (rank % 2)).backward()
    step.reduce()  # a parameter without any beside others with one
    assert step.model.get_parameter("2.weight").grad is None


def _replace(step: Step, every: int = 1) -> None:
    """Replace gradients by zeros; those between every so many by None."""
    for n, weight in enumerate(step.model.parameters()):
        weight.grad = None if n % every else torch.zeros_like(weight)


def _set_all(step: Step, value: float) -> None:
    for weight in step.model.parameters():
        weight.grad = torch.full_like(weight, value)


def _clip_and_zero(step: Step) -> None:
    STILL_SUMS["clipped"](step)
    step.optimizer.step()
    step.model.zero_grad(set_to_none=False)


def _of_autograd(step: Step) -> None:
    """Replace gradients by those of ``torch.autograd.grad``, as some loops do without zeroing."""
    parts = torch.autograd.grad(step.loss(), list(step.model.parameters()))
    for weight, part in zip(step.model.parameters(), parts, strict=True):
        weight.grad = part
    step.reduce()
    step.check()
    step.model.zero_grad()


def _by_hand(step: Step) -> None:
    """Set gradients of each rank's own, that no backward has made, and without a step between."""
    _set_all(step, step.cp.cp_rank + 1)
    step.reduce()
    assert all((grad == 1 + SIZE).all() for grad in step.grads)
    step.model.zero_grad()


def _not_finite(step: Step) -> None:
    """Set gradients that are NaN on all ranks, for steps that are left out."""
    for _ in range(2):
        _set_all(step, torch.nan)
        step.reduce()
    step.model.zero_grad()


def _of_master_weights(step: Step) -> None:
    """Step, and set gradients that no backward of these parameters has made."""
    step.optimizer.step()
    _set_all(step, 1)
    step.reduce()
    assert all((grad == SIZE).all() for grad in step.grads)
    step.model.zero_grad()


FRESH: dict[str, Callable[[Step], Any]] = {
    "set to none": lambda step: step.optimizer.zero_grad(set_to_none=True),
    "of autograd": _of_autograd, "by hand": _by_hand,
    "not finite": _not_finite, "of master weights": _of_master_weights,
    "zeroed": lambda step: step.model.zero_grad(set_to_none=False),
    "zeroed by foreach": lambda step: torch.optim.SGD(
        step.model.parameters(), lr=0.0, foreach=True
    ).zero_grad(set_to_none=False),
    # Version counters do not notice what is written through ``.data``.
    "zeroed unseen": lambda step: [grad.data.zero_() for grad in step.grads], "replaced": _replace,
    "each other replaced": partial(_replace, every=2),
    "clipped and zeroed": _clip_and_zero,
}  # fmt: skip


@pytest.mark.parametrize("freshen", FRESH)
@on_ranks
def test_steps_that_zero_or_replace_gradients_go_on(rank: int, freshen: str) -> None:
    step = Step(rank)
    for _ in range(3):
        step.backward()
        step.backward()  # micro-batches
        step.reduce()
        step.check(6)
        FRESH[freshen](step)
    if not step.grads:
        with pytest.raises(ValueError, match=r"no parameter .* has a gradient on any rank"):
            step.reduce()
    else:
        step.reduce()  # sums of zeros
    assert not any(grad.any() for grad in step.grads)


@on_ranks
def test_buckets_of_ddp_are_no_sums_in_the_next_step(rank: int) -> None:
    """Let DDP put views of its buckets, of which each step has the same, in gradients' places."""
    step = Step(rank)
    alone = [dist.new_group([n]) for n in range(dist.get_world_size())][rank]
    ddp = DistributedDataParallel(step.model, process_group=alone, gradient_as_bucket_view=True)
    for to_none in (True, False, True):
        for _ in range(2):
            step.optimizer.zero_grad(set_to_none=to_none)
            for context in (ddp.no_sync(), nullcontext()):
                with context:
                    (ddp(step.x).square().sum() * (step.cp.cp_rank + 1)).backward()
            step.reduce()
            step.check(6)
    with pytest.raises(ValueError, match="already"):
        step.reduce()


@on_ranks
def test_other_groups_and_gradients_of_other_things_are_free(rank: int) -> None:
    step = Step(rank)
    cross = [dist.new_group([0, 2]), dist.new_group([1, 3])]  # data parallel, beside the pairs
    other = ContextParallel(cross[rank % SIZE])  # type: ignore[arg-type]  # there on its ranks
    step.backward()
    step.reduce()
    torch.autograd.grad(step.loss(), list(step.model.parameters()))
    x = step.x.clone().requires_grad_()
    step.model(x).sum().backward(inputs=[x])
    other.reduce_gradients(step.model)
    step.check(SIZE * 3)
    for cp in (step.cp, other):
        with pytest.raises(ValueError, match="over the 2 ranks of the group already"):
            cp.reduce_gradients(step.model)
    with pytest.raises(ValueError, match="over 2 of the 4 ranks of the group already"):
        ContextParallel().reduce_gradients(step.model)


@on_ranks
def test_nothing_outlives_gradients_and_models(rank: int) -> None:
    step = Step(rank)
    step.backward()
    step.reduce()
    first = step.model[0]
    assert isinstance(first, nn.Linear)
    assert first.weight.grad is not None
    grad = ref(first.weight.grad)
    step.model.zero_grad()
    assert grad() is None
    step.backward()
    step.reduce()
    twin = copy.deepcopy(step.model)
    read = pickle.loads(pickle.dumps(step.model))
    assert all(not x._backward_hooks for model in (twin, read) for x in model.parameters())
    hooks = [len(x._backward_hooks or {}) for x in step.model.parameters()]
    assert hooks == [1] * len(hooks)  # of two steps
    weight = ref(first.weight)
    del first, step, twin, read
    assert weight() is None


#: Gradients that programs may set, into which no sum can be written, for a weight ``[4, 3]``.
UNWRITABLE: tuple[Callable[[], Tensor], ...] = (
    lambda: torch.ones(()).expand(4, 3),
    lambda: torch.arange(6.0).unfold(0, 3, 1),
    torch.inference_mode()(lambda: torch.ones(4, 3)),
    lambda: torch.arange(12.0).view(3, 4).T,  # this one can be written to, and stays
)


@on_ranks
def test_gradients_that_cannot_be_written_are_replaced(rank: int) -> None:
    cp, weight = ContextParallel(), nn.Parameter(torch.zeros(4, 3))
    model = nn.ParameterList([weight])
    given = weight.grad = UNWRITABLE[rank]()
    cp.reduce_gradients(model)
    torch.testing.assert_close(weight.grad, sum((make() for make in UNWRITABLE), torch.zeros(4, 3)))
    assert (weight.grad is given) == (rank == len(UNWRITABLE) - 1)
    assert not weight.grad.is_inference()
    with pytest.raises(ValueError, match="already"):
        cp.reduce_gradients(model)


@on_ranks
def test_a_gradient_of_one_rank_is_summed_and_a_sparse_one_refused(rank: int) -> None:
    """A gradient of an expert that others do not use is summed; one that no rank has stays none."""
    cp, layers = ContextParallel(), [nn.Linear(3, 2, bias=False) for _ in range(3)]
    layers[1].double()
    layers[0].weight.grad = torch.full((2, 3), float(rank))
    if rank == 3:
        layers[1].weight.grad = torch.ones(2, 3, dtype=torch.float64)
    cp.reduce_gradients(nn.ModuleList(layers))
    sums = [None if x.weight.grad is None else float(x.weight.grad.mean()) for x in layers]
    assert sums == [6.0, 1.0, None]
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match="sparse"):
        cp.reduce_gradients(embedding)


@on_ranks
def test_compiled_models_are_compiled_once(rank: int) -> None:
    torch._dynamo.reset()
    step = Step(rank)
    run: Any = torch.compile(step.model, backend="aot_eager", fullgraph=True)
    for n in range(3):
        with torch.compiler.set_stance("fail_on_recompile" if n else "default"):
            (run(step.x).square().sum() * (step.cp.cp_rank + 1)).backward()
        step.reduce()
        step.check()
        if n < 2:
            step.model.zero_grad()
    with pytest.raises(ValueError, match="adds to the gradient"):
        run(step.x).sum().backward()


def _model(*sizes: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    layers = [nn.Linear(width, next_width, dtype=dtype) for width, next_width in pairwise(sizes)]
    return nn.Sequential(*layers)


@on_ranks
def test_gradients_of_a_device_that_sends_none_are_refused(rank: int) -> None:
    cp, model = ContextParallel(), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    model[0](torch.ones(1, 2)).sum().backward()
    cp.reduce_gradients(model)  # it has no gradient there
    model.zero_grad()
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, rank)
    with pytest.raises(ValueError, match="sends no tensors of device 'meta'"):
        cp.reduce_gradients(model)


def _frozen() -> nn.Module:
    model = _model(3, 4)
    model.get_parameter("0.bias").requires_grad = False
    return model


#: Models of the last rank; the others have ``Linear(3, 4)``.
UNLIKE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "shape": (partial(_model, 3, 5), r"0\.weight \[[45], 3\] float32"),
    "dtype": (partial(_model, 3, 4, dtype=torch.float64), r"0\.weight \[4, 3\] float(32|64)"),
    "more": (partial(_model, 3, 4, 4), r"parameters is [24] there and [24] here"),
    "frozen": (_frozen, r"parameters is [12] there and [12] here"),
    "none": (nn.Module, r"parameters is [02] there and [02] here"),
    "deep": (partial(_model, *[4] * 40, 5), r"parameters 70 to 79 is '.?35\.weight"),
}


@pytest.mark.parametrize("name", UNLIKE)
@on_ranks
def test_unlike_parameters_are_named_on_all_ranks(rank: int, name: str) -> None:
    group: Any = dist.new_group(timeout=timedelta(seconds=20))
    cp, last = ContextParallel(group), rank == dist.get_world_size() - 1
    make, message = UNLIKE[name]
    like = _model(*[4] * 41) if name == "deep" else _model(3, 4)
    model = make() if last else like
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    with pytest.raises(RankMismatchError, match=message):
        cp.reduce_gradients(model)
    assert all(x.grad is None or bool((x.grad == 1).all()) for x in model.parameters())
    cp.reduce_gradients(like)  # nothing was sent: the group stays usable


WIDTH, HEADS, KV_HEADS, DIM, TOKENS = 16, 4, 2, 4, 32


class Attention(nn.Module):
    """A layer of attention, with a norm whose weights tensor parallelism does not split."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        wide, narrow = HEADS * DIM, KV_HEADS * DIM
        self.q = nn.Linear(WIDTH, wide, dtype=torch.float64)
        self.k = nn.Linear(WIDTH, narrow, dtype=torch.float64)
        self.v = nn.Linear(WIDTH, narrow, dtype=torch.float64)
        self.o = nn.Linear(wide, WIDTH, dtype=torch.float64)
        self.norm, self.attend = nn.RMSNorm(DIM, dtype=torch.float64), attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, DIM)) for p in (self.q, self.k, self.v))
        out: Tensor = self.o(self.attend(self.norm(q), self.norm(k), v).flatten(2))
        return out


def _mesh(*names: str) -> DeviceMesh:
    return dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def _whole(x: Tensor) -> Attention:
    whole = Attention(partial(sdpa, is_causal=True))
    whole(x).square().sum().backward()
    return whole


def _input() -> Tensor:
    return torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator())


def _full(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()


@pytest.mark.parametrize("names", [("cp", "tp"), ("tp", "cp")], ids=str)
@on_ranks
def test_shards_of_tensor_parallelism_are_summed_over_the_ring(names: tuple[str, str]) -> None:
    x, mesh = _input(), _mesh(*names)
    whole, cp = _whole(x), ContextParallel(mesh["cp"])
    local = Attention(lambda *qkv: cp.attention(*qkv, causal=True))
    column, row = ColwiseParallel, RowwiseParallel
    parallelize_module(local, mesh["tp"], {"q": column(), "k": column(), "v": column(), "o": row()})
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
    with pytest.raises(ValueError, match="adds to the gradient"):
        local(cp.shard(x)).sum().backward()


@on_ranks
def test_shards_over_other_ranks_are_summed_over_the_ring() -> None:
    x, mesh = _input(), _mesh("dp", "cp")
    cp, size = ContextParallel(mesh["cp"]), mesh["dp"].size()
    whole, local = _whole(x), Attention(lambda *qkv: cp.attention(*qkv, causal=True))
    fully_shard(local, mesh=mesh["dp"])
    local(cp.shard(x.chunk(size)[mesh["dp"].get_local_rank()])).square().sum().mul(size).backward()
    cp.reduce_gradients(local)
    for weight, like in zip(local.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(_full(weight.grad), like.grad)


@pytest.mark.parametrize("version", [1, 2])
@on_ranks
def test_what_fsdp_reduces_is_refused(version: int) -> None:
    x, mesh = _input(), _mesh("dp", "cp")
    cp = ContextParallel(mesh["cp"])
    local: nn.Module = Attention(lambda *qkv: cp.attention(*qkv, causal=True))
    if version == 1:
        cpu = torch.device("cpu")
        local = FullyShardedDataParallel(local, dist.group.WORLD, device_id=cpu)
    else:
        fully_shard(local, mesh=mesh["dp", "cp"]._flatten())
    local(cp.shard(x)).square().sum().backward()
    with pytest.raises(UnsupportedError, match="FSDP reduces such gradients itself") as error:
        cp.reduce_gradients(local)
    for words in ("as a mean", "multiply the loss by the number of ranks", "reduction='mean'"):
        assert words in str(error.value)

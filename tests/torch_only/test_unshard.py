"""``unshard``, and relayouts to other ranks: exact in both directions, or refused on all ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from dense import numbers
from messages import Sent
from on_ranks import on_four_ranks, on_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from ring_core import Layout, LayoutSpec, RankMismatchError
from ring_torch import ContextParallel
from ring_torch.local import LocalRanks

RANKS, T, W = 3, 36, 8
UnshardGrad = Literal["sum", "slice"]


#: The last rank's input and the error on all ranks; the others pass ``ones(1, 4, 2)``.
UNLIKE: dict[str, tuple[Callable[[], Tensor], dict[str, Any], str]] = {
    "longer": (lambda: torch.ones(1, 6, 2), {}, r"shape is \[1, [46], 2\] there and \[1, [46], 2\]"),
    "no slice": (lambda: torch.ones(1, 5, 2), {}, r"shape is \[1, [45], 2\] there"),
    "wider": (lambda: torch.ones(1, 4, 3), {}, r"shape is \[1, 4, [23]\] there"),
    "dimensions": (lambda: torch.ones(1, 4, 2, 1), {}, r"shape is \[1, 4, 2(, 1)?\] there"),
    "dtype": (lambda: torch.ones(1, 4, 2).double(), {}, r"dtype is 'float(32|64)' there"),
    "dim": (lambda: torch.ones(1, 4, 2), {"dim": 2}, "dim is [12] there"),
    "grad": (
        lambda: torch.ones(1, 4, 2, requires_grad=True), {"grad": "sum"},
        "sums_gradients is (True|False) there",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNLIKE)
@on_ranks
def test_unlike_slices_are_named_on_all_ranks(rank: int, name: str) -> None:
    make, options, message = UNLIKE[name]
    group: Any = dist.new_group(timeout=timedelta(seconds=20))
    cp = ContextParallel(group)
    x, more = (make(), options) if rank == RANKS - 1 else (torch.ones(1, 4, 2), {})
    with pytest.raises(RankMismatchError, match=message):
        cp.unshard(x, **more)
    whole = cp.unshard(torch.full((1, 4, 2), float(rank)))  # nothing was sent: the group is usable
    assert torch.equal(cp.shard(whole), torch.full((1, 4, 2), float(rank)))


@pytest.mark.parametrize("name", ["longer", "dtype"])
@on_ranks
def test_a_new_shape_beside_an_agreed_one_is_named_on_all_ranks(rank: int, name: str) -> None:
    make, options, message = UNLIKE[name]
    group: Any = dist.new_group(timeout=timedelta(seconds=2))
    cp = ContextParallel(group)
    for _ in range(2):
        cp.unshard(torch.ones(1, 4, 2))
    x, more = (make(), options) if rank == RANKS - 1 else (torch.ones(1, 4, 2), {})
    with pytest.raises(RankMismatchError, match=message):
        cp.unshard(x, **more)


@on_ranks
def test_what_is_no_slice_or_cannot_be_sent_is_refused() -> None:
    cp = ContextParallel()
    with pytest.raises(ValueError, match=r"^sequence length 15 is not a positive multiple"):
        cp.unshard(torch.ones(1, 5, 2))
    with pytest.raises(ValueError, match=r"^the process group \(gloo\) sends no tensors of"):
        cp.unshard(torch.ones(1, 4, device="meta"))
    assert cp.unshard(torch.ones(1, 4)).shape == (1, 4 * RANKS)


def _numbers(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*shape, dtype=torch.float64) * 0.3 for shape in shapes]


class Classifier(torch.nn.Module):
    """A classifier of one layer that pools tokens, with its head before ``join``, or after it."""

    def __init__(self, join: Callable[[Tensor], Tensor], behind: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(W, W, dtype=torch.float64)
        self.head = torch.nn.Linear(W, 5, dtype=torch.float64)
        self.join, self.behind = join, behind

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x).tanh()
        states = self.head(self.join(hidden)) if self.behind else self.join(self.head(hidden))
        weights = torch.linspace(0.5, 1.5, states.shape[1], dtype=states.dtype)
        return cross_entropy((states.sin() * weights[:, None]).mean(1), torch.tensor([3, 1]))


def _classify(_: int, behind: bool, grad: UnshardGrad, share: float) -> list[float]:
    """Return each parameter's gradient summed over ranks, as a multiple of the whole model's."""
    cp = ContextParallel()
    (x,) = _numbers((2, T, W))
    whole = Classifier(lambda y: y, behind)
    whole(x).backward()
    local = Classifier(lambda y: cp.unshard(y, grad=grad), behind)
    (local(cp.shard(x)) * share).backward()
    cp.reduce_gradients(local)
    ratios = []
    for weight, like in zip(local.parameters(), whole.parameters(), strict=True):
        assert weight.grad is not None
        assert like.grad is not None
        ratio = weight.grad.norm() / like.grad.norm()
        torch.testing.assert_close(weight.grad, like.grad * ratio)
        ratios.append(round(ratio.item(), 6))
    return ratios


EXACT = [1.0, 1.0, 1.0, 1.0]  # layer.weight, layer.bias, head.weight, head.bias


@pytest.mark.parametrize(
    ("behind", "grad", "share", "times"),
    [
        (False, "slice", 1.0, EXACT),
        (False, "sum", 1 / RANKS, EXACT),
        (True, "sum", 1 / RANKS, EXACT),
        (True, "slice", 1.0, [1.0, 1.0, float(RANKS), float(RANKS)]),  # not a use case of "slice"
    ],
)
def test_a_classification_head_is_exact_with_the_gradient_its_loss_needs(
    behind: bool, grad: UnshardGrad, share: float, times: list[float], pool: LocalRanks
) -> None:
    assert pool.run(_classify, behind, grad, share) == [times] * RANKS


@on_ranks
def test_half_precision_gradients_are_summed_in_float32(rank: int) -> None:
    """A sum in bfloat16 would lose the two small parts next to 1."""
    parts = (1.0, 2**-9, 2**-9)
    rounded = torch.tensor(1 + 2**-8, dtype=torch.bfloat16).item()
    for grad, expected in (("sum", rounded), ("slice", parts[rank])):
        x = torch.zeros(1, 2, dtype=torch.bfloat16, requires_grad=True)
        (ContextParallel().unshard(x, grad=grad) * parts[rank]).sum().backward()  # type: ignore[arg-type]  # one of both
        assert x.grad is not None and x.grad[0, 0].item() == expected


def test_what_becomes_of_a_gradient_has_to_be_said() -> None:
    cp, x = ContextParallel(), torch.ones(1, 4, requires_grad=True)
    for run in (cp.unshard, torch.compile(cp.unshard, backend="eager")):
        torch._dynamo.reset()
        with pytest.raises(ValueError, match=r"x requires a gradient") as refused:
            run(x)
        lines = str(refused.value).splitlines()
        assert [line[:12] for line in lines[1:3]] == ["grad='sum': ", "grad='slice'"]
        with torch.no_grad():
            assert torch.equal(run(x), x)
        assert torch.equal(run(x.detach()), x)


LENGTH, WORLD = 48, 4
#: Ranks that hold the sequence, and ranks that get it. ``(2, 0, 3, 1)`` is a group in that order.
PAIRS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "to some": ((0, 1, 2, 3), (1, 3)), "from some": ((0, 2), (0, 1, 2, 3)),
    "to one": ((0, 1, 2, 3), (2,)), "from one": ((3,), (0, 1, 2, 3)),
    "another order": ((0, 1, 2, 3), (2, 0, 3, 1)), "among some": ((1, 2), (2,)),
}  # fmt: skip
LAYOUTS: dict[str, tuple[LayoutSpec, LayoutSpec]] = {
    "zigzag-contiguous": ("zigzag", "contiguous"), "striped-zigzag": ("striped", "zigzag"),
}  # fmt: skip
#: Pairs of which this torch can make groups: one may sort the ranks of every group.
NAMES = [
    x for x in PAIRS
    if x != "another order" or "sort_ranks" in inspect.signature(dist.new_group).parameters
]  # fmt: skip


def cp_over(ranks: tuple[int, ...], layout: LayoutSpec) -> ContextParallel:
    """Return context parallelism over some ranks; every rank has to call this."""
    if list(ranks) != sorted(ranks):
        options: Any = {"sort_ranks": False}
        group: Any = dist.new_group(list(ranks), **options)
        return ContextParallel(group, layout)
    return ContextParallel(DeviceMesh("cpu", list(ranks)), layout)


def part(cp: ContextParallel, ranks: tuple[int, ...], rank: int, x: Tensor, dim: int) -> Tensor:
    """Return this rank's part of a whole tensor; ranks outside of the group get no tokens."""
    return cp.shard(x, dim=dim) if rank in ranks else x.narrow(dim, 0, 0).contiguous()


Move = Callable[[Tensor], Tensor]
RUNS: dict[str, Callable[[Move], Move]] = {
    "eager": lambda move: move,
    "compiled": lambda move: torch.compile(move, backend="aot_eager", fullgraph=True),
    "checkpointed": lambda move: lambda x: checkpoint(move, x, use_reentrant=False),
}


@pytest.mark.nightly(
    only=[f"{how}-{layouts}-{name}" for how in ("compiled", "checkpointed") for layouts in LAYOUTS
          for name in NAMES
          if (how, layouts, name) != ("checkpointed", "zigzag-contiguous", "from some")]
)  # fmt: skip
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("how", RUNS)
@on_four_ranks
def test_other_ranks_get_the_tokens_of_their_layout(
    rank: int, how: str, layouts: str, name: str
) -> None:
    (source_ranks, target_ranks), (layout, to) = PAIRS[name], LAYOUTS[layouts]
    source, target = cp_over(source_ranks, layout), cp_over(target_ranks, to)
    if rank not in {*source_ranks, *target_ranks}:
        return
    torch._dynamo.reset()
    for dim, shape in ((1, (2, LENGTH, 3)), (0, (LENGTH,)), (-1, (2, 3, LENGTH))):
        whole, grad = numbers(0, *shape), numbers(1, *shape)

        def move(x: Tensor, dim: int = dim) -> Tensor:
            return source.relayout(x, to=target, dim=dim, seq_len=LENGTH)

        x = part(source, source_ranks, rank, whole, dim).requires_grad_()
        out = RUNS[how](move)(x)
        assert torch.equal(out, part(target, target_ranks, rank, whole, dim))
        returned = part(target, target_ranks, rank, grad, dim)
        (actual,) = torch.autograd.grad(out, x, returned)
        assert torch.equal(actual, part(source, source_ranks, rank, grad, dim))
        tokens = torch.arange(LENGTH)
        moved = source.relayout(
            part(source, source_ranks, rank, tokens, 0), to=target, dim=0, seq_len=LENGTH
        )
        assert torch.equal(moved, part(target, target_ranks, rank, tokens, 0))


def _bytes(rank: int, name: str) -> tuple[int, ...]:
    """Return the bytes that a rank sends and needs to send, forward and backward."""
    source_ranks, target_ranks = PAIRS[name]
    source, target = cp_over(source_ranks, "zigzag"), cp_over(target_ranks, "striped")
    if rank not in {*source_ranks, *target_ranks}:
        return 0, 0, 0, 0
    owner = [torch.empty(LENGTH, dtype=torch.int64), torch.empty(LENGTH, dtype=torch.int64)]
    layouts: tuple[LayoutSpec, LayoutSpec] = ("zigzag", "striped")
    for of, ranks, layout in zip(owner, PAIRS[name], layouts, strict=True):
        for number, holder in enumerate(ranks):
            of[torch.as_tensor(Layout(layout, LENGTH, len(ranks)).positions(number))] = holder
    crossing = owner[0] != owner[1]
    forth = int((crossing & (owner[0] == rank)).sum()) * 2 * 3 * 8
    back = int((crossing & (owner[1] == rank)).sum()) * 2 * 3 * 8
    x = part(source, source_ranks, rank, numbers(0, 2, LENGTH, 3), 1).requires_grad_()

    def move() -> Tensor:
        return source.relayout(x, to=target, seq_len=LENGTH)

    move().sum().backward()  # ranks have agreed from here on
    with Sent() as forward:
        out = move()
    with Sent() as backward:
        out.sum().backward()
    return forward.sent, forth, backward.sent, back


@pytest.mark.parametrize("name", NAMES)
def test_only_rows_that_change_rank_are_sent(name: str, pools: dict[int, LocalRanks]) -> None:
    counts = pools[4].run(_bytes, name)
    for sent, needed, returned, needed_back in counts:
        assert (sent, returned) == (needed, needed_back)
    assert sum(needed for _, needed, *_ in counts) > 0


UNLIKE_RELAYOUTS = {
    "length": "tokens is (48|96) there", "layout": "to is '(striped|zigzag)' there",
    "ranks": r"target_ranks is \[0, [12]\] there", "dtype": "dtype is 'float(32|64)' there",
    "tokens": r"shape is \[2, (23|48), 3\] there", "gradient": "needs_grad is (True|False) there",
    "tokens outside": r"shape is \[2, (1|48), 3\] there",
}  # fmt: skip


@pytest.mark.parametrize("kind", UNLIKE_RELAYOUTS)
@on_four_ranks
def test_unlike_relayouts_are_named_on_all_ranks(rank: int, kind: str) -> None:
    group: Any = dist.new_group(timeout=timedelta(seconds=20))
    everyone, some = ContextParallel(group), cp_over((0, 2), "zigzag")
    other = cp_over((0, 1), "zigzag")
    x = torch.ones(2, LENGTH // 2 if rank in (0, 2) else 0, 3)
    calls: dict[str, Callable[[], Any]] = {
        "length": lambda: some.relayout(x, to=everyone, seq_len=LENGTH + 48 * (rank == 1)),
        "layout": lambda: some.relayout(
            x, seq_len=LENGTH, to=ContextParallel(group, "striped" if rank == 1 else "zigzag")
        ),
        "ranks": lambda: everyone.relayout(
            torch.ones(2, LENGTH // WORLD, 3), to=other if rank % 2 else some
        ),
        "tokens": lambda: some.relayout(x[:, rank == 2 :], to=everyone, seq_len=LENGTH),
        "tokens outside": lambda: some.relayout(
            torch.ones(2, 1, 3) if rank == 1 else x, to=everyone, seq_len=LENGTH
        ),
        "dtype": lambda: some.relayout(x.double() if rank == 3 else x, to=everyone, seq_len=LENGTH),
        "gradient": lambda: some.relayout(
            x.requires_grad_(rank == 1), to=everyone, seq_len=LENGTH
        ),
    }  # fmt: skip
    with pytest.raises(RankMismatchError, match=UNLIKE_RELAYOUTS[kind]):
        calls[kind]()


@on_four_ranks
def test_refusals_say_what_is_possible(rank: int) -> None:
    everyone, some, others = (
        ContextParallel(), cp_over((0, 2), "zigzag"), cp_over((1, 2, 3), "contiguous")
    )  # fmt: skip
    x = torch.ones(2, LENGTH // 2 if rank in (0, 2) else 0, 3)
    whole = torch.ones(2, LENGTH, 3)
    outside = r"this rank is not in the DeviceMesh of the ranks \[0, 2\]"
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("Give seq_len", lambda: some.relayout(x, to=everyone)),
        (
            "go through a ContextParallel over a group that has all of them",
            lambda: some.relayout(x, to=others, seq_len=LENGTH),
        ),
        (
            "x has 12 tokens, and the part that this rank holds",
            lambda: everyone.relayout(everyone.shard(whole), to=some, seq_len=2 * LENGTH),
        ),
        (
            "and the part that this rank holds of a sequence of 4 is 2",
            lambda: everyone.relayout(torch.ones(1, 1, 3), to=some, seq_len=WORLD),
        ),
        (
            "seq_len must be at least 1, and an integer",
            lambda: everyone.relayout(everyone.shard(whole), to=some, seq_len=0.5),  # type: ignore[arg-type]  # wrong
        ),
        *((
            (outside, lambda: some.shard(whole)), (outside, lambda: some.cp_rank),
            (outside, lambda: some.attention(*[torch.ones(1, 4, 1, 4)] * 3)),
        ) if rank not in (0, 2) else ()),
    ]  # fmt: skip
    for message, call in calls:
        with pytest.raises(ValueError, match=message):
            call()
    assert everyone.shift(torch.ones(1, 8), 0).sum() == 8

"""``unshard`` refuses unequal slices on all ranks, and its gradient is that of ``grad=``."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor
from torch.nn.functional import cross_entropy

from ring_core import RankMismatchError
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
    """Unequal slices after equal calls, whose ranks send headers, too."""
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


def _half(rank: int, grad: UnshardGrad) -> float:
    """Return a bfloat16 gradient whose two small parts a sum in bfloat16 would lose next to 1."""
    x = torch.zeros(1, 2, dtype=torch.bfloat16, requires_grad=True)
    whole = ContextParallel().unshard(x, grad=grad)
    (whole * [1.0, 2**-9, 2**-9][rank]).sum().backward()
    assert x.grad is not None
    return x.grad[0, 0].item()


def test_half_precision_gradients_are_summed_in_float32(pool: LocalRanks) -> None:
    rounded = torch.tensor(1 + 2**-8, dtype=torch.bfloat16).item()
    assert pool.run(_half, "sum") == [rounded] * RANKS
    assert pool.run(_half, "slice") == [1.0, 2**-9, 2**-9]


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

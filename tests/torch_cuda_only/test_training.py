"""A model with replaced attention and loss is as accurate on two GPUs as the whole one on one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import ring_torch
from ring_torch import ContextParallel, cross_entropy, linear_cross_entropy, replace_sdpa
from ring_torch.local import LocalRanks

pytestmark = pytest.mark.ranks(2)
CLASSES, WIDTH, HEADS, LENGTH = 512, 256, 4, 4096


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        added: Tensor = x + self.out(y.transpose(1, 2).flatten(2))
        return added


class _Model(nn.Module):
    """Returns hidden states; the head is part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(CLASSES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.head = nn.Sequential(_Layer(), _Layer()), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden: Tensor = self.blocks(self.tokens(tokens) + self.places(positions))
        return hidden


def _whole(model: _Model, hidden: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model.head(hidden).float().flatten(0, 1), labels.flatten())


def _grads(model: _Model, loss: Tensor, cp: ContextParallel | None = None) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    if cp is not None:
        cp.reduce_gradients(model)
    return [x.grad.float() for x in model.parameters() if x.grad is not None]


def _error(grads: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    pairs = zip(grads, expected, strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def losses_and_errors(_: int, layout: Any) -> list[tuple[float, float, float]]:
    """Return for each loss its sum's error, and gradient errors on two GPUs and on one."""
    torch.manual_seed(0)
    exact = _Model().cuda()
    model = copy.deepcopy(exact).bfloat16()
    tokens = torch.randint(CLASSES, (2, LENGTH + 1), device="cuda")
    labels = tokens[:, 1:].clone()
    labels[:, ::7] = -100
    tokens, positions = tokens[:, :-1], torch.arange(LENGTH, device="cuda")[None]
    reference = _whole(exact, exact(tokens, positions), labels)
    expected = _grads(exact, reference)
    alone = _error(_grads(model, _whole(model, model(tokens, positions), labels)), expected)

    cp = ContextParallel(layout=layout)
    replace_sdpa(model, cp)
    head = model.head
    ways: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda hidden, y: cross_entropy(cp, head(hidden).float(), y),
        lambda hidden, y: linear_cross_entropy(cp, hidden, head.weight, y, bias=head.bias),
    ]
    results = []
    for loss_of in ways:
        hidden = model(cp.shard(tokens, dim=1), cp.positions(LENGTH, device=tokens.device)[None])
        loss = loss_of(hidden, cp.shard(labels, dim=1))
        error = _error(_grads(model, loss, cp), expected)
        total = loss.detach().float()
        dist.all_reduce(total)
        results.append((float(total - reference), error, alone))
    return results


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_losses_and_gradients_are_those_of_one_gpu(layout: str) -> None:
    with LocalRanks(2, cuda=True) as ranks:
        for results in ranks.run(losses_and_errors, layout):
            for difference, error, alone in results:
                assert abs(difference) < 1e-3
                assert error < 1.5 * alone


def _repeats(rank: int, heads: tuple[int, ...]) -> None:
    """Compare later calls with the first, while the memory orders of k and v change."""
    torch.manual_seed(rank)
    made: Any = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    q, k, v, dout = (torch.randn(1, 1024, n, 128, **made) for n in heads)
    results = []
    for turn in range(5):
        if turn == 2:  # from now on the tokens of a head are contiguous
            k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
            k.requires_grad_()
            v.requires_grad_()
        out = ring_torch.ring_attention(q, k, v, causal=True, layout="zigzag")
        results.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
    for again in results[1:]:
        torch.testing.assert_close(again, results[0], atol=2e-2, rtol=2e-2)


#: Query and K/V heads: grouped ones take FlashAttention-4's split backward, others do not.
@pytest.mark.parametrize("heads", [(8, 2, 2, 8), (4, 4, 4, 4)], ids=["grouped", "single"])
def test_key_heads_may_lie_apart_in_later_calls(heads: tuple[int, ...], backend: Any) -> None:
    backend.pool(2).run(_repeats, heads)

"""A model with replaced attention and loss is as accurate on two GPUs as the whole one on one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ring_torch import ContextParallel, cross_entropy, linear_cross_entropy, replace_sdpa

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


def _grads(model: nn.Module, loss: Tensor, cp: ContextParallel | None = None) -> list[Tensor]:
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

    def whole(model: _Model) -> Tensor:
        logits = model.head(model(tokens, positions)).float().flatten(0, 1)
        return functional.cross_entropy(logits, labels.flatten())

    reference = whole(exact)
    expected = _grads(exact, reference)
    alone = _error(_grads(model, whole(model)), expected)
    cp = ContextParallel(layout=layout)
    replace_sdpa(model, cp)
    shard, own = cp.shard(tokens, dim=1), cp.shard(labels, dim=1)
    results = []
    for is_linear in (False, True):
        hidden, head = model(shard, cp.positions(LENGTH, device=tokens.device)[None]), model.head
        if is_linear:
            loss = linear_cross_entropy(cp, hidden, head.weight, own, bias=head.bias)
        else:
            loss = cross_entropy(cp, head(hidden).float(), own)
        error = _error(_grads(model, loss, cp), expected)
        total = loss.detach().float()
        dist.all_reduce(total)
        results.append((float(total - reference), error, alone))
    return results


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_losses_and_gradients_are_those_of_one_gpu(layout: str, backend: Any) -> None:
    for results in backend.pool(2).run(losses_and_errors, layout):
        for difference, error, alone in results:
            assert abs(difference) < 1e-3
            assert error < 1.5 * alone

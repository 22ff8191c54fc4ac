"""Packed prompts and completions: losses, gradients and order are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ring_core import Mask, RankMismatchError, make_plan, ring_program
from ring_torch import ContextParallel
from ring_torch.local import LocalRanks
from ring_torch.training import RolloutLoader, token_log_probs

RANKS = 4
VOCAB, DIM = 13, 8


class Policy(nn.Module):
    """A layer of attention and a head, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.where = nn.Embedding(VOCAB, DIM), nn.Embedding(512, DIM)
        self.qkv, self.head = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, VOCAB)
        self.double()

    def forward(self, tokens: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        x: Tensor = self.embed(tokens) + self.where(positions)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, DIM // 2)).unbind(2)
        return x + attend(q, k, v).flatten(2)


def samples(count: int) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
    """Return prompts, completions (the second is empty), old log-probabilities and advantages."""
    draw = torch.Generator().manual_seed(1)

    def some(n: int) -> Tensor:
        return torch.randint(VOCAB, (n,), generator=draw)

    least = 50 if count == 3 else 1
    lengths = [int(torch.randint(least, 90, (), generator=draw)) for _ in range(2 * count)]
    lengths[3] = lengths[3] if count == 3 else 0
    prompts, completions = [some(n) for n in lengths[::2]], [some(n) for n in lengths[1::2]]
    old = [-2 - torch.rand(len(x), generator=draw).double() for x in completions]
    return prompts, completions, old, torch.randn(count, generator=draw).double()


def whole_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _contexts(dp_size: int) -> tuple[ContextParallel, Any]:
    mesh = init_device_mesh("cpu", (dp_size, RANKS // dp_size), mesh_dim_names=("dp", "cp"))
    return ContextParallel(mesh["cp"]), mesh["dp"] if dp_size > 1 else None


def _compare(_: int, dp_size: int, count: int, tokens: int) -> tuple[int, int]:
    cp, dp = _contexts(dp_size)
    prompts, completions, old, advantages = samples(count)
    # One process, a sequence at a time.
    model = Policy()
    expected, log_probs_of = torch.zeros((), dtype=torch.float64), []
    count_of_tokens = sum(map(len, completions))
    for prompt, completion, old_, advantage in zip(
        prompts, completions, old, advantages, strict=True
    ):
        row = torch.cat([prompt, completion])
        hidden = model(row[None], torch.arange(len(row)), whole_attention)[0]
        log_p = model.head(hidden).log_softmax(-1)[len(prompt) - 1 : -1]
        own = log_p.gather(-1, completion[:, None])[:, 0]
        log_probs_of.append(own.detach())
        expected = expected - ((own - old_).exp() * advantage).sum() / count_of_tokens
    expected.backward()
    # Rings, a row at a time.
    mine = Policy()
    loader = RolloutLoader(cp, prompts, completions, tokens=tokens, dp=dp, hidden_size=DIM)
    assert loader.count == count_of_tokens
    total, sums, of_tokens, empty = torch.zeros_like(expected), [], [], 0
    for batch in loader:
        empty += not batch.index

        def attend(*qkv: Tensor, batch: Any = batch) -> Tensor:
            out: Tensor = batch.cp.attention(*qkv, causal=True, cu_seqlens=batch.cu_seqlens)
            return out

        hidden = mine(batch.tokens, batch.positions, attend)
        log_probs = token_log_probs(
            batch.cp, hidden, mine.head.weight, batch.labels, bias=mine.head.bias
        )
        ratio = (log_probs - batch.shard(old)).exp()
        values = ratio * advantages[batch.owner] * (batch.labels != -100)
        part = -batch.sum(values, grad="slice").sum() / loader.count
        part.backward()
        total += part.detach()
        sums.append(batch.sum(log_probs.detach()))
        of_tokens.append(log_probs)
    for weight in mine.parameters():
        assert weight.grad is not None
        dist.all_reduce(weight.grad)
    if dp is not None:
        dist.all_reduce(total, group=dp.get_group())
    torch.testing.assert_close(total, expected.detach())
    for weight, plain in zip(mine.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, plain.grad)
    torch.testing.assert_close(loader.restore(sums), torch.stack([x.sum() for x in log_probs_of]))
    restored = loader.restore_tokens(of_tokens)
    torch.testing.assert_close([*restored], log_probs_of)
    return len(loader), empty


@pytest.mark.parametrize(
    ("dp_size", "count", "tokens"), [(1, 9, 300), (2, 9, 200), (2, 3, 180), (4, 5, 1000)]
)
def test_losses_gradients_and_order_are_those_of_one_process(
    pool: LocalRanks, dp_size: int, count: int, tokens: int
) -> None:
    results = pool.run(_compare, dp_size, count, tokens)
    assert len({rows for rows, _ in results}) == 1  # rings take equally many steps
    if count == 3:
        assert sum(empty for _, empty in results) == 2  # a ring of two has no sequence in one


@on_ranks
def test_ranks_and_rings_have_equally_much_work() -> None:
    """Ranks of a ring have equally many pairs, and rings equally much work."""
    cp, dp = _contexts(2)
    lengths = [800, 60, 780, 400, 390, 40, 400, 128]
    prompts = [torch.ones(n // 2).long() for n in lengths]
    completions = [torch.ones(n - n // 2).long() for n in lengths]
    work = torch.zeros(2, dtype=torch.int64)
    for batch in RolloutLoader(cp, prompts, completions, tokens=1400, dp=dp, hidden_size=16):
        mask, length = Mask(causal=True, cu_seqlens=batch.cu_seqlens), batch.cu_seqlens[-1]
        program = ring_program(make_plan(mask, seq_len=length, cp_size=2, layout=batch.cp.layout))
        assert program.imbalance < 1.1
        work[dp.get_local_rank()] += sum(lengths[n] * (lengths[n] + 193) for n in batch.index)
    dist.all_reduce(work, group=dp.get_group())
    assert work.max() < 1.2 * work.min()


@on_ranks
def test_mistakes_are_named(rank: int) -> None:
    cp, dp = _contexts(2)
    prompts, completions, old, _ = samples(4)

    def refused(error: type[Exception], message: str, *arguments: Any, **options: Any) -> None:
        with pytest.raises(error, match=message):
            RolloutLoader(cp, *arguments, **{"tokens": 400, "dp": dp} | options)

    refused(ValueError, "prompts and completions must be as many", prompts, completions[1:])
    refused(
        ValueError, "prompts must be a list of int64", [x.float() for x in prompts], completions
    )
    refused(ValueError, "prompts must be .* 1 token or more", [x[:0] for x in prompts], completions)
    refused(
        ValueError, "completions.* has a token", prompts, completions,
        ignore_index=int(completions[0][0]),
    )  # fmt: skip
    refused(ValueError, "a row has at most tokens=9", prompts, completions, tokens=9)
    refused(ValueError, "dp is missing: the ring has 2 of 4", prompts, completions, dp=None)
    refused(
        ValueError,
        "dp must be a process group, a DeviceMesh or None",
        prompts,
        completions,
        dp="own",
    )
    changed = [x + (rank == 2) for x in completions]
    refused(RankMismatchError, "different sequences", prompts, changed)
    refused(RankMismatchError, "different sequences", prompts, completions, tokens=400 + rank // 2)
    loader = RolloutLoader(cp, prompts, completions, tokens=400, dp=dp)
    batch = next(iter(loader))
    first = batch.index[0]
    with pytest.raises(ValueError, match=rf"numbers\[{first}\] must be \[{len(old[first])}\]"):
        batch.shard([x.repeat(2)[: len(x) + 1] if len(x) else torch.ones(1) for x in old])
    assert batch.to("meta").owner.is_meta

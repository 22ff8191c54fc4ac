"""Loaders: documents packed for each ring, and rollouts with their losses on a ring."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from ring_core import Mask, RankMismatchError, make_plan, ring_program
from ring_torch import ContextParallel, dataloader
from ring_torch.local import LocalRanks
from ring_torch.training import RolloutLoader, token_log_probs

RANKS = 4

IGNORED = -100


def documents(number: int = 14) -> list[Tensor]:
    """Return documents of different lengths, each recognizable by its token ids."""
    return [torch.arange(3 + 5 * n % 11) + 100 * n for n in range(number)]


def shuffled(seed: int = 0, documents_at_once: int = 3) -> Iterable[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(
        documents(),  # type: ignore[arg-type]  # a list is a dataset to torch
        documents_at_once, shuffle=True, generator=generator, collate_fn=list,
    )  # fmt: skip


class Counted:
    """A loader with its own state."""

    def __init__(self) -> None:
        self.at = 0
        self.read = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.at < 6:
            self.at += 1
            self.read += 1
            yield torch.full((2, 5), self.at)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def _rings() -> tuple[ContextParallel, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    return ContextParallel(mesh["cp"]), mesh["dp"]


@on_ranks
def test_documents_are_packed_for_each_ring(rank: int) -> None:
    cp, dp = _rings()
    batches = list(dataloader(cp, shuffled(), dp=dp))
    whole = list(shuffled())  # 5 batches; the last does not fill a turn of all rings
    assert len(batches) == len(dataloader(cp, shuffled(), dp=dp)) == 2
    for step, batch in enumerate(batches):
        docs = whole[2 * step + rank // 2]
        lengths = [len(x) for x in docs]
        assert batch.seq_len == sum(lengths)
        assert batch.cu_seqlens == (0, *torch.tensor(lengths).cumsum(0).tolist())
        rows = {
            name: cp.unshard(getattr(batch, name), dim=dim, seq_len=batch.seq_len)
            for name, dim in (("tokens", 1), ("labels", 1), ("positions", 0))
        }
        assert rows["tokens"].tolist() == [torch.cat(docs).tolist()]
        assert rows["positions"].tolist() == [n for x in lengths for n in range(x)]
        shifted = [y for x in docs for y in (*x[1:].tolist(), IGNORED)]
        assert rows["labels"].tolist() == [shifted]
        both = whole[2 * step] + whole[2 * step + 1]
        assert batch.count == sum(len(x) - 1 for x in both)
        counted = (batch.labels != IGNORED).sum()
        dist.all_reduce(counted)  # padding has no labels
        assert counted == batch.count


@on_ranks
def test_each_batch_has_a_balanced_layout() -> None:
    cp = ContextParallel()
    lengths = (40, 1400, 30, 70, 300, 150)
    docs = [torch.arange(n) for n in lengths]
    (batch,) = dataloader(cp, [docs], balanced=True)
    tokens = sum(lengths)
    assert batch.cu_seqlens is not None
    assert (batch.seq_len, batch.cu_seqlens[-2:]) == (2048, (tokens, 2048))
    joined = batch.cp.unshard(batch.tokens)[:, :tokens]
    assert joined.tolist() == [torch.cat(docs).tolist()]
    assert batch.count == tokens - len(lengths)  # padding has no labels
    mask = Mask(causal=True, cu_seqlens=batch.cu_seqlens)
    imbalance = {
        name: ring_program(make_plan(mask, seq_len=2048, cp_size=4, layout=layout)).imbalance
        for name, layout in (("zigzag", cp.layout), ("balanced", batch.cp.layout))
    }  # fmt: skip
    assert imbalance["balanced"] < 1.1 < imbalance["zigzag"]
    with pytest.raises(ValueError, match="balanced=True is for batches of documents"):
        next(iter(dataloader(cp, [torch.ones(1, 8).long()], balanced=True)))


@on_ranks
def test_rows_of_each_rings_own_loader(rank: int) -> None:
    cp, _ = _rings()
    tokens = torch.arange(14).reshape(2, 7) + 100 * (rank // 2)
    labels = tokens.masked_fill(torch.arange(7) < 3, IGNORED)
    (batch,) = dataloader(cp, [{"input_ids": tokens, "labels": labels}], dp="own")
    joined = cp.unshard(batch.labels, seq_len=7)
    assert joined.tolist() == [[IGNORED, IGNORED, *x[3:].tolist(), IGNORED] for x in tokens]
    assert (batch.count, batch.cu_seqlens, batch.seq_len) == (8, None, 7)
    assert batch.tokens.shape == (2, 4)
    assert batch.to("meta").tokens.is_meta


@on_ranks
def test_a_run_that_was_cut_off_goes_on() -> None:
    cp, dp = _rings()
    for make in (shuffled, Counted):
        expected = [x.tokens.tolist() for x in dataloader(cp, make(), dp=dp)]
        first = dataloader(cp, make(), dp=dp)
        batches = iter(first)
        head = [next(batches).tokens.tolist()]
        state = first.state_dict()
        assert isinstance(batches, Generator)
        batches.close()
        source = make()
        second = dataloader(cp, source, dp=dp)
        second.load_state_dict(state)
        assert head + [x.tokens.tolist() for x in second] == expected
        assert second.state_dict()["batches"] == 0  # the epoch has ended; the next starts at 0
        if isinstance(source, Counted):
            assert source.read == 4  # the first 2 are not read again
            assert len([*second]) == 3
    other = dataloader(cp, shuffled(seed=1), dp=dp)
    other.load_state_dict(first.state_dict() | {"loader": None, "batches": 1, "digest": "00"})
    with pytest.raises(ValueError, match="yields other batches than when this state was saved"):
        next(iter(other))


@pytest.mark.parametrize("seeds", [[0, 1, 0, 0], [0, 0, 1, 1]], ids=["of a ring", "of rings"])
@on_ranks
def test_ranks_that_read_other_batches_are_told(rank: int, seeds: list[int]) -> None:
    """Also on ranks whose own ring reads the same."""
    cp, dp = _rings()
    with pytest.raises(RankMismatchError, match="read different batches until batch 0") as error:
        list(dataloader(cp, shuffled(seeds[rank]), dp=dp))
    assert "seed the loader's generator alike" in str(error.value)


@on_ranks
def test_more_ranks_than_those_of_a_ring_need_dp() -> None:
    cp, dp = _rings()
    with pytest.raises(ValueError, match=r"dp is missing: the ring has 2 of 4 ranks.*mesh\['dp'\]"):
        dataloader(cp, [])
    with pytest.raises(ValueError, match="no other rank than this one in common"):
        dataloader(ContextParallel(), [], dp=dp)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (torch.zeros(3, dtype=torch.int64), "input_ids of a batch must be int64"),
        (torch.zeros(1, 3), "input_ids of a batch must be int64"),
        ([], "a list of documents"),
        ([torch.zeros(0, dtype=torch.int64)], "a list of documents"),
        ("text", "a list of documents"),
        ({"tokens": torch.zeros(1, 3)}, "has input_ids and may have labels"),
        (
            {"input_ids": torch.ones(1, 3).long(), "labels": torch.ones(1, 2).long()},
            "labels of a batch must be of the lengths of its input_ids",
        ),
    ],
)
def test_batches_of_another_form_are_refused(item: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        next(iter(dataloader(ContextParallel(), [item])))


@pytest.mark.parametrize("state", [None, {}, {"batches": -1, "digest": "", "loader": None}])
def test_states_of_something_else_are_refused(state: Any) -> None:
    with pytest.raises(ValueError, match=r"state( must be what|\['batches'\])"):
        dataloader(ContextParallel(), []).load_state_dict(state)
    with pytest.raises(ValueError, match="the same kind of loader"):
        dataloader(ContextParallel(), Counted()).load_state_dict(
            {"batches": 1, "digest": "", "loader": None}
        )


@on_ranks
def test_a_state_is_loaded_during_a_pass() -> None:
    cp = ContextParallel()
    loader = dataloader(cp, list(shuffled()))  # the same in each epoch
    running = iter(loader)
    next(running)
    state = loader.state_dict()
    for wrong in (5, "zz", "abc"):
        with pytest.raises(ValueError, match="state\\['digest'\\] must be hexadecimal digits"):
            loader.load_state_dict({**state, "digest": wrong})
    next(running)  # nothing was loaded
    loader.load_state_dict(state)
    with pytest.raises(RuntimeError, match="this pass over the loader has ended"):
        next(running)
    assert len(list(loader)) == len(loader) - 1
    first, second = iter(loader), iter(loader)
    next(first), next(second)
    with pytest.raises(RuntimeError, match="another one began"):
        next(first)


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
    with pytest.raises(ValueError, match="a tensor for each of the 4 sequences"):
        batch.shard(old[:1])
    for restore, wrong in (
        (loader.restore, [1]),
        (loader.restore_tokens, [1, batch.tokens.shape[1] + 1]),
    ):
        with pytest.raises(ValueError, match="for each of the loader's"):
            restore([])
        with pytest.raises(ValueError, match=r"numbers\[0\] must be"):
            restore([torch.zeros(*wrong, 1)] * len(loader))
    assert batch.to("meta").owner.is_meta

"""Loaders: documents packed for each ring, and rollouts with their losses on a ring."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense import sdpa
from on_ranks import on_ranks
from refused import refused
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from ring_core import Mask, RankMismatchError, make_plan, ring_program
from ring_torch import ContextParallel, dataloader
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


def _rings(dp_size: int = 2) -> tuple[ContextParallel, Any]:
    mesh = init_device_mesh("cpu", (dp_size, RANKS // dp_size), mesh_dim_names=("dp", "cp"))
    return ContextParallel(mesh["cp"]), mesh["dp"] if dp_size > 1 else None


def first_of(*items: Any, **options: Any) -> Callable[[], Any]:
    """Return a call that reads the first batch of a loader."""
    return lambda: next(iter(dataloader(ContextParallel(), [*items], **options)))


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
        shifted = [y for x in docs for y in (*x[1:].tolist(), IGNORED)]
        for name, dim, expected in (
            ("tokens", 1, [torch.cat(docs).tolist()]), ("labels", 1, [shifted]),
            ("positions", 0, [n for x in lengths for n in range(x)]),
        ):  # fmt: skip
            row = cp.unshard(getattr(batch, name), dim=dim, seq_len=batch.seq_len)
            assert row.tolist() == expected, name
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
    of_rows = first_of(torch.ones(1, 8).long(), balanced=True)
    refused("balanced=True is for batches of documents", of_rows)


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
    refused("yields other batches than when this state was saved", lambda: next(iter(other)))


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
    refused(r"dp is missing: the ring has 2 of 4 ranks.*mesh\['dp'\]", lambda: dataloader(cp, []))
    everyone = ContextParallel()
    refused("no other rank than this one in common", lambda: dataloader(everyone, [], dp=dp))


ONES, NOTHING = torch.ones(1, 3).long(), {"batches": 1, "digest": "", "loader": None}


def loaded(state: Any, loader: Any = ()) -> Callable[[], Any]:
    """Return a call that loads a state."""
    return lambda: dataloader(ContextParallel(), loader).load_state_dict(state)


#: Batches of another form, and states of something else: a call, and the error's words.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a row": (first_of(ONES[0]), "input_ids of a batch must be int64"),
    "floats": (first_of(ONES.float()), "input_ids of a batch must be int64"),
    "no document": (first_of([]), "a list of documents"),
    "an empty document": (first_of([ONES[0, :0]]), "a list of documents"),
    "text": (first_of("text"), "a list of documents"),
    "tokens": (first_of({"tokens": ONES}), "has input_ids and may have labels"),
    "few labels": (first_of({"input_ids": ONES, "labels": ONES[:, 1:]}), "labels of a batch must be of the lengths of its input_ids"),
    "no state": (loaded(None), "state must be what"),
    "an empty state": (loaded({}), "state must be what"),
    "batches": (loaded(NOTHING | {"batches": -1}), r"state\['batches'\]"),
    "another loader": (loaded(NOTHING, Counted()), "the same kind of loader"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_of_another_form_is_refused(case: str) -> None:
    call, words = REFUSED[case]
    refused(words, call)


@on_ranks
def test_a_state_is_loaded_during_a_pass() -> None:
    loader = dataloader(ContextParallel(), list(shuffled()))  # the same in each epoch
    running = iter(loader)
    next(running)
    state = loader.state_dict()
    for wrong in (5, "zz", "abc"):
        load = partial(loader.load_state_dict, {**state, "digest": wrong})
        refused(r"state\['digest'\] must be hexadecimal digits", load)
    next(running)  # nothing was loaded
    loader.load_state_dict(state)
    refused("this pass over the loader has ended", running.__next__, error=RuntimeError)
    assert len(list(loader)) == len(loader) - 1
    first, second = iter(loader), iter(loader)
    next(first), next(second)
    refused("another one began", first.__next__, error=RuntimeError)


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


@pytest.mark.parametrize(
    ("dp_size", "count", "tokens"), [(1, 9, 300), (2, 9, 200), (2, 3, 180), (4, 5, 1000)]
)
@on_ranks
def test_losses_gradients_and_order_are_those_of_one_process(
    dp_size: int, count: int, tokens: int
) -> None:
    cp, dp = _rings(dp_size)
    prompts, completions, old, advantages = samples(count)
    # One process, a sequence at a time.
    model, mine = Policy(), Policy()
    expected, log_probs_of = torch.zeros((), dtype=torch.float64), []
    count_of_tokens = sum(map(len, completions))
    for n, completion in enumerate(completions):
        row = torch.cat([prompts[n], completion])
        hidden = model(row[None], torch.arange(len(row)), partial(sdpa, is_causal=True))[0]
        log_p = model.head(hidden).log_softmax(-1)[len(prompts[n]) - 1 : -1]
        own = log_p.gather(-1, completion[:, None])[:, 0]
        log_probs_of.append(own.detach())
        expected = expected - ((own - old[n]).exp() * advantages[n]).sum() / count_of_tokens
    expected.backward()
    # Rings, a row at a time.
    loader = RolloutLoader(cp, prompts, completions, tokens=tokens, dp=dp, hidden_size=DIM)
    assert loader.count == count_of_tokens
    total, sums, of_tokens, empty = torch.zeros_like(expected), [], [], 0
    for batch in loader:
        empty += not batch.index
        options = {"causal": True, "cu_seqlens": batch.cu_seqlens}
        hidden = mine(batch.tokens, batch.positions, partial(batch.cp.attention, **options))
        head = mine.head
        log_probs = token_log_probs(batch.cp, hidden, head.weight, batch.labels, bias=head.bias)
        ratio = (log_probs - batch.shard(old)).exp()
        values = ratio * advantages[batch.owner] * (batch.labels != -100)
        part = -batch.sum(values, grad="slice").sum() / loader.count
        part.backward()
        total += part.detach()
        sums.append(batch.sum(log_probs.detach()))
        of_tokens.append(log_probs)
    if dp is not None:
        dist.all_reduce(total, group=dp.get_group())
    torch.testing.assert_close(total, expected.detach())
    for weight, plain in zip(mine.parameters(), model.parameters(), strict=True):
        assert weight.grad is not None
        dist.all_reduce(weight.grad)
        torch.testing.assert_close(weight.grad, plain.grad)
    torch.testing.assert_close(loader.restore(sums), torch.stack([x.sum() for x in log_probs_of]))
    torch.testing.assert_close([*loader.restore_tokens(of_tokens)], log_probs_of)
    steps: list[Any] = [None] * RANKS
    dist.all_gather_object(steps, (len(loader), empty))
    assert len({rows for rows, _ in steps}) == 1  # rings take equally many steps
    assert count != 3 or sum(x for _, x in steps) == 2  # a ring of two has no sequence in one


@on_ranks
def test_mistakes_are_named(rank: int) -> None:
    cp, dp = _rings(2)
    prompts, completions, old, _ = samples(4)

    def loader_of(*arguments: Any, **options: Any) -> Callable[[], Any]:
        return lambda: RolloutLoader(cp, *arguments, **{"tokens": 400, "dp": dp} | options)

    changed, floats = [x + (rank == 2) for x in completions], [x.float() for x in prompts]
    both = (prompts, completions)
    loader = RolloutLoader(cp, *both, tokens=400, dp=dp)
    batch = next(iter(loader))
    first, longer = batch.index[0], [torch.ones(len(x) + 1) for x in old]
    wrong_rows: Any = [torch.zeros(1, batch.tokens.shape[1] + 1, 1)] * len(loader)
    wrong_sums: Any = [torch.zeros(1, 1)] * len(loader)
    mistakes: list[tuple[Callable[[], Any], str]] = [
        (loader_of(prompts, completions[1:]), "prompts and completions must be as many"),
        (loader_of(floats, completions), "prompts must be a list of int64"),
        (loader_of([x[:0] for x in prompts], completions), "prompts must be .* 1 token or more"),
        (loader_of(*both, ignore_index=int(completions[0][0])), "completions.* has a token"),
        (loader_of(*both, tokens=9), "a row has at most tokens=9"),
        (loader_of(*both, dp=None), "dp is missing: the ring has 2 of 4"),
        (loader_of(*both, dp="own"), "dp must be a process group, a DeviceMesh or None"),
        (partial(batch.shard, longer), rf"numbers\[{first}\] must be \[{len(old[first])}\]"),
        (partial(batch.shard, old[:1]), "a tensor for each of the 4 sequences"),
        (partial(loader.restore, []), "for each of the loader's"),
        (partial(loader.restore_tokens, []), "for each of the loader's"),
        (partial(loader.restore, wrong_sums), r"numbers\[0\] must be"),
        (partial(loader.restore_tokens, wrong_rows), r"numbers\[0\] must be"),
    ]  # fmt: skip
    for call, message in mistakes:
        refused(message, call)
    refused("different sequences", loader_of(prompts, changed), error=RankMismatchError)
    of_rings = loader_of(*both, tokens=400 + rank // 2)
    refused("different sequences", of_rings, error=RankMismatchError)
    assert batch.to("meta").owner.is_meta

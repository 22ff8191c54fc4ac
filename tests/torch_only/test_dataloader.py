"""Data loading: ranks of a ring read the same batches, rings read different ones; runs resume."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from ring_core import Mask, RankMismatchError, make_plan, ring_program
from ring_torch import ContextParallel, dataloader

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
    """Check that a state loaded during an epoch is kept, and that epochs do not mix batches."""
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

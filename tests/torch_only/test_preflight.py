"""``preflight`` runs a step on a ring and alone; ``check_equal`` compares bits of ranks."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from on_ranks import on_ranks, on_three_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import ring_torch
from ring_core import RankMismatchError
from ring_torch import ContextParallel
from ring_torch.verification.equality import digest_of

T, D, VOCAB = 16, 8, 11


class Model(nn.Module):
    """One layer of attention over shards, with positions and a causal convolution."""

    def __init__(self, cp: ContextParallel, mistake: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cp, self.mistake = cp, mistake
        self.embed, self.places = nn.Embedding(VOCAB, D), nn.Embedding(T, D)
        self.qkv, self.head = nn.Linear(D, 3 * D), nn.Linear(D, VOCAB)
        self.dropout = nn.Dropout(0.5)
        self.kernel = nn.Parameter(torch.randn(D, 1, 3) / 2)

    def forward(self, tokens: Tensor) -> Tensor:
        cp, local = self.cp, tokens.shape[1]
        positions = torch.arange(local)
        if self.mistake != "positions":
            positions = cp.positions(local * cp.cp_size)
        x = self.embed(tokens) + self.places(positions)
        if self.mistake == "convolution":
            x = x + functional.conv1d(
                functional.pad(x.transpose(1, 2), (2, 0)), self.kernel, groups=D
            ).transpose(1, 2)
        else:
            x = x + cp.causal_conv1d(x, self.kernel[:, 0])
        q, k, v = self.qkv(x).unflatten(2, (3, 1, D)).unbind(2)
        logits: Tensor = self.head(self.dropout(cp.attention(q, k, v, causal=True).flatten(2)))
        return logits


def _step(cp: ContextParallel, mistake: str) -> Callable[[Any, Any], Tensor]:
    def step(model: Any, batch: Any) -> Tensor:
        tokens, labels = batch["tokens"], batch["labels"]
        logits = model(cp.shard(tokens))
        if mistake == "labels":
            labels = labels[:, cp.cp_rank * logits.shape[1] :][:, : logits.shape[1]]
        else:
            labels = cp.shard(labels)
        if mistake == "denominator":
            return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return ring_torch.cross_entropy(cp, logits, labels)

    return step


def _clip_first(cp: ContextParallel, model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    cp.reduce_gradients(model)


def _clip_last(cp: ContextParallel, model: nn.Module) -> None:
    cp.reduce_gradients(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


AFTER: dict[str, Callable[[ContextParallel, nn.Module], None]] = {
    "clipped first": _clip_first, "clipped last": _clip_last, "not reduced": lambda *_: None,
}  # fmt: skip

#: What is said of each mistake.
MISTAKES = {
    "labels": "in the layout 'contiguous' it is right",
    "positions": "the loss differs .* first that of.*the first module whose output differs is Model by",
    "denominator": "the loss is 2 times the whole step's",
    "convolution": "in the layout 'contiguous', which has fewer edges of shards, it differs less",
    "clipped first": "it is after_backward: clip",
    "not reduced": "not the same on all ranks behind after_backward",
    "weights": "weights differs between ranks.*weights.head.bias",
    "batch": r"batch differs between ranks.*batch\['tokens'\]",
}


@pytest.mark.parametrize("mistake", [*MISTAKES, "none", "clipped last"])
@on_ranks
def test_each_mistake_is_found(rank: int, mistake: str) -> None:
    cp = ContextParallel()
    model = Model(cp, mistake)
    torch.manual_seed(1)
    tokens = torch.randint(VOCAB, (2, T + 1))
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].contiguous()}
    if mistake == "weights" and rank:
        with torch.no_grad():
            model.head.bias.add_(1)
    if mistake == "batch":
        batch["tokens"] = batch["tokens"].roll(rank, 1)
    model.embed.weight.grad = kept = torch.ones(VOCAB, D)
    if mistake in ("positions", "convolution"):  # whose hooks break no graph
        model.compile(backend="aot_eager", fullgraph=True)
    state = torch.get_rng_state()
    after = AFTER.get(mistake)
    report = ring_torch.preflight(
        cp, _step(cp, mistake), model=model, batch=batch,
        after_backward=None if after is None else lambda model: after(cp, model),
    )  # fmt: skip
    assert model.embed.weight.grad is kept
    assert kept.eq(1).all()
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert cp.layout == "zigzag"
    if mistake in MISTAKES:
        assert not report.passed
        assert mistake == "denominator" or "the whole step's" not in str(report)
        assert re.search(MISTAKES[mistake], str(report)), str(report)
        if mistake not in ("weights", "batch"):
            assert re.search(r"in .*step \(.*test_preflight\.py:\d+\)", str(report))
    else:
        assert report.passed, str(report)
        assert str(report).startswith("preflight passed: loss")


LOSSES: dict[str, Any] = {"whole loss": "whole", "ddp": "mean", "fsdp2": "mean"}


@pytest.mark.nightly(only=["inductor", "compiled in place"])
@pytest.mark.parametrize(
    "way",
    [
        "whole loss",
        "ddp",
        "fsdp2",
        "compiled",
        "compiled in place",
        "compiled step",
        "inductor",
        "bfloat16",
        "contiguous",
        "float64",
        "random",
        "pops",
    ],
)
@on_ranks
def test_other_right_ways_pass(way: str) -> None:
    cp = ContextParallel(layout="contiguous" if way == "contiguous" else "zigzag")
    model: Any = Model(cp, "").to(getattr(torch, way, torch.float32) if "float" in way else None)
    batch = {"x": torch.randint(VOCAB, (2, T))}
    if way == "ddp":
        model = DistributedDataParallel(model)
    elif way == "fsdp2":
        fully_shard(model)
    elif way == "compiled":
        model = torch.compile(model, backend="aot_eager", fullgraph=True)
    elif way in ("compiled in place", "inductor"):
        backend = way if way == "inductor" else "aot_eager"
        model.compile(backend=backend, fullgraph=True)

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        tokens = batch["x"]
        if way == "random":
            tokens = tokens.masked_fill(torch.rand(tokens.shape) < 0.3, 0)
        logits = model(cp.shard(tokens))
        if way == "pops":
            return ring_torch.cross_entropy(cp, logits, cp.shard(batch.pop("x")))
        if way == "whole loss":
            return cp.unshard(logits, grad="slice").square().mean()
        factor = cp.cp_size if way in ("ddp", "fsdp2") else 1
        return factor * ring_torch.cross_entropy(cp, logits, cp.shard(batch["x"]))

    if way == "compiled step":
        step = torch.compile(step, backend="aot_eager", fullgraph=True)
    report = ring_torch.preflight(
        cp, step, model=model, batch=batch, loss=LOSSES.get(way, "sum"),
        after_backward=(lambda _: None) if way in ("ddp", "fsdp2") else None,
    )  # fmt: skip
    assert report.passed, str(report)
    assert all(x.noise < 0.01 for x in report.gradients.values()) or way == "bfloat16"


@on_ranks
def test_gradients_in_buckets_of_ddp_are_compared() -> None:
    cp = ContextParallel()
    batch = {"tokens": torch.randint(VOCAB, (2, T)), "labels": torch.randint(VOCAB, (2, T))}
    model = DistributedDataParallel(Model(cp, ""), gradient_as_bucket_view=True)
    # Means over the ring of parts of a sum.
    report = ring_torch.preflight(
        cp, _step(cp, ""), model=model, batch=batch, after_backward=lambda _: None
    )
    assert "first that of module" in str(report)


@on_ranks
def test_a_step_that_changes_or_draws_is_refused() -> None:
    cp = ContextParallel()
    model = Model(cp, "")
    batch = {"tokens": torch.randint(VOCAB, (2, T)), "labels": torch.randint(VOCAB, (2, T))}
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="has changed the weights"):
        ring_torch.preflight(
            cp, _step(cp, ""), model=model, batch=batch, after_backward=lambda _: optimizer.step()
        )
    runs = iter(range(9))

    def other_in_each_run(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        factor = -1.0 if next(runs) % 2 else 1.0
        return factor * _step(cp, "")(model, batch)

    with pytest.raises(ValueError, match="nothing can be told"):
        # A new model: the optimizer made that of each rank another.
        ring_torch.preflight(cp, other_in_each_run, model=Model(cp, ""), batch=batch)


@on_ranks
def test_a_loss_that_is_not_finite_on_one_rank_fails(rank: int) -> None:
    cp = ContextParallel()
    batch = {"tokens": torch.randint(VOCAB, (2, T)), "labels": torch.randint(VOCAB, (2, T))}

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = _step(cp, "")(model, batch)
        # Whole, and on the last rank alone: its gradients are right.
        return loss + (torch.nan if cp.cp_size == 1 and rank else 0.0)

    assert not ring_torch.preflight(cp, step, model=Model(cp, ""), batch=batch).passed


#: Where a step fails on one rank, what it is doing there, and if its group is closed by it.
FAILING = {
    "split": True, "behind a collective": True, "loss": True, "backward": True, "whole": True,
    "alike": False, "late": True,
}  # fmt: skip


@pytest.mark.nightly(unless=["split", "loss", "alike"])
@pytest.mark.parametrize("where", FAILING)
@on_three_ranks
def test_a_step_that_fails_on_one_rank_fails_on_all(rank: int, where: str) -> None:
    """Check that each rank says which one failed and how, soon, whatever the others wait for."""
    group: Any = torch.distributed.new_group()
    cp = ContextParallel(group)
    torch.manual_seed(0)
    batch = {"x": torch.randint(VOCAB, (2, 18))}
    is_failing = rank == 1 or where == "alike"

    def fail(*_: object) -> Any:
        raise KeyError("mine")

    def step(model: Model, batch: dict[str, Tensor]) -> Tensor:
        is_split = cp.cp_size > 1
        if is_failing and (where in ("split", "alike") if is_split else where == "whole"):
            fail()
        if where == "behind a collective" and is_split:
            torch.distributed.all_reduce(torch.ones(3) if not is_failing else fail(), group=group)
        x = model(cp.shard(batch["x"])[:, :, None].float())
        x = cp.attention(*[x[..., None, :]] * 3)
        if is_failing and where == "backward":
            x.register_hook(fail)
        loss = ring_torch.cross_entropy(cp, x.flatten(2), cp.shard(batch["x"]))
        return fail() if is_failing and where == "loss" and is_split else loss

    def after(_: object) -> None:
        if where == "late" and is_failing and cp.cp_size > 1:
            fail()

    error = KeyError if is_failing else RuntimeError
    start = time.monotonic()
    with pytest.raises(error) as raised:
        ring_torch.preflight(cp, step, model=nn.Linear(1, VOCAB), batch=batch, after_backward=after)
    assert time.monotonic() - start < 15
    kind = "whole" if where == "whole" else "split"
    if not is_failing:
        assert f"preflight: a {kind} run failed on rank 1: KeyError: 'mine'" in str(raised.value)
    closed = pytest.raises(RuntimeError, match=r"an earlier call .* failed on rank 1: KeyError")
    with closed if FAILING[where] else nullcontext():
        cp.check_equal(0, what="x")


def test_a_step_returns_a_loss() -> None:
    cp = ContextParallel()
    with pytest.raises(ValueError, match=r"step must return the loss, .* got \[2\]"):
        ring_torch.preflight(cp, lambda *_: torch.ones(2), model=nn.Linear(2, 2), batch=0)


def _model(_: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def _changed_weight(rank: int) -> nn.Module:
    model = _model(rank)
    with torch.no_grad():
        model.get_parameter("0.weight")[1, 2] += float(rank)
    return model


def _changed_buffer(rank: int) -> nn.Module:
    model = _model(rank)
    model.get_buffer("1.num_batches_tracked").add_(rank)
    return model


def _optimizer(rank: int) -> torch.optim.Optimizer:
    model = _model(rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    (model(torch.randn(3, 4)).square().sum() * (1 + rank)).backward()
    optimizer.step()
    return optimizer


#: Objects by rank, and what is said of them; ``None`` where all ranks have the same.
CASES: dict[str, tuple[Callable[[int], Any], str | None]] = {
    "tensor": (lambda _: torch.arange(6.0), None),
    "nan": (lambda _: torch.tensor([torch.nan, 1.0]), None),
    "model": (_model, None),
    "empty": (lambda _: torch.empty(0, 3), None),
    "bool": (lambda _: {"mask": torch.tensor([True, False]), "seed": 3, "name": "x"}, None),
    "view": (lambda rank: torch.zeros(3, 4).t() if rank else torch.zeros(4, 3), None),
    "weight": (_changed_weight, r"rank 1: x.0.weight: float32 \[3, 4\], 1 of 12 numbers differ from rank 0's, the first at \[1, 2\]"),
    "buffer": (_changed_buffer, r"x.1.num_batches_tracked: int64 \[\], 1 of 1"),
    "optimizer": (_optimizer, r"\['exp_avg'\]"),
    "rows swapped": (lambda rank: torch.arange(4.0).view(2, 2)[[rank, 1 - rank]], r"4 of 4 numbers"),
    "sign of zero": (lambda rank: torch.zeros(2) * (1 - 2 * rank), r"2 of 2 numbers"),
    "dtype": (lambda rank: torch.zeros(2, dtype=(torch.float32, torch.float16)[rank]), r"rank 0: x: float32 \[2\]; rank 1: x: float16 \[2\]"),
    "shape": (lambda rank: torch.zeros(2 + rank), r"rank 1: x: float32 \[3\]"),
    "number": (lambda rank: {"lr": 0.1 * (1 + rank)}, r"rank 0: x\['lr'\] = 0.1; rank 1: x\['lr'\] = 0.2"),
    "keys": (lambda rank: {"a": 1, "bc"[rank]: 2}, r"rank 0: x\['b'\] = 2; rank 1: x\['c'\] = 2"),
    "length": (lambda rank: [1] * (1 + rank), r"rank 1: x, a list of 2"),
    "complex": (lambda rank: torch.full((2,), 1j * (1 + rank)), r"2 of 2 numbers .*: 2j for 1j"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@on_ranks
def test_the_first_difference_is_named(rank: int, case: str) -> None:
    make, message = CASES[case]
    cp = ContextParallel()
    if message is None:
        cp.check_equal(make(rank), what="x")
    else:
        with pytest.raises(RankMismatchError, match=message):
            cp.check_equal(make(rank), what="x")
    cp.check_equal(rank * 0, what="x")  # the group goes on


@on_ranks
def test_each_nth_call_is_compared(rank: int) -> None:
    cp = ContextParallel()
    cp.check_equal(0, what="of some calls", every=2)
    cp.check_equal(rank, what="of some calls", every=2)
    with pytest.raises(RankMismatchError):
        cp.check_equal(rank, what="of some calls", every=2)
    with cp.whole():
        cp.check_equal(rank, what="x")


@on_ranks
def test_shards_are_compared_along_cp(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "cp"))
    cp = ContextParallel(mesh["cp"])
    over_tp: Tensor = DTensor.from_local(torch.full((2,), float(rank)), mesh["tp"], [Shard(0)])
    with pytest.raises(RankMismatchError, match=r"placed .*2 of 2 numbers"):
        cp.check_equal(over_tp, what="x")
    cp.check_equal(distribute_tensor(torch.arange(4.0), mesh["cp"], [Shard(0)]), what="x")


def test_what_has_no_bits_is_refused() -> None:
    cp = ContextParallel()
    with pytest.raises(ValueError, match=r"x\['a'\]\[0\] is a object"):
        cp.check_equal({"a": [object()]}, what="x")
    with pytest.raises(ring_torch.UnsupportedError, match="meta"):
        cp.check_equal(torch.empty(2, device="meta"), what="x")


def test_the_digest_sees_every_place() -> None:
    torch.manual_seed(0)
    x = torch.randint(-3, 3, (5000,), dtype=torch.int8)
    digests = {int(digest_of(x))}
    for n in range(0, 4999, 50):
        y = x.clone()
        y[n] += 1
        digests.add(int(digest_of(y)))
    assert len(digests) == 101
    assert digest_of(x) == digest_of(x.view(50, 100).t().contiguous().t())


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@on_ranks
def test_the_whole_length_of_a_slice(layout: Any) -> None:
    cp = ContextParallel(layout=layout)
    x = torch.zeros(1, 10, 3)
    shard = cp.shard(x, pad=True)
    assert cp.whole_length(shard) == 10
    assert cp.whole_length(shard * 1) == 2 * shard.shape[1]
    assert cp.whole_length(shard.shape[1], seq_len=10) == 10
    assert cp.whole_length(shard[0], dim=0, seq_len=10) == 10
    with pytest.raises(ValueError, match="seq_len=30 is the length of the whole sequence"):
        cp.whole_length(shard, seq_len=30)
    with cp.whole():
        assert cp.whole_length(x) == 10

"""``debug`` and ``preflight`` find mistakes of a step; ``check_equal`` compares bits of ranks.

``debug`` does so at the call that makes a mistake, ``preflight`` by a step that is run split and
whole; both are silent about all else.
"""

from __future__ import annotations

import gc
import inspect
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import EXPERTS, MODELS, WHOLE, build, in_training, run, whole
from on_ranks import on_ranks, on_three_ranks
from refused import refused
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional
from torch.nn.functional import cross_entropy as by_another_name
from torch.nn.parallel import DistributedDataParallel

import ring_torch
from ring_core import RankMismatchError
from ring_torch import ContextParallel, hf
from ring_torch.verification.equality import digest_of

T, VOCAB, DIM, HEADS = 16, 11, 8, 2


class Model(nn.Module):
    """Attention between an embedding with positions and a convolution, and a head."""

    def __init__(self, cp: ContextParallel, mistake: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cp, self.mistake = cp, mistake
        self.embed, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(64, DIM)
        self.qkv, self.head = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, VOCAB)
        self.dropout, self.kernel = nn.Dropout(0.5), nn.Parameter(torch.randn(DIM, 1, 3) / 2)

    def forward(self, tokens: Tensor, turned: bool = False, **options: Any) -> Tensor:
        cp, local = self.cp, tokens.shape[1]
        is_local = self.mistake == "positions"
        x = self.embed(tokens)
        x = x + self.places(torch.arange(local) if is_local else cp.positions(local * cp.cp_size))
        if self.mistake == "convolution":
            x = x + functional.conv1d(functional.pad(x.mT, (2, 0)), self.kernel, groups=DIM).mT
        else:
            x = x + cp.causal_conv1d(x, self.kernel[:, 0])
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, -1)).unbind(2)
        if turned:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        attend: Any = cp.attention
        if options.pop("by_function", False):
            attend = partial(ring_torch.ring_attention, layout=cp.layout)
        out = attend(q, k, v, **{"causal": True} | options)
        out = (out.transpose(1, 2) if turned else out).flatten(2)
        logits: Tensor = self.head(self.dropout(out))
        return logits


class Step:
    """A step of training, of which one thing is done otherwise."""

    def __init__(self, rank: int, **other: Any) -> None:
        self.rank, self.other = rank, other
        self.cp = ContextParallel(layout=other.get("layout", "zigzag"))
        self.model = Model(self.cp, other.get("model", ""))
        if other.get("has_own_weights"):
            self.model.head.weight.data.add_(rank)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def batch(self) -> Tensor:
        """Return tokens ``[2, T + 1]``."""
        torch.manual_seed(self.rank if self.other.get("has_own") else 1)
        return torch.randint(VOCAB, (2, self.other.get("length", T) + 1))

    def loss(self, model: Any, whole: Tensor) -> Tensor:
        cp, other = self.cp, self.other
        inputs = cp.shard(whole[:, :-1], pad=True)
        logits = model(inputs, **other.get("options", {}))
        labels = cp.shard(whole[:, 1:], pad=True, fill=-100)
        if "labels" in other:
            labels = other["labels"](cp, whole[:, 1:])
        loss: Tensor = other.get("loss", ring_torch.cross_entropy)(cp, logits, labels)
        return loss

    def after_backward(self, model: Any) -> None:
        for name in self.other.get("after", ("reduce", "clip")):
            if name == "reduce":
                self.cp.reduce_gradients(model)
            if name == "clip":
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    def __call__(self) -> None:
        self.loss(self.model, self.batch()).backward()
        self.after_backward(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def preflight(self, step: Any = None, **options: Any) -> Any:
        more: Any = {"model": self.model, "batch": self.batch()} | options
        return ring_torch.preflight(self.cp, step or self.loss, **more)


def _natural(cp: ContextParallel, labels: Tensor) -> Tensor:
    own = labels.shape[1] // cp.cp_size
    return labels[:, cp.cp_rank * own : (cp.cp_rank + 1) * own]


def _torchs(_: ContextParallel, logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


ATTEND, LOSS = "out = attend(q, k, v", 'loss: Tensor = other.get("loss"'
#: Steps with a mistake: what is done otherwise, what is said of it, and the code of the line named.
MISTAKES: dict[str, tuple[dict[str, Any], str, str]] = {
    "heads before tokens": ({"options": {"turned": True}}, r"q is \(2, 2, 8, 4\), and 8 are the tokens", ATTEND),
    "heads first, by the function": ({"options": {"turned": True, "by_function": True}}, r"q is \(2, 2, 8, 4\), and 8 are", ATTEND),
    "`seq_len` of another length": ({"length": 21, "options": {"seq_len": 24}}, "seq_len=24, and the sequence has 21", ATTEND),
    "`seq_len` forgotten, not causal": ({"length": 29, "options": {"causal": False}}, "padded to 32 at .*every token sees", ATTEND),
    "labels in natural order": ({"labels": _natural}, "in natural order, and this rank holds", LOSS),
    "labels in another layout": ({"labels": lambda _, x: ContextParallel(layout="striped").shard(x)}, "in the layout 'striped'", LOSS),
    "`F.cross_entropy` of a shard": ({"loss": _torchs}, "divides by the labels of this rank", "return functional"),
    "by name": ({"loss": lambda _, x, y: by_another_name(x.flatten(0, 1), y.view(-1))}, "divides by the labels of this rank", '"by name": '),
    "by a class": ({"loss": lambda _, x, y: nn.CrossEntropyLoss()(x.mT, y)}, "divides by the labels of this rank", '"by a class": '),
    "batches that differ between ranks": ({"has_own": True}, "what is sharded differs", "inputs = cp.shard"),
    "clipped before the sum": ({"after": ("clip", "reduce")}, "clip_grad_norm_ of gradients that differ", "nn.utils.clip_grad"),
    "weights that differ between ranks": ({"has_own_weights": True}, "gradients that are equal for weights that differ: .*weights", "self.optimizer.step"),
    "gradients not summed": ({"after": ()}, "a step of the optimizer with gradients", "self.optimizer.step"),
}  # fmt: skip
#: Steps that are right.
RIGHT: dict[str, dict[str, Any]] = {
    "plain": {},
    "contiguous labels by hand": {"layout": "contiguous", "labels": _natural},
    "shards of padded sequences": {"length": 13},
    "seq_len": {"length": 13, "options": {"seq_len": 13, "causal": False}},
    "documents": {"options": {"cu_seqlens": (0, 5, T)}},
    "a sum by torch": {"loss": lambda *x: _torchs(*x, reduction="sum") / (2 * T)},
    "labels of a copy": {"labels": lambda cp, x: cp.shard(x).clone().flatten().view(2, -1)},
    "shifted on ranks": {"labels": lambda cp, x: cp.shift(cp.shard(x), 0)},
    "no clipping": {"after": ("reduce",)},
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
@on_ranks
def test_each_mistake_is_found(rank: int, name: str) -> None:
    other, message, line = MISTAKES[name]
    step = Step(rank, **other)
    error = RankMismatchError if "batches" in name else ValueError
    with ring_torch.debug(), pytest.raises(error, match=message) as raised:
        step()
    assert re.search(rf"\n  at .*test_debug\.py:\d+: {re.escape(line)}", str(raised.value)), (
        raised.value
    )


def _found_by() -> dict[str, str]:
    """Return what finds each mistake, as the page says."""
    page = Path(__file__).parents[2] / "docs" / "checking.md"
    text = page.read_text().partition("| found by |")[2].partition("\n\n")[0]
    rows = [[x.strip() for x in row.split("|")[1:-1]] for row in text.splitlines()[2:]]
    return {mistake: found_by for found_by, text in rows for mistake in text.split("; ")}


#: Mistakes that ``preflight`` alone finds, and what it says of these and of others.
ALONE = {
    "positions forgotten": {"model": "positions"},
    "a convolution without its neighbours": {"model": "convolution"},
}
SAID = {
    "labels in natural order": "in the layout 'contiguous' it is right",
    "positions forgotten": "the loss differs .* first that of.*the first module whose output differs is Model by",
    "`F.cross_entropy` of a shard": "the loss is 2 times the whole step's",
    "a convolution without its neighbours": "in the layout 'contiguous', which has fewer edges of shards, it differs less",
    "clipped before the sum": "it is after_backward: clip",
    "gradients not summed": "not the same on all ranks behind after_backward",
    "weights that differ between ranks": "weights differs between ranks.*weights.head.weight",
    "batches that differ between ranks": "batch differs between ranks",
}  # fmt: skip


@pytest.mark.nightly(only=["`seq_len` forgotten, not causal"])
@pytest.mark.parametrize("name", ["none", *ALONE, *(x for x in MISTAKES if x in _found_by())])
@on_ranks
def test_preflight_finds_it_too(rank: int, name: str) -> None:
    step = Step(rank, **ALONE.get(name) or MISTAKES.get(name, ({},))[0])
    if name == "positions forgotten":  # hooks break no graph
        step.model.compile(backend="eager", fullgraph=True)
    step.model.embed.weight.grad = kept = torch.ones(VOCAB, DIM)
    batch, state = step.batch(), torch.get_rng_state()
    is_refused = "seq_len` of another" in name  # by the call on whole sequences
    with pytest.raises(ValueError, match="seq_len=24") if is_refused else nullcontext():
        report = step.preflight(batch=batch, after_backward=step.after_backward)
        text = str(report)
        assert report.passed == (name == "none"), text
        assert name != "none" or text.startswith("preflight passed: loss")
        if name in SAID:
            assert re.search(SAID[name], text), text
            assert "cross_entropy" in name or "the whole step's" not in text
        if name in SAID and "differ between" not in name:
            assert re.search(r"in .*loss \(.*test_debug\.py:\d+\)", text), text
    assert step.model.embed.weight.grad is kept and kept.eq(1).all()
    assert step.model.training and step.cp.layout == "zigzag"
    assert torch.equal(torch.get_rng_state(), state)


def test_the_page_names_what_debug_finds() -> None:
    by_debug = {name for name, found_by in _found_by().items() if found_by == "both"}
    assert by_debug == {*MISTAKES} - {"by name", "by a class", "heads first, by the function"}
    by_preflight = {name for name, found_by in _found_by().items() if found_by == "`preflight`"}
    assert by_preflight == {*ALONE}


@pytest.mark.nightly(unless=["plain", "contiguous labels by hand", "seq_len", "a sum by torch"])
@pytest.mark.parametrize("name", RIGHT)
@on_ranks
def test_what_is_right_is_not_judged(rank: int, name: str) -> None:
    """Check two steps in the block, whose results are those of two outside of it."""
    results = []
    for block in (nullcontext(), ring_torch.debug()):
        step = Step(rank, **RIGHT[name])
        with block:
            step()
            step()
            with step.cp.whole():
                step()
        results.append([*step.model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_functions_are_their_own_outside_of_the_block() -> None:
    functions: list[Any] = [
        inspect.unwrap(x)
        for x in (ContextParallel.shard, functional.cross_entropy, nn.utils.clip_grad_norm_)
    ]
    before = [(x.__code__, x.__defaults__, x.__kwdefaults__) for x in functions]
    with ring_torch.debug(), ring_torch.debug():
        assert all(x.__code__ is not code for x, (code, *_) in zip(functions, before, strict=True))
    assert [(x.__code__, x.__defaults__, x.__kwdefaults__) for x in functions] == before
    cp = ContextParallel()
    with ring_torch.debug():
        x = torch.randn(1, 4, 2, 8, requires_grad=True)
        cp.attention(cp.shard(x), x, x, causal=True).sum().backward()
        refused("shard", cp.shard, error=TypeError)


@on_ranks
def test_experts_and_compiled_calls_are_not_judged(rank: int) -> None:
    cp = ContextParallel()
    with ring_torch.debug():
        q = cp.shard(torch.zeros(1, T, HEADS, 4))
        cp.attention(q, q, q)
        expert = nn.Linear(2, 2)
        expert.weight.data.fill_(rank)
        expert.weight.grad = torch.full((2, 2), float(rank))
        torch.optim.SGD(expert.parameters(), lr=0.1).step()
        loss = torch.compile(functional.cross_entropy, backend="aot_eager", fullgraph=True)
        labels = cp.shard(torch.zeros(1, T, dtype=torch.long))
        loss(torch.randn(T // 2, VOCAB), labels.flatten())


def test_the_environment_turns_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from ring_torch.debugging import debug as module, records

    ends: list[Any] = []
    monkeypatch.setattr("atexit.register", lambda *call: ends.append(partial(*call)))
    for value, every in {"0": [], "": [], "1": [1], "every:20": [20]}.items():
        monkeypatch.setenv("RING_DEBUG", value)
        module.begin()
        gc.collect()
        assert [x.every for x in records.BLOCKS] == every
        for _ in every:
            ends.pop()()
        assert not records.BLOCKS
    monkeypatch.setenv("RING_DEBUG", "yes")
    refused(r"RING_DEBUG must be 1 .*, got 'yes'", module.begin)


@on_ranks
def test_each_nth_digest_is_exchanged(rank: int) -> None:
    cp = ContextParallel()
    with ring_torch.debug(every=2):
        cp.shard(torch.zeros(1, T))
        cp.shard(torch.full((1, T), rank))
        refused(".", cp.shard, torch.full((1, T), rank), error=RankMismatchError)
    with ring_torch.debug(every=2), pytest.raises(RankMismatchError):  # it begins again
        cp.shard(torch.full((1, T), rank))


@pytest.mark.nightly(unless=["Llama"])
@pytest.mark.parametrize("name", [*MODELS, *EXPERTS])
@on_ranks
def test_models_of_transformers_are_not_judged(name: str) -> None:
    """Check steps of tiny models in the block, whose weights are those of steps outside of it."""
    results = []
    for block in (nullcontext(), ring_torch.debug()):
        cp, model = ContextParallel(), in_training(build(name))
        hf.parallelize(model, cp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with block:
            for kind in ("plain", "right", "packed", "plain"):
                run(model, whole(kind) | WHOLE)
                cp.reduce_gradients(model)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        results.append([x.detach() for x in model.parameters()])
    torch.testing.assert_close(*results, rtol=0, atol=0)
    with ring_torch.debug():
        run(model, whole("plain") | WHOLE)
        refused(r"call cp\.reduce_gradients", optimizer.step)


@pytest.mark.nightly(only=["inductor", "compiled in place"])
@pytest.mark.parametrize("way", [
    "whole loss", "ddp", "fsdp2", "compiled", "compiled in place", "compiled step", "inductor",
    "bfloat16", "contiguous", "float64", "random", "pops",
])  # fmt: skip
@on_ranks
def test_other_right_ways_pass(way: str) -> None:
    cp = ContextParallel(layout="contiguous" if way == "contiguous" else "zigzag")
    model: Any = Model(cp).to(getattr(torch, way, torch.float32) if "float" in way else None)
    batch, is_mean = {"x": torch.randint(VOCAB, (2, T))}, way in ("ddp", "fsdp2")
    if way == "ddp":
        model = DistributedDataParallel(model)
    elif way == "fsdp2":
        fully_shard(model)
    elif way == "compiled":
        model = torch.compile(model, backend="eager", fullgraph=True)
    elif way in ("compiled in place", "inductor"):
        model.compile(backend=way if way == "inductor" else "aot_eager", fullgraph=True)

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        tokens = batch["x"]
        if way == "random":
            tokens = tokens.masked_fill(torch.rand(tokens.shape) < 0.3, 0)
        logits = model(cp.shard(tokens))
        if way == "pops":
            return ring_torch.cross_entropy(cp, logits, cp.shard(batch.pop("x")))
        if way == "whole loss":
            return cp.unshard(logits, grad="slice").square().mean()
        loss = ring_torch.cross_entropy(cp, logits, cp.shard(batch["x"]))
        return loss * cp.cp_size if is_mean else loss

    if way == "compiled step":
        step = torch.compile(step, backend="eager", fullgraph=True)
    kind: Any = "mean" if is_mean else "whole" if way == "whole loss" else "sum"
    after = (lambda _: None) if is_mean else None
    report = ring_torch.preflight(
        cp, step, model=model, batch=batch, loss=kind, after_backward=after
    )
    assert report.passed, str(report)
    assert all(x.noise < 0.01 for x in report.gradients.values()) or way == "bfloat16"


@on_ranks
def test_steps_that_preflight_fails_or_refuses(rank: int) -> None:
    step, runs = Step(rank), iter(range(9))
    model = DistributedDataParallel(step.model, gradient_as_bucket_view=True)
    # Gradients in buckets are means over the ring of parts of a sum.
    report = step.preflight(model=model, after_backward=lambda _: None)
    assert "first that of module" in str(report)
    step = Step(rank)
    refused(
        "has changed the weights", step.preflight, after_backward=lambda _: step.optimizer.step()
    )
    step = Step(rank)  # the optimizer made the weights of each rank others
    with pytest.raises(ValueError, match="nothing can be told"):
        step.preflight(lambda *x: step.loss(*x) * (-1.0 if next(runs) % 2 else 1.0))
    refused(r"step must return the loss, .* got \[2\]", step.preflight, lambda *_: torch.ones(2))

    def last_is_nan(*args: Any) -> Tensor:
        # Whole, and on the last rank alone: its gradients are right.
        return step.loss(*args) + (torch.nan if step.cp.cp_size == 1 and rank else 0.0)

    assert not step.preflight(last_is_nan).passed


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
    is_failing, place = rank == 1 or where == "alike", "split" if where == "alike" else where

    def reach(here: str) -> None:
        if is_failing and here == place:
            raise KeyError("mine")

    def step(model: Model, batch: dict[str, Tensor]) -> Tensor:
        is_split = cp.cp_size > 1
        reach("split" if is_split else "whole")
        if where == "behind a collective" and is_split:
            reach(where)
            torch.distributed.all_reduce(torch.ones(3), group=group)
        x = model(cp.shard(batch["x"])[:, :, None].float())
        x = cp.attention(*[x[..., None, :]] * 3)
        x.register_hook(lambda _: reach("backward"))
        loss = ring_torch.cross_entropy(cp, x.flatten(2), cp.shard(batch["x"]))
        reach("loss" if is_split else "")
        return loss

    options: Any = {"model": nn.Linear(1, VOCAB), "batch": batch}
    options["after_backward"] = lambda _: reach("late" if cp.cp_size > 1 else "")
    kind, start = "whole" if where == "whole" else "split", time.monotonic()
    message = f"preflight: a {kind} run failed on rank 1: KeyError: 'mine'"
    error, message = (KeyError, "mine") if is_failing else (RuntimeError, message)
    refused(message, ring_torch.preflight, cp, step, error=error, **options)
    assert time.monotonic() - start < 15
    closed = pytest.raises(RuntimeError, match=r"an earlier call .* failed on rank 1: KeyError")
    with closed if FAILING[where] else nullcontext():
        cp.check_equal(0, what="x")


def _model(rank: int, changed: str = "") -> nn.Sequential:
    """Return a model, of which one number of a weight or buffer may be other on rank 1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    if changed:
        model.state_dict()[changed].view(-1)[-1:] += rank
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
    "weight": (partial(_model, changed="0.weight"), r"rank 1: x.0.weight: float32 \[3, 4\], 1 of 12 numbers differ from rank 0's, the first at \[2, 3\]"),
    "buffer": (partial(_model, changed="1.num_batches_tracked"), r"x.1.num_batches_tracked: int64 \[\], 1 of 1"),
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
        refused(message, cp.check_equal, make(rank), what="x", error=RankMismatchError)
    cp.check_equal(rank * 0, what="x")  # the group goes on


@on_ranks
def test_each_nth_call_is_compared_along_cp(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "cp"))
    cp = ContextParallel(mesh["cp"])
    check, of_some = partial(cp.check_equal, what="x"), partial(cp.check_equal, what="y", every=2)
    of_some(0)
    of_some(rank)
    refused(".", of_some, rank, error=RankMismatchError)
    with cp.whole():
        check(rank)
    over_tp: Tensor = DTensor.from_local(torch.full((2,), float(rank)), mesh["tp"], [Shard(0)])
    refused(r"placed .*2 of 2 numbers", check, over_tp, error=RankMismatchError)
    check(distribute_tensor(torch.arange(4.0), mesh["cp"], [Shard(0)]))
    refused(r"x\['a'\]\[0\] is a object", check, {"a": [object()]})
    refused("meta", check, torch.empty(2, device="meta"), error=ring_torch.UnsupportedError)


def test_the_digest_sees_every_place() -> None:
    x, places = torch.randint(-3, 3, (5000,), dtype=torch.int8), torch.arange(5000)
    assert len({int(digest_of(x + (places == n))) for n in range(-1, 4999, 50)}) == 100
    assert digest_of(x) == digest_of(x.view(50, 100).t().contiguous().t())

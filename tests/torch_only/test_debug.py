"""``debug`` finds mistakes at the call that makes them, and is silent about all else."""

from __future__ import annotations

import gc
import inspect
import re
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import EXPERTS, MODELS, Wide, build, in_training, whole
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy as by_another_name

import ring_torch
from ring_core import RankMismatchError
from ring_torch import ContextParallel, hf

T, VOCAB, DIM, HEADS = 16, 11, 8, 2
PAGE = Path(__file__).parents[2] / "docs" / "checking.md"


class Model(nn.Module):
    """One layer of attention between an embedding and a head."""

    def __init__(self, cp: ContextParallel) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cp, self.embed = cp, nn.Embedding(VOCAB, DIM)
        self.qkv, self.head = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor, turned: bool = False, **options: Any) -> Tensor:
        q, k, v = self.qkv(self.embed(tokens)).unflatten(2, (3, HEADS, -1)).unbind(2)
        if turned:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        attend: Any = self.cp.attention
        if options.pop("by_function", False):
            attend = partial(ring_torch.ring_attention, layout=self.cp.layout)
        out = attend(q, k, v, **{"causal": True} | options)
        logits: Tensor = self.head((out.transpose(1, 2) if turned else out).flatten(2))
        return logits


class Step:
    """A step of training, of which one thing is done otherwise."""

    def __init__(self, rank: int, **other: Any) -> None:
        self.rank, self.other = rank, other
        self.cp = ContextParallel(layout=other.get("layout", "zigzag"))
        self.model = Model(self.cp)
        if other.get("has_own_weights"):
            with torch.no_grad():
                self.model.head.weight.add_(rank)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def batch(self) -> Tensor:
        """Return tokens ``[2, T + 1]``."""
        torch.manual_seed(self.rank if self.other.get("has_own") else 1)
        return torch.randint(VOCAB, (2, self.other.get("length", T) + 1))

    def loss(self, model: Any, whole: Tensor) -> Tensor:
        cp, other = self.cp, self.other
        inputs = cp.shard(whole[:, :-1], pad=True)
        logits = model(inputs, **other.get("options", {}))
        labels = other.get("labels", _sharded)(cp, whole[:, 1:])
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


def _sharded(cp: ContextParallel, labels: Tensor) -> Tensor:
    return cp.shard(labels, pad=True, fill=-100)


def _striped(_: ContextParallel, labels: Tensor) -> Tensor:
    return ContextParallel(layout="striped").shard(labels)


def _sum_by_torch(_: ContextParallel, logits: Tensor, labels: Tensor) -> Tensor:
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss / (2 * T)


def _natural(cp: ContextParallel, labels: Tensor) -> Tensor:
    own = labels.shape[1] // cp.cp_size
    return labels[:, cp.cp_rank * own : (cp.cp_rank + 1) * own]


def _torchs(_: ContextParallel, logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _torchs_by_name(_: ContextParallel, logits: Tensor, labels: Tensor) -> Tensor:
    return by_another_name(logits.flatten(0, 1), labels.view(-1))


def _of_a_class(_: ContextParallel, logits: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = nn.CrossEntropyLoss()(logits.mT, labels)
    return loss


#: Steps with a mistake: what is done otherwise, what is said of it, and the code of the line named.
MISTAKES: dict[str, tuple[dict[str, Any], str, str]] = {
    "heads before tokens": (
        {"options": {"turned": True}}, r"q is \(2, 2, 8, 4\), and 8 are the tokens", "out = attend(q, k, v"),
    "heads first, by the function": (
        {"options": {"turned": True, "by_function": True}}, r"q is \(2, 2, 8, 4\), and 8 are", "out = attend(q, k, v"),
    "`seq_len` of another length": (
        {"length": 21, "options": {"seq_len": 24}}, "seq_len=24, and the sequence has 21", "out = attend(q, k, v"),
    "`seq_len` forgotten, not causal": (
        {"length": 29, "options": {"causal": False}}, "padded to 32 at .*every token sees", "out = attend(q, k, v"),
    "labels in natural order": ({"labels": _natural}, "in natural order, and this rank holds", 'loss: Tensor = other.get("loss"'),
    "labels in another layout": (
        {"labels": _striped}, "in the layout 'striped'",
        'loss: Tensor = other.get("loss"'),
    "`F.cross_entropy` of a shard": ({"loss": _torchs}, "divides by the labels of this rank", "return functional"),
    "by name": ({"loss": _torchs_by_name}, "divides by the labels of this rank", "return by_another_name"),
    "by a class": ({"loss": _of_a_class}, "divides by the labels of this rank", "loss: Tensor = nn.Cross"),
    "batches that differ between ranks": ({"has_own": True}, "what is sharded differs", "inputs = cp.shard"),
    "clipped before the sum": (
        {"after": ("clip", "reduce")}, "clip_grad_norm_ of gradients that differ", "nn.utils.clip_grad"),
    "weights that differ between ranks": (
        {"has_own_weights": True}, "gradients that are equal for weights that differ: .*weights", "self.optimizer.step"),
    "gradients not summed": ({"after": ()}, "a step of the optimizer with gradients", "self.optimizer.step"),
}  # fmt: skip
#: Steps that are right.
RIGHT: dict[str, dict[str, Any]] = {
    "plain": {},
    "contiguous labels by hand": {"layout": "contiguous", "labels": _natural},
    "shards of padded sequences": {"length": 13},
    "seq_len": {"length": 13, "options": {"seq_len": 13, "causal": False}},
    "documents": {"options": {"cu_seqlens": (0, 5, T)}},
    "a sum by torch": {"loss": _sum_by_torch},
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
    text = PAGE.read_text().partition("| found by |")[2].partition("\n\n")[0]
    rows = [[x.strip() for x in row.split("|")[1:-1]] for row in text.splitlines()[2:]]
    return {mistake: found_by for found_by, text in rows for mistake in text.split("; ")}


@pytest.mark.nightly(unless=["heads before tokens", "labels in another layout"])
@pytest.mark.parametrize("name", [x for x in MISTAKES if x in _found_by()])
@on_ranks
def test_preflight_finds_it_too(rank: int, name: str) -> None:
    step = Step(rank, **MISTAKES[name][0])
    assert _found_by()[name] == "both"
    is_refused = "seq_len` of another" in name  # by the call on whole sequences
    with pytest.raises(ValueError, match="seq_len=24") if is_refused else nullcontext():
        report = ring_torch.preflight(
            step.cp, step.loss, model=step.model, batch=step.batch(),
            after_backward=step.after_backward,
        )  # fmt: skip
        assert not report.passed


def test_the_page_names_what_debug_finds() -> None:
    by_debug = {name for name, found_by in _found_by().items() if found_by == "both"}
    assert by_debug == {*MISTAKES} - {"by name", "by a class", "heads first, by the function"}
    by_preflight = [name for name, found_by in _found_by().items() if found_by == "`preflight`"]
    found = import_module(__name__.replace("debug", "preflight")).MISTAKES
    assert by_preflight
    assert all(any(x in name for x in found) for name in by_preflight)


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
        with pytest.raises(TypeError, match="shard"):
            cp.shard()  # type: ignore[call-arg]


def test_experts_and_compiled_calls_are_not_judged(pool: Any) -> None:
    pool.run(_others)


def _others(rank: int) -> None:
    cp = ContextParallel()
    with ring_torch.debug():
        q = cp.shard(torch.zeros(1, T, HEADS, 4))
        cp.attention(q, q, q)
        expert = nn.Linear(2, 2)
        nn.init.constant_(expert.weight, rank)
        expert(torch.ones(1, 2)).sum().backward()
        expert.bias.grad = None
        expert.weight.grad = torch.full((2, 2), float(rank))
        torch.optim.SGD(expert.parameters(), lr=0.1).step()

        @torch.compile(backend="aot_eager", fullgraph=True)
        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            return functional.cross_entropy(logits, labels)

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
    with pytest.raises(ValueError, match=r"RING_DEBUG must be 1 .*, got 'yes'"):
        module.begin()


@on_ranks
def test_each_nth_digest_is_exchanged(rank: int) -> None:
    cp = ContextParallel()
    with ring_torch.debug(every=2):
        cp.shard(torch.zeros(1, T))
        cp.shard(torch.full((1, T), rank))
        with pytest.raises(RankMismatchError):
            cp.shard(torch.full((1, T), rank))
    with ring_torch.debug(every=2), pytest.raises(RankMismatchError):  # it begins again
        cp.shard(torch.full((1, T), rank))
    with pytest.raises(ValueError, match="every must be at least 1"), ring_torch.debug(every=0):
        pass


#: Models whose batches can be split by hand.
BY_HAND = [x for x in (*MODELS, *EXPERTS) if x not in ("Llama4", "Lfm2")]


@pytest.mark.nightly(unless=["hooks-Llama", "by hand-Gemma3"])
@pytest.mark.parametrize(
    ("way", "name"),
    [*(("hooks", x) for x in (*MODELS, *EXPERTS)), *(("by hand", x) for x in BY_HAND)],
)
@on_ranks
def test_models_of_transformers_are_not_judged(way: str, name: str) -> None:
    """Check steps of tiny models in the block, whose weights are those of steps outside of it."""
    results = []
    for block in (nullcontext(), ring_torch.debug()):
        cp, model = ContextParallel(), in_training(build(name))
        if way == "hooks":
            hf.parallelize(model, cp)
        else:
            model.set_attn_implementation(hf.register())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with block:
            for kind in ("plain", "right", "packed", "plain"):
                batch = whole(kind)
                if way == "by hand":
                    batch = hf.shard_batch(cp, batch, model=model)
                with Wide():
                    loss = model(**batch, use_cache=False).loss
                loss.backward()
                cp.reduce_gradients(model)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        results.append([x.detach() for x in model.parameters()])
    torch.testing.assert_close(*results, rtol=0, atol=0)
    with ring_torch.debug():
        model(**batch, use_cache=False).loss.backward()
        with pytest.raises(ValueError, match=r"call cp\.reduce_gradients"):
            optimizer.step()

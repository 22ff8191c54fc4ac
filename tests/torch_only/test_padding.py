"""Sequences of any length: from ``shard(pad=True)`` to ``unshard(seq_len=)``."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from dense import numbers_of
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

import ring_torch
from ring_core import ChunkLayout, Layout, LayoutSpec, Mask
from ring_torch import ContextParallel
from ring_torch.sharding import UnshardGrad

RANKS = 3

LAYOUTS = ("zigzag", "contiguous", "striped")


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks
def test_there_and_back(rank: int, layout: Any) -> None:
    cp = ContextParallel(layout=layout)
    for length in range(1, 3 * cp.cp_size + 1):
        x = numbers_of(2, length, 5).requires_grad_()
        tokens = int(cp.layout_of(length, pad=True).num_tokens(rank))
        for dim, y in ((1, x), (-2, x), (0, x.transpose(0, 1))):
            slice_of_rank = cp.shard(y, dim=dim, pad=True, fill=-3.5)
            rows = slice_of_rank.movedim(dim, 0)
            assert rows[tokens:].eq(-3.5).all() and rows.is_leaf is False
            assert torch.equal(cp.unshard(slice_of_rank.detach(), dim=dim, seq_len=length), y)
        positions = cp.positions(length)
        assert torch.equal(
            cp.shard(torch.arange(length), dim=0, pad=True, fill=-1)[:tokens], positions[:tokens]
        )
        assert (positions[tokens:] >= length).all()
        # The gradient of padding is dropped, for each ``grad=`` of ``unshard``.
        weights = numbers_of(2, length, 5)
        factors: dict[UnshardGrad, int] = {"slice": 1, "sum": cp.cp_size}
        for grad, factor in factors.items():
            whole = cp.unshard(cp.shard(x, pad=True), grad=grad, seq_len=length)
            (grad_of_x,) = torch.autograd.grad((whole * weights).sum(), x)
            dist.all_reduce(grad_of_x)
            torch.testing.assert_close(grad_of_x, factor * weights)
        (grad_of_x,) = torch.autograd.grad(cp.shard(x, pad=True).sum(), x)
        dist.all_reduce(grad_of_x)
        assert grad_of_x.eq(1).all()
    labels = cp.shard(torch.ones(1, 7, dtype=torch.int64), pad=True, fill=-100)
    assert labels.dtype == torch.int64 and labels.eq(1).logical_or(labels.eq(-100)).all()
    flags = cp.shard(torch.ones(1, 7, dtype=torch.bool), pad=True)
    assert flags.dtype == torch.bool


def _alone() -> Any:
    groups = [dist.new_group([n]) for n in range(dist.get_world_size())]
    return groups[dist.get_rank()]


@on_ranks
def test_explain_tells_the_padding() -> None:
    cp = ContextParallel()
    q = cp.shard(numbers_of(1, 10, 2, 8), pad=True)
    text = cp.explain(q, q, q, causal=True, seq_len=10)
    assert "seq_len=10 (padded to 12)" in text


@pytest.mark.nightly(unless=["bias"])
@pytest.mark.parametrize("name", ["causal", "bias", "mask"])
@on_ranks
def test_in_one_graph(name: str) -> None:
    cp = ContextParallel()

    def step(x: Tensor, length: int) -> Tensor:
        q = cp.shard(x, pad=True)
        options: dict[str, Any] = {"causal": name == "causal"}
        if name == "bias":
            scores = torch.einsum("bihd,bjhd->bhij", x, x)
            options["bias"] = cp.shard(scores, dim=-2, pad=True)
        if name == "mask":
            visible = torch.arange(length)[:, None] != torch.arange(length) + 2
            options["mask"] = cp.shard(visible, dim=-2, pad=True)
        out = cp.attention(q, q, q, seq_len=length, **options)
        return cp.unshard(out, grad="slice", seq_len=length)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    grads, outs = [], []
    for function in (step, compiled):
        x = numbers_of(1, 7, 2, 8).requires_grad_()
        outs.append(function(x, 7))
        outs[-1].square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(outs[1], outs[0], rtol=0, atol=0)
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)


@on_ranks
def test_varying_lengths_are_one_graph() -> None:
    """Check that lengths with one padded length share a graph: the length is an argument."""
    cp = ContextParallel()

    def step(q: Tensor, length: int) -> Tensor:
        return cp.attention(q, q, q, seq_len=length)

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for length in (7, 8, 9, 10, 11):
        q = cp.shard(numbers_of(1, length, 2, 8), pad=True)
        torch.testing.assert_close(compiled(q, length), step(q, length), rtol=0, atol=0)
    assert (
        counter.frame_count == 2
    )  # one for the first length, one for any length that is padded to 12


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks
def test_a_padded_shard_is_known_again(layout: Any) -> None:
    """Shift, read neighbours and take losses of shards whose padding nobody names.

    The class is a length that a call reads off a shard, and that is padding's: where the shard is
    the very tensor that ``shard(pad=True)`` returned, its own length is known.
    """
    cp = ContextParallel(layout=layout)
    length, padded = 13, Layout.padded(layout, 13, cp.cp_size).padded_len
    tokens = torch.arange(1, length + 1)[None]
    labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)

    def shift(x: Tensor) -> Tensor:
        return cp.shift(x, -1, fill=-100)

    def sharded_inside(x: Tensor) -> Tensor:
        return shift(cp.shard(x, pad=True))

    def compiled(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return torch.compile(function, fullgraph=True, backend="aot_eager")

    shard = cp.shard(tokens, pad=True)
    for moved in (
        shift(shard), compiled(shift)(shard), compiled(sharded_inside)(tokens), shift(deepcopy(shard)),
        shift(shard[:]).masked_fill(cp.positions(length) >= length - 1, -100),  # a view is another tensor
    ):  # fmt: skip
        assert torch.equal(cp.unshard(moved, seq_len=length), labels), moved
        assert (cp.unshard(moved)[:, length:] == -100).all()
    # Other tensors are as long as they are, also in the graph that was compiled for this one.
    whole = torch.arange(padded)[None]
    full = compiled(shift)(cp.shard(whole))
    assert torch.equal(cp.unshard(full)[:, :-1], whole[:, 1:])
    if layout != "striped":
        rows = cp.halo(cp.shard(tokens[..., None], pad=True, fill=7), 1, 1)
        assert rows.positions.max() < length and not rows.rows[rows.positions < 0].any()
    logits = numbers_of(1, length, 20)
    part, mine = cp.shard(logits, pad=True), cp.shard(tokens, pad=True, fill=3)
    loss = ring_torch.cross_entropy(cp, part, mine)
    linear = ring_torch.linear_cross_entropy(cp, part, torch.eye(20).double(), mine)
    dist.all_reduce(loss)
    dist.all_reduce(linear)
    expected = torch.nn.functional.cross_entropy(logits[0], tokens[0])
    torch.testing.assert_close(torch.stack([loss, linear]), torch.stack([expected, expected]))
    # A length that is named counts, and one along another dimension, or of other ranks, does not.
    alone = ContextParallel(_alone())
    with cp.whole():
        assert torch.equal(cp.shift(shard, 0), shard) and torch.equal(alone.shift(shard, 0), shard)
    assert torch.equal(alone.shift(shard, 0), shard)
    assert torch.equal(cp.shift(shard, 0, seq_len=padded), shard)
    both = cp.shard(numbers_of(length, padded), dim=0, pad=True)
    assert torch.equal(
        cp.shift(both[:, : padded // cp.cp_size], 0), both[:, : padded // cp.cp_size]
    )


class _Attends(nn.Module):
    """A module that shards its input itself, or is given shards, and attends by torch's SDPA."""

    def __init__(self, split: Callable[[Tensor], Tensor], options: dict[str, Any]) -> None:
        super().__init__()
        self.split, self.options = split, options

    def forward(self, x: Tensor) -> Tensor:
        q = self.split(x).unflatten(-1, (2, -1)).transpose(1, 2)
        return scaled_dot_product_attention(q, q, q, **self.options)


@on_ranks
def test_padding_that_a_replaced_module_sees_is_refused() -> None:
    cp, length = ContextParallel(), 13
    x = numbers_of(1, length, 8)
    real = cp.positions(length) < length

    def pad(x: Tensor) -> Tensor:
        return cp.shard(x, pad=True)

    ways: list[tuple[dict[str, Any], tuple[int, ...] | None]] = [
        ({}, None), ({"is_causal": True}, None), ({"attn_mask": real[None, None, None]}, None),
        ({}, (0, length)), ({}, (0, 5, length)),
    ]  # fmt: skip
    for options, documents in ways:
        for split, batch in ((pad, x), (lambda y: y, pad(x))):
            for compiles in {False, not options}:
                torch._dynamo.reset()  # each model is a graph of its own
                model = _Attends(split, options)
                ring_torch.replace_sdpa(model, cp, documents=documents)
                call: Any = torch.compile(model, backend="aot_eager") if compiles else model
                if not options and documents is None:
                    with pytest.raises(Exception, match="the call would see the padding"):
                        call(batch)
                    assert cp._split.thread.padded is None
                    continue
                out = cp.unshard(call(batch), dim=2, seq_len=length)
                q = x.unflatten(-1, (2, -1)).transpose(1, 2)
                bounds = documents or (0, length)
                causal = "is_causal" in options
                want = [
                    scaled_dot_product_attention(*(q[:, :, a:b],) * 3, is_causal=causal)
                    for a, b in pairwise(bounds)
                ]
                torch.testing.assert_close(out, torch.cat(want, dim=2))
    # Whole lengths, behind one with padding, and local modules, are as before.
    model = _Attends(lambda y: y, {})
    ring_torch.replace_sdpa(model, cp)
    full = numbers_of(1, cp.cp_size * 6, 8)
    assert cp.unshard(model(cp.shard(full)), dim=2).shape[2] == full.shape[1]
    model = _Attends(pad, {})
    ring_torch.replace_sdpa(model, cp, local=["*"])
    assert model(x).isfinite().all()


@pytest.mark.parametrize("padded", [True, False])
@on_ranks
def test_padding_of_another_thread_is_not_seen(padded: bool) -> None:
    """Attend while another thread's forward, of the other kind of sequence, is under way."""
    cp, length = ContextParallel(), 13
    x, full = numbers_of(1, length, 8), numbers_of(1, 6 * cp.cp_size, 8)
    inputs = [cp.shard(x, pad=True), cp.shard(full)]
    is_entered, is_done = threading.Event(), threading.Event()

    def enter(y: Tensor) -> Tensor:
        is_entered.set()
        assert is_done.wait(30)
        return y

    def wait(y: Tensor) -> Tensor:
        thread.start()
        assert is_entered.wait(30)
        return y

    mine, other = inputs if padded else reversed(inputs)
    model, beside = _Attends(wait, {}), _Attends(enter, {"is_causal": True})
    for each in (model, beside):
        ring_torch.replace_sdpa(each, cp)
    thread = threading.Thread(target=beside, args=(other,))
    seen = "the call would see the padding"
    try:
        with pytest.raises(ring_torch.UnsupportedError, match=seen) if padded else nullcontext():
            out = cp.unshard(model(mine), dim=2)
    finally:
        is_done.set()
        thread.join()
    if padded:
        return
    q = full.unflatten(-1, (2, -1)).transpose(1, 2)
    torch.testing.assert_close(out, scaled_dot_product_attention(q, q, q))


CHUNKS = ChunkLayout(((1, 5), (0, 2), (3, 4)))
#: A layout and options of a strategy; ``sdpa`` gathers keys in two stages.
WAYS: dict[str, tuple[LayoutSpec, dict[str, Any]]] = {
    "ring-zigzag": ("zigzag", {"strategy": "ring"}),
    "ring-contiguous": ("contiguous", {"strategy": "ring"}),
    "ring-striped": ("striped", {"strategy": "ring"}),
    "ring-chunks": (CHUNKS, {"strategy": "ring"}),
    "balanced": ("contiguous", {"strategy": "balanced"}),
    "gather-zigzag": ("zigzag", {"strategy": "gather"}),
    "gather-contiguous": ("contiguous", {"strategy": "gather"}),
    "gather-chunks": (CHUNKS, {"strategy": "gather"}),
    "two stages-zigzag": ("zigzag", {"strategy": "gather", "kernel": "sdpa"}),
    "two stages-contiguous": ("contiguous", {"strategy": "gather", "kernel": "sdpa"}),
    "ulysses-zigzag": ("zigzag", {"strategy": "ulysses"}),
    "ulysses-contiguous": ("contiguous", {"strategy": "ulysses"}),
    "ulysses-striped": ("striped", {"strategy": "ulysses"}),
}  # fmt: skip


def _every_third(q: Any, k: Any) -> Any:
    return (k - q) % 3 != 1


#: Options for a sequence of this many tokens.
OPTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "full": lambda _: {},
    "causal": lambda _: {"causal": True},
    "window": lambda _: {"window": (2, 1)},
    "window of the past": lambda _: {"causal": True, "window": (1, 0)},
    "window of what follows": lambda _: {"window": (0, 2)},
    "chunks": lambda _: {"causal": True, "chunk_size": 2},
    "documents": lambda n: {"causal": True, "cu_seqlens": (0, n // 2, n)},
    "documents, not causal": lambda n: {"cu_seqlens": (0, 0, n // 3, n)},
    "predicate": lambda _: {"mask": Mask(predicate=_every_third)},
    "mask": lambda n: {"mask": torch.rand(n, n, generator=torch.manual_seed(n)) < 0.7},
    "mask of heads": lambda n: {
        "mask": torch.rand(1, 6, n, n, generator=torch.manual_seed(n)) < 0.7
    },
    "bias": lambda n: {"bias": numbers_of(1, 6, n, n), "causal": True},
    "sinks": lambda _: {"sinks": numbers_of(6)},
    "segment ids": lambda n: {"segment_ids": (torch.arange(n) // 2).int()[None]},
    "dropout": lambda _: {"dropout_p": 0.4, "dropout_seed": 3},
    "scores": lambda _: {"softcap": 2.0, "alibi_slopes": numbers_of(6).abs(), "softmax_scale": 0.3},
}
#: Options that a strategy refuses with or without padding, by the first word of its name.
REFUSED = {"gather": {"predicate"}, "two": {*OPTIONS} - {"full", "causal", "sinks"}}
PAIRS = [
    (name, way)
    for name in OPTIONS
    for way in WAYS
    if name not in REFUSED.get(way.partition("-")[0].partition(" ")[0], ())
]
_DIMS = {"segment_ids": 1, "mask": -2, "bias": -2}


def _leaves(length: int, options: dict[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
    """Return q, k and v, and options; their float tensors get gradients, too."""
    qkv = [numbers_of(1, length, heads, 4).requires_grad_() for heads in (6, 3, 3)]
    return qkv, {
        name: x.clone().requires_grad_() if name in ("bias", "sinks") else x
        for name, x in options.items()
    }


def _grads(qkv: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    leaves = [*qkv, *(options[name] for name in ("bias", "sinks") if name in options)]
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


@pytest.mark.nightly(
    unless=[
        "causal-two stages-zigzag", "mask-ring-zigzag", "mask of heads-gather-contiguous",
        "bias-ulysses-striped", "segment ids-ring-contiguous", "sinks-gather-contiguous",
        *(f"{name}-{way}" for name, way in PAIRS[::32]),
    ]
)  # fmt: skip
@pytest.mark.parametrize(("name", "way"), PAIRS)
@on_ranks
def test_padded_calls_are_those_of_one_process(way: str, name: str) -> None:
    layout, how = WAYS[way]
    cp, takes_lse_grad = ContextParallel(layout=layout), not way.startswith("two")
    alone: Any = [dist.new_group([n]) for n in range(RANKS)][dist.get_rank()]
    for length in range(1, 3 * RANKS + 1):
        qkv, options = _leaves(length, OPTIONS[name](length))
        like, like_options = _leaves(length, OPTIONS[name](length))
        sharded: dict[str, Any] = {
            key: cp.shard(x, dim=_DIMS[key], pad=True) if isinstance(x, Tensor) and key in _DIMS else x
            for key, x in options.items()
        }  # fmt: skip
        q, k, v = (cp.shard(x, pad=True, fill=9) for x in qkv)
        with ring_torch.check(every=1) if length in (1, 7, 9) else nullcontext():
            out, lse = cp.attention(q, k, v, seq_len=length, return_lse=True, **how, **sharded)
        lse = lse if takes_lse_grad else lse.detach()
        whole = cp.unshard(out, grad="slice", seq_len=length)
        whole_lse = cp.unshard(lse, dim=2, grad="slice", seq_len=length)
        expected, expected_lse = ring_torch.ring_attention(
            *like, group=alone, return_lse=True, kernel="eager", **like_options
        )
        torch.testing.assert_close(whole, expected, msg=f"{length} tokens: out")
        torch.testing.assert_close(whole_lse, expected_lse, msg=f"{length} tokens: lse")
        if not takes_lse_grad:
            expected_lse = expected_lse.detach()
        for results in ((whole, whole_lse), (expected, expected_lse)):
            finite = [x.masked_fill(x.isinf(), 0) for x in results]
            sum(((x * numbers_of(*x.shape)).sum() for x in finite), torch.zeros(())).backward()
        for mine, other in zip(_grads(qkv, options), _grads(like, like_options), strict=True):
            dist.all_reduce(mine)
            torch.testing.assert_close(mine, other, msg=f"{length} tokens: gradients")


@pytest.mark.parametrize(
    ("layout", "length"), [("zigzag", 17), ("contiguous", 19), ("striped", 23)]
)
@on_ranks
def test_the_error_says_how_to_pad(layout: Any, length: int) -> None:
    cp, x = ContextParallel(layout=layout), numbers_of(1, length, 2, 8)
    with pytest.raises(ValueError, match="pad to") as error:
        cp.shard(x)
    said = re.search(
        r"pad to (\d+) with zeros at the end, as shard\(x, pad=True\) does, and pass seq_len=(\d+)",
        str(error.value),
    )
    assert said is not None
    to, seq_len = int(said[1]), int(said[2])
    assert seq_len == length and to == cp.layout_of(length, pad=True).padded_len
    zeros = pad(x, (0, 0, 0, 0, 0, to - length))
    assert torch.equal(cp.shard(x, pad=True), cp.shard(zeros))


def test_a_length_of_nothing_is_no_advice() -> None:
    with pytest.raises(ValueError, match=r"pad to 1$"):
        ContextParallel().layout_of(0)

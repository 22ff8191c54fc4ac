"""Sequences of any length: from ``shard(pad=True)`` to ``unshard(seq_len=)``."""

from __future__ import annotations

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
from torch.nn.functional import scaled_dot_product_attention

import ring_torch
from ring_core import Layout
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
    """Attend to shards with padding in a replaced module: exact, or refused if it is seen."""
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
    """Attend while another thread's forward, of the other kind of sequence, is under way.

    Each forward knows the padding of its own thread: no refusal is missed, and none is wrong.
    """
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

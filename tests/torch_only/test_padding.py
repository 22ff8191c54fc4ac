"""Sequences of any length: from ``shard(pad=True)`` to ``unshard(seq_len=)``."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense import numbers_of
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

import ring_torch
from ring_core import ChunkLayout, Layout, LayoutSpec
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
        own = cp.shard(torch.arange(length), dim=0, pad=True, fill=-1)
        assert torch.equal(own[:tokens], positions[:tokens])
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
    for dtype, fill in ((torch.int64, -100), (torch.bool, False)):
        padded = cp.shard(torch.ones(1, 7, dtype=dtype), pad=True, fill=fill)
        assert padded.dtype == dtype and (padded.eq(1) | padded.eq(fill)).all()


def _alone() -> Any:
    return [dist.new_group([n]) for n in range(RANKS)][dist.get_rank()]


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
    labels = pad(tokens[:, 1:], (0, 1), value=-100)

    def shift(x: Tensor) -> Tensor:
        return cp.shift(x, -1, fill=-100)

    compiled: Any = partial(torch.compile, fullgraph=True, backend="aot_eager")

    shard = cp.shard(tokens, pad=True)
    for moved in (
        shift(shard), compiled(shift)(shard), compiled(lambda x: shift(cp.shard(x, pad=True)))(tokens), shift(deepcopy(shard)),
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
    losses = torch.stack([
        ring_torch.cross_entropy(cp, part, mine),
        ring_torch.linear_cross_entropy(cp, part, torch.eye(20).double(), mine),
    ])  # fmt: skip
    dist.all_reduce(losses)
    expected = torch.nn.functional.cross_entropy(logits[0], tokens[0])
    torch.testing.assert_close(losses, expected.expand(2))
    # A length that is named counts, and one along another dimension, or of other ranks, does not.
    alone = ContextParallel(_alone())
    with cp.whole():
        assert torch.equal(cp.shift(shard, 0), shard) and torch.equal(alone.shift(shard, 0), shard)
    assert torch.equal(alone.shift(shard, 0), shard)
    assert torch.equal(cp.shift(shard, 0, seq_len=padded), shard)
    both = cp.shard(numbers_of(length, padded), dim=0, pad=True)[:, : padded // cp.cp_size]
    assert torch.equal(cp.shift(both, 0), both)


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
    x, shard = numbers_of(1, length, 8), partial(cp.shard, pad=True)
    real = cp.positions(length) < length
    ways: list[tuple[dict[str, Any], tuple[int, ...] | None]] = [
        ({}, None), ({"is_causal": True}, None), ({"attn_mask": real[None, None, None]}, None),
        ({}, (0, length)), ({}, (0, 5, length)),
    ]  # fmt: skip
    for (options, documents), inside in product(ways, (True, False)):
        split, batch = (shard, x) if inside else (lambda y: y, shard(x))
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
            q, causal = x.unflatten(-1, (2, -1)).transpose(1, 2), "is_causal" in options
            want = [
                scaled_dot_product_attention(*(q[:, :, a:b],) * 3, is_causal=causal)
                for a, b in pairwise(documents or (0, length))
            ]
            torch.testing.assert_close(out, torch.cat(want, dim=2))
    # Whole lengths, behind one with padding, and local modules, are as before.
    model = _Attends(lambda y: y, {})
    ring_torch.replace_sdpa(model, cp)
    full = numbers_of(1, cp.cp_size * 6, 8)
    assert cp.unshard(model(cp.shard(full)), dim=2).shape[2] == full.shape[1]
    model = _Attends(shard, {})
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
#: Layouts of each strategy, and its options; ``sdpa`` gathers keys in two stages.
_LAYOUTS: dict[str, Any] = {**{x: x for x in LAYOUTS}, "chunks": CHUNKS}
WAYS: dict[str, tuple[LayoutSpec, dict[str, Any]]] = {
    f"{name}-{layout}": (_LAYOUTS[layout], options)
    for name, layouts, options in (
        ("ring", _LAYOUTS, {"strategy": "ring"}),
        ("balanced", ["contiguous"], {"strategy": "balanced"}),
        ("gather", ["zigzag", "contiguous", "chunks"], {"strategy": "gather"}),
        ("two stages", ["zigzag", "contiguous"], {"strategy": "gather", "kernel": "sdpa"}),
        ("ulysses", LAYOUTS, {"strategy": "ulysses"}),
    )
    for layout in layouts
}


#: Options for a sequence of this many tokens: masks, of which no case of the table has padding, and
#: sinks, which checks do not see in padding.
OPTIONS: tuple[Callable[[int], dict[str, Tensor]], ...] = (
    lambda _: {"sinks": numbers_of(6).requires_grad_()},
    lambda n: {"mask": torch.rand(n, n, generator=torch.manual_seed(n)) < 0.7},
    lambda n: {"mask": torch.rand(1, 6, n, n, generator=torch.manual_seed(n)) < 0.7},
)


@pytest.mark.nightly(
    unless=["two stages-zigzag", "ring-zigzag", "gather-contiguous", "ulysses-striped"]
)
@pytest.mark.parametrize("way", WAYS)
@on_ranks
def test_padded_calls_are_those_of_one_process(way: str) -> None:
    layout, how = WAYS[way]
    cp, alone = ContextParallel(layout=layout), _alone()
    made = OPTIONS[:1] if way.startswith("two") else OPTIONS  # two stages refuse masks
    for length, make in product(range(1, 3 * RANKS + 1), made):
        qkv = [numbers_of(1, length, heads, 4).requires_grad_() for heads in (6, 3, 3)]
        options = make(length)
        leaves = [*qkv, *(x for x in options.values() if x.requires_grad)]
        sharded: Any = options
        if "mask" in options:
            sharded = {"mask": cp.shard(options["mask"], dim=-2, pad=True)}
        q, k, v = (cp.shard(x, pad=True, fill=9) for x in qkv)
        with ring_torch.check(every=1) if length in (1, 7, 9) else nullcontext():
            out, lse = cp.attention(q, k, v, seq_len=length, return_lse=True, **how, **sharded)
        whole = [
            cp.unshard(x, dim=dim, grad="slice", seq_len=length) for x, dim in ((out, 1), (lse, 2))
        ]
        own: Any = {"group": alone, "return_lse": True, "kernel": "eager", **options}
        expected = [*ring_torch.ring_attention(*qkv, **own)]
        torch.testing.assert_close(whole, expected, msg=f"{length} tokens: out and lse")
        grads = []
        for results in (whole, expected):
            if way.startswith("two"):  # it takes no gradient of lse
                del results[1]
            finite = [x.masked_fill(x.isinf(), 0) for x in results]
            loss = torch.stack([(x * numbers_of(*x.shape)).sum() for x in finite]).sum()
            grads.append(torch.autograd.grad(loss, leaves, materialize_grads=True))
        for mine, other in zip(*grads, strict=True):
            dist.all_reduce(mine)
            torch.testing.assert_close(mine, other, msg=f"{length} tokens: gradients")


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks
def test_the_error_says_how_to_pad(layout: Any) -> None:
    cp, length = (
        ContextParallel(layout=layout),
        {"zigzag": 17, "contiguous": 19, "striped": 23}[layout],
    )
    x = numbers_of(1, length, 2, 8)
    with pytest.raises(ValueError, match="pad to") as error:
        cp.shard(x)
    advice = (
        r"pad to (\d+) with zeros at the end, as shard\(x, pad=True\) does, and pass seq_len=(\d+)"
    )
    (said,) = re.findall(advice, str(error.value))
    to = cp.layout_of(length, pad=True).padded_len
    assert said == (str(to), str(length))
    q = cp.shard(x, pad=True)
    assert torch.equal(q, cp.shard(pad(x, (0, 0, 0, 0, 0, to - length))))
    assert f"seq_len={length} (padded to {to})" in cp.explain(q, q, q, seq_len=length)


def test_a_length_of_nothing_is_no_advice() -> None:
    with pytest.raises(ValueError, match=r"pad to 1$"):
        ContextParallel().layout_of(0)

"""Padded sequences with each strategy, mask and option, from one token to three per rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense import numbers_of
from on_ranks import on_ranks
from torch import Tensor
from torch.nn.functional import pad

import ring_torch
from ring_core import ChunkLayout, LayoutSpec, Mask
from ring_torch import ContextParallel

RANKS = 3
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
    """Compare sequences of all lengths with one process; some calls are checked, too."""
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

"""Strategies over NCCL and peers' memory, on cases of the table, each call checked.

Also Ulysses with head counts that GPUs do not divide, compiled calls with views, and repeated
calls, of windows with sinks over gathered keys, too, as in gpt-oss.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from backends.torch_ranks import Arrays, gather, run_rank
from cases import CASES, Case
from dense import dense, errors
from tolerances import assert_close

import ring_torch
from ring_core import Mask, StrategyConfig
from ring_torch import ContextParallel, UnsupportedError
from ring_torch.local import LocalRankError

#: Strategy and transport.
WAYS = {
    "p2p": ("ring", "p2p"), "gather": ("gather", "p2p"), "symm_mem": ("gather", "symm_mem"),
    "ulysses": ("ulysses", "p2p"), "ulysses-symm_mem": ("ulysses", "symm_mem"),
}  # fmt: skip


#: Cases of two ranks under each that supports them, and cases of four in two groups of two, of
#: which every other one gathers between the groups.
ROWS: dict[str, tuple[Case, tuple[str | StrategyConfig, str]]] = {
    **{
        f"{name}-{case.name}": (case, (case.moved(strategy), transport))
        for name, (strategy, transport) in WAYS.items()
        for case in CASES.values()
        if case.cp_size == 2 and (name == "p2p" or case.strategy == "ring")
    },
    **{
        f"hybrid-{case.name}": (case, (StrategyConfig("hybrid", ulysses_size=2, outer=outer), "p2p"))
        for n, case in enumerate(CASES.values())
        if (case.cp_size, case.strategy) == (4, "ring") and case.layout != "striped"
        for outer in ("gather" if n % 2 and case.mask.predicate is None else "ring",)
    },
}  # fmt: skip


def checked(rank: int, case: Case, way: tuple[str | StrategyConfig, str]) -> Arrays | str:
    """Return a rank's part of a case, or the reason of its refusal."""
    with ring_torch.check():
        try:
            return run_rank(rank, case, ("auto", *way), None, True)
        except UnsupportedError as error:
            return str(error)


def parts_of(backend: Any, case: Case, *way: str | StrategyConfig) -> list[Any]:
    """Return what each rank computes of a case; after a failure other ranks take their place."""
    try:
        parts: list[Any] = backend.pool(case.cp_size).run(checked, case, way)
    except LocalRankError:
        backend.discard(case.cp_size)
        raise
    return parts


@pytest.mark.parametrize(("case", "way"), ROWS.values(), ids=ROWS)
def test_case(case: Case, way: tuple[str | StrategyConfig, str], backend: Any) -> None:
    parts = parts_of(backend, case, *way)
    if any(isinstance(x, str) for x in parts):
        assert way[0] == "gather", parts
        assert all(isinstance(x, str) and "'gather'" in x for x in parts), parts
    else:
        assert_close(case, gather(case, case.plan, parts))


#: Query and K/V heads by number of ranks: copied, padded, or both, and divided.
HEADS = {2: [(3, 1), (3, 3), (4, 2)], 4: [(16, 1), (7, 7), (12, 3), (14, 2), (8, 4)]}
PLAIN = Case("plain", Mask(causal=True), "zigzag", 2, 512, dims=(64, 64), dtype="bfloat16")
TRADED = {
    f"{kind}-{ranks}-{heads[0]}-{heads[1]}": replace(
        case, name=f"cuda-{kind}-{heads[0]}-{heads[1]}", cp_size=ranks, heads=heads
    )
    for ranks, some in HEADS.items()
    for heads in some
    for kind, case in {
        "plain": PLAIN,
        "window": replace(PLAIN, mask=Mask(causal=True, window=(100, 0)), sinks=0, batch=2),
        "all": Case(
            "all", Mask(causal=True), "striped", seq_len=64, kv_seq_len=96, batch=2, dims=(16, 8),
            softcap=3.0, sinks=2, bias="shared" if heads[0] % 2 else "heads", alibi=2, dropout_p=0.2,
            segments="pair", lse_grad=True,
        ),
        "shifted": replace(PLAIN, bias="very-negative", dropout_p=0.1, seq_len=128),
    }.items()
}  # fmt: skip


@pytest.mark.parametrize("transport", ["p2p", "symm_mem"])
@pytest.mark.parametrize("case", TRADED.values(), ids=TRADED)
def test_heads(case: Case, transport: str, backend: Any) -> None:
    assert_close(case, gather(case, case.plan, parts_of(backend, case, "ulysses", transport)))


def _compiled(rank: int, case: Case, kernel: str) -> Arrays:
    torch._dynamo.reset()
    call = torch.compile(ring_torch.ring_attention, fullgraph=True)
    with patch.object(ring_torch, "ring_attention", call):
        return run_rank(rank, case, (kernel, "auto", "auto"), None, cuda=True)


@pytest.mark.parametrize("turn", range(1, 8))
@pytest.mark.parametrize(
    ("kernel", "dtype"), [("triton", "float32"), ("triton", "bfloat16"), ("auto", "bfloat16")]
)
def test_compiled(kernel: str, dtype: str, turn: int, backend: Any) -> None:
    """Results have the strides that the graph expects; Triton's kernels are exact in float32."""
    inputs = "" if kernel == "triton" else "-few"
    case = replace(CASES[f"views{turn}{inputs}-zigzag"], cp_size=1, dtype=dtype, dims=(64, 64))
    parts = backend.pool(1).run(_compiled, replace(case), kernel)
    assert_close(case, gather(case, case.plan, parts))


def on_a_rank(
    _: int, layout: Any, heads: tuple[int, int], window: int | None, dtype: torch.dtype
) -> list[list[float]]:
    """Return errors of some calls' results, relative to those of dense attention in bfloat16.

    A window has sinks. From the third call on the tokens of each head of K/V are contiguous.
    """
    torch.manual_seed(0)
    q_heads, kv_heads = heads
    *qkv, dout = whole = [
        torch.randn(1, 4096, h, 64, device="cuda").bfloat16()
        for h in (q_heads, kv_heads, kv_heads, q_heads)
    ]
    sinks = [torch.randn(q_heads, device="cuda").to(dtype).requires_grad_()] if window else []
    exact, plain = (
        dense(*(x.to(kind) for x in whole), window=window, sinks=sinks[0].to(kind) if sinks else None)
        for kind in (torch.float32, torch.bfloat16)
    )  # fmt: skip
    cp, options = ContextParallel(layout=layout), dict[str, Any]()
    if window:
        options = {"window": (window - 1, 0), "sinks": sinks[0], "strategy": "gather"}
    q, k, v = (cp.shard(x).requires_grad_() for x in qkv)
    errors_of_calls = []
    for turn in range(5):
        if turn == 2:
            k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
            k.requires_grad_()
            v.requires_grad_()
        out = cp.attention(q, k, v, causal=True, **options)
        grads = torch.autograd.grad(out, (q, k, v, *sinks), cp.shard(dout))
        results = [cp.unshard(x.detach()) for x in (out, *grads[:3])]
        for part in grads[3:]:
            results.append(part.float())
            dist.all_reduce(results[-1])
        errors_of_calls.append(errors(results, exact, plain))
    return errors_of_calls


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "row",
    [
        *product(["contiguous", "zigzag"], [(16, 2)], [128, 200], [torch.bfloat16, torch.float32]),
        # Grouped heads take FlashAttention-4's split backward, others do not.
        *product(["zigzag"], [(8, 2), (4, 4)], [None], [torch.bfloat16]),
    ],
)
def test_repeated_calls(row: tuple[Any, ...], backend: Any) -> None:
    for errors_of_calls in backend.pool(2).run(on_a_rank, *row):
        assert max(map(max, errors_of_calls)) < 2, errors_of_calls

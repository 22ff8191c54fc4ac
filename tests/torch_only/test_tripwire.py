"""The check for running jobs: right calls pass it, and each fault trips it on all ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import mutants
import numpy as np
import pytest
import torch
import torch.distributed as dist
from dense import numbers
from on_ranks import on_ranks
from patched import chosen
from plain_flash import FLASH
from refused import refused
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import ring_torch
from ring_core import StrategyConfig
from ring_core.base.config import OUTER_NAMES
from ring_torch import ContextParallel, RankMismatchError, WrongResultError, ring_attention
from ring_torch.call import Call
from ring_torch.checking import settings as check_settings, watch
from ring_torch.comm.ranks import DONE, Ranks, Transfer
from ring_torch.kernels.eager import EagerKernel
from ring_torch.prepare import _prepare
from ring_torch.strategies.ring import Ring
from ring_torch.tripwire import samples as tripwire_samples

Patches = list[tuple[Any, str, Any]]
SIZE = 3


def around(target: Any, name: str, wrong: Callable[..., Any]) -> Patches:
    """Return the patch of a method by ``wrong(right, *args)``."""
    right = getattr(target, name)
    return [(target, name, lambda *args: wrong(right, *args))]


def keys_one_hop_late() -> Patches:
    """Fault: a step computes with the K/V of the step before, at its own positions."""
    last: list[list[torch.Tensor]] = []

    def wrong(right: Any, call: Any, rank: int, tensors: Any) -> Any:
        last.append([x.clone() for x in tensors])
        return right(call, rank, last[-2] if len(last) > 1 else tensors)

    return around(Call, "columns", wrong)


def in_kernels(change: Callable[..., Any]) -> Patches:
    """Fault: kernels get another item or other parameters than they should."""

    def wrong(right: Any, kernel: Any, item: Any, params: Any, *rest: Any) -> Any:
        return right(kernel, *change(item, params), *rest)

    return [x for name in ("attend", "differentiate") for x in around(EagerKernel, name, wrong)]


def scaled(method: str, pick: Callable[..., Tensor], by: float = 1.01) -> Patches:
    """Fault: kernels are off by 1 % in what is picked of a method's result and arguments."""

    def wrong(right: Any, *args: Any) -> Any:
        result = right(*args)
        pick(result, *args).mul_(by)
        return result

    return around(EagerKernel, method, wrong)


def one_head_wrong() -> Patches:
    """Fault: the forward is wrong in its last head."""
    return scaled("attend", lambda result, *_: result.out[:, :, -1])


def one_head_of_dk_wrong(by: float = 1.01) -> Patches:
    """Fault: the backward is wrong in dK of the first K/V head."""
    return scaled("differentiate", lambda *args: args[-1].dk[:, :, 0], by)


def nothing_is_sent() -> Patches:
    """Fault: no message but headers is sent, so receivers read what was in memory."""

    def wrong(right: Any, ring: Any, sends: Any, receives: Any) -> Any:
        if all(x.nbytes == 2048 for x, _ in (*sends, *receives)):  # headers, and the check's
            return right(ring, sends, receives)
        for x, _ in receives:
            x.zero_()
        return Transfer()

    return around(Ranks, "start", wrong)


def gradients_to_the_wrong_owner() -> Patches:
    """Fault: dK and dV end one rank too far."""

    def wrong(right: Any, strategy: Any, call: Any, *args: Any) -> Any:
        grads, ring = right(strategy, call, *args), call.ranks
        came = grads._replace(dk=torch.empty_like(grads.dk), dv=torch.empty_like(grads.dv))
        ring.start(
            [(grads.dk, ring.next), (grads.dv, ring.next)],
            [(came.dk, ring.previous), (came.dv, ring.previous)],
        ).wait()
        return came

    return around(Ring, "backward", wrong)


FAULTS: dict[str, Callable[[], Patches]] = {
    "one_head_wrong": one_head_wrong, "one_head_of_dk_wrong": one_head_of_dk_wrong,
    "nothing_is_sent": nothing_is_sent, "keys_one_hop_late": keys_one_hop_late,
    "gradients_to_the_wrong_owner": gradients_to_the_wrong_owner,
    # The backward uses the K/V that arrived last in another call.
    "stale_keys_in_the_backward": lambda: around(
        Ring, "backward", lambda right, *args: right(*args[:-1], [x.roll(256) for x in args[-1]])
    ),
    "scale_dropped": lambda: in_kernels(lambda item, x: (item, replace(x, scale=16**-0.5))),
    "another_mask_on_one_rank": lambda: in_kernels(
        lambda item, x: (replace(item, lo=None, hi=None) if item.q_rank == 1 else item, x)
    ),
}  # fmt: skip
#: Mutants of the test suite, which change the program, the plan's arithmetic, or what a step does.
MUTANTS = (
    "last-step-dropped", "window-off-by-one", "local-positions", "sink-per-step",
)  # fmt: skip


@contextmanager
def broken(fault: str | Patches) -> Iterator[None]:
    """Apply a fault, or a mutant of the suite, with a fresh cache of prepared calls."""
    with ExitStack() as stack:
        stack.callback(_prepare.cache_clear)
        if isinstance(fault, str) and fault not in FAULTS:
            stack.enter_context(mutants.applied(fault))
        else:
            for patched in FAULTS[fault]() if isinstance(fault, str) else fault:
                stack.enter_context(patch.object(*patched))
        _prepare.cache_clear()
        yield


def attend(rank: int, **options: Any) -> None:
    """Run both passes of a call whose window shows each rank a part of every other's keys."""
    torch.manual_seed(rank)
    q, k, v = (torch.randn(2, 12, heads, 16).requires_grad_() for heads in (4, 2, 2))
    results: Any = ring_torch.ring_attention(
        q, k, v, window=(20, 3), softmax_scale=0.4,
        **{"kernel": "eager", "strategy": "ring", "sinks": torch.zeros(4)} | options,
    )  # fmt: skip
    results = results if isinstance(results, tuple) else (results,)
    torch.autograd.backward(results, [torch.randn(x.shape) for x in results])


def errors(calls: int, call: Callable[[], object]) -> list[str]:
    """Return the errors of calls that the check finds wrong; of others, empty strings."""
    messages = []
    for _ in range(calls):
        try:
            call()
            messages.append("")
        except WrongResultError as error:
            messages.append(str(error))
    return messages


def tripped(rank: int, fault: str, options: dict[str, Any]) -> list[str]:
    """Return the first error of checked calls under a fault, and make a right call after them."""
    messages = list[str]()
    with ring_torch.check(), broken(fault):
        while len(messages) < 3 and not any(messages):
            messages += errors(1, lambda: attend(rank, **options))
    with ring_torch.check():
        attend(rank, **options)
    return messages


IN_GROUPS: dict[str, Any] = {
    "strategy": StrategyConfig("hybrid", ulysses_size=2), "layout": "zigzag", "sinks": torch.arange(4.0),
}  # fmt: skip
SENT = " bytes were sent, and the program sends "
FORWARD, BACKWARD = (f"({x}) is wrong. rank " for x in ("forward", "backward"))
IN_BACKWARD = ("stale_keys_in_the_backward", "gradients_to_the_wrong_owner", "one_head_of_dk_wrong")


@pytest.mark.parametrize(
    ("fault", "words", "is_hybrid"),
    [
        *((x, BACKWARD if x in IN_BACKWARD else FORWARD, False) for x in (*FAULTS, *MUTANTS)),
        ("nothing_is_sent", SENT, True), ("options-of-the-first-heads", FORWARD, True),
        ("gradients_to_the_wrong_owner", BACKWARD, True),
    ],
)  # fmt: skip
def test_a_fault_trips(fault: str, words: str, is_hybrid: bool, backend: Any) -> None:
    size, options = (4, IN_GROUPS) if is_hybrid else (SIZE, {})
    by_rank = backend.pool(size).run(tripped, fault, options)
    assert all(messages == by_rank[0] for messages in by_rank), "all ranks raise the same"
    text = by_rank[0][-1]
    assert text, "one of three calls at least shows it"
    assert words in text
    assert f"Kernel 'eager', strategy '{'hybrid' if is_hybrid else 'ring'}' over 'p2p'" in text
    if fault == "one_head_wrong":  # the error names the entry
        assert "rank 0: out[" in text and "rank 2: out[" in text
        assert ", 3, " in text.split("out[")[1].split("]", maxsplit=1)[0], "the head"
        assert "of [2, 12, 4, 16] is " in text
        assert "by the dense formula in float64" in text
    if fault == "nothing_is_sent" and not is_hybrid:
        assert f"2,048{SENT}" in text


@pytest.mark.parametrize("strategy", ["ring", "balanced", "gather", "ulysses"])
@on_ranks
def test_right_calls_pass(rank: int, strategy: str) -> None:
    """Also with a bias whose rows are shifted."""
    layout = "contiguous" if strategy == "balanced" else "zigzag"
    options: dict[str, Any] = {"strategy": strategy, "layout": layout, "kernel": "auto"}
    bias = torch.zeros(1, 1, 12, 24).index_fill(3, torch.arange(8), -1e10).requires_grad_()
    with ring_torch.check():
        for return_lse in (False, True, True):  # the last with a gradient through lse
            attend(rank, return_lse=return_lse, **options)
        for more in ({}, {"segment_ids": IDS}):
            attend(rank, sinks=None, bias=bias, return_lse=True, **options, **more)
        with torch.no_grad():
            attend_only(rank, torch.bfloat16, options)
        if strategy == "gather":  # a graph is checked as a call is, whatever the strategy
            compiled = torch.compile(attend_only, backend="aot_eager", fullgraph=True)
            compiled(rank, torch.float32, options)


def attend_only(rank: int, dtype: torch.dtype, options: dict[str, Any]) -> torch.Tensor:
    q, k, v = (torch.full((1, 8, heads, 16), 0.1 + rank, dtype=dtype) for heads in (4, 2, 2))
    out = ring_torch.ring_attention(q, k, v, causal=True, **options | {"sinks": None})
    assert isinstance(out, torch.Tensor)
    return out


IDS = (torch.arange(12).expand(2, 12) // 5).int()


def attend_with_all(rank: int, strategy: Any) -> None:
    """Make right calls in which a bias, its shift and gradient, ids and padding travel."""
    options: Any = {"strategy": strategy, "layout": "zigzag", "segment_ids": IDS}
    with ring_torch.check():
        for bias_heads, sinks in ((1, torch.zeros(4)), (4, None)):
            bias = numbers(rank, 1, bias_heads, 12, 12 * dist.get_world_size()).float()
            attend(rank, sinks=sinks, bias=bias, return_lse=True, **options)
            bias.requires_grad_()
            attend(rank, sinks=sinks, bias=bias, dropout_p=0.2, dropout_seed=5, **options)


#: Three ranks divide neither number of heads.
TRAVELS: dict[str, tuple[int, Any]] = {"ulysses": (3, "ulysses")} | {
    x: (4, StrategyConfig("hybrid", ulysses_size=2, outer=x)) for x in OUTER_NAMES
}


@pytest.mark.parametrize("name", TRAVELS)
def test_right_calls_with_all_that_travels_pass(name: str, backend: Any) -> None:
    size, strategy = TRAVELS[name]
    backend.pool(size).run(attend_with_all, strategy)


@pytest.mark.parametrize(
    ("variable", "every", "expected"),
    [
        (None, None, []), ("0", None, []), ("1", None, [1, 2, 3, 4]), ("every:2", None, [2, 4]),
        ("1", 0, []), (None, 3, [3]), ("0", 1, [1, 2, 3, 4]),
    ],
)  # fmt: skip
@on_ranks
def test_which_calls_are_checked(
    rank: int, variable: str | None, every: int | None, expected: list[int]
) -> None:
    environment = {} if variable is None else {"RING_CHECK": variable}
    check = nullcontext() if every is None else ring_torch.check(every)
    group = dist.new_group()  # calls of a group are numbered
    with patch.dict(os.environ, environment), check, broken("one_head_wrong"):
        messages = errors(4, lambda: attend(rank, group=group))
    assert [n for n, message in enumerate(messages, 1) if message] == expected


def test_a_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with ring_torch.check(), warnings.catch_warnings():
        warnings.simplefilter("error")
        attend(0)
        with broken("one_head_wrong"):
            refused("1 ranks", attend, 0, error=WrongResultError)
    monkeypatch.setattr(tripwire_samples, "peak_tflops", lambda _: 989.5)
    with ring_torch.check():
        attend(0)  # a CPU is slower than that
        with monkeypatch.context() as patched:
            patched.setattr(watch.Watch, "seconds", 1e-12)
            refused("TFLOP/s, and the device has 990", attend, 0, error=WrongResultError)
    monkeypatch.setattr(check_settings, "is_capturing", lambda: True)
    message = "captured into a CUDA graph are not checked"
    with ring_torch.check(), broken("one_head_wrong"), pytest.warns(UserWarning, match=message):
        attend(0)


@on_ranks
def test_ranks_with_unlike_settings_are_told(rank: int) -> None:
    cp = ContextParallel()
    for call in (lambda: attend(rank), lambda: cp.shift(torch.ones(1, T // RANKS), 1)):
        with ring_torch.check(rank), pytest.raises(RankMismatchError, match="check is"):
            call()


def _attend(q: Tensor, k: Tensor, v: Tensor, cp: ContextParallel | None = None) -> Tensor:
    options: Any = {"causal": True, "kernel": "eager", "strategy": "ring"}
    out: Tensor = (ring_attention if cp is None else cp.attention)(q, k, v, **options)
    return out.sin()


def _compiled(*args: Any) -> Tensor:
    torch._dynamo.reset()
    out: Tensor = torch.compile(_attend, backend="aot_eager", fullgraph=True)(*args)
    return out


WAYS: dict[str, Callable[..., Any]] = {
    "eager": _attend, "compiled": _compiled,
    "checkpointed": lambda *x: checkpoint(_attend, *x, use_reentrant=False),
    "reentrant": lambda *x: checkpoint(_attend, *x, use_reentrant=True),
}  # fmt: skip
WRONG_GRADS = one_head_of_dk_wrong(1.5)


def _inputs(rank: int) -> list[Tensor]:
    torch.manual_seed(rank)
    return [torch.randn(1, 16, heads, 8).requires_grad_() for heads in (4, 2, 2)]


def _raised(rank: int, way: str, forward: int, backward: int) -> list[str]:
    """Return the errors of a wrong backward, given the check's settings around either pass."""
    with broken(WRONG_GRADS):
        with ring_torch.check(forward):
            out = WAYS[way](*_inputs(rank))

        def run() -> None:
            with ring_torch.check(backward):
                out.sum().backward()

        # Autograd runs backwards on GPUs in another thread.
        with ThreadPoolExecutor(1) as threads:
            return [*filter(None, threads.submit(errors, 1, run).result())]


@pytest.mark.nightly(only=["compiled-2"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_the_forward_decides(way: str, size: int, backend: Any) -> None:
    """But of a reentrant checkpoint the backward, as that makes the call again."""
    checked, other = ((0, 1), (1, 0)) if way == "reentrant" else ((1, 0), (0, 1))
    for raised in backend.pool(size).run(_raised, way, *checked):
        assert len(raised) == 1 and "(backward) is wrong" in raised[0]
    assert backend.pool(size).run(_raised, way, *other) == [[]] * size


@pytest.mark.nightly(only=["compiled"])
@pytest.mark.parametrize("way", ["eager", "compiled"])
@on_ranks
def test_both_passes_are_of_one_number(rank: int, way: str) -> None:
    """Every third call is checked, in both passes: a compiled backward is not counted as a call."""
    group: Any = dist.new_group()
    cp = ContextParallel(group)
    with ring_torch.check(3), broken(WRONG_GRADS):
        messages = errors(6, lambda: WAYS[way](*_inputs(rank), cp).sum().backward())
    assert [n for n, message in enumerate(messages, 1) if message] == [3, 6]


T, RANKS = 40, 2


#: Movements of a rank's slice; the second argument is context parallelism of rank 1 alone.
MOVES: dict[str, Callable[[ContextParallel, ContextParallel, Tensor], Tensor]] = {
    "shift": lambda cp, _, x: cp.shift(x, 3, cu_seqlens=(0, 7, 9, T - 1), seq_len=T - 1),
    "halo": lambda cp, _, x: cp.halo(x, 3, 2).rows,
    "relayout": lambda cp, _, x: cp.relayout(x, to="striped"),
    "relayout to one rank": lambda cp, one, x: cp.relayout(x, to=one, seq_len=T),
}


def moves(name: str) -> Callable[[Tensor], Tensor]:
    """Return a movement with its ``ContextParallel`` objects."""
    cp, one_rank = ContextParallel(), ContextParallel(DeviceMesh("cpu", [1]))
    return lambda x: MOVES[name](cp, one_rank, x)


def more_rows() -> Patches:
    """Fault: each peer receives its last row twice, and drops the second copy."""

    def wrong(right: Any, ranks: Ranks, sends: Any, receives: Any) -> Any:
        if any(x.nbytes == 2048 for x, _ in (*sends, *receives)):  # headers, and findings
            return right(ranks, sends, receives)
        longer, sent = (
            [(torch.cat([x, x[-16:]]), peer) for x, peer in y] for y in (receives, sends)
        )
        right(ranks, sent, longer).wait()
        for (x, _), (y, _) in zip(receives, longer, strict=True):
            x.copy_(y[: len(x)])
        return DONE

    return around(Ranks, "start", wrong)


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("name", MOVES)
@on_ranks
def test_more_bytes_than_those_of_rows_that_move_are_an_error(name: str, how: str) -> None:
    move, kind = moves(name), name.partition(" ")[0]
    if how == "compiled":
        torch._dynamo.reset()
        move = torch.compile(move, backend="aot_eager", fullgraph=True)
    x = torch.ones(1, T // RANKS, 2, dtype=torch.float64).requires_grad_()
    sent = "bytes were sent, and the rows that change rank have"
    with ring_torch.check():
        with broken(more_rows()):
            refused(rf"\({kind}\) is wrong. rank (.|\n)*{sent}", move, x, error=WrongResultError)
        out = move(x)
    with broken(more_rows()):  # of a checked movement, so checked outside of the block, too
        said = rf"\({kind} backward\) is wrong. rank "
        refused(said, out.sum().backward, error=WrongResultError)


@on_ranks
def test_right_movements_pass() -> None:
    for move in map(moves, MOVES):
        x = torch.randn(1, T // RANKS, 2, dtype=torch.float64).requires_grad_()
        with ring_torch.check():
            out = move(x)
            (grad,) = torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)
            grad.sum().backward()
            move(torch.ones(2, T // RANKS, dtype=torch.int8))
            move(torch.ones(2, T // RANKS, 0))
        assert torch.equal(out, move(x))


DTYPES = ("bfloat16", "float16", "float32", "float64")
KERNELS = {"eager": EagerKernel(), "flash": FLASH}
SMALL_CALLS = 50  # calls of each kernel and dtype in a part
PARTS = 12


def small_call(seed: int, dtype: torch.dtype) -> None:
    """Run both passes of random inputs: even to peaked scores, K/V independent to nearly equal."""
    rng = np.random.default_rng(seed)
    batch, length = int(rng.integers(1, 3)), int(rng.integers(1, 9))
    kv_heads, group = int(rng.choice([1, 2])), int(rng.choice([1, 2]))
    dim, v_dim = (int(rng.choice([1, 4, 16])) for _ in range(2))
    q_size, shift = float(rng.choice([1, 6, 20])), float(rng.choice([0, 0, 5]))

    def random(heads: int, dim: int) -> Tensor:
        return torch.as_tensor(rng.standard_normal((batch, length, heads, dim)))

    q, dout = q_size * random(kv_heads * group, dim), random(kv_heads * group, v_dim)
    k, v = (shift + random(kv_heads, n) for n in (dim, v_dim))
    options: dict[str, Any] = {"window": (2, 9), "softmax_scale": 0.3}
    if rng.random() < 0.5:
        options["sinks"] = torch.as_tensor(rng.standard_normal(kv_heads * group)).to(dtype)
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    out: Any = ring_attention(*leaves, **options)
    torch.autograd.grad(out, leaves, dout.to(dtype))


def found_wrong(seeds: range, dtype: str) -> list[str]:
    """Return the error of each call that the check finds wrong."""
    calls = iter(seeds)
    with ring_torch.check():
        messages = errors(len(seeds), lambda: small_call(next(calls), getattr(torch, dtype)))
    return [text.partition(". Kernel")[0] for text in messages if text]


@pytest.mark.nightly(
    unless=["eager-float32-0", "eager-bfloat16-0", "flash-float16-0", "flash-float64-0"]
)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_right_small_calls_pass(kernel: str, dtype: str, part: int) -> None:
    with chosen(KERNELS[kernel]):  # with float32 sums: plain, or rounding as fused ones do
        assert found_wrong(range(part * SMALL_CALLS, (part + 1) * SMALL_CALLS), dtype) == []


@pytest.mark.nightly(unless=["float16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_small_calls_trip(dtype: str) -> None:
    with chosen(KERNELS["eager"]), broken(WRONG_GRADS):
        calls_found_wrong = found_wrong(range(40), dtype)
    assert len(calls_found_wrong) >= 10
    assert all("(backward)" in text for text in calls_found_wrong)

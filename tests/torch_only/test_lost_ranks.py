"""Ranks killed, stopped or cut off in a step, missing in a call, or failing in a pass.

The others raise an error in time, which names the rank where it can; a pass that fails closes the
group, which is closed in forks of its process, too.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch
from weakref import ReferenceType, ref

import pytest
import torch
import torch.distributed as dist
from dense import is_exact
from lost import LONGEST, LOSSES, MOVEMENTS, STEPS, Loss, Steps, lose, steps
from on_ranks import on_ranks
from patched import replaced
from refused import refused
from torch import Tensor

from ring_core import StrategyConfig
from ring_torch import ContextParallel, ring_attention
from ring_torch.comm import handshake
from ring_torch.comm.groups import hosts_of
from ring_torch.comm.ranks import PeerError, Ranks, peer_errors, ranks_of, run_collective
from ring_torch.comm.state import QueuedPass
from ring_torch.kernels import eager, sdpa
from ring_torch.local import LocalRankError, LocalRanks
from ring_torch.strategies import ask_ranks


@pytest.fixture(scope="module")
def right() -> list[Steps]:
    """Return the results of the steps without a fault."""
    with LocalRanks(3) as pool:
        return pool.run(steps, None, {})


#: The number of ranks, and options of a step. Of `hybrid` both Ulysses groups end: the lost rank's
#: own, and the one that it exchanges with.
STEPS_OF: dict[str, tuple[int, dict[str, Any]]] = {
    "": (3, {}), "-hybrid": (4, {"strategy": StrategyConfig("hybrid", ulysses_size=2)}),
    **{f"-{name}": (3, {"movement": name}) for name in MOVEMENTS},
}  # fmt: skip
RUNS = {"-".join(loss[:3]) + end: (loss, *run) for loss in LOSSES for end, run in STEPS_OF.items()}
RUNS["late"] = Loss("late", "forward", "before", step=0), 3, {}  # not there for the first call
PER_CHANGE = (
    *("-".join(loss[:3]) for loss in LOSSES), "late", "killed-forward-during-hybrid",
    "killed-backward-during-hybrid", "killed-forward-during-shift", "killed-backward-during-halo",
)  # fmt: skip


@pytest.mark.nightly(unless=PER_CHANGE)
@pytest.mark.parametrize("name", RUNS)
def test_others_end_in_an_error_in_time(name: str, right: list[Steps]) -> None:
    loss, ranks, options = RUNS[name]
    outcome = lose(loss, ranks, options)
    assert outcome.seconds < LONGEST and outcome.staying == []
    for rank, (ok, answer) in outcome.survivors.items():
        assert ok, answer
        assert min(loss.step, 1) <= len(answer.sums) < STEPS and answer.error is not None
        if not options:
            assert answer.sums == right[rank].sums[: len(answer.sums)]
    ok, answer = outcome.lost
    if loss.how in ("killed", "stopped"):
        assert (ok, answer) == (False, f"died with exit code {-signal.SIGKILL}")
    elif ok:
        assert answer.error is not None
    else:  # gloo aborts
        assert answer == f"died with exit code {-signal.SIGABRT}"


def _slowly(rank: int, seconds: float) -> tuple[int, float]:
    if rank == 0 and seconds:
        raise ValueError("rank 0 refuses")
    time.sleep(seconds)
    return rank, seconds


def test_an_answer_that_comes_too_late_is_not_taken_for_that_of_the_next_call() -> None:
    """A failing rank ends the run of all at once, which would wait for it for ten minutes."""
    with LocalRanks(2, timeout=600) as ranks:
        answers = ranks.answers(_slowly, 1.5, grace=0.2)
        assert "rank 0 refuses" in answers[0][1]
        assert answers[1] == (False, "no answer in time")
        assert ranks.run(_slowly, 0.0) == [(0, 0.0), (1, 0.0)]


TIMEOUT = timedelta(seconds=2)
BROKEN = 1  # this rank runs out of memory
LENGTHS = {"short": 8, "long": 256}  # bytes of K/V as many as a header's, and more


def _attend(length: int, group: Any = None, **options: Any) -> tuple[Tensor, Tensor]:
    x = torch.ones(1, length, 2, 16, requires_grad=True)
    return x, ring_attention(x, x, x, group=group, **options)


def _words(function: Any) -> str:
    try:
        function()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "a result"


_no_memory: Any = Mock(side_effect=torch.OutOfMemoryError("played: out of memory"))


def _fail_once(rank: int, where: str, length: int, strategy: Any) -> None:
    """Check the errors of a failing call, the next one and its backward; then use a new group."""
    x, out = _attend(length, strategy=strategy)  # imports everything before the failure
    out.sum().backward()
    broken: Any = dist.new_group(timeout=TIMEOUT)
    kernels, is_backward = (eager.EagerKernel, sdpa.CpuFlashKernel), where == "backward"
    failing: dict[str, Callable[[], Any]] = {
        "agreement": partial(patch.object, handshake.Header, "of", _no_memory),
        "forward": partial(replaced, *kernels, attend=_no_memory),
        "backward": partial(replaced, *kernels, differentiate=_no_memory),
    }

    def again() -> tuple[Tensor, Tensor]:
        return _attend(length, broken, strategy=strategy)

    kept = again()[1]
    with failing[where]() if rank == BROKEN else nullcontext():
        if is_backward:  # its launches were made with the forward's
            kept = again()[1]
        first = _words(kept.sum().backward if is_backward else again)
    second, *later = _words(again), _words(lambda: ContextParallel(broken).unshard(x))
    later += [] if is_backward else [_words(kept.sum().backward)]
    name, error = (
        "backward" if is_backward else "forward",
        "OutOfMemoryError: played: out of memory",
    )
    said = f"({name}) failed on rank {BROKEN} of the group: {error}"
    if rank == BROKEN:
        assert first == error
        later.append(second)
    else:  # a rank that had all it needed learns of the failure in the next pass
        assert said in first or (first == "a result" and said in second), (first, second)
    for message in later:
        assert "an earlier call on this process group failed" in message
        assert said in message and "new_group" in message
    group: Any = dist.new_group()
    assert is_exact(ContextParallel(group), strategy=strategy)


#: Strategies, and the number of ranks.
STRATEGIES: dict[str, tuple[Any, int]] = {
    "ring": ("ring", 2), "gather": ("gather", 2),
    "hybrid-ring": (StrategyConfig("hybrid", ulysses_size=2), 4),
    "hybrid-gather": (StrategyConfig("hybrid", ulysses_size=2, outer="gather"), 4),
}  # fmt: skip


@pytest.mark.nightly(unless=[
    "forward-short-ring", "forward-long-gather", "backward-long-ring", "agreement-long-gather",
    "backward-short-hybrid-ring",
])  # fmt: skip
@pytest.mark.parametrize(
    ("where", "length", "strategy"),
    [
        (where, length, strategy)
        for where in ("forward", "backward", "agreement") for length in LENGTHS for strategy in STRATEGIES
        if "hybrid" not in strategy or (where, length) in (("forward", "short"), ("backward", "short"))
    ],
)  # fmt: skip
def test_a_failed_pass_is_named_on_all_ranks(
    where: str, length: str, strategy: str, pools: dict[int, LocalRanks]
) -> None:
    config, ranks = STRATEGIES[strategy]
    pools[ranks].run(_fail_once, where, LENGTHS[length], config)


def _in_a_child(_: int) -> list[str]:
    """Return outcomes of calls in a forked process, on a group that was used and on another."""
    groups: list[Any] = [dist.new_group(timeout=TIMEOUT) for _ in range(2)]
    x, out = _attend(8, groups[0])
    calls: list[Callable[[], object]] = [
        *(partial(_attend, 8, group) for group in groups),
        out.sum().backward,
        lambda: ContextParallel(groups[1]).unshard(x),
        lambda: ask_ranks(ranks_of(groups[1])),
        lambda: hosts_of(ranks_of(groups[1]), torch.device("cpu"), wait=False),
        lambda: ContextParallel(groups[1]).shard(x).shape,  # nothing is sent
    ]
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            for call in calls:
                os.write(writer, f"{_words(call)}\n".encode())
        finally:  # on any error: a second process must not serve the pool
            os._exit(0)
    os.close(writer)
    dist.barrier()  # this process continues
    with os.fdopen(reader) as file:
        answers = file.read().splitlines()
    os.waitpid(child, 0)
    return answers


def test_a_forked_child_refuses_the_groups_of_its_parent(pool: LocalRanks) -> None:
    for *messages, shard in pool.run(_in_a_child):
        assert len(messages) == 6
        assert all("this process was forked" in message for message in messages), messages
        assert shard == "a result"


@contextmanager
def _logged() -> Iterator[list[str]]:
    """Yield the lines that are logged meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ring_torch").addHandler(handler)
    yield lines
    logging.getLogger("ring_torch").removeHandler(handler)


def _stuck(rank: int, ended: bool) -> None:
    ring, since = ranks_of(None), time.monotonic() + (-100 if rank else 100)
    ring.watch(timedelta(seconds=1))
    with _logged() as lines:
        event: Any = SimpleNamespace(query=lambda: ended)  # of a pass that ends, or does not
        ring.state.queued = QueuedPass("call 7 (backward)", since, event)
        until = time.monotonic() + 15
        while rank and not ended and not lines and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.6)  # time for repeated or wrong lines
        dist.barrier()
    assert len(lines) == (rank == 1 and not ended), lines  # logged once
    for line in lines:
        assert "call 7 (backward)" in line and "rank 1: it waits for ranks 0 " in line


@pytest.mark.parametrize("ended", [True, False])
def test_a_pass_that_does_not_end_is_named(ended: bool) -> None:
    """A pass that hangs is logged by name before NCCL's watchdog ends the process."""
    with LocalRanks(2, timeout=20) as pool:
        pool.run(_stuck, ended)


def _watched(rank: int, ends: str) -> None:
    ring = ranks_of(None)
    with _logged() as lines:
        _attend(8)
        thread, state = ring.watch(timedelta(seconds=1)), ring.state
        if ends == "destroyed":
            dist.destroy_process_group()
        elif rank == BROKEN:
            handshake.fail(ring, "played")
        thread.join(20)
        assert not thread.is_alive()
        if ends == "failed" and rank != BROKEN:
            assert "played" in _words(lambda: _attend(8))
        time.sleep(0.5)  # one of the ranks serves the store
    assert lines == ["played"] * (ends == "failed" and rank != BROKEN)
    assert state.failure == ("played" if ends == "failed" else None)


@pytest.mark.parametrize("ends", ["failed", "destroyed"])
def test_a_host_that_waits_for_nothing_is_told(ends: str) -> None:
    """The failure is logged by a thread, as with NCCL, even if the host waits for nothing."""
    with LocalRanks(2, timeout=20) as pool:
        pool.run(_watched, ends)


#: Errors of this rank alone, and those of peers, that torch raises as ``RuntimeError``.
OWN_ERRORS = (
    torch.OutOfMemoryError("played: out of memory"),
    NotImplementedError("Could not run 'c10d::allreduce_' with arguments from the 'Meta' backend"),
    RuntimeError("Invalid scalar type"),
    RuntimeError("Tensors must be contiguous"),
    RuntimeError("Inplace update to inference tensor outside InferenceMode is not allowed."),
)


def test_only_what_ends_the_wait_is_blamed_on_a_peer() -> None:
    """A start is refused for this rank's fault; an error of a peer names it."""
    ranks = Ranks(None, 0, 2)
    for error in OWN_ERRORS:
        with pytest.raises(type(error)) as caught:
            run_collective(ranks, Mock(side_effect=error))
        assert caught.value is error
        if type(error) is not RuntimeError:
            with pytest.raises(type(error)) as caught, peer_errors(ranks.peers):
                raise error
            assert caught.value is error
    words = "Connection closed by peer"
    waits = SimpleNamespace(wait=Mock(side_effect=RuntimeError(words)))
    for start in (Mock(side_effect=dist.DistBackendError(words)), Mock(return_value=waits)):
        message = "in vain for rank 1 of the group: Connection closed"
        refused(message, run_collective, ranks, start, error=PeerError)


@pytest.mark.parametrize("where", ["unshard", "unshard backward", "reduce_gradients"])
@on_ranks
def test_a_rank_without_memory_is_named_on_the_others(rank: int, where: str) -> None:
    group: Any = dist.new_group(timeout=TIMEOUT)
    cp = ContextParallel(group)
    model = torch.nn.Linear(4, 4)
    x = cp.shard(torch.ones(1, 8, 4)).requires_grad_()
    model(x).sum().backward()
    whole = cp.unshard(x, grad="sum")
    calls: dict[str, Callable[[], object]] = {
        "unshard": lambda: cp.unshard(x.detach()),
        "unshard backward": lambda: whole.sum().backward(),
        "reduce_gradients": lambda: cp.reduce_gradients(model),
    }
    name = {"unshard": "empty_like", "unshard backward": "stack"}.get(where, "cat")
    with patch.object(torch, name, _no_memory) if rank == BROKEN else nullcontext():
        message = _words(calls[where])
    said = "" if rank == BROKEN else f"({where}) failed on rank 1 of the group: "
    assert f"{said}OutOfMemoryError: played: out of memory" in message


@pytest.mark.parametrize("captures", [True, False])
def test_a_failed_pass_lets_its_tensors_go_and_closes_the_group(
    captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not while a graph is captured: it may be made once more outside of one."""
    closed, held = list[object](), list[ReferenceType[Tensor]]()
    monkeypatch.setattr(handshake, "fail", lambda *_: closed.append("closed"))
    monkeypatch.setattr(handshake, "is_capturing", lambda: captures)
    state = SimpleNamespace(before_passes={})
    ranks: Any = SimpleNamespace(size=2, rank=0, check_open=lambda: None, state=state)
    signature: Any = SimpleNamespace(fields={"pass": "forward"})

    def failing_pass() -> None:
        x = torch.ones(3)
        held.append(ref(x))
        with handshake.GuardedPass(ranks, 1, signature, torch.device("cpu")):
            raise MemoryError(x.shape)

    gc.disable()
    with suppress(MemoryError):
        failing_pass()
    gc.enable()
    assert held[0]() is None and bool(closed) is not captures


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can be had")
def test_no_gpu() -> None:
    with (
        LocalRanks(2, cuda=True) as ranks,
        pytest.raises(LocalRankError, match=r"rank 0: Traceback(.|\n)*(CUDA|NVIDIA)"),
    ):
        ranks.run(int)
